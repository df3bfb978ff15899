"""Packing of examples that come in batches: `BatchPacker` for `datasets.map` and collators, buffers of a stream.

Each batch is merged and packed as if it were all there is, so a prefix is shared only within it.

Cost: one batch, its forest and its rows in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import IterableDataset

from dagpack_hf.columns import packing_columns, row_features, rows_to_table
from dagpack_hf.forest_packing import pack_whole
from dagpack_hf.layout import Rows
from dagpack_hf.merging import merge_batch
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport, StreamReport


@dataclass(frozen=True)
class BatchPacker:
    """Packs the examples of one batch, for `datasets.map(BatchPacker(...), batched=True)`.

    A batch border cuts trees: what two examples share is computed once only if both are in the same batch, each batch
    ends with a window that is not full, and under `"once"` a target that occurs in two batches counts twice. Sort or
    group the data so that related examples are neighbours, choose a large `batch_size`, or use `pack_dataset`, which
    packs the whole split.

    Args:
        max_length: window length in tokens.
        loss_weighting: `"once"` or `"paths"`, as in `pack_dataset`.
        overflow: `"error"`, `"truncate"` or `"drop"`, as in `pack_dataset`.
        strategy: `"best"` or `"dfs"`, as in `pack_dataset`.
        count_sequences: whether to write `sequence_count`, as in `pack_dataset`.

    Example:
        >>> from datasets import Dataset
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
        >>> packed = dataset.map(BatchPacker(8), batched=True, remove_columns=dataset.column_names)
        >>> packed[0]["position_ids"]
        [0, 1, 2, 1, 2]
    """

    max_length: int
    loss_weighting: str = "once"
    overflow: str = "error"
    strategy: str = "best"
    count_sequences: bool = False

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
        """Rows of one batch of examples (token trees, or `input_ids` and optional `labels`)."""
        rows, _ = self.pack(batch)
        return _lists(rows)

    def pack(self, batch: Mapping[str, Any]) -> tuple[Rows, PackReport]:
        """Rows and report of one batch."""
        options = PackOptions(
            self.max_length,
            self.loss_weighting,
            self.overflow,
            self.strategy,
            count_sequences=self.count_sequences,
        )
        forest, dropped = merge_batch(batch, options)
        return pack_whole(forest, options, dropped)


def pack_stream(
    stream: IterableDataset, options: PackOptions, buffer_size: int
) -> tuple[IterableDataset, StreamReport]:
    """Pack a stream, so many examples at a time; the report fills as the rows are read.

    Raises:
        ValueError: columns are missing, or `bucket_size` is set.
    """
    if options.bucket_size is not None:
        raise ValueError("A stream is packed a buffer at a time: set buffer_size and leave bucket_size out.")
    columns = stream.column_names or list(next(iter(stream.take(1)), {}))
    names = packing_columns(columns)
    pack_buffer = _BufferPacker(options, StreamReport())
    features = row_features(options.count_sequences)
    options_of_map = {"batched": True, "batch_size": buffer_size, "features": features}
    source = stream.select_columns(names)
    if stream.features is None:
        return source.map(pack_buffer, remove_columns=names, **options_of_map), pack_buffer.report
    # of tables it is the result that remove_columns takes columns from, not the input
    return source.with_format("arrow").map(pack_buffer, **options_of_map).with_format(None), pack_buffer.report


@dataclass(frozen=True)
class _BufferPacker:
    """Packs the buffers of a stream and adds their reports up."""

    options: PackOptions
    report: StreamReport

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> Any:
        forest, dropped = merge_batch(batch, self.options)
        rows, packed = pack_whole(forest, self.options, dropped, advice=False)
        self.report.add(packed)
        return rows_to_table(rows) if isinstance(batch, pa.Table) else _lists(rows)


def _lists(rows: Rows) -> dict[str, list[np.ndarray]]:
    return {name: [row[name] for row in rows] for name in rows.columns}

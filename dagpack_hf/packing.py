"""Packing of data sets: token trees or plain sequences in, rows and a report out.

`pack_dataset` merges the whole data set, which shares most. `BatchPacker` does the same inside `datasets.map`, where
a prefix is shared only within one batch. Both are thin: read Arrow columns as numpy arrays, `TokenForest`,
`limit_paths`, `pack_windows`, `layout_rows`, and back to Arrow. The token ids are not copied on the way in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from tqdm.auto import tqdm

from dagpack_hf.layout import ROW_COLUMNS, Rows, layout_rows
from dagpack_hf.overflow import OVERFLOW_CHOICES, Overflow, limit_paths
from dagpack_hf.pack import lower_bound, pack_windows
from dagpack_hf.segments import build_segments
from dagpack_hf.trie import TokenForest, TokenTree

logger = logging.getLogger(__name__)

TREE_COLUMNS = ("input_ids", "target_count", "node_length", "node_parent", "logical_tokens")
"""Columns of a data set of token trees."""

OPTIONAL_TREE_COLUMNS = ("target_weight",)
"""Columns that a data set of token trees may have besides. A tree without a value there has no weights."""

ROW_FEATURES = Features({name: List(Value("float32" if name == "loss_weight" else "int32")) for name in ROW_COLUMNS})
"""Features of a data set of rows."""


@dataclass(frozen=True)
class PackReport:
    """What packing did, in tokens.

    Args:
        max_length: window length.
        loss_weighting: `"once"` or `"paths"`.
        logical_tokens: tokens of all source sequences, one for each trained turn.
        unique_tokens: tokens of the trie.
        executed_tokens: positions of all windows, replay and branch copies included, padding not.
        loss_tokens: targets over all windows; those of weight 0 are context.
        loss_weight: sum of the weights of all targets.
        padding_tokens: positions that padding every window to `max_length` adds.
        windows: number of windows.
        lower_bound: windows that no packing can do without.
        longest_path: tokens of the longest path that was packed.
        overflow: what the limit on the path length cost, by reason (empty if nothing).
    """

    max_length: int
    loss_weighting: str
    logical_tokens: int
    unique_tokens: int
    executed_tokens: int
    loss_tokens: int
    loss_weight: float
    padding_tokens: int
    windows: int
    lower_bound: int
    longest_path: int
    overflow: dict[str, int] = field(default_factory=dict)

    @property
    def reuse_ratio(self) -> float:
        """Logical tokens over unique tokens: what sharing could save at best."""
        return self.logical_tokens / max(self.unique_tokens, 1)

    @property
    def speedup_bound(self) -> float:
        """Logical tokens over executed tokens: what sharing saves in these windows."""
        return self.logical_tokens / max(self.executed_tokens, 1)

    @property
    def replay_tokens(self) -> int:
        """Executed tokens beyond the unique ones: repeated ancestors and copies at branch points."""
        return self.executed_tokens - self.unique_tokens

    @property
    def gap(self) -> float:
        """Windows over the lower bound, minus one."""
        return self.windows / self.lower_bound - 1 if self.lower_bound else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures, the derived ones included, for JSON."""
        derived = {name: getattr(self, name) for name in ("reuse_ratio", "speedup_bound", "replay_tokens", "gap")}
        return asdict(self) | derived

    def __str__(self) -> str:
        rows = [
            ("logical tokens", f"{self.logical_tokens:,}", "each trained sequence written out"),
            ("unique tokens", f"{self.unique_tokens:,}", f"reuse ratio {self.reuse_ratio:.2f}"),
            (
                "executed tokens",
                f"{self.executed_tokens:,}",
                f"replay {self.replay_tokens:,}; speedup bound {self.speedup_bound:.2f}",
            ),
            (
                "loss tokens",
                f"{self.loss_tokens:,}",
                f"total weight {round(self.loss_weight, 2):,.15g} ({self.loss_weighting!r})",
            ),
            ("padding tokens", f"{self.padding_tokens:,}", f"to windows of {self.max_length:,}"),
            ("windows", f"{self.windows:,}", f"lower bound {self.lower_bound:,}, gap {self.gap:.1%}"),
            (
                "longest path",
                f"{self.longest_path:,}",
                f"window is {self.max_length / max(self.longest_path, 1):.1f}x",
            ),
        ]
        rows += [(reason.replace("_", " "), f"{count:,}", "overflow") for reason, count in self.overflow.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {note}" for name, figure, note in rows)


def pack_dataset(
    dataset: Dataset,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    seed: int | None = 0,
    progress: bool = True,
) -> tuple[Dataset, PackReport]:
    """Merge a data set by common prefixes and pack it into windows.

    Args:
        dataset: token trees (columns `input_ids`, `target_count`, `node_length`, `node_parent`, `logical_tokens`, from
            `tokenize_conversations`; and `target_weight` if sequences are weighted), or plain sequences (`input_ids`,
            and `labels` with -100 where there is no loss).
        max_length: window length in tokens. Two to four times the longest path keeps most of the sharing.
        loss_weighting: `"once"`: each distinct target counts once, with the mean weight of the sequences that have it
            as a target. `"paths"`: each target counts as often as source sequences train it, with the sum of their
            weights; loss and gradients are then those of ordinary training on the unpacked data.
        overflow: what to do with paths longer than `max_length`: `"error"`, `"truncate"` (cut what lies beyond) or
            `"drop"` (leave out the sequences, or turns of a tree, that reach beyond). What is lost is in the report.
        seed: shuffles the windows; `None` keeps them in depth-first order.
        progress: show a progress bar.

    Returns:
        The rows (columns `input_ids`, `shift_labels`, `position_ids`, `subtree_end`, `loss_weight`) and the report.

    Raises:
        TypeError: not a `datasets.Dataset`.
        ValueError: columns are missing, a path is too long, or an option is unknown.

    Example:
        >>> from datasets import Dataset
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
        >>> rows, report = pack_dataset(dataset, max_length=8, progress=False)
        >>> rows[0]["input_ids"], rows[0]["subtree_end"], report.windows
        ([1, 2, 3, 2, 4], [5, 3, 3, 5, 5], 1)
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"pack_dataset needs a datasets.Dataset, got {type(dataset).__name__}. Pack each split of a DatasetDict "
            "on its own; pack a stream batch by batch with map(BatchPacker(...), batched=True)."
        )
    dropped = Overflow()
    if is_tree_dataset(dataset.column_names):
        trees = tqdm(iter_trees(dataset), total=len(dataset), desc="Merging trees", disable=not progress)
        forest = TokenForest.from_trees(trees)
    else:
        sequences, labels, dropped = _read_sequences(dataset, max_length, overflow)
        bar = tqdm(sequences, desc="Merging sequences", disable=not progress)
        forest = TokenForest.from_sequences(bar, labels)
    rows, report = pack_forest(
        forest, max_length, loss_weighting=loss_weighting, overflow=overflow, seed=seed, _dropped=dropped
    )
    return Dataset(rows_to_table(rows)), report


def pack_forest(
    forest: TokenForest,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    seed: int | None = None,
    _dropped: Overflow = Overflow(),
) -> tuple[Rows, PackReport]:
    """Pack a forest into windows; arguments and errors as in `pack_dataset`."""
    fitting, lost = limit_paths(forest, max_length, overflow)
    lost = lost + _dropped
    segments = build_segments(fitting)
    windows = pack_windows(segments, max_length)
    rows = layout_rows(fitting, segments, windows, loss_weighting=loss_weighting, seed=seed)
    executed = len(rows.input_ids)
    report = PackReport(
        max_length=max_length,
        loss_weighting=loss_weighting,
        logical_tokens=forest.logical_tokens,
        unique_tokens=fitting.num_tokens,
        executed_tokens=executed,
        loss_tokens=int(np.count_nonzero(rows.loss_weight)),
        loss_weight=float(rows.loss_weight.sum(dtype=np.float64)),
        padding_tokens=len(rows) * max_length - executed,
        windows=len(rows),
        lower_bound=lower_bound(fitting, max_length),
        longest_path=fitting.longest_path,
        overflow={reason: count for reason, count in asdict(lost).items() if count},
    )
    if lost:
        logger.warning(
            "max_length=%d: %d sequences or turns were %s, %d lie wholly beyond; %d labelled tokens are not trained.",
            max_length,
            lost.cut_sequences,
            "dropped" if overflow == "drop" else "cut short",
            lost.lost_sequences,
            lost.lost_targets,
        )
    return rows, report


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

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
        """Rows of one batch of examples (token trees, or `input_ids` and optional `labels`)."""
        rows, _ = self.pack(batch)
        return {name: [row[name] for row in rows] for name in ROW_COLUMNS}

    def pack(self, batch: Mapping[str, Any]) -> tuple[Rows, PackReport]:
        """Rows and report of one batch."""
        dropped = Overflow()
        if is_tree_dataset(batch):
            forest = TokenForest.from_trees(_batch_trees(batch))
        else:
            _check_columns(list(batch))
            sequences, labels = list(batch["input_ids"]), batch.get("labels")
            keep, dropped = _fitting(sequences, labels, self.max_length, self.overflow)
            forest = TokenForest.from_sequences(
                [sequences[index] for index in keep], None if labels is None else [labels[index] for index in keep]
            )
        return pack_forest(
            forest, self.max_length, loss_weighting=self.loss_weighting, overflow=self.overflow, _dropped=dropped
        )


def is_tree_dataset(columns: Any) -> bool:
    """Whether these are the columns of a data set of token trees."""
    return "node_parent" in columns and "target_count" in columns


def is_row_dataset(columns: Any) -> bool:
    """Whether these are the columns of a data set of rows."""
    return all(name in columns for name in ROW_COLUMNS)


def iter_trees(dataset: Dataset) -> Iterator[TokenTree]:
    """Token trees of a data set, as views of its Arrow buffers."""
    names = _tree_columns(dataset.column_names)
    for batch in dataset.select_columns(names).with_format("arrow").iter(batch_size=256):
        columns: dict[str, Iterable[Any]] = {
            name: batch[name].to_pylist() if name == "logical_tokens" else _list_views(batch[name]) for name in names
        }
        for values in zip(*columns.values(), strict=True):
            yield TokenTree(**dict(zip(names, values, strict=True)))


def _batch_trees(batch: Mapping[str, Any]) -> Iterator[TokenTree]:
    """Token trees of a batch of examples, whose lists are of any kind."""
    names = _tree_columns(batch)
    for values in zip(*(batch[name] for name in names), strict=True):
        arrays: list[Any] = [None if value is None else np.asarray(value) for value in values]
        yield TokenTree(**dict(zip(names, arrays, strict=True)))


def _tree_columns(columns: Any) -> list[str]:
    return [*TREE_COLUMNS, *(name for name in OPTIONAL_TREE_COLUMNS if name in columns)]


def rows_to_table(rows: Rows) -> pa.Table:
    """Rows as an Arrow table with the features of `ROW_FEATURES`."""
    offsets = pa.array(rows.offsets, pa.int64())
    if len(rows.input_ids) > np.iinfo(np.int32).max:
        columns = [pa.LargeListArray.from_arrays(offsets, pa.array(getattr(rows, name))) for name in ROW_COLUMNS]
        return pa.table(dict(zip(ROW_COLUMNS, columns, strict=True)))
    columns = [
        pa.ListArray.from_arrays(offsets.cast(pa.int32()), pa.array(getattr(rows, name))) for name in ROW_COLUMNS
    ]
    return pa.table(dict(zip(ROW_COLUMNS, columns, strict=True)), schema=ROW_FEATURES.arrow_schema)


def _list_views(column: pa.ChunkedArray) -> Iterator[Any]:
    """The lists of a column as numpy arrays, `None` for a null."""
    for chunk in column.chunks:
        if chunk.null_count == len(chunk):
            yield from [None] * len(chunk)
            continue
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=True)
        is_null = chunk.is_null().to_pylist() if chunk.null_count else repeat(False)
        for (low, high), null in zip(pairwise(offsets.tolist()), is_null, strict=False):
            yield None if null else values[low:high]


def _read_sequences(
    dataset: Dataset, max_length: int, overflow: str
) -> tuple[list[np.ndarray], list[np.ndarray] | None, Overflow]:
    _check_columns(dataset.column_names)
    names = [name for name in ("input_ids", "labels") if name in dataset.column_names]
    table = dataset.select_columns(names).with_format("arrow")[:]
    sequences = list(_list_views(table["input_ids"]))
    labels = list(_list_views(table["labels"])) if "labels" in names else None
    keep, dropped = _fitting(sequences, labels, max_length, overflow)
    return [sequences[index] for index in keep], None if labels is None else [labels[index] for index in keep], dropped


def _fitting(sequences: list[Any], labels: Any, max_length: int, overflow: str) -> tuple[list[int], Overflow]:
    """Indices of the sequences that are kept: all, but under `"drop"` those that fit the window."""
    if overflow not in OVERFLOW_CHOICES:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOW_CHOICES))}, got {overflow!r}.")
    if overflow != "drop":
        return list(range(len(sequences))), Overflow()
    keep = [index for index, sequence in enumerate(sequences) if len(sequence) <= max_length]
    gone = set(range(len(sequences))).difference(keep)
    targets = sum(
        len(sequences[index][1:]) if labels is None else int(np.count_nonzero(np.asarray(labels[index])[1:] != -100))
        for index in gone
    )
    tokens = sum(len(sequences[index]) for index in gone)
    return keep, Overflow(cut_sequences=len(gone), lost_tokens=tokens, lost_targets=targets)


def _check_columns(columns: list[str]) -> None:
    if "input_ids" in columns:
        masks = [name for name in ("assistant_masks", "completion_mask") if name in columns]
        if masks and "labels" not in columns:
            raise ValueError(
                f"The data set has {' and '.join(masks)} but no labels column, so every token would be trained. Add a "
                "labels column (-100 where there is no loss) or remove the masks."
            )
        return
    remedy = (
        "Turn conversations into token trees with `tokenize_conversations(dataset, tokenizer)` first."
        if "messages" in columns
        else "Tokenise the data set first."
    )
    raise ValueError(f"Packing needs an input_ids column; the data set has {', '.join(columns) or 'none'}. {remedy}")

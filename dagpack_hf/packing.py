"""Packing of data sets: token trees or plain sequences in, rows and a report out.

`pack_dataset` merges a whole data set, which shares most, in partitions if that does not fit into memory (`external`);
of a stream it merges a buffer at a time (`batch_packing`).
It is thin: examples to a forest (`merging`), forest to windows (`forest_packing`), and rows portion by portion to
Arrow, beside the data set if that is on disk (`row_cache`).

Cost: the token ids are not copied on the way in if they are int32. In memory the forest and its segments, and of the
rows one portion if they are written to a file, else all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from tqdm.auto import tqdm

from dagpack_hf.batch_packing import BatchPacker, pack_stream
from dagpack_hf.columns import (
    PORTION,
    TREE_COLUMNS,
    is_row_dataset,
    iter_trees,
    packing_columns,
    row_features,
    written,
)
from dagpack_hf.external.memory import memory_limit
from dagpack_hf.external.packing import PARTITION_STAGES, LargeDataset
from dagpack_hf.forest_packing import pack_forest, plan_forest, warn_of_losses
from dagpack_hf.layout import Rows
from dagpack_hf.merging import merge_dataset
from dagpack_hf.pack_options import PackOptions, check_examples
from dagpack_hf.pack_report import PackReport
from dagpack_hf.row_cache import cached_rows

__all__ = ["TREE_COLUMNS", "BatchPacker", "PackReport", "is_row_dataset", "iter_trees", "pack_dataset", "pack_forest"]

STAGES = ("merging", "planning", "writing")


def pack_dataset(
    dataset: Dataset | DatasetDict | IterableDataset | IterableDatasetDict,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    strategy: str = "best",
    effort: float = 0.0,
    bucket_size: int | None = None,
    buffer_size: int = 1000,
    seed: int | None = 0,
    max_memory: int | str | None = None,
    count_sequences: bool = False,
    load_from_cache_file: bool | None = None,
    progress: bool = True,
) -> Any:
    """Merge a data set by common prefixes and pack it into windows.

    Args:
        dataset: token trees (columns `input_ids`, `target_count`, `node_length`, `node_parent`, `logical_tokens`, from
            `tokenize_conversations`; and `target_weight` if sequences are weighted), or plain sequences (`input_ids`,
            and `labels` with -100 where there is no loss). Each split of a dictionary is packed on its own.
        max_length: window length in tokens. Two to four times the longest path keeps most of the sharing; the report
            says what that would give.
        loss_weighting: `"once"`: each distinct target counts once, with the mean weight of the sequences that have it
            as a target. `"paths"`: each target counts as often as source sequences train it, with the sum of their
            weights; loss and gradients are then those of ordinary training on the unpacked data.
        overflow: what to do with paths longer than `max_length`: `"error"`, `"truncate"` (cut what lies beyond) or
            `"drop"` (leave out the sequences, or turns of a tree, that reach beyond). What is lost is in the report.
        strategy: `"best"`, or `"dfs"` (depth first, a new window when one is full), which is never better.
        effort: seconds of further search for a packing with fewer windows. How far it gets depends on the machine.
        bucket_size: pack within buckets of so many examples, drawn at random with `seed` (in order with `None`), so
            that the windows are less correlated. Every target is still trained exactly once, with its count and weight
            in the whole data set. What examples of several buckets share is computed in each of them: the fewer
            examples, the more. By default the whole data set is one bucket.
        buffer_size: examples of a stream that are packed at a time, as if they were all; under `"once"` a target
            counts once for each buffer that has it.
        seed: shuffles the windows, of a stream within each buffer; `None` keeps them in depth-first order.
        max_memory: memory that packing may take, in bytes or as `"8GB"`; by default what the machine has. What needs
            more is packed in partitions that fit, by way of a file on the disk of the data set: with the same targets,
            weights and bound, and a few more windows, at most one for each partition as a rule. Not for streams.
        count_sequences: write a sixth column, `sequence_count`: how many source sequences pass through each position
            (under `"once"` 1), 0 where another position stands for them. `DagSFTTrainer` needs it for the
            load-balancing loss of mixtures of experts. Not for what is packed in partitions, nor for token trees that
            do not show where their sequences end.
        load_from_cache_file: whether to take the rows of an earlier run on the same data with the same options and
            code; by default as `datasets` does. They are kept beside the files of the data set; of one in memory, or a
            stream, nothing is kept.
        progress: show a progress bar.

    Returns:
        The rows (columns `input_ids`, `shift_labels`, `position_ids`, `subtree_end`, `loss_weight`, and
        `sequence_count` if asked for) and the report.
        For a dictionary, one of each; for a stream, a stream and a `StreamReport`, which fills as it is read.

    Raises:
        TypeError: not a data set.
        ValueError: columns are missing, a path is too long, or an option is unknown.

    Example:
        >>> from datasets import Dataset
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
        >>> rows, report = pack_dataset(dataset, max_length=8, progress=False)
        >>> rows[0]["input_ids"], rows[0]["subtree_end"], report.windows
        ([1, 2, 3, 2, 4], [5, 3, 3, 5, 5], 1)
    """
    options = PackOptions(max_length, loss_weighting, overflow, strategy, effort, bucket_size, seed, count_sequences)
    check_examples("buffer_size", buffer_size)
    memory_limit(max_memory)

    def pack(split: Dataset | IterableDataset) -> tuple[Any, Any]:
        if isinstance(split, Dataset):
            return _pack_split(split, options, max_memory, load_from_cache_file, progress)
        return pack_stream(split, options, buffer_size)

    if isinstance(dataset, Dataset | IterableDataset):
        return pack(dataset)
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        packed = {name: pack(split) for name, split in dataset.items()}
        return type(dataset)({name: rows for name, (rows, _) in packed.items()}), {
            name: report for name, (_, report) in packed.items()
        }
    raise TypeError(
        f"pack_dataset needs a data set of `datasets`, got {type(dataset).__name__}. Make one of sequences with "
        'Dataset.from_dict({"input_ids": sequences}).'
    )


def _pack_split(
    dataset: Dataset,
    options: PackOptions,
    max_memory: int | str | None,
    load_from_cache_file: bool | None,
    progress: bool,
) -> tuple[Dataset, PackReport]:
    packing_columns(dataset.column_names)  # refuses what has none, also where the rows are in the cache

    def write_rows(write: Callable[[pa.Table], None]) -> PackReport:
        larger = LargeDataset.of(dataset, options, max_memory)
        if larger is not None:
            with _Stages(progress, PARTITION_STAGES) as stages:
                return larger.pack(write, advance=stages.advance)
        with _Stages(progress) as stages:
            stages.begin("merging")
            source = merge_dataset(dataset, options)
            stages.begin("planning")
            plan = plan_forest(source.forest, options, source.dropped, source.examples)
            stages.begin("writing")
            return plan.report(stages.through(written(plan.writer.portions(PORTION), write), len(plan.writer)))

    rows, report = cached_rows(
        dataset,
        {**asdict(options), "max_memory": max_memory},
        write_rows,
        row_features(options.count_sequences),
        load_from_cache_file,
    )
    warn_of_losses(report, options.overflow)
    return rows, report


class _Stages:
    """A progress bar that counts stages and names the one that runs; the last one moves on with the rows."""

    def __init__(self, show: bool, stages: Sequence[str] = STAGES) -> None:
        self._stages = stages
        self._bar = tqdm(total=len(stages), desc="Packing", disable=not show, bar_format="{l_bar}{bar}| {elapsed}")

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, stage: str) -> None:
        """Begin a stage; those before it are done."""
        self._bar.n = self._stages.index(stage)
        self._bar.set_description(f"Packing: {stage}")

    def advance(self, stage: str, share: float) -> None:
        """Say how much of a stage is done."""
        self._bar.n = self._stages.index(stage) + share
        self._bar.set_description(f"Packing: {stage}")

    def through(self, portions: Iterator[Rows], total: int) -> Iterator[Rows]:
        """Pass portions of so many rows on and count them as parts of the stage."""
        for rows in portions:
            self._bar.update(len(rows) / total)
            yield rows

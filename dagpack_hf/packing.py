"""Packing of data sets: token trees or plain sequences in, rows and a report out.

`pack_dataset` merges a whole data set, which shares most; of a stream it merges a buffer at a time. `BatchPacker` does
the same inside `datasets.map`, where a prefix is shared only within one batch. All are thin: read Arrow columns as
numpy arrays, `TokenForest`, `limit_paths`, `pack_windows`, and rows portion by portion back to Arrow.

Cost: the token ids are not copied on the way in if they are int32. In memory the forest and its segments, and of the
rows one portion if they are written to a file, else all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from tqdm.auto import tqdm

from dagpack_hf.advice import LengthAdvice, advise
from dagpack_hf.buckets import Examples, pack_buckets
from dagpack_hf.columns import (
    OPTIONAL_TREE_COLUMNS,
    ROW_FEATURES,
    TREE_COLUMNS,
    SequenceColumns,
    batch_trees,
    is_row_dataset,
    is_tree_dataset,
    iter_trees,
    packing_columns,
    rows_to_table,
    table_trees,
)
from dagpack_hf.layout import LOSS_WEIGHTINGS, ROW_COLUMNS, Rows, RowWriter
from dagpack_hf.overflow import OVERFLOW_CHOICES, Overflow, limit_paths
from dagpack_hf.pack import STRATEGIES, Windows, lower_bound, pack_windows
from dagpack_hf.pack_report import PackReport, StreamReport, add_reports
from dagpack_hf.row_cache import cached_rows
from dagpack_hf.segments import Segments, build_segments
from dagpack_hf.spans import read_arrays
from dagpack_hf.token_trees import read_trees
from dagpack_hf.trie import IGNORE_INDEX, TokenForest

__all__ = [
    "OPTIONAL_TREE_COLUMNS",
    "ROW_FEATURES",
    "TREE_COLUMNS",
    "BatchPacker",
    "LengthAdvice",
    "PackReport",
    "StreamReport",
    "add_reports",
    "is_row_dataset",
    "is_tree_dataset",
    "iter_trees",
    "pack_dataset",
    "pack_forest",
    "rows_to_table",
]

logger = logging.getLogger(__name__)

PORTION = 4 * 1024 * 1024
"""Positions of the rows that are in memory at a time while a file is written."""

STAGES = ("merging", "planning", "writing")


@dataclass(frozen=True)
class PackOptions:
    """The options of packing, checked; see `pack_dataset`."""

    max_length: int
    loss_weighting: str = "once"
    overflow: str = "error"
    strategy: str = "best"
    effort: float = 0.0
    bucket_size: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("loss_weighting", LOSS_WEIGHTINGS),
            ("overflow", OVERFLOW_CHOICES),
            ("strategy", STRATEGIES),
        ):
            if getattr(self, name) not in choices:
                listed = (
                    " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(map(repr, choices))}"
                )
                raise ValueError(f"{name} must be {listed}, got {getattr(self, name)!r}.")
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}.")
        if not self.effort >= 0:
            raise ValueError(f"effort must be a number of seconds, 0 or more, got {self.effort}.")
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 example, or None, got {self.bucket_size}.")


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
        load_from_cache_file: whether to take the rows of an earlier run on the same data with the same options and
            code; by default as `datasets` does. They are kept beside the files of the data set; of one in memory, or a
            stream, nothing is kept.
        progress: show a progress bar.

    Returns:
        The rows (columns `input_ids`, `shift_labels`, `position_ids`, `subtree_end`, `loss_weight`) and the report.
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
    options = PackOptions(max_length, loss_weighting, overflow, strategy, effort, bucket_size, seed)
    if buffer_size < 1:
        raise ValueError(f"buffer_size must be at least 1 example, got {buffer_size}.")

    def pack(split: Dataset | IterableDataset) -> tuple[Any, Any]:
        if isinstance(split, Dataset):
            return _pack_split(split, options, load_from_cache_file, progress)
        return _pack_stream(split, options, buffer_size)

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


def pack_forest(
    forest: TokenForest,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    strategy: str = "best",
    effort: float = 0.0,
    seed: int | None = None,
    _dropped: Overflow = Overflow(),
) -> tuple[Rows, PackReport]:
    """Pack a forest into windows; arguments and errors as in `pack_dataset`."""
    options = PackOptions(max_length, loss_weighting, overflow, strategy, effort, None, seed)
    plan = _plan(forest, options, _dropped)
    rows = plan.writer.write(0, len(plan.writer))
    report = plan.report([rows])
    _warn(report, overflow)
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
        strategy: `"best"` or `"dfs"`, as in `pack_dataset`.

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

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
        """Rows of one batch of examples (token trees, or `input_ids` and optional `labels`)."""
        rows, _ = self.pack(batch)
        return _lists(rows)

    def pack(self, batch: Mapping[str, Any]) -> tuple[Rows, PackReport]:
        """Rows and report of one batch."""
        options = PackOptions(self.max_length, self.loss_weighting, self.overflow, self.strategy)
        forest, dropped = _merge_batch(batch, options)
        return pack_forest(
            forest,
            self.max_length,
            loss_weighting=self.loss_weighting,
            overflow=self.overflow,
            strategy=self.strategy,
            _dropped=dropped,
        )


# Data sets


def _pack_split(
    dataset: Dataset, options: PackOptions, load_from_cache_file: bool | None, progress: bool
) -> tuple[Dataset, PackReport]:
    names = packing_columns(dataset.column_names)

    def write_rows(write: Callable[[pa.Table], None]) -> PackReport:
        with _Stages(progress) as stages:
            stages.begin("merging")
            source = _Source.of(dataset.select_columns(names), options)
            stages.begin("planning")
            plan = _plan(source.forest, options, source.dropped, source.examples)
            stages.begin("writing")
            return plan.report(stages.through(_written(plan.writer, write), len(plan.writer)))

    rows, report = cached_rows(dataset, asdict(options), write_rows, load_from_cache_file)
    _warn(report, options.overflow)
    return rows, report


def _written(writer: RowWriter, write: Callable[[pa.Table], None]) -> Iterator[Rows]:
    for rows in writer.portions(PORTION):
        write(rows_to_table(rows))
        yield rows


@dataclass(frozen=True)
class _Source:
    """A data set, merged.

    Args:
        forest: the merged examples.
        dropped: what was left out before.
        examples: where each example is, if that is needed.
    """

    forest: TokenForest
    dropped: Overflow
    examples: Examples | None

    @classmethod
    def of(cls, dataset: Dataset, options: PackOptions) -> _Source:
        """Merge a data set that has the columns of packing only."""
        in_buckets = options.bucket_size is not None
        if is_tree_dataset(dataset.column_names):
            examples = _tree_examples(dataset) if in_buckets else None
            return cls(TokenForest.from_trees(iter_trees(dataset)), Overflow(), examples)
        sequences, dropped = _fitting(SequenceColumns.of(dataset.with_format("arrow")[:]), options)
        ids = sequences.ids
        examples = Examples.of_sequences(read_arrays(ids.values, ids.offsets)) if in_buckets else None
        return cls(sequences.forest(), dropped, examples)


def _tree_examples(dataset: Dataset) -> Examples:
    nodes = np.fromiter((len(tree.node_length) for tree in iter_trees(dataset)), np.int64, len(dataset))
    return Examples.of_trees(read_trees(iter_trees(dataset)), nodes)


def _fitting(sequences: SequenceColumns, options: PackOptions) -> tuple[SequenceColumns, Overflow]:
    """The sequences that are packed: all, but under `"drop"` those that fit the window."""
    return sequences.up_to(options.max_length) if options.overflow == "drop" else (sequences, Overflow())


def _pack_stream(
    stream: IterableDataset, options: PackOptions, buffer_size: int
) -> tuple[IterableDataset, StreamReport]:
    if options.bucket_size is not None:
        raise ValueError("A stream is packed a buffer at a time: set buffer_size and leave bucket_size out.")
    columns = stream.column_names or list(next(iter(stream.take(1)), {}))
    names = packing_columns(columns)
    pack_buffer = _BufferPacker(options, StreamReport())
    options_of_map = {"batched": True, "batch_size": buffer_size, "features": ROW_FEATURES}
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
        forest, dropped = _merge_batch(batch, self.options)
        plan = _plan(forest, self.options, dropped, advice=False)
        rows = plan.writer.write(0, len(plan.writer))
        packed = plan.report([rows])
        _warn(packed, self.options.overflow)
        self.report.add(packed)
        return rows_to_table(rows) if isinstance(batch, pa.Table) else _lists(rows)


def _lists(rows: Rows) -> dict[str, list[np.ndarray]]:
    return {name: [row[name] for row in rows] for name in ROW_COLUMNS}


def _merge_batch(batch: pa.Table | Mapping[str, Any], options: PackOptions) -> tuple[TokenForest, Overflow]:
    """Merge a batch of examples, as a table or as lists of any kind."""
    if isinstance(batch, pa.Table):
        if is_tree_dataset(batch.column_names):
            return TokenForest.from_trees(table_trees(batch)), Overflow()
        sequences, dropped = _fitting(SequenceColumns.of(batch), options)
        return sequences.forest(), dropped
    names = packing_columns(list(batch))
    if is_tree_dataset(names):
        return TokenForest.from_trees(batch_trees(batch)), Overflow()
    ids, labels = list(batch["input_ids"]), batch.get("labels")
    keep, dropped = _fitting_lists(ids, labels, options)
    return (
        TokenForest.from_sequences(
            [ids[index] for index in keep], None if labels is None else [labels[index] for index in keep]
        ),
        dropped,
    )


def _fitting_lists(ids: Sequence[Any], labels: Any, options: PackOptions) -> tuple[Sequence[int], Overflow]:
    """The same of lists of any kind, as indices."""
    if options.overflow != "drop":
        return range(len(ids)), Overflow()
    gone = [index for index, sequence in enumerate(ids) if len(sequence) > options.max_length]
    lost = Overflow(
        cut_sequences=len(gone),
        lost_tokens=sum(len(ids[index]) for index in gone),
        lost_targets=sum(
            len(ids[index]) - 1
            if labels is None
            else int(np.count_nonzero(np.asarray(labels[index])[1:] != IGNORE_INDEX))
            for index in gone
        ),
    )
    return sorted(set(range(len(ids))).difference(gone)), lost


# Forests


@dataclass(frozen=True)
class _Plan:
    """A packed forest before it is written.

    Args:
        writer: its rows.
        figures: the report without what only the rows tell.
    """

    writer: RowWriter
    figures: PackReport

    def report(self, portions: Iterable[Rows]) -> PackReport:
        """The report, when all portions of the rows went through."""
        tokens, weight = 0, 0.0
        for rows in portions:
            tokens += int(np.count_nonzero(rows.loss_weight))
            weight += float(rows.loss_weight.sum(dtype=np.float64))
        return replace(self.figures, loss_tokens=tokens, loss_weight=weight)


def _plan(
    forest: TokenForest,
    options: PackOptions,
    dropped: Overflow,
    examples: Examples | None = None,
    *,
    advice: bool = True,
) -> _Plan:
    max_length = options.max_length
    fitting, lost = limit_paths(forest, max_length, options.overflow)
    lost = lost + dropped
    segments = build_segments(fitting)
    windows = _windows(fitting, segments, options, examples)
    writer = RowWriter(fitting, segments, windows, loss_weighting=options.loss_weighting, seed=options.seed)
    executed = int(writer.offsets[-1])
    figures = PackReport(
        max_length=max_length,
        loss_weighting=options.loss_weighting,
        logical_tokens=forest.logical_tokens,
        unique_tokens=fitting.num_tokens,
        executed_tokens=executed,
        loss_tokens=0,
        loss_weight=0.0,
        padding_tokens=len(writer) * max_length - executed,
        windows=len(writer),
        lower_bound=lower_bound(fitting, max_length),
        longest_path=fitting.longest_path,
        overflow={reason: count for reason, count in asdict(lost).items() if count},
        strategy=options.strategy,
        effort=options.effort,
        bucket_size=options.bucket_size,
        source_targets=forest.num_source_targets + dropped.lost_targets,
        advice=advise(forest) if advice else (),
    )
    return _Plan(writer, figures)


def _windows(forest: TokenForest, segments: Segments, options: PackOptions, examples: Examples | None) -> Windows:
    if options.bucket_size is None or examples is None:
        return pack_windows(
            segments, options.max_length, strategy=options.strategy, effort=options.effort, seed=options.seed or 0
        )
    return pack_buckets(
        forest,
        segments,
        examples,
        options.max_length,
        bucket_size=options.bucket_size,
        strategy=options.strategy,
        effort=options.effort,
        seed=options.seed,
    )


def _warn(report: PackReport, overflow: str) -> None:
    lost = report.overflow
    if lost:
        logger.warning(
            "max_length=%d: %d sequences or turns were %s, %d lie wholly beyond; %d labelled tokens are not trained "
            "(%.2g%% of them).",
            report.max_length,
            lost.get("cut_sequences", 0),
            "dropped" if overflow == "drop" else "cut short",
            lost.get("lost_sequences", 0),
            lost.get("lost_targets", 0),
            100 * report.lost_share,
        )


# Progress


class _Stages:
    """A progress bar that counts stages and names the one that runs; the last one moves on with the rows."""

    def __init__(self, show: bool) -> None:
        self._bar = tqdm(total=len(STAGES), desc="Packing", disable=not show, bar_format="{l_bar}{bar}| {elapsed}")

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, stage: str) -> None:
        """Begin a stage; those before it are done."""
        self._bar.n = STAGES.index(stage)
        self._bar.set_description(f"Packing: {stage}")

    def through(self, portions: Iterator[Rows], total: int) -> Iterator[Rows]:
        """Pass portions of so many rows on and count them as parts of the stage."""
        for rows in portions:
            self._bar.update(len(rows) / total)
            yield rows

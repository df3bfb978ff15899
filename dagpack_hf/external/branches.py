"""The examples of a table as paths: stretches of tokens, each below another, of sequences and token trees alike.

A token tree is cut where others of its nodes hang from the middle of one, so that all branches leave at the end of a
stretch. A stretch that nothing hangs from is a leaf, and the tokens from the root to its end are a path. A sequence is
one stretch.

Cost: the tokens of sequences are read where they lie, those of token trees are put together, 8 to 16 bytes for each;
`measure` reads lengths only, and `sample_paths` the tokens of the paths it picks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dagpack_hf.columns import ListColumn, SequenceColumns, is_tree_dataset, table_trees
from dagpack_hf.kernels.paths import locate
from dagpack_hf.kernels.pieces import COUNTS, LABELS, TARGETS
from dagpack_hf.overflow import Overflow
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.spans import FloatArray, IntArray, LongArray, SequenceSpans, read_arrays
from dagpack_hf.token_trees import TreeColumns, read_trees

NOTHING_LOST = Overflow()
NO_TOKENS = np.zeros(0, np.int32)
NO_WEIGHTS = np.zeros(0, np.float64)
NOWHERE = np.zeros(1, np.int64)
"""Where no splitters begin."""


@dataclass(frozen=True)
class Branches:
    """The stretches of the examples of a table, those of an example one after the other, parents first.

    Args:
        values: `int32[...]`, an array with all tokens.
        begin: `int64[n]`, where in it each stretch begins.
        end: `int64[n]`, where it ends; none is empty.
        parent: `int64[n]`, the stretch that each hangs from the end of, -1 for none.
        example: `int64[n]`, the example it belongs to.
        marks: `int32[...]`, counts or labels; empty if every token is a target.
        mark_begin: `int64[n]`, where in it those of each stretch begin.
        kind: `TARGETS`, `COUNTS` or `LABELS`.
        weights: `float64[...]`, weights, placed like the marks; empty if they are the counts.
        logical_tokens: tokens of all sequences, each written out on its own.
        dropped: what was left out since it is longer than a window.
        sequences: where sequences come from, `None` for token trees.
    """

    values: IntArray
    begin: LongArray
    end: LongArray
    parent: LongArray
    example: LongArray
    marks: IntArray
    mark_begin: LongArray
    kind: int
    weights: FloatArray
    logical_tokens: int
    dropped: Overflow = NOTHING_LOST
    sequences: SequenceSpans | None = None

    @classmethod
    def of(cls, table: pa.Table, options: PackOptions) -> Branches:
        """Read a table that has the columns of packing only.

        Raises:
            ValueError: an example is wrong; the message names it by its position in the table.
        """
        return _of_trees(table) if is_tree_dataset(table.column_names) else _of_sequences(table, options)


@dataclass(frozen=True)
class Extent:
    """How much there is in a table, or in several.

    Args:
        examples: number of examples.
        tokens: their tokens, as stored.
        nodes: stretches that they are stored in.
        paths: paths from a root to a leaf.
        path_tokens: tokens of all paths, each written out.
        longest: tokens of the longest path.
        longer: paths that are longer than a window.
    """

    examples: int = 0
    tokens: int = 0
    nodes: int = 0
    paths: int = 0
    path_tokens: int = 0
    longest: int = 0
    longer: int = 0

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.examples + other.examples,
            self.tokens + other.tokens,
            self.nodes + other.nodes,
            self.paths + other.paths,
            self.path_tokens + other.path_tokens,
            max(self.longest, other.longest),
            self.longer + other.longer,
        )


def measure(table: pa.Table, max_length: int) -> Extent:
    """How much there is in a table; no token is read.

    Raises:
        ValueError: columns that contradict each other.
    """
    shape = _Shape.of(table)
    lengths = shape.reach[shape.leaves]
    return Extent(
        examples=table.num_rows,
        tokens=int((shape.end - shape.begin).sum()),
        nodes=len(shape.begin),
        paths=len(lengths),
        path_tokens=int(lengths.sum()),
        longest=int(lengths.max(initial=0)),
        longer=int(np.count_nonzero(lengths > max_length)),
    )


def sample_paths(table: pa.Table, first: int, step: int, options: PackOptions) -> Iterator[IntArray]:
    """Every so many paths of a table, no more than a window of each.

    Args:
        table: some examples of the corpus.
        first: number of paths before these.
        step: one of so many paths is taken. Which ones depends on their place in the corpus alone.
        options: of sequences that are dropped, as too long, none is taken.
    """
    shape = _Shape.of(table)
    picked = shape.leaves[(first + np.arange(len(shape.leaves))) % step == step // 2]
    if options.overflow == "drop" and not is_tree_dataset(table.column_names):
        picked = picked[shape.reach[picked] <= options.max_length]
    if not len(picked):
        return
    mask = np.zeros(table.num_rows, bool)
    mask[shape.example[picked]] = True
    tokens = dict(
        zip(np.flatnonzero(mask).tolist(), ListColumn.of("input_ids", table["input_ids"]).lists(mask), strict=True)
    )
    for leaf in picked.tolist():
        ids, at = tokens[int(shape.example[leaf])], shape.example_begin[shape.example[leaf]]
        pieces = []
        while leaf >= 0:
            pieces.append(ids[shape.begin[leaf] - at : shape.end[leaf] - at])
            leaf = int(shape.parent[leaf])
        yield np.concatenate(pieces[::-1])[: options.max_length].astype(np.int32)


@dataclass(frozen=True)
class _Shape:
    """The stretches of a table by their lengths alone; tokens are counted over all examples."""

    begin: LongArray
    end: LongArray
    parent: LongArray
    example: LongArray
    example_begin: LongArray
    reach: LongArray
    leaves: LongArray

    @classmethod
    def of(cls, table: pa.Table) -> _Shape:
        if is_tree_dataset(table.column_names):
            example_begin, columns = _tree_shape(table)
            begin, end, parent = _cut(*columns)
        else:
            lengths = ListColumn.of("input_ids", table["input_ids"]).lengths
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            held = lengths > 0
            example_begin, begin, end = bounds, bounds[:-1][held], bounds[1:][held]
            parent = np.full(len(begin), -1, np.int64)
        reach = locate(NO_TOKENS, begin, end, parent, NO_TOKENS, NOWHERE)[0]
        has_child = np.zeros(len(begin), bool)
        has_child[parent[parent >= 0]] = True
        example = np.searchsorted(example_begin, begin, side="right") - 1
        return cls(begin, end, parent, example, example_begin, reach, np.flatnonzero(~has_child))


def _tree_shape(table: pa.Table) -> tuple[LongArray, tuple[LongArray, LongArray, LongArray]]:
    """Where each tree begins; begin and end of the nodes, and the token that each hangs from."""
    ids, length, above = (ListColumn.of(name, table[name]) for name in ("input_ids", "node_length", "node_parent"))
    flat = _flat(length), _flat(above)
    example_begin = np.concatenate([[0], np.cumsum(ids.lengths)]).astype(np.int64)
    node_begin = np.concatenate([[0], np.cumsum(length.lengths)]).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(flat[0])]).astype(np.int64)
    if len(flat[0]) == len(flat[1]):
        hangs_from = np.where(flat[1] < 0, flat[1], flat[1] + np.repeat(example_begin[:-1], length.lengths))
        if (
            np.array_equal(length.lengths, above.lengths)
            and np.array_equal(before[node_begin], example_begin)
            and flat[0].min(initial=0) >= 0
            and hangs_from.min(initial=0) >= -1
            and np.all(hangs_from < before[:-1])
        ):
            return example_begin, (before[:-1], before[1:], hangs_from)
    read_trees(table_trees(table))
    raise AssertionError("a tree was refused and then found right")


def _flat(column: ListColumn) -> LongArray:
    """The values of all lists, one after the other."""
    pieces = [flat[low[0] : low[-1]] for flat, low in zip(column.values, column.offsets, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)


def _cut(begin: LongArray, end: LongArray, hangs_from: LongArray) -> tuple[LongArray, LongArray, LongArray]:
    """Cut nodes, one behind the other, where others hang from them: begin, end and parent of the stretches."""
    held = end > begin
    node_begin, hangs_from = begin[held], hangs_from[held]
    bounds = np.unique(np.concatenate([node_begin, hangs_from[hangs_from >= 0] + 1, end[held]]))
    first, last = bounds[:-1], bounds[1:]
    node = np.searchsorted(node_begin, first, side="right") - 1
    above = hangs_from[node]
    owner = np.where(above < 0, -1, np.searchsorted(first, above, side="right") - 1)
    return first, last, np.where(node_begin[node] == first, owner, np.arange(len(first)) - 1)


def _of_sequences(table: pa.Table, options: PackOptions) -> Branches:
    columns, dropped = SequenceColumns.of(table), Overflow()
    if options.overflow == "drop":
        columns, dropped = columns.up_to(options.max_length)
    labels = columns.labels
    spans = read_arrays(
        columns.ids.values,
        columns.ids.offsets,
        None if labels is None else labels.values,
        None,
        None if labels is None else labels.offsets,
    )
    held = np.flatnonzero(spans.ids.end > spans.ids.begin)
    begin, end = spans.ids.begin[held], spans.ids.end[held]
    return Branches(
        values=spans.ids.values,
        begin=begin,
        end=end,
        parent=np.full(len(held), -1, np.int64),
        example=held,
        marks=NO_TOKENS if spans.labels is None else spans.labels.values,
        mark_begin=begin if spans.labels is None else spans.labels.begin[held],
        kind=TARGETS if spans.labels is None else LABELS,
        weights=NO_WEIGHTS,
        logical_tokens=int((end - begin).sum()),
        dropped=dropped,
        sequences=spans,
    )


def _of_trees(table: pa.Table) -> Branches:
    parts = read_trees(table_trees(table)).parts
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    begin, end, parent = _cut(whole.begin, whole.end, whole.hangs_from)
    example_begin = np.cumsum(ListColumn.of("input_ids", table["input_ids"]).lengths)
    return Branches(
        values=whole.ids,
        begin=begin,
        end=end,
        parent=parent,
        example=np.searchsorted(example_begin, begin, side="right"),
        marks=whole.counts,
        mark_begin=begin,
        kind=COUNTS,
        weights=NO_WEIGHTS if whole.weights is None else whole.weights,
        logical_tokens=whole.logical_tokens,
    )


def _joined(parts: Sequence[TreeColumns]) -> TreeColumns:
    """Columns of several parts, one after the other."""
    shift = np.cumsum([0, *(len(part.ids) for part in parts)])[:-1]
    weights = None
    if any(part.weights is not None for part in parts):
        weights = np.concatenate([p.counts.astype(np.float64) if p.weights is None else p.weights for p in parts])
    empty = np.zeros(0, np.int64)
    hangs_from = [np.where(p.hangs_from < 0, -1, p.hangs_from + by) for p, by in zip(parts, shift, strict=True)]
    return TreeColumns(
        ids=np.concatenate([NO_TOKENS, *(part.ids for part in parts)]),
        counts=np.concatenate([NO_TOKENS, *(part.counts for part in parts)]),
        weights=weights,
        begin=np.concatenate([empty, *(p.begin + by for p, by in zip(parts, shift, strict=True))]),
        end=np.concatenate([empty, *(p.end + by for p, by in zip(parts, shift, strict=True))]),
        owner=empty,
        hangs_from=np.concatenate([empty, *hangs_from]),
        logical_tokens=sum(part.logical_tokens for part in parts),
    )

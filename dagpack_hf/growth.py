"""Growing a forest from spans: the nodes, and the sequences that train each of their tokens.

See `trie` for the design and `kernels` for the loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dagpack_hf.kernels.canonical import (
    copy_pieces,
    count_pieces,
    find_nodes,
    group_children,
    sort_keys,
    write_nodes,
)
from dagpack_hf.kernels.radix import HOPPY, NEGATIVE, grow
from dagpack_hf.kernels.tally import (
    FREE,
    change_at_counts,
    change_at_labels,
    new_changes,
    places_of_ends,
    weigh_sequences,
    weigh_spans,
    write_runs,
)
from dagpack_hf.spans import FloatArray, IntArray, LongArray, SequenceSpans, Spans, read_only
from dagpack_hf.tally import Tally
from dagpack_hf.token_trees import TreeColumns, TreeSpans

PATIENCE = 4096
"""Steps from branch to branch after which the sequences are inserted anew, the longest first, if there is more than
one step for each 16 tokens."""

NEVER = 2**62
Changes = tuple[LongArray, LongArray]
"""Places where the tally changes, ascending, and how much at each; see `write_runs`."""

NONE = read_only(np.zeros(0, np.int64))
NO_WEIGHTS = read_only(np.zeros(0, np.float64))
NO_LABELS = read_only(np.zeros(0, np.int32))


@dataclass(frozen=True)
class Shape:
    """A forest without tallies, and where the spans it was grown from are in it.

    Args:
        values: as in `TokenForest`, like the next four.
        source: of each node.
        parent: of each node.
        length: of each node.
        depth: of each node.
        last_node: `int32[n]`, the node each span ends in, -1 if it is empty.
        above: `int32[n]`, tokens above each span; empty for sequences.
    """

    values: IntArray
    source: LongArray
    parent: IntArray
    length: IntArray
    depth: IntArray
    last_node: IntArray
    above: IntArray

    @cached_property
    def start(self) -> LongArray:
        """First token of each node in node order."""
        return before(self.length)

    def ends(self, sequences: Spans) -> Changes:
        """The changes of sequences all of whose tokens are targets: 1 at the end of each."""
        ends = places_of_ends(self.last_node, sequences.begin, sequences.end, self.depth)
        ends.sort()
        return ends, NONE

    def runs(self, changes: Changes, weighted: bool) -> tuple[LongArray, IntArray, LongArray]:
        """Runs of equal counts; see `write_runs`."""
        return write_runs(*changes, self.parent, self.start, self.length, weighted)

    def tally(self, end: LongArray, count: IntArray, weight: FloatArray) -> Tally:
        """Runs with weights as a tally: a token without a predecessor is no target."""
        tally = Tally(end, count, weight)
        weight[tally.run_of(self.start[self.parent < 0])] = 0
        return tally.merged()


def merge_sequences(sequences: SequenceSpans) -> tuple[Shape, Tally, int]:
    """Nodes, tallies and logical tokens of sequences."""
    ids, labels = sequences.ids, sequences.labels
    try:
        shape = _grow(ids, NONE, NONE, PATIENCE)
    except ValueError:
        sequences.check()
        raise
    if labels is None:
        changes = shape.ends(ids)
    else:
        *changes, fit = change_at_labels(
            labels.values,
            labels.begin,
            labels.end,
            shape.last_node,
            shape.values,
            shape.source,
            shape.parent,
            shape.depth,
        )
        if not fit:
            sequences.check()
            raise ValueError("A label differs from its token.")
        changes = _held(*changes)
    logical_tokens = int((ids.end - ids.begin).sum())
    end, count, first = shape.runs(changes, sequences.weights is not None)
    if sequences.weights is None:
        return shape, Tally(end, count), logical_tokens
    weight = np.zeros(len(end))
    weigh_sequences(
        sequences.weights.astype(np.float32),
        ids.end - ids.begin,
        NO_LABELS if labels is None else labels.values,
        NONE if labels is None else labels.begin,
        shape.last_node,
        shape.parent,
        shape.depth,
        shape.start,
        first,
        end,
        weight,
    )
    return shape, shape.tally(end, count, weight), logical_tokens


def merge_trees(trees: TreeSpans) -> tuple[Shape, Tally, int]:
    """Nodes, tallies and logical tokens of token trees."""
    shape = _grow(trees.ids, trees.owner, trees.hangs_from, NEVER)
    weighted = any(part.weights is not None for part in trees.parts)
    weights = [_tree_weights(part) if weighted else NO_WEIGHTS for part in trees.parts]
    nodes = np.cumsum([0, *(len(part.begin) for part in trees.parts)])
    spans = [slice(*bounds) for bounds in pairwise(nodes.tolist())]
    places, changes = new_changes(64)
    used = 0
    for part, at, part_weights in zip(trees.parts, spans, weights, strict=True):
        places, changes, used = change_at_counts(
            places,
            changes,
            used,
            part.counts,
            part_weights,
            part.begin,
            part.end,
            shape.above[at],
            shape.last_node[at],
            shape.parent,
            shape.depth,
        )
    logical_tokens = sum(part.logical_tokens for part in trees.parts)
    end, count, first = shape.runs(_held(places, changes), weighted)
    if not weighted:
        return shape, Tally(end, count), logical_tokens
    weight = np.zeros(len(end))
    for part, at, part_weights in zip(trees.parts, spans, weights, strict=True):
        weigh_spans(
            part_weights,
            part.begin,
            part.end,
            shape.above[at],
            shape.last_node[at],
            shape.parent,
            shape.depth,
            shape.start,
            first,
            end,
            weight,
        )
    return shape, shape.tally(end, count, weight), logical_tokens


def before(length: IntArray) -> LongArray:
    """Tokens of all nodes before each."""
    before = np.cumsum(length, dtype=np.int64)
    before -= length
    return before


def _held(places: LongArray, changes: LongArray) -> Changes:
    """The entries of a table of changes in order of their places."""
    held = np.flatnonzero(places != FREE)
    held = held[np.argsort(places[held])]
    return places[held], changes[held]


def _tree_weights(part: TreeColumns) -> FloatArray:
    return read_only(part.counts.astype(np.float64)) if part.weights is None else part.weights


def _grow(ids: Spans, owner: LongArray, hangs_from: LongArray, patience: int) -> Shape:
    """Grow a forest from spans."""
    status, *grown = grow(ids.values, ids.begin, ids.end, owner, hangs_from, NONE, patience)
    if status == HOPPY:
        longest_first = read_only(np.argsort(ids.begin - ids.end, kind="stable"))
        status, *grown = grow(ids.values, ids.begin, ids.end, owner, hangs_from, longest_first, NEVER)
    if status == NEGATIVE:
        raise ValueError("Token ids must not be below 0.")
    source, length, parent, at, depth, last_branch, above = grown
    first, child = group_children(parent, np.argsort(sort_keys(ids.values, source, at)))
    pieces = count_pieces(length, at, first, child)
    node_parent, node_depth, first_piece, *piece, head, following = write_nodes(
        ids.values, source, length, at, depth, first, child, pieces, len(owner) > 0
    )
    find_nodes(last_branch, ids.begin, ids.end, above, depth, first, child, at, head, following)
    values = ids.values
    node_source, node_length = piece
    if len(node_parent) < pieces:
        values = read_only(copy_pieces(ids.values, *piece))
        node_length = np.add.reduceat(node_length, first_piece[: len(node_parent)], dtype=np.int32)
        node_source = before(node_length)
    return Shape(values, node_source, node_parent, node_length, node_depth, last_branch, above)

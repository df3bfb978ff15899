"""Token trees, the contract between rendering and the trie, and their nodes as spans of flat arrays, checked.

The columns of some trees at a time are put together, which is a copy of their distinct tokens. Which tree is wrong,
and how, is looked up only if one is.

Cost: 8 to 16 bytes per token, 64 per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dagpack_hf.spans import (
    FloatArray,
    IntArray,
    LongArray,
    Spans,
    are_weights,
    one_view,
    read_only,
    rounded,
    token_array,
    weight_array,
    within,
)

TREES_AT_ONCE = 1024
"""Trees whose columns are checked and put together at once."""


@dataclass(frozen=True)
class TokenTree:
    """The tokens of one conversation or session, as a tree of stretches. A plain sequence is a tree of one node.

    Args:
        input_ids: `int32[n]`, the new tokens of all nodes, parents before children.
        target_count: `[n]`, how many of the tree's sequences have this token as a target; 0 for context.
        node_length: `[m]`, tokens of each node; they sum to `n`.
        node_parent: `[m]`, index in `input_ids` of the token the node hangs from, -1 for a root.
        logical_tokens: what the same sequences cost when each is written out on its own.
        target_weight: `float32[n]`, for each token the sum of the weights of the sequences that have it as a target, 0
            where there are none. `None`: every sequence weighs 1, so the weight is the count.
    """

    input_ids: npt.NDArray[np.integer]
    target_count: npt.NDArray[np.integer]
    node_length: npt.NDArray[np.integer]
    node_parent: npt.NDArray[np.integer]
    logical_tokens: int
    target_weight: npt.NDArray[np.floating] | None = None


@dataclass(frozen=True)
class TreeColumns:
    """The columns of some token trees, put together. The arrays are read-only.

    Args:
        ids: `int32[total]`, tokens of their nodes.
        counts: `int32[total]`, target counts.
        weights: `float64[total]`, target weights; `None` if none of the trees has any.
        begin: `int64[n]`, first token of each node.
        end: `int64[n]`, one past its last token.
        owner: `int64[n]`, the node that each hangs from, -1 for a root.
        hangs_from: `int64[n]`, the token it hangs from, -1 for a root.
        logical_tokens: of these trees.
    """

    ids: IntArray
    counts: IntArray
    weights: FloatArray | None
    begin: LongArray
    end: LongArray
    owner: LongArray
    hangs_from: LongArray
    logical_tokens: int


@dataclass(frozen=True)
class TreeSpans:
    """The nodes of token trees. The arrays are read-only.

    Args:
        ids: tokens of the nodes.
        owner: `int64[n]`, the node that each hangs from, -1 for a root.
        hangs_from: `int64[n]`, the token it hangs from, -1 for a root.
        parts: the columns that the trees came in, for their counts and weights.
    """

    ids: Spans
    owner: LongArray
    hangs_from: LongArray
    parts: Sequence[TreeColumns]


def read_trees(trees: Iterable[TokenTree]) -> TreeSpans:
    """Nodes of token trees; see `TokenForest.from_trees`."""
    iterator = iter(trees)
    parts: list[TreeColumns] = []
    count = 0
    while batch := list(islice(iterator, TREES_AT_ONCE)):
        parts.append(_read_columns(batch, count))
        count += len(batch)
    view, first = one_view([part.ids for part in parts])
    nodes = np.cumsum([0, *(len(part.begin) for part in parts)])[:-1]

    def shifted(name: str, shift: LongArray) -> LongArray:
        columns = [getattr(part, name) for part in parts]
        return _joined([np.where(c < 0, -1, c + by) for c, by in zip(columns, shift.tolist(), strict=True)], np.int64)

    ids = Spans(view, shifted("begin", first), shifted("end", first))
    return TreeSpans(ids, shifted("owner", nodes), shifted("hangs_from", first), parts)


def _read_columns(trees: list[TokenTree], first: int) -> TreeColumns:
    """Put the columns of trees together; `first` is the number of the first tree."""
    columns = _join_columns(trees)
    if columns is None:
        for index, tree in enumerate(trees, start=first):
            _check_tree(tree, index)
        raise AssertionError("a tree was refused and then found right")
    return columns


def _join_columns(trees: list[TokenTree]) -> TreeColumns | None:
    """Put the columns of trees together, unless one of them is wrong."""
    size = np.array([(len(t.input_ids), len(t.target_count), len(t.node_length), len(t.node_parent)) for t in trees])
    token = np.concatenate([[0], np.cumsum(size[:, 0])])
    node = np.concatenate([[0], np.cumsum(size[:, 2])])
    ids = _joined_numbers([tree.input_ids for tree in trees])
    counts = _joined_numbers([tree.target_count for tree in trees])
    length = _joined([tree.node_length for tree in trees], np.int64)
    hangs_from = _joined([tree.node_parent for tree in trees], np.int64)
    before = np.concatenate([[0], np.cumsum(length)])
    if (
        ids is None
        or counts is None
        or not np.array_equal(size[:, 0], size[:, 1])
        or not np.array_equal(size[:, 2], size[:, 3])
        or not np.array_equal(before[node], token)
        or length.min(initial=0) < 0
    ):
        return None
    token_above = np.where(hangs_from < 0, hangs_from, hangs_from + np.repeat(token[:-1], size[:, 2]))
    if hangs_from.min(initial=-1) < -1 or np.any(token_above >= before[:-1]):
        return None
    weights = None
    if any(tree.target_weight is not None for tree in trees):
        given = [tree.target_count if tree.target_weight is None else tree.target_weight for tree in trees]
        if any(len(each) != size[at, 0] for at, each in enumerate(given)):
            return None
        weights = _joined(given, np.float64)
        weighed = np.repeat([tree.target_weight is not None for tree in trees], size[:, 0])
        kept = rounded(weights)
        if np.any(weighed & ~(are_weights(weights) & ((kept == 0) | (counts != 0)))):
            return None
        weights = np.where(weighed, kept, weights)
    return TreeColumns(
        ids=ids,
        counts=counts,
        weights=None if weights is None else read_only(weights),
        begin=read_only(before[:-1]),
        end=read_only(before[1:]),
        owner=read_only(np.where(token_above < 0, -1, np.searchsorted(before[:-1], token_above, side="right") - 1)),
        hangs_from=read_only(token_above),
        logical_tokens=sum(int(tree.logical_tokens) for tree in trees),
    )


def _joined_numbers(columns: list[Any]) -> IntArray | None:
    """Token ids or counts of all trees, unless something else is among them."""
    arrays = [np.asarray(column) for column in columns]
    limit = np.iinfo(np.int32).max
    for at, array in enumerate(arrays):
        if array.dtype == np.int32 and array.ndim == 1:
            continue
        if array.ndim != 1 or (array.size and not (array.dtype.kind in "iu" and within(array, 0, limit))):
            return None
        arrays[at] = array.astype(np.int32)
    joined = _joined(arrays, np.int32)
    return joined if joined.min(initial=0) >= 0 else None


def _joined(arrays: Iterable[Any], dtype: type) -> npt.NDArray[Any]:
    pieces = [np.zeros(0, dtype), *arrays]
    return read_only(np.concatenate(pieces, dtype=dtype, casting="unsafe"))


def _check_tree(tree: TokenTree, index: int) -> None:
    """Raise if a tree is wrong."""
    ids = token_array(tree.input_ids, index)
    count = np.asarray(tree.target_count)
    length = np.asarray(tree.node_length, np.int64)
    hangs_from = np.asarray(tree.node_parent, np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    if len(count) != len(ids) or len(length) != len(hangs_from) or offset[-1] != len(ids):
        raise ValueError(
            f"Token tree {index}: {len(ids)} input_ids, {len(count)} target_count, node_length summing to "
            f"{offset[-1]} over {len(length)} nodes and {len(hangs_from)} node_parent contradict each other. "
            "Build token trees with `tokenize_conversations`."
        )
    _check_tree_count(count, index)
    if length.min(initial=0) < 0:
        node = int(length.argmin())
        raise ValueError(
            f"Token tree {index}: node {node} has {length[node]} tokens; node_length must not be below 0."
        )
    misplaced = (hangs_from >= offset[:-1]) | (hangs_from < -1)
    if misplaced.any():
        node = int(misplaced.argmax())
        raise ValueError(
            f"Token tree {index}: node {node} hangs from token {hangs_from[node]}, which does not come before its own "
            f"tokens (they begin at {offset[node]}). Parents must come before children."
        )
    if tree.target_weight is not None:
        _check_tree_weight(tree.target_weight, count, index)


def _check_tree_count(count: npt.NDArray[np.integer], index: int) -> None:
    if count.ndim != 1 or (count.size and count.dtype.kind not in "iu"):
        raise ValueError(
            f"Token tree {index}: target_count must be a flat list of integers, got {count.dtype} of shape "
            f"{count.shape}."
        )
    limit = np.iinfo(np.int32).max
    outside = (count < 0) | (count > limit)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"Token tree {index}: target_count {count[at]} of token {at} is outside 0 .. {limit}. It is how many of "
            "the tree's sequences have the token as a target."
        )


def _check_tree_weight(weight: npt.NDArray[np.floating], count: npt.NDArray[np.integer], index: int) -> None:
    if len(weight) != len(count):
        raise ValueError(
            f"Token tree {index}: {len(count)} target_count and {len(weight)} target_weight contradict each other. "
            "Give each token a weight (0 where it is no target), or leave target_weight out."
        )
    weight = weight_array(weight, f"Token tree {index}: target_weight")
    without_target = (weight > 0) & (count == 0)
    if without_target.any():
        at = int(without_target.argmax())
        raise ValueError(
            f"Token tree {index}: token {at} has target_weight {weight[at]}, but its target_count is 0. A weight is "
            "the sum over the sequences that have the token as a target, so it must be 0 where there are none."
        )

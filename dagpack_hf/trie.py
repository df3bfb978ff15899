"""The trie: all token sequences of a corpus, merged by their common prefixes.

Design. A radix tree (one node per stretch of tokens without a branch) is grown by insertion. Children are found
through one hash table keyed by (node, next token); edges are compared with vectorised blocks. Trees are inserted node
by node from the place where their parent landed, so the tokens of a context are never written out again for each turn
that shares it. At the end the forest is put into canonical form: chains are merged, children ordered by their first
token and nodes numbered in preorder, so the result depends neither on the order of the input nor on how it was cut
into trees.

Weights. How many sequences train a token, and what these sequences weigh together, are added up, split and merged
alike; so while the forest grows they are the rows of one array, the *tally* of a token: its count, and below it, where
a sequence has a weight, its weight. Weights are read as float32 and added as float64. Such sums are exact, and do not
depend on the order of the input, as long as the number of sequences times the ratio of the largest to the smallest
weight stays below 2**28.

Cost. Every input token is read once. Nothing is kept per token but the token and its tally (8 bytes, 20 with weights);
the Python objects are per node, never per token, and nothing recurses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label of a token that is not a target, as in PyTorch's cross entropy."""

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
TokenSequence = Sequence[int] | npt.NDArray[np.integer]


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
class TokenForest:
    """Path-compressed trie of a corpus in flat arrays. Nodes are in preorder, tokens in node order.

    Args:
        tokens: `int32[U]`, the distinct (unique) tokens; node `v` owns `tokens[start[v] : start[v] + length[v]]`.
        target_count: `int32[U]`, how many source sequences train this token; 0 for context. A token without a
            predecessor is never a target.
        parent: `int32[N]`, parent node, -1 for a root. `parent[v] < v`.
        start: `int64[N]`, first token of the node.
        length: `int32[N]`, tokens of the node, at least 1.
        depth: `int32[N]`, tokens above the node, 0 for a root.
        logical_tokens: tokens of all source sequences, each written out on its own.
        target_weight: `float64[U]`, what the sequences that train this token weigh together; 0 for context. `None`:
            every sequence weighs 1, so the weight is the count.
    """

    tokens: IntArray
    target_count: IntArray
    parent: IntArray
    start: npt.NDArray[np.int64]
    length: IntArray
    depth: IntArray
    logical_tokens: int
    target_weight: FloatArray | None = None

    @classmethod
    def from_trees(cls, trees: Iterable[TokenTree]) -> TokenForest:
        """Merge token trees.

        Args:
            trees: the trees of the corpus, in any order, with weights or without. The forest has weights if one of
                them has; the sequences of the others then weigh 1.

        Raises:
            ValueError: a tree whose columns contradict each other, or a weight that is negative or not finite; the
                message names the tree by its position.
        """
        builder = _ForestBuilder()
        logical = 0
        for index, tree in enumerate(trees):
            _insert_tree(builder, tree, index)
            logical += int(tree.logical_tokens)
        return builder.build(logical)

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[TokenSequence],
        labels: Iterable[TokenSequence] | None = None,
        weights: Iterable[float] | None = None,
    ) -> TokenForest:
        """Merge plain token sequences.

        Args:
            sequences: token ids of each sequence.
            labels: for each sequence, its labels: the token itself where the token is a target, -100 where it is not
                (not shifted, as in `transformers`). Without labels every token is a target. The label of the first
                token is not used, since nothing precedes it.
            weights: for each sequence, how much each of its targets counts. Without weights each counts 1.

        Raises:
            ValueError: ids or labels that cannot be represented, or a weight that is negative or not finite; the
                message names sequence and position.

        Example:
            >>> forest = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4]])
            >>> forest.num_nodes, forest.num_tokens, forest.logical_tokens
            (3, 4, 6)
        """
        builder = _ForestBuilder(weighted=weights is not None)
        logical = 0
        label_iterator = iter(labels) if labels is not None else None
        weight_iterator = iter(weights) if weights is not None else None
        for index, sequence in enumerate(sequences):
            ids = _token_array(sequence, index)
            if label_iterator is None:
                count = np.ones(len(ids), np.int32)
            else:
                count = _label_count(ids, next(label_iterator, None), index)
            weight = None if weight_iterator is None else count * _sequence_weight(next(weight_iterator, None), index)
            builder.insert(-1, 0, ids, join_tally(count, weight))
            logical += len(ids)
        if weight_iterator is not None and next(weight_iterator, None) is not None:
            raise ValueError("There are more weights than sequences; weights must have one number for each sequence.")
        return builder.build(logical)

    @property
    def num_nodes(self) -> int:
        """Nodes of the path-compressed trie."""
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Unique tokens: each shared prefix counted once."""
        return len(self.tokens)

    @property
    def path_weight(self) -> IntArray | FloatArray:
        """`[U]`, weight of each token under `"paths"`: `target_weight`, or where that is `None` the count.

        Trained is a token with a weight above 0. One that only sequences of weight 0 have as a target is context.
        """
        return self.target_count if self.target_weight is None else self.target_weight

    @property
    def num_targets(self) -> int:
        """Distinct tokens that are trained."""
        return int(np.count_nonzero(self.path_weight))

    @property
    def num_source_targets(self) -> int:
        """Labelled tokens of all source sequences."""
        return int(self.target_count.sum(dtype=np.int64))

    @cached_property
    def leaves(self) -> npt.NDArray[np.int64]:
        """`int64[L]`, the nodes without children, in preorder."""
        has_child = np.zeros(self.num_nodes, bool)
        has_child[self.parent[self.parent >= 0]] = True
        return np.flatnonzero(~has_child)

    @property
    def longest_path(self) -> int:
        """Tokens from a root to the deepest leaf; 0 for an empty forest."""
        return int((self.depth + self.length).max(initial=0))

    def path(self, node: int) -> IntArray:
        """Token ids from the root to the end of `node`."""
        pieces = []
        while node >= 0:
            pieces.append(self.tokens[self.start[node] : self.start[node] + self.length[node]])
            node = int(self.parent[node])
        return np.concatenate(pieces[::-1])


def join_tally(count: npt.NDArray[np.integer], weight: npt.NDArray[np.number] | None) -> IntArray | FloatArray:
    """Counts (`int32[1, n]`), or counts and weights (`float64[2, n]`), as the rows of one array."""
    if weight is None:
        return np.asarray(count, np.int32)[None]
    return np.array([count, weight], np.float64)


def split_tally(tally: IntArray | FloatArray) -> tuple[IntArray, FloatArray | None]:
    """The inverse of `join_tally`: `target_count`, and `target_weight` if there are weights."""
    return tally[0].astype(np.int32), tally[1].astype(np.float64) if len(tally) > 1 else None


def common_prefix(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Length of the common prefix of two arrays, compared in blocks that grow."""
    limit = min(len(a), len(b))
    at, block = 0, 64
    while at < limit:
        stop = min(at + block, limit)
        unequal = a[at:stop] != b[at:stop]
        first = int(unequal.argmax())
        if unequal[first]:
            return at + first
        at, block = stop, block * 4
    return limit


class _ForestBuilder:
    """Grows the radix tree. Node ids are in order of creation; a split gives the new id to the upper part.

    Args:
        weighted: whether tallies have a row of weights; all that are inserted must be alike in this.
    """

    def __init__(self, weighted: bool = False) -> None:
        self.weighted = weighted
        self.tokens: list[IntArray] = []
        self.tallies: list[IntArray | FloatArray] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.child: dict[tuple[int, int], int] = {}

    def weigh(self) -> None:
        """Give every sequence so far the weight 1."""
        self.weighted = True
        self.tallies = [join_tally(tally[0], tally[0]) for tally in self.tallies]

    def insert(self, node: int, depth: int, ids: IntArray, tally: IntArray | FloatArray) -> int:
        """Insert `ids` below the first `depth` tokens of the path that ends in `node`; return where they end."""
        if not len(ids):
            return node
        if depth == 0:
            node, offset = -1, 0
            if tally[0, 0]:
                tally = tally.copy()
                tally[:, 0] = 0
        else:
            while self.depth[node] >= depth:
                node = self.parent[node]
            offset = depth - self.depth[node]
        while True:
            if node >= 0 and offset < len(self.tokens[node]):
                shared = common_prefix(self.tokens[node][offset:], ids)
                self.tallies[node][:, offset : offset + shared] += tally[:, :shared]
                ids, tally = ids[shared:], tally[:, shared:]
                if not len(ids):
                    return node
                if offset + shared < len(self.tokens[node]):
                    node = self._split(node, offset + shared)
            child = self.child.get((node, int(ids[0])))
            if child is None:
                return self._append(node, ids, tally)
            node, offset = child, 0

    def _append(self, parent: int, ids: IntArray, tally: IntArray | FloatArray) -> int:
        node = len(self.parent)
        self.tokens.append(ids)
        self.tallies.append(tally.copy())
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + len(self.tokens[parent]) if parent >= 0 else 0)
        self.child[parent, int(ids[0])] = node
        return node

    def _split(self, node: int, at: int) -> int:
        upper = len(self.parent)
        ids, tally = self.tokens[node], self.tallies[node]
        self.tokens.append(ids[:at])
        self.tallies.append(tally[:, :at])
        self.parent.append(self.parent[node])
        self.depth.append(self.depth[node])
        self.child[self.parent[node], int(ids[0])] = upper
        self.tokens[node], self.tallies[node] = ids[at:], tally[:, at:]
        self.parent[node] = upper
        self.depth[node] += at
        self.child[upper, int(ids[at])] = node
        return upper

    def build(self, logical_tokens: int) -> TokenForest:
        """Canonical form: children by first token, preorder, a node with an only child merged with it."""
        size = len(self.parent)
        parent = np.array(self.parent, np.int64).reshape(size)
        first = np.fromiter((ids[0] for ids in self.tokens), np.int64, size)
        order, num_children = preorder(parent, first)

        length = np.fromiter((len(self.tokens[v]) for v in order), np.int64, size)
        start = np.zeros(size, np.int64)
        np.cumsum(length[:-1], out=start[1:])
        old_parent = parent[order]
        head = (old_parent < 0) | (num_children[old_parent] != 1)
        chain = np.cumsum(head) - 1
        new_id = np.empty(size, np.int64)
        new_id[order] = chain
        heads = np.flatnonzero(head)
        no_tally = join_tally(np.zeros(0, np.int32), np.zeros(0) if self.weighted else None)
        count, weight = split_tally(np.concatenate([no_tally, *(self.tallies[v] for v in order)], axis=1))
        return TokenForest(
            tokens=np.concatenate([np.zeros(0, np.int32), *(self.tokens[v] for v in order)]),
            target_count=count,
            parent=np.where(old_parent[heads] < 0, -1, new_id[old_parent[heads]]).astype(np.int32),
            start=start[heads],
            length=np.bincount(chain, weights=length, minlength=len(heads)).astype(np.int32),
            depth=np.array(self.depth, np.int32).reshape(size)[order][heads],
            logical_tokens=logical_tokens,
            target_weight=weight,
        )


def preorder(
    parent: npt.NDArray[np.int64], key: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Preorder of the nodes, children by ascending key, and the number of children of each node."""
    size = len(parent)
    by_parent = np.lexsort((key, parent))
    bounds = np.searchsorted(parent[by_parent], np.arange(-1, size + 1))
    children = by_parent.tolist()
    order: list[int] = []
    stack = children[: bounds[1]][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        low, high = bounds[node + 1], bounds[node + 2]
        if high > low:
            stack.extend(children[low:high][::-1])
    return np.array(order, np.int64), np.diff(bounds[1:])


def _insert_tree(builder: _ForestBuilder, tree: TokenTree, index: int) -> None:
    ids = _token_array(tree.input_ids, index)
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
    misplaced = (hangs_from >= offset[:-1]) | (hangs_from < -1)
    if misplaced.any():
        node = int(misplaced.argmax())
        raise ValueError(
            f"Token tree {index}: node {node} hangs from token {hangs_from[node]}, which does not come before its own "
            f"tokens (they begin at {offset[node]}). Parents must come before children."
        )
    tally = _tree_tally(builder, count, tree.target_weight, index)
    owner = np.searchsorted(offset, hangs_from, side="right") - 1
    landed: list[int] = []
    depth: list[int] = []
    for node in range(len(length)):
        above = -1 if hangs_from[node] < 0 else int(owner[node])
        depth.append(0 if above < 0 else depth[above] + int(hangs_from[node] - offset[above]) + 1)
        piece = slice(offset[node], offset[node + 1])
        landed.append(builder.insert(-1 if above < 0 else landed[above], depth[node], ids[piece], tally[:, piece]))


def _tree_tally(
    builder: _ForestBuilder, count: npt.NDArray[np.integer], weight: npt.NDArray[np.floating] | None, index: int
) -> IntArray | FloatArray:
    """Tally of a tree's tokens, with weights if the forest has or gets them."""
    if weight is None:
        return join_tally(count, count if builder.weighted else None)
    if len(weight) != len(count):
        raise ValueError(
            f"Token tree {index}: {len(count)} target_count and {len(weight)} target_weight contradict each other. "
            "Give each token a weight (0 where it is no target), or leave target_weight out."
        )
    weight = _weight_array(weight, f"Token tree {index}: target_weight")
    without_target = (weight > 0) & (count == 0)
    if without_target.any():
        at = int(without_target.argmax())
        raise ValueError(
            f"Token tree {index}: token {at} has target_weight {weight[at]}, but its target_count is 0. A weight is "
            "the sum over the sequences that have the token as a target, so it must be 0 where there are none."
        )
    if not builder.weighted:
        builder.weigh()
    return join_tally(count, weight)


def _token_array(sequence: TokenSequence, index: int) -> IntArray:
    array = np.asarray(sequence)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"Sequence {index}: token ids must be a flat list of integers, got {array.dtype} of shape {array.shape}."
        )
    limit = np.iinfo(np.int32).max
    outside = (array < 0) | (array > limit)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(f"Sequence {index}: token id {array[at]} at position {at} is outside 0 .. {limit}.")
    return array.astype(np.int32, copy=False)


def _label_count(ids: IntArray, labels: TokenSequence | None, index: int) -> IntArray:
    array = np.asarray([] if labels is None else labels)
    if array.shape != ids.shape:
        raise ValueError(f"Sequence {index}: {len(ids)} tokens but {array.size} labels; they must be aligned.")
    is_target = array != IGNORE_INDEX
    differs = is_target & (array != ids)
    if differs.any():
        at = int(differs.argmax())
        raise ValueError(
            f"Sequence {index}: label {array[at]} at position {at} differs from its token {ids[at]}. A label must be "
            "the token itself or -100: in a trie the target of a position is its child."
        )
    return is_target.astype(np.int32)


def _sequence_weight(weight: float | None, index: int) -> np.float32:
    if weight is None:
        raise ValueError(f"Sequence {index}: no weight; weights must have one number for each sequence.")
    return _weight_array([weight], f"Sequence {index}: weight")[0]


def _weight_array(weight: npt.ArrayLike, owner: str) -> npt.NDArray[np.float32]:
    given = np.asarray(weight, np.float64)
    with np.errstate(over="ignore"):
        array = given.astype(np.float32)
    refused = ~(np.isfinite(array) & (array >= 0))
    if refused.any():
        at = int(refused.argmax())
        place = f" of token {at}" if given.size > 1 else ""
        raise ValueError(
            f"{owner}{place} is {given[at]}. A weight must be a finite float32 of at least 0; give 0 to what should "
            "not count."
        )
    return array

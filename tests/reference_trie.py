"""The trie without compiled code: insertion in Python, node by node, and numpy for the tokens of a node.

A radix tree whose nodes are split where sequences part or end, put into canonical form at the end. Slow, plain, and
what the compiled trie has to equal in every array. It takes its input for granted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagpack_hf.trie import IGNORE_INDEX, FloatArray, IntArray, TokenForest, TokenTree


def join_tally(count: npt.NDArray[np.integer], weight: npt.NDArray[np.number] | None) -> IntArray | FloatArray:
    """Counts (`int32[1, n]`), or counts and weights (`float64[2, n]`), as the rows of one array."""
    if weight is None:
        return np.asarray(count, np.int32)[None]
    return np.array([count, weight], np.float64)


def split_tally(tally: IntArray | FloatArray) -> tuple[IntArray, FloatArray | None]:
    """The inverse of `join_tally`: `target_count`, and `target_weight` if there are weights."""
    return tally[0].astype(np.int32), tally[1].astype(np.float64) if len(tally) > 1 else None


def reference_forest(sequences, labels=None, weights=None) -> TokenForest:
    """`TokenForest.from_sequences`."""
    builder = _ForestBuilder(weighted=weights is not None)
    for index, sequence in enumerate(sequences):
        ids = np.asarray(sequence, np.int32)
        count = np.ones(len(ids), np.int32)
        if labels is not None:
            count = (np.asarray(labels[index], np.int64) != IGNORE_INDEX).astype(np.int32)
        weight = None if weights is None else count * np.float32(weights[index])
        builder.insert(-1, 0, ids, join_tally(count, weight))
    return builder.build(sum(map(len, sequences)))


def reference_forest_of_trees(trees: list[TokenTree]) -> TokenForest:
    """`TokenForest.from_trees`."""
    builder = _ForestBuilder(weighted=any(tree.target_weight is not None for tree in trees))
    for tree in trees:
        _insert_tree(builder, tree)
    return builder.build(sum(int(tree.logical_tokens) for tree in trees))


def _insert_tree(builder: _ForestBuilder, tree: TokenTree) -> None:
    ids = np.asarray(tree.input_ids, np.int32)
    weight = tree.target_count if tree.target_weight is None else tree.target_weight
    tally = join_tally(tree.target_count, weight if builder.weighted else None)
    length = np.asarray(tree.node_length, np.int64)
    hangs_from = np.asarray(tree.node_parent, np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    owner = np.searchsorted(offset, hangs_from, side="right") - 1
    landed: list[int] = []
    depth: list[int] = []
    for node in range(len(length)):
        above = -1 if hangs_from[node] < 0 else int(owner[node])
        depth.append(0 if above < 0 else depth[above] + int(hangs_from[node] - offset[above]) + 1)
        piece = slice(offset[node], offset[node + 1])
        landed.append(builder.insert(-1 if above < 0 else landed[above], depth[node], ids[piece], tally[:, piece]))


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
        return TokenForest.from_tokens(
            tokens=np.concatenate([np.zeros(0, np.int32), *(self.tokens[v] for v in order)]),
            target_count=count,
            parent=np.where(old_parent[heads] < 0, -1, new_id[old_parent[heads]]).astype(np.int32),
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

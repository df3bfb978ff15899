"""The trie as it is written into windows: every position has one target.

In the trie a branch point has several children, and its last token would need several targets. Here that token is
taken off the node and written once for each child that begins with a target; each copy has its own target and its own
subtree. Children that begin with context need no copy and hang from the first one; a target that weighs nothing is
context too. What is left is a tree of *segments*, stretches of tokens whose inner targets are the next token and whose
end has at most one target.

Cost: one pass over the nodes; as many extra positions as there are trained branches beyond the first at each branch
point (0.07 % of tokens on agent sessions).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dagpack_hf.trie import TokenForest, preorder


@dataclass(frozen=True)
class Segments:
    """Segments in preorder, heavy child first.

    Args:
        parent: `int64[M]`, parent segment, -1 for a root. `parent[s] < s`.
        start: `int64[M]`, first token of the segment in the forest's `tokens`.
        length: `int64[M]`, tokens; 0 for what is left of a branch point of one token.
        depth: `int64[M]`, tokens above.
        target: `int64[M]`, index in the forest's `tokens` of the target of the last position, -1 for none.
    """

    parent: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def leaves(self) -> npt.NDArray[np.int64]:
        """`int64[L]`, segments without children, in preorder."""
        has_child = np.zeros(len(self), bool)
        has_child[self.parent[self.parent >= 0]] = True
        return np.flatnonzero(~has_child)


def build_segments(forest: TokenForest) -> Segments:
    """Split the branch points of a forest, so that each position has at most one target."""
    trained, untrained = _children(forest)
    start, length, depth = forest.start.tolist(), forest.length.tolist(), forest.depth.tolist()
    hangs_from = [-1] * forest.num_nodes
    rows: list[tuple[int, int, int, int, int]] = []  # parent, start, length, depth, target
    for node in range(forest.num_nodes):
        last = start[node] + length[node] - 1
        targets = trained.get(node, [])
        if len(targets) <= 1:
            rows.append(
                (hangs_from[node], start[node], length[node], depth[node], start[targets[0]] if targets else -1)
            )
        else:
            trunk_target = last if length[node] > 1 and forest.path_weight[last] > 0 else -1
            rows.append((hangs_from[node], start[node], length[node] - 1, depth[node], trunk_target))
            trunk = len(rows) - 1
            for child in targets:
                hangs_from[child] = len(rows)
                rows.append((trunk, last, 1, depth[node] + length[node] - 1, start[child]))
        first = hangs_from[targets[0]] if len(targets) > 1 else len(rows) - 1
        if len(targets) == 1:
            hangs_from[targets[0]] = first
        for child in untrained.get(node, []):
            hangs_from[child] = first

    parent, *columns = np.array(rows, np.int64).reshape(-1, 5).T
    order, _ = preorder(parent, -subtree_lengths(parent, columns[1]))
    new_id = np.empty(len(order) + 1, np.int64)
    new_id[order] = np.arange(len(order))
    new_id[-1] = -1
    return Segments(new_id[parent[order]], *(column[order] for column in columns))


def subtree_lengths(parent: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens in each node's subtree, the node included. Parents come before children."""
    total = length.tolist()
    above = parent.tolist()
    for node in range(len(total) - 1, -1, -1):
        if above[node] >= 0:
            total[above[node]] += total[node]
    return np.array(total, np.int64)


def _children(forest: TokenForest) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Children of each node that begin with a target, heavy child first, and those that begin with context."""
    weight = subtree_lengths(forest.parent.astype(np.int64), forest.length.astype(np.int64))
    is_target = forest.path_weight[forest.start] > 0
    groups: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for node in np.lexsort((-weight, forest.parent)).tolist():
        if forest.parent[node] >= 0:
            groups[0 if is_target[node] else 1].setdefault(int(forest.parent[node]), []).append(node)
    return groups

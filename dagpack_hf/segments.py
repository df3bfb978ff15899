"""The trie as it is written into windows: every position has one target.

In the trie a branch point has several children, and its last token would need several targets. Here that token is
taken off the node and written once for each child that begins with a target; each copy has its own target and its own
subtree. Children that begin with context need no copy and hang from the first one; a target that weighs nothing is
context too. What is left is a tree of *segments*, stretches of tokens whose inner targets are the next token and whose
end has at most one target.

Cost: linear in the nodes but for the sorting of siblings, 104 bytes for each while it runs and 40 for each segment
afterwards; as many extra positions as there are trained branches beyond the first at each branch
point (0.07 % of tokens on agent sessions).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.segments import renumber_in_preorder, split_branches
from dagpack_hf.trie import TokenForest


@dataclass(frozen=True)
class Segments:
    """Segments in preorder, heavy child first.

    Args:
        parent: `int64[M]`, parent segment, -1 for a root. `parent[s] < s`.
        start: `int64[M]`, first token of the segment, counted in node order.
        length: `int64[M]`, tokens; 0 for what is left of a branch point of one token.
        depth: `int64[M]`, tokens above.
        target: `int64[M]`, the token, counted in node order, that is the target of the last position,
            -1 for none.
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
    start, length = forest.start, forest.length.astype(np.int64)
    columns = renumber_in_preorder(
        split_branches(
            forest.parent.astype(np.int64),
            start,
            length,
            forest.depth.astype(np.int64),
            forest.tally.is_target(start),
            forest.tally.is_target(start + length - 1),
        )
    )
    return Segments(*columns)

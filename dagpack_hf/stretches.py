"""Stretches of tokens with equal tallies: the runs of a forest, cut where nodes end and where a limit is.

Cost: linear in runs and nodes but for a sort of their ends; 24 to 36 bytes for each stretch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dagpack_hf.spans import FloatArray, IntArray, LongArray
from dagpack_hf.trie import TokenForest


@dataclass(frozen=True)
class Stretches:
    """The stretches of a forest that is not empty.

    Args:
        first: `int64[N + 1]`, the first stretch of each node.
        length: `int64[S]`, tokens of each stretch, at least 1.
        count: `int32[S]`, how many sequences train each of its tokens.
        weight: `float64[S]`, what they weigh together; `None`: each weighs 1.
        sequences: `int32[S]`, how many sequences pass through them; `None`: not counted.
    """

    first: LongArray
    length: LongArray
    count: IntArray
    weight: FloatArray | None
    sequences: IntArray | None

    @classmethod
    def of(cls, forest: TokenForest, limit: int | None = None) -> Stretches:
        """The stretches of a forest, also cut at a depth."""
        start, depth, tally = forest.start, forest.depth, forest.tally
        ends = [tally.end, start[1:]]
        if limit is not None:
            crossing = (depth < limit) & (limit < depth + forest.length)
            ends.append(start[crossing] + limit - depth[crossing])
        end = np.unique(np.concatenate(ends))
        runs = tally.some(tally.run_of(end - 1))
        first = np.append(np.searchsorted(end, start, side="right"), len(end))
        return cls(first, np.diff(end, prepend=0), runs.count, runs.weight, runs.sequences)

    @property
    def end(self) -> LongArray:
        """`int64[S]`, one past the last token of each stretch."""
        return np.cumsum(self.length)

"""The leaf lines of partitions, put together: all of the corpus' trie that its bound, its advice and its size need.

Cost: 16 bytes per leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dagpack_hf.advice import FACTORS, LengthAdvice
from dagpack_hf.kernels.bound import certificate
from dagpack_hf.pack import LeafLine
from dagpack_hf.spans import LongArray
from dagpack_hf.trie import TokenForest


@dataclass(frozen=True)
class PartLine:
    """The leaf line of one partition.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that it shares with the one before; of the first one with the partition before, if
            that is not empty.
        last: tokens that the last path shares with the partition after it, if that is not empty.
        common: tokens that the paths of partitions on both sides share across this one.
    """

    end: LongArray
    shared: LongArray
    last: int
    common: int

    @classmethod
    def of(cls, forest: TokenForest, first: int, last: int, common: int) -> PartLine:
        """The line of a forest whose first and last path share so much with other partitions."""
        line = LeafLine.of(forest)
        shared = line.shared.copy()
        shared[:1] = first
        return cls(line.end, shared, last, common)


@dataclass(frozen=True)
class WholeLine:
    """The leaf line of a corpus.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that it shares with the one before.
    """

    end: LongArray
    shared: LongArray

    @classmethod
    def of(cls, parts: Iterable[PartLine]) -> WholeLine:
        """Put the lines of partitions together; a path that is a prefix of the one before or after it is no leaf."""
        ends, shares = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        before = 0
        for part in parts:
            if not len(part.end):
                before = min(before, part.common)
                continue
            shared = part.shared.copy()
            shared[0] = min(shared[0], before)
            ends.append(part.end)
            shares.append(shared)
            before = part.last
        return cls(*_leaves(np.concatenate(ends), np.concatenate(shares)))

    @property
    def tokens(self) -> int:
        """Distinct tokens."""
        return int((self.end - self.shared).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return int(self.end.max(initial=0))

    def lower_bound(self, max_length: int) -> int:
        """As `dagpack_hf.pack.lower_bound`."""
        return int(certificate(self.end, self.shared, max_length)[0])

    def advise(self, logical_tokens: int) -> tuple[LengthAdvice, ...]:
        """As `dagpack_hf.advice.advise`."""
        lengths = {factor: factor * self.longest for factor in FACTORS} if self.longest else {}
        least = {factor: int(certificate(self.end, self.shared, length)[1]) for factor, length in lengths.items()}
        return tuple(
            LengthAdvice(factor, lengths[factor], tokens, logical_tokens / tokens) for factor, tokens in least.items()
        )


def _leaves(end: LongArray, shared: LongArray) -> tuple[LongArray, LongArray]:
    """Take out of a line what is a prefix of its neighbour."""
    while len(end):
        gone = end <= np.maximum(shared, np.append(shared[1:], 0))
        if not gone.any():
            break
        # only the first of several in a row, so that each passes on what it shares
        gone[1:] &= ~gone[:-1]
        at = np.flatnonzero(gone)
        passed = at[at + 1 < len(end)]
        shared = shared.copy()
        shared[passed + 1] = np.minimum(shared[passed], shared[passed + 1])
        end, shared = end[~gone], shared[~gone]
    return end, shared

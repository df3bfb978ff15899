"""Splitters: where the sorted paths of a corpus are cut into partitions.

Paths are compared token by token, a prefix before what goes on from it. Partition `b` holds the paths from splitter
`b - 1` on up to splitter `b`, which is not in it. A splitter is no longer than it has to be to separate two
neighbouring paths of the sample. Where there is a choice it separates two that have little in common, for what two
partitions share is computed in both (as the separators of a prefix B-tree; Bayer and Unterauer, Prefix B-trees, 1977).

Cost: the sampled paths, twice, while they are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dagpack_hf.kernels.radix import common_prefix
from dagpack_hf.spans import IntArray, LongArray, TokenSequence

TOKENS_OF_A_PATH = 16
"""What a path costs that adds nothing to the one before it, in tokens."""

SLACK = 0.125
"""How far from the even cut a splitter may be, in partitions, if it then separates paths that share less."""


@dataclass(frozen=True)
class Splitters:
    """Ascending paths, all different.

    Args:
        tokens: `int32[...]`, their tokens, one after the other.
        offset: `int64[S + 1]`, where each begins.
    """

    tokens: IntArray
    offset: LongArray

    @classmethod
    def of(cls, paths: Iterable[TokenSequence]) -> Splitters:
        """Splitters from paths.

        Raises:
            ValueError: they do not ascend, or one is empty.
        """
        arrays = [np.asarray(path, np.int32) for path in paths]
        keys = [_key(each) for each in arrays]
        if any(one >= other for one, other in pairwise(keys)) or not all(map(len, arrays)):
            raise ValueError("Splitters must be ascending paths of at least one token, all different.")
        offset = np.cumsum([0, *map(len, arrays)]).astype(np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *arrays]), offset)

    def __len__(self) -> int:
        return len(self.offset) - 1

    @property
    def partitions(self) -> int:
        """One more than there are splitters."""
        return len(self) + 1

    @cached_property
    def shared(self) -> LongArray:
        """`int64[S]`, tokens that each has in common with the one before; 0 for the first."""
        return _shared_with_previous([self.tokens[low:high] for low, high in pairwise(self.offset.tolist())])

    def common(self, first: int, last: int) -> int:
        """Tokens that two splitters have in common, all of those between them as well; `first` is not above `last`."""
        length = int(self.offset[first + 1] - self.offset[first])
        return int(self.shared[first + 1 : last + 1].min(initial=length))


def choose_splitters(sample: Sequence[IntArray], partitions: int) -> Splitters:
    """Splitters that make partitions with about equally many new tokens.

    Args:
        sample: paths of the corpus, in any order.
        partitions: how many partitions there should be; there are fewer if the sample has fewer different paths.
    """
    paths = sorted((path for path in sample if len(path)), key=_key)
    shared = _shared_with_previous(paths)
    length = np.fromiter(map(len, paths), np.int64, len(paths))
    cost = np.cumsum(length - shared + TOKENS_OF_A_PATH)
    differs = shared < length
    differs[:1] = False  # nothing is before the first path
    found: list[IntArray] = []
    last = 0
    for border in range(1, partitions):
        each = cost[-1] / partitions if len(cost) else 0
        low, high = np.searchsorted(cost, [(border - SLACK) * each, (border + SLACK) * each])
        near = np.flatnonzero(differs[max(low, last + 1) : high + 1]) + max(low, last + 1)
        if len(near):
            last = int(near[np.lexsort((np.abs(cost[near] - border * each), shared[near]))[0]])
            found.append(paths[last][: shared[last] + 1])
    return Splitters.of(found)


def _key(path: IntArray) -> bytes:
    """Bytes that are ordered as the paths are."""
    return path.astype(">i4").tobytes()


def _shared_with_previous(paths: Sequence[IntArray]) -> LongArray:
    """Tokens that each path has in common with the one before; 0 for the first."""
    common = (common_prefix(one, 0, other, 0, min(len(one), len(other))) for one, other in pairwise(paths))
    return np.array([0, *common][: len(paths)], np.int64)

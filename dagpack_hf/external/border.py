"""What neighbouring partitions share: paths along the splitters between them, and who trains the tokens there.

If `last` is the last path of a partition, `first` the first path of the next one and `s` the splitter between them,
then `last < s <= first`. So what `last` and `first` have in common is a prefix of `s`, and its length is that of what
`last` and `s` have in common, or `s` and `first`, whichever is less. It is therefore enough to know of each partition
how far its paths go along the splitters at its ends, and the tallies of the tokens there. Sums of such summaries are
exact, so they may be made table by table, in any order.

A token that several partitions hold is trained in the last of them, with its tally in the whole corpus.

Cost: 32 bytes for each token of the splitters in a summary; in borders as much for each token that is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dagpack_hf.external.splitters import Splitters
from dagpack_hf.kernels.pieces import ABOVE, BELOW
from dagpack_hf.overflow import Overflow
from dagpack_hf.spans import FloatArray, LongArray

NOTHING_LOST = Overflow()


@dataclass(frozen=True)
class Summary:
    """What is known of the partitions before they are merged.

    Args:
        tokens: `int64[P]`, tokens of the pieces in each partition; one with none is empty.
        reach: `int64[2, S]`, how far the paths of the partitions below and above each splitter go along it.
        count: `int64[2, ...]`, for each token of the splitters, how many sequences train it in the partition below,
            and in the partition above, its splitter.
        weight: `float64[2, ...]`, what these sequences weigh together.
        weighted: whether any has a weight.
        logical_tokens: of the corpus.
        dropped: what was left out before.
    """

    tokens: LongArray
    reach: LongArray
    count: LongArray
    weight: FloatArray
    weighted: bool = False
    logical_tokens: int = 0
    dropped: Overflow = NOTHING_LOST

    @classmethod
    def empty(cls, splitters: Splitters) -> Summary:
        """The summary of nothing."""
        shape = (2, len(splitters.tokens))
        reach = np.zeros((2, len(splitters)), np.int64)
        return cls(np.zeros(splitters.partitions, np.int64), reach, np.zeros(shape, np.int64), np.zeros(shape))

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.tokens + other.tokens,
            np.maximum(self.reach, other.reach),
            self.count + other.count,
            self.weight + other.weight,
            self.weighted or other.weighted,
            self.logical_tokens + other.logical_tokens,
            self.dropped + other.dropped,
        )


@dataclass(frozen=True)
class SharedPath:
    """The tokens of a partition's first path that earlier partitions hold, or of its last path that later ones hold.

    Args:
        count: `int64[n]`, how many sequences of the corpus train each token; the path begins with them.
        weight: `float64[n]`, what these weigh together; `None` if no sequence of the corpus has a weight.
    """

    count: LongArray
    weight: FloatArray | None

    def __len__(self) -> int:
        return len(self.count)

    def upto(self, length: int) -> SharedPath:
        """The first tokens of it."""
        return SharedPath(self.count[:length], None if self.weight is None else self.weight[:length])

    def beyond(self, length: int) -> SharedPath:
        """What is behind the first tokens of it."""
        return SharedPath(self.count[length:], None if self.weight is None else self.weight[length:])

    def then(self, other: SharedPath) -> SharedPath:
        """This path, and another one behind it."""
        weight = None
        if self.weight is not None and other.weight is not None:
            weight = np.concatenate([self.weight, other.weight])
        return SharedPath(np.concatenate([self.count, other.count]), weight)

    def plus(self, other: SharedPath) -> SharedPath:
        """The sum of the tallies of two paths of one length."""
        weight = None if self.weight is None or other.weight is None else self.weight + other.weight
        return SharedPath(self.count + other.count, weight)


@dataclass(frozen=True)
class Border:
    """What a partition shares with others.

    Args:
        partition: its number.
        first: what its first path shares with the partitions before it.
        last: what its last path shares with those after it.
        common: tokens of these that are the same ones, since all of its paths begin with them; their tallies are read
            from `first`.
        share: share of the partition in the tokens of the corpus.
    """

    partition: int
    first: SharedPath
    last: SharedPath
    common: int
    share: float

    def after(self, left: SharedPath) -> Border:
        """The same with other tallies of the first path, as the partition before left them."""
        return replace(self, first=left)


def draw_borders(summary: Summary, splitters: Splitters) -> list[Border]:
    """The borders of all partitions that are not empty, in order."""
    held = np.flatnonzero(summary.tokens).tolist()
    shared = [0, *(_shared(summary, splitters, *pair) for pair in pairwise(held)), 0]
    total = max(int(summary.tokens.sum()), 1)
    nothing = SharedPath(np.zeros(0, np.int64), np.zeros(0) if summary.weighted else None)
    borders: list[Border] = []
    open_path = nothing
    for at, partition in enumerate(held):
        left, right = shared[at], shared[at + 1]
        common = min(left, right)
        if common:
            common = min(common, splitters.common(partition - 1, partition))
        first = open_path.plus(_own(summary, splitters, ABOVE, partition - 1, left)) if left else nothing
        own = _own(summary, splitters, BELOW, partition, right) if right else nothing
        last = first.upto(common).then(own.beyond(common))
        borders.append(Border(partition, first, last, common, float(summary.tokens[partition] / total)))
        open_path = last
    for at in range(len(borders) - 2, -1, -1):  # what comes later belongs to the tally as well
        last, common = borders[at + 1].first, borders[at].common
        first = last.upto(common).then(borders[at].first.beyond(common))
        borders[at] = replace(borders[at], first=first, last=last)
    return borders


def _shared(summary: Summary, splitters: Splitters, one: int, other: int) -> int:
    """Tokens that the last path of a partition shares with the first path of the next one."""
    below, above = summary.reach[BELOW, one], summary.reach[ABOVE, other - 1]
    return int(min(below, above, splitters.common(one, other - 1)))


def _own(summary: Summary, splitters: Splitters, side: int, splitter: int, length: int) -> SharedPath:
    """Tallies of a partition itself along a splitter."""
    at = splitters.offset[splitter]
    weight = summary.weight[side, at : at + length] if summary.weighted else None
    return SharedPath(summary.count[side, at : at + length], weight)

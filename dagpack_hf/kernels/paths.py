"""Paths among splitters: how far each path goes along one of them, and which partition it belongs to.

A path is made of stretches of tokens, each below the one that is its parent, which comes before it. Splitters are
ascending paths, one behind the other in a flat array. What is known of a path after each of its stretches is the range
of splitters that begin with it; so a stretch that many paths share is looked at once.

Cost: each token is compared twice at most, in blocks, and only as long as some splitter agrees; a binary search where
splitters part.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel
from dagpack_hf.kernels.radix import common_prefix


@inlined
def first_from(low, high, depth, token, splitter, offset):
    """The first splitter of a range whose token at a depth is at least this one; those before are smaller there."""
    while low < high:
        middle = (low + high) // 2
        if splitter[offset[middle] + depth] < token:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def descend(values, at, stop, depth, low, high, splitter, offset):
    """Follow splitters along a stretch.

    Args:
        values: `int32[...]`, the tokens.
        at: where the stretch begins in it.
        stop: where it ends.
        depth: tokens above it.
        low: first splitter that begins with the path so far.
        high: one past the last one; above `low`.
        splitter: `int32[...]`, tokens of the splitters.
        offset: `int64[S + 1]`, where each begins.

    Returns:
        The same range at the end of the stretch. If it is empty, its bounds are the number of splitters that are not
        greater than any path which goes on from there. Then the most tokens that a splitter has in common with the
        path, and such a splitter, which is next to those bounds.
    """
    while True:
        if offset[low] + depth == offset[low + 1]:
            if at == stop:
                return low, high, depth, low
            low += 1  # this splitter is a prefix of the path, so it comes before it
            if low == high:
                return low, high, depth, low - 1
        if at == stop:
            return low, high, depth, low
        rest = min(stop - at, offset[low + 1] - offset[low] - depth)
        run = common_prefix(values, at, splitter, offset[low] + depth, rest)
        if high - low > 1:  # what the first and the last of them have, all between them have
            rest = min(run, offset[high] - offset[high - 1] - depth)
            run = common_prefix(values, at, splitter, offset[high - 1] + depth, rest)
        at += run
        depth += run
        if run == 0:
            begin = first_from(low, high, depth, values[at], splitter, offset)
            end = first_from(begin, high, depth, np.int64(values[at]) + 1, splitter, offset)
            if begin == end:
                return begin, begin, depth, begin if begin < high else begin - 1
            low, high = begin, end


@kernel
def locate(values, begin, end, parent, splitter, offset):
    """Follow splitters along all paths.

    Args:
        values: as in `descend`, like the last two.
        begin: `int64[n]`, first token of each stretch.
        end: `int64[n]`, one past its last one; no stretch is empty.
        parent: `int64[n]`, the stretch before it on its path, -1 for none.
        splitter: tokens of the splitters.
        offset: where each begins.

    Returns:
        For each stretch: tokens of the path up to its end; bounds of the range of splitters, the common tokens and
        the splitter that has them, as in `descend`.
    """
    n = len(begin)
    reach = np.empty(n, np.int64)
    low, high = np.empty(n, np.int64), np.empty(n, np.int64)
    common, near = np.empty(n, np.int64), np.empty(n, np.int64)
    splitters = len(offset) - 1
    for stretch in range(n):
        above = parent[stretch]
        if above < 0:
            depth, low[stretch], high[stretch] = 0, 0, splitters
            common[stretch], near[stretch] = 0, 0
        else:
            depth, low[stretch], high[stretch] = reach[above], low[above], high[above]
            common[stretch], near[stretch] = common[above], near[above]
        reach[stretch] = depth + end[stretch] - begin[stretch]
        if low[stretch] < high[stretch]:
            low[stretch], high[stretch], common[stretch], near[stretch] = descend(
                values, begin[stretch], end[stretch], depth, low[stretch], high[stretch], splitter, offset
            )
    return reach, low, high, common, near


@kernel
def assign(parent, reach, low, high, offset):
    """The partition of each leaf, and the first partition below each stretch.

    Args:
        parent: as in `locate`.
        reach: what `locate` returns, like the next two.
        low: lower bounds.
        high: upper bounds.
        offset: as in `locate`.

    Returns:
        `int64[n]`, the partition of each stretch that is a leaf, -1 for others; and `int64[n]`, the first partition
        of the leaves at or below each.
    """
    n = len(parent)
    first = np.full(n, np.iinfo(np.int64).max, np.int64)
    partition = np.full(n, -1, np.int64)
    for stretch in range(n - 1, -1, -1):
        if first[stretch] == np.iinfo(np.int64).max:
            where = low[stretch]
            if where < high[stretch] and offset[where + 1] - offset[where] == reach[stretch]:
                where += 1  # the path is this splitter, which begins the next partition
            partition[stretch] = first[stretch] = where
        if parent[stretch] >= 0:
            first[parent[stretch]] = min(first[parent[stretch]], first[stretch])
    return partition, first

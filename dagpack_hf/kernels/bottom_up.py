"""Leaves into windows from the bottom up: at every branch point the bundles below it are packed into bins.

A bundle is a set of leaves that go into one window together. Each bin of a branch point is a bundle of the next one;
those of the virtual root are the windows. Bundles lie on one stack, and the leaves of each are a linked list, so that
merging two is one step.

Cost: the bundles of a branch point are sorted, and of each branch point below it they are at most `2 * OPEN_BINS`:
O(L log L) in all. Memory is some numbers for each leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.plan import descending
from dagpack_hf.kernels.rooms import fill, put, take, tightest

OPEN_BINS = 128
"""Bins with the most room that are packed on at the next branch point, where there are more than twice as many."""


class Bundles(NamedTuple):
    """Sets of leaves that go into one window together. Stacked by branch points; there are never more than leaves.

    Args:
        size: `int64[L]`, tokens of each bundle, its path from the root included.
        head: `int64[L]`, first leaf of each bundle.
        tail: `int64[L]`, last leaf of each bundle.
        following: `int64[L]`, for each leaf the next one of the same bundle, -1 for none.
    """

    size: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    tail: npt.NDArray[np.int64]
    following: npt.NDArray[np.int64]


@kernel
def move(bundles, bundle, target, place):
    """Write a bundle to a place of the same or another stack."""
    target.size[place] = bundles.size[bundle]
    target.head[place] = bundles.head[bundle]
    target.tail[place] = bundles.tail[bundle]


@kernel
def merge(bundles, into, bundle, trunk):
    """Append the leaves of a bundle to another one; both share the trunk."""
    bundles.size[into] += bundles.size[bundle] - trunk
    bundles.following[bundles.tail[into]] = bundles.head[bundle]
    bundles.tail[into] = bundles.tail[bundle]


@kernel
def best_fit(bundles, begin, stop, trunk, jitter, rooms, max_length):
    """Pack the bundles of a branch point into bins, largest first; the bins replace them. Return where they stop."""
    order, bin_of = np.empty(stop - begin, np.int64), np.empty(stop - begin, np.int64)
    for index in range(stop - begin):
        bin_of[index] = np.int64((bundles.size[begin + index] - trunk) * jitter[bundles.head[begin + index]])
    descending(bin_of, order)
    first = np.empty(stop - begin, np.int64)
    bins = np.int64(0)
    for index in order:
        bundle = begin + index
        added = bundles.size[bundle] - trunk
        found = tightest(rooms, added)
        if found < 0:
            put(rooms, bins, max_length - bundles.size[bundle])
            first[bins] = bundle
            bins += 1
        else:
            fill(rooms, found, added)
            merge(bundles, first[found], bundle, trunk)
    for index in range(bins):
        take(rooms, index)
    kept = first[:bins]
    kept.sort()
    for index in range(bins):
        move(bundles, kept[index], bundles, begin + index)
    return begin + bins


@kernel
def pack_bundles(bundles, begin, stop, trunk, jitter, rooms, max_length):
    """Pack the bundles of a branch point; the bins replace them. Return where they stop.

    All go in one bin if they fit, each stays alone if no two fit, and else best fit decides.

    Args:
        bundles: the stack; those of the branch point are `[begin, stop)`.
        begin: the first of them.
        stop: one past the last.
        trunk: tokens from the root to the branch point.
        jitter: `float64[L]`, factor on the size of a bundle where bundles are ordered, by its first leaf.
        rooms: no window is in a list, before and after.
        max_length: tokens of a window.
    """
    total, smallest, second = trunk, max_length, max_length
    for bundle in range(begin, stop):
        added = bundles.size[bundle] - trunk
        total += added
        if added < smallest:
            smallest, second = added, smallest
        elif added < second:
            second = added
    if trunk + smallest + second > max_length:
        return stop
    if total > max_length:
        return best_fit(bundles, begin, stop, trunk, jitter, rooms, max_length)
    for bundle in range(begin + 1, stop):
        merge(bundles, begin, bundle, trunk)
    return min(begin + 1, stop)


@kernel
def set_aside(bundles, begin, stop, aside, count):
    """Keep the `OPEN_BINS` bins with the most room and put the others aside; return how many are aside."""
    order = np.empty(stop - begin, np.int64)
    descending(bundles.size[begin:stop], order)
    for index in order[: stop - begin - OPEN_BINS]:
        move(bundles, begin + index, aside, count)
        count += 1
    kept = order[stop - begin - OPEN_BINS :]
    kept.sort()
    for index in range(OPEN_BINS):
        move(bundles, begin + kept[index], bundles, begin + index)
    return count


@kernel
def bottom_up(end, shared, jitter, rooms, max_length):
    """At every branch point, best fit of the bundles below it into bins; each bin is a bundle then.

    Branch points are found from the leaf line with a stack, as the intervals of a suffix array are from its common
    prefixes (Abouelhoda, Kurtz, Ohlebusch: Replacing suffix trees with enhanced suffix arrays, 2004, algorithm 4.4).
    Of very many bins the fullest skip the branch points up to the virtual root, so that none is looked at too often.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each path shares with the one before.
        jitter: `float64[L]`, factors on the sizes of bundles where they are ordered; 1 for largest first.
        rooms: no window is in a list, before and after.
        max_length: tokens of a window.

    Returns:
        The window of each leaf, and the number of windows.
    """
    leaves = len(end)
    bundles, aside = no_bundles(leaves), no_bundles(leaves)
    trunk, first = np.zeros(leaves + 1, np.int64), np.zeros(leaves + 1, np.int64)  # of open branch points
    top, count, passed = np.int64(0), np.int64(0), np.int64(0)
    for leaf in range(leaves + 1):
        cut = shared[leaf] if leaf < leaves else 0
        begin = count - 1
        while trunk[top] > cut:
            begin = first[top]
            count = pack_bundles(bundles, begin, count, trunk[top], jitter, rooms, max_length)
            if count - begin > 2 * OPEN_BINS:
                passed = set_aside(bundles, begin, count, aside, passed)
                count = begin + OPEN_BINS
            top -= 1
        if trunk[top] < cut:
            top += 1
            trunk[top], first[top] = cut, begin
        if leaf < leaves:
            bundles.size[count], bundles.head[count], bundles.tail[count] = end[leaf], leaf, leaf
            count += 1
    for index in range(passed):
        move(aside, index, bundles, count + index)
    windows = pack_bundles(bundles, first[0], count + passed, trunk[0], jitter, rooms, max_length)
    return windows_of_leaves(bundles, windows), windows


@kernel
def no_bundles(leaves):
    """An empty stack of bundles."""
    return Bundles(
        np.empty(leaves, np.int64),
        np.empty(leaves, np.int64),
        np.empty(leaves, np.int64),
        np.full(leaves, -1, np.int64),
    )


@kernel
def windows_of_leaves(bundles, windows):
    """The window of each leaf, from the bundle of each window."""
    window_of = np.empty(len(bundles.following), np.int64)
    for window in range(windows):
        leaf = bundles.head[window]
        while leaf >= 0:
            window_of[leaf] = window
            leaf = bundles.following[leaf]
    return window_of

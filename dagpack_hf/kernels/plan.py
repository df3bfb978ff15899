"""Leaves into windows.

All that matters of a forest here is its *leaf line*: its leaves in preorder, the tokens of each leaf's path (`end`)
and how many of them are those of the leaf before (`shared`, 0 for the first). Two leaves share the least of `shared`
between them, so a window's size, what a leaf adds to it, and the branch points themselves can be read off the line,
for a part of the leaves as well as for all.

Cost: one pass over the line, but for the sorting of bundles and windows: O(L log L), with constants of at most `REACH`
leaves that are looked at for each leaf that is placed, and `2 * OPEN_BINS` bins for each branch point. Memory is some
numbers for each leaf and each token of one window, nothing for each node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.rooms import fill, no_rooms, put, take, tightest

OPEN_BINS = 128
"""Bins with the most room that are packed on at the next branch point, where there are more than twice as many."""

REACH = 64
"""Neighbours on either side whose windows are looked at when a leaf is placed."""

PATIENCE = 32
"""Windows in a row that cannot be dissolved before the attempt ends."""


@kernel
def descending(values, order):
    """Write to `order` the indices of the values, largest first, equal ones in order. Values are below 2**31."""
    for index in range(len(values)):
        order[index] = (-values[index] << 32) + index
    order.sort()
    for index in range(len(values)):
        order[index] &= 0xFFFFFFFF


@kernel
def minimum_tree(values):
    """Complete binary tree of minima; the values are its second half."""
    size = len(values)
    tree = np.empty(2 * size, np.int64)
    for index in range(size):
        tree[size + index] = values[index]
    for node in range(size - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
    return tree


@kernel
def least(tree, low, high):
    """The least of the values `[low, high)`, which are not empty."""
    size = len(tree) // 2
    low += size
    high += size
    found = tree[low]
    while low < high:
        if low & 1:
            found = min(found, tree[low])
            low += 1
        if high & 1:
            high -= 1
            found = min(found, tree[high])
        low >>= 1
        high >>= 1
    return found


@kernel
def sizes_of(end, shared, window_of, windows):
    """Tokens in the union of the paths of each window's leaves."""
    tree = minimum_tree(shared)
    last = np.full(windows, -1, np.int64)
    size = np.zeros(windows, np.int64)
    for leaf in range(len(end)):
        window = window_of[leaf]
        before = last[window]
        known = 0 if before < 0 else shared[leaf] if before == leaf - 1 else least(tree, before + 1, leaf + 1)
        size[window] += end[leaf] - known
        last[window] = leaf
    return size


@kernel
def number_by_first_leaf(window_of, numbers):
    """Renumber windows in place, from 0 in the order of their first leaves; return how many there are."""
    new = np.full(numbers, -1, np.int64)
    windows = 0
    for leaf in range(len(window_of)):
        window = window_of[leaf]
        if new[window] < 0:
            new[window] = windows
            windows += 1
        window_of[leaf] = new[window]
    return windows


@kernel
def group_by_window(window_of, windows):
    """Indices of the leaves of window after window, each window's in order, and where each window begins."""
    offset = np.zeros(windows + 1, np.int64)
    for leaf in range(len(window_of)):
        offset[window_of[leaf]] += 1
    for window in range(windows):
        offset[window + 1] += offset[window]
    order = np.empty(len(window_of), np.int64)
    for leaf in range(len(window_of) - 1, -1, -1):
        window = window_of[leaf]
        offset[window] -= 1
        order[offset[window]] = leaf
    return order, offset


@kernel
def walk(end, shared, max_length):
    """Leaves in depth-first order, a new window when the next leaf does not fit; the window of each leaf."""
    window_of = np.empty(len(end), np.int64)
    window, free = -1, 0
    for leaf in range(len(end)):
        added = end[leaf] - shared[leaf]
        if window < 0 or added > free:
            window += 1
            free = max_length
            added = end[leaf]
        free -= added
        window_of[leaf] = window
    return window_of


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


@kernel
def cheapest(leaf, end, shared, window_of, free):
    """Window of a near leaf that has room and gets the fewest new tokens, and that number; -1 if there is none.

    Of windows that get equally many the fuller one is taken, then the one of the nearer leaf. Windows with a negative
    room are passed over.
    """
    own = end[leaf]
    best, added, room = -1, own, 0
    for step in (-1, 1):
        share, at = own, leaf
        for _ in range(REACH):
            border = at if step < 0 else at + 1
            if border == len(end):
                break
            share = min(share, shared[border])
            new = own - share
            if share == 0 or new > added:
                break
            at += step
            window = window_of[at]
            if window >= 0 and free[window] >= new and (best < 0 or new < added or free[window] < room):
                best, added, room = window, new, free[window]
    return best, added


@kernel
def nearest(end, shared, order, rooms, max_length):
    """Leaves in a given order, each into the window of a neighbour where it adds the fewest tokens.

    If no neighbour's window has room, the fullest window that has any is taken, else a new one.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each path shares with the one before.
        order: `int64[L]`, the leaves.
        rooms: no window is in a list, before and after.
        max_length: tokens of a window.

    Returns:
        The window of each leaf, and the number of windows.
    """
    window_of = np.full(len(end), -1, np.int64)
    windows = np.int64(0)
    for leaf in order:
        window, added = cheapest(leaf, end, shared, window_of, rooms.free)
        if window < 0:
            added = end[leaf]
            window = tightest(rooms, added)
        if window < 0:
            window = windows
            windows += 1
            put(rooms, window, max_length - added)
        else:
            fill(rooms, window, added)
        window_of[leaf] = window
    for window in range(windows):
        take(rooms, window)
    return window_of, windows


@kernel
def move_out(leaves, end, shared, window_of, rooms, added):
    """Place leaves of one window elsewhere; if one of them has no place, change nothing.

    Args:
        leaves: the leaves, in the order in which they are placed.
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each path shares with the one before.
        window_of: `int64[L]`, the window of each leaf.
        rooms: of all windows but that of the leaves, whose room is negative.
        added: space for as many numbers as there are leaves.

    Returns:
        Whether all leaves have moved.
    """
    source = window_of[leaves[0]]
    for index in range(len(leaves)):
        leaf = leaves[index]
        window, new = cheapest(leaf, end, shared, window_of, rooms.free)
        if window < 0:
            new = end[leaf]
            window = tightest(rooms, new)
        if window < 0:
            for undo in range(index):
                fill(rooms, window_of[leaves[undo]], -added[undo])
                window_of[leaves[undo]] = source
            return False
        fill(rooms, window, new)
        window_of[leaf] = window
        added[index] = new
    return True


@kernel
def dissolve(end, shared, window_of, windows, max_length):
    """Empty windows in place, emptiest first, by placing their leaves as `nearest` does; keep what vanishes.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each path shares with the one before.
        window_of: `int64[L]`, the window of each leaf; changed.
        windows: number of windows.
        max_length: tokens of a window.
    """
    rooms = no_rooms(windows, max_length)
    size = sizes_of(end, shared, window_of, windows)
    head, following = link_leaves(window_of, windows)
    for window in range(windows):
        put(rooms, window, max_length - size[window])
    order = np.empty(windows, np.int64)
    descending(rooms.free, order)
    leaves, keys, added = np.empty(len(end), np.int64), np.empty(len(end), np.int64), np.empty(len(end), np.int64)
    failures = 0
    for window in order:
        count = longest_first(window, head, following, end, leaves, keys)
        free = rooms.free[window]
        take(rooms, window)
        rooms.free[window] = -1
        if move_out(leaves[:count], end, shared, window_of, rooms, added):
            for index in range(count):
                leaf = leaves[index]
                following[leaf] = head[window_of[leaf]]
                head[window_of[leaf]] = leaf
            failures = 0
        else:
            put(rooms, window, free)
            failures += 1
            if failures == PATIENCE:
                break


@kernel
def link_leaves(window_of, windows):
    """Linked list of the leaves of each window: its head, and for each leaf the one that follows."""
    head, following = np.full(windows, -1, np.int64), np.empty(len(window_of), np.int64)
    for leaf in range(len(window_of) - 1, -1, -1):
        following[leaf] = head[window_of[leaf]]
        head[window_of[leaf]] = leaf
    return head, following


@kernel
def longest_first(window, head, following, end, leaves, keys):
    """Write the leaves of a window to `leaves`, longest path first, equal ones in preorder; return how many."""
    count = 0
    leaf = head[window]
    while leaf >= 0:
        keys[count] = (-end[leaf] << 32) + leaf
        count += 1
        leaf = following[leaf]
    keys[:count].sort()
    for index in range(count):
        leaves[index] = keys[index] & 0xFFFFFFFF
    return count

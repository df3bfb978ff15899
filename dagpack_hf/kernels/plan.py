"""Leaves into windows, leaf by leaf: the walk, the nearest neighbour, and windows dissolved.

All that matters of a forest here is its *leaf line*: its leaves in preorder, the tokens of each leaf's path (`end`)
and how many of them are those of the leaf before (`shared`, 0 for the first). Two leaves share the least of `shared`
between them, so a window's size, what a leaf adds to it, and the branch points themselves (`bottom_up`) can be read
off the line, for a part of the leaves as well as for all.

Cost: one pass over the line, but for the sorting of windows: O(L log L), with a constant of at most `2 * REACH` leaves
that are looked at for each leaf that is placed. Memory is some numbers for each leaf and each token of one window,
nothing for each node.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.rooms import fill, no_rooms, put, take, tightest

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

"""Ruin and recreate: a few windows are emptied and their leaves packed anew, again and again.

The windows are near each other in depth-first order and tend to have room left. Their leaves are packed bottom up
with noise on the sizes, and by nearest neighbour either so or in depth-first order from a random leaf on; the better
of the two is kept if it has fewer windows, or as many with the free space more concentrated (a larger sum of squares),
which makes it likelier that a later step empties one (Schrimpf, Schneider, Stamm-Wilbrandt, Dueck: Record breaking
optimization results using the ruin and recreate principle, 2000; the objective is Falkenauer's for bin packing, 1996).

Cost of an iteration: that of packing the leaves of at most `WINDOWS` windows.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.bottom_up import bottom_up
from dagpack_hf.kernels.plan import descending, least, link_leaves, minimum_tree, nearest, sizes_of
from dagpack_hf.kernels.rooms import no_rooms

WINDOWS = 8
"""Most windows that are emptied in one iteration."""

ENTRANTS = 6
"""Windows of which the emptiest is the first that is taken."""

SPAN = 400
"""Leaves on either side of a leaf among which its neighbours are looked for."""

NOISE = 0.4
"""Sizes are multiplied by factors between 1 - NOISE and 1 + NOISE at most where they are ordered."""


@kernel
def draw(random):
    """The next number of a 64-bit xorshift* generator (Vigna 2016), uniform in [0, 1)."""
    state = random[0]
    state ^= state >> np.uint64(12)
    state ^= state << np.uint64(25)
    state ^= state >> np.uint64(27)
    random[0] = state
    return ((state * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) * 2.0**-53


@kernel
def draw_below(random, limit):
    """A uniform integer in [0, limit)."""
    return np.int64(draw(random) * limit)


@kernel
def enter(chosen, count, window):
    """Add a window to a short list unless it is there or the list is full; return how many it has."""
    for index in range(count):
        if chosen[index] == window:
            return count
    if count == len(chosen):
        return count
    chosen[count] = window
    return count + 1


@kernel
def choose_windows(window_of, size, alive, head, following, random, chosen):
    """Write to `chosen` an emptyish window, some of its neighbours and some other emptyish ones; return how many."""
    emptiest, second = np.int64(-1), np.int64(-1)
    for _ in range(ENTRANTS):
        window = alive[draw_below(random, len(alive))]
        if emptiest < 0 or size[window] < size[emptiest]:
            emptiest, second = window, emptiest
        elif second < 0 or size[window] < size[second]:
            second = window
    leaf = head[emptiest]
    while following[leaf] >= 0 and draw(random) < 0.5:
        leaf = following[leaf]
    wanted = 2 + draw_below(random, WINDOWS - 2)
    count = enter(chosen, np.int64(0), emptiest)
    for distance in range(1, SPAN + 1):
        for near in (leaf - distance, leaf + distance):
            if 0 <= near < len(window_of) and count < wanted and draw(random) < 0.7:
                count = enter(chosen, count, window_of[near])
        if count >= wanted:
            break
    for _ in range(ENTRANTS):
        if count < wanted:
            count = enter(chosen, count, alive[draw_below(random, len(alive))])
    if second >= 0 and draw(random) < 0.5:
        count = enter(chosen, count, second)
    return count


@kernel
def part_of_line(end, shared, tree, leaves):
    """The leaf line of a part of the leaves, which are in order."""
    part_end, part_shared = np.empty(len(leaves), np.int64), np.empty(len(leaves), np.int64)
    before = -1
    for index in range(len(leaves)):
        leaf = leaves[index]
        part_end[index] = end[leaf]
        part_shared[index] = 0 if before < 0 else least(tree, before + 1, leaf + 1)
        before = leaf
    return part_end, part_shared


@kernel
def concentration(size, max_length):
    """Sum of the squares of the free space, as a share of the windows' own."""
    total = 0.0
    for tokens in size:
        total += (1 - tokens / max_length) ** 2
    return total


@kernel
def is_better(new_size, old_size, max_length):
    """Whether windows are fewer, or as many and their free space more concentrated."""
    if len(new_size) != len(old_size):
        return len(new_size) < len(old_size)
    return concentration(new_size, max_length) > concentration(old_size, max_length) + 1e-9


@kernel
def recreate(end, shared, random, rooms, max_length):
    """Pack leaves bottom up and by nearest neighbour, with noise; the better windows and their sizes."""
    leaves = len(end)
    noise = NOISE * draw(random)
    begin = draw_below(random, leaves) if draw(random) < 0.5 else np.int64(-1)
    jitter, key, order = np.empty(leaves, np.float64), np.empty(leaves, np.int64), np.empty(leaves, np.int64)
    for leaf in range(leaves):
        jitter[leaf] = 1 + noise * (2 * draw(random) - 1)
        key[leaf] = np.int64(end[leaf] * jitter[leaf]) if begin < 0 else (begin - leaf) % leaves
    window_of, windows = bottom_up(end, shared, jitter, rooms, max_length)
    size = sizes_of(end, shared, window_of, windows)
    descending(key, order)
    other_of, others = nearest(end, shared, order, rooms, max_length)
    if others <= windows:
        other_size = sizes_of(end, shared, other_of, others)
        if is_better(other_size, size, max_length):
            return other_of, other_size
    return window_of, size


@kernel
def gather_leaves(chosen, head, following, space):
    """The leaves of the chosen windows, in order; written to the beginning of `space`."""
    count = 0
    for window in chosen:
        leaf = head[window]
        while leaf >= 0:
            space[count] = leaf
            count += 1
            leaf = following[leaf]
    leaves = space[:count]
    leaves.sort()
    return leaves


@kernel
def list_alive(size, alive):
    """Write the windows that are not gone to `alive`; return how many."""
    count = 0
    for window in range(len(size)):
        if size[window]:
            alive[count] = window
            count += 1
    return count


@kernel
def replace(chosen, leaves, new_of, new_size, window_of, size, head, following):
    """Put leaves into new windows, which take the places of chosen ones."""
    for index in range(len(chosen)):
        size[chosen[index]] = new_size[index] if index < len(new_size) else 0
        head[chosen[index]] = -1
    for index in range(len(leaves) - 1, -1, -1):
        leaf, window = leaves[index], chosen[new_of[index]]
        window_of[leaf] = window
        following[leaf] = head[window]
        head[window] = leaf


@kernel
def improve(end, shared, window_of, size, random, iterations, max_length):
    """Ruin and recreate, in place.

    Args:
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each path shares with the one before.
        window_of: `int64[L]`, the window of each leaf; changed.
        size: `int64[W]`, tokens of each window, 0 for one that is gone; changed.
        random: `uint64[1]`, state of the random numbers, not 0; changed.
        iterations: how often.
        max_length: tokens of a window.

    Returns:
        Number of windows.
    """
    tree = minimum_tree(shared)
    rooms = no_rooms(len(end), max_length)
    head, following = link_leaves(window_of, len(size))
    alive = np.empty(len(size), np.int64)
    windows = list_alive(size, alive)
    space = np.empty(len(end), np.int64)
    chosen, old_size = np.empty(WINDOWS, np.int64), np.zeros(WINDOWS, np.int64)
    for _ in range(iterations):
        if windows < 2:
            break
        count = choose_windows(window_of, size, alive[:windows], head, following, random, chosen)
        leaves = gather_leaves(chosen[:count], head, following, space)
        part_end, part_shared = part_of_line(end, shared, tree, leaves)
        new_of, new_size = recreate(part_end, part_shared, random, rooms, max_length)
        for index in range(count):
            old_size[index] = size[chosen[index]]
        if is_better(new_size, old_size[:count], max_length):
            replace(chosen[:count], leaves, new_of, new_size, window_of, size, head, following)
            if len(new_size) < count:
                windows = list_alive(size, alive)
    return windows

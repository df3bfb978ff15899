"""Open windows by the room that is left in them.

Best fit asks for the window with the least room that still takes an item. Windows of equal room are a linked list, the
last one changed first; a bit for each room tells whether its list is empty, and a bit for each word of these bits
whether the word is 0. Cost: a few word operations each way, 9 bytes for each token of a window and 24 for each window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels import kernel

BITS = 64
"""Bits of a word."""


class Rooms(NamedTuple):
    """Room of each window, and the windows of each room.

    Args:
        free: `int64[W]`, room of each window. Kept for windows that are not in a list too.
        head: `int64[T + 1]`, for each room its first window, -1 if there is none.
        after: `int64[W]`, the next window of the same room, -1 at the end of the list.
        before: `int64[W]`, the one before, -1 at the head.
        word: `uint64[T / 64]`, a bit for each room that has windows.
        summary: `uint64[T / 64 / 64]`, a bit for each word that is not 0.
    """

    free: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    word: npt.NDArray[np.uint64]
    summary: npt.NDArray[np.uint64]


@kernel
def no_rooms(windows, max_length):
    """Space for a number of windows of at most `max_length` tokens; none is in a list yet."""
    words = max_length // BITS + 1
    return Rooms(
        np.zeros(windows, np.int64),
        np.full(max_length + 1, -1, np.int64),
        np.empty(windows, np.int64),
        np.empty(windows, np.int64),
        np.zeros(words, np.uint64),
        np.zeros(words // BITS + 1, np.uint64),
    )


@kernel
def bit(index):
    """A word with one bit set."""
    return np.uint64(1) << np.uint64(index % BITS)


@kernel
def lowest_bit(word):
    """Index of the lowest bit of a word that is not 0."""
    index = 0
    for width in (32, 16, 8, 4, 2, 1):
        if word & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) == 0:
            word >>= np.uint64(width)
            index += width
    return index


@kernel
def put(rooms, window, free):
    """Enter a window with its room."""
    rooms.free[window] = free
    behind = rooms.head[free]
    rooms.after[window] = behind
    rooms.before[window] = -1
    if behind >= 0:
        rooms.before[behind] = window
    rooms.head[free] = window
    word = free // BITS
    rooms.word[word] |= bit(free)
    rooms.summary[word // BITS] |= bit(word)


@kernel
def take(rooms, window):
    """Take a window out of the list of its room."""
    free = rooms.free[window]
    after, before = rooms.after[window], rooms.before[window]
    if after >= 0:
        rooms.before[after] = before
    if before >= 0:
        rooms.after[before] = after
        return
    rooms.head[free] = after
    if after < 0:
        word = free // BITS
        rooms.word[word] &= ~bit(free)
        if rooms.word[word] == 0:
            rooms.summary[word // BITS] &= ~bit(word)


@kernel
def fill(rooms, window, tokens):
    """Put tokens into a window that is entered (a negative number takes them out)."""
    take(rooms, window)
    put(rooms, window, rooms.free[window] - tokens)


@kernel
def not_below(words, index):
    """Index of the first set bit at or after `index`, within the word that holds it; -1 if there is none."""
    word = index // BITS
    rest = words[word] & ~(bit(index) - np.uint64(1))
    return word * BITS + lowest_bit(rest) if rest != 0 else -1


@kernel
def tightest(rooms, tokens):
    """The window with the least room for so many tokens, -1 if there is none."""
    free = not_below(rooms.word, tokens)
    if free < 0:
        word = tokens // BITS + 1
        found = not_below(rooms.summary, word) if word < len(rooms.word) else -1
        at = word // BITS + 1
        while found < 0 and at < len(rooms.summary):
            if rooms.summary[at] != 0:
                found = at * BITS + lowest_bit(rooms.summary[at])
            at += 1
        if found < 0:
            return -1
        free = found * BITS + lowest_bit(rooms.word[found])
    return rooms.head[free]

"""Best fit: items into windows, each into the one that it fills most.

Cost: a few word operations for each item; 9 bytes for each token of a window and 32 for each item.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.rooms import fill, no_rooms, put, tightest


@kernel
def best_fit_windows(lengths, max_length):
    """Put items, in the order in which they come, each into the window with the least room that takes it.

    Args:
        lengths: `int64[n]`, 1 to `max_length` each.
        max_length: room of an empty window.

    Returns:
        `int64[n]`, the window of each item, numbered as they are opened; and their number.
    """
    rooms = no_rooms(len(lengths), max_length)
    window_of = np.empty(len(lengths), np.int64)
    windows = np.int64(0)
    for item in range(len(lengths)):
        length = lengths[item]
        window = tightest(rooms, length)
        if window < 0:
            window = windows
            put(rooms, window, max_length - length)
            windows += 1
        else:
            fill(rooms, window, length)
        window_of[item] = window
    return window_of, windows

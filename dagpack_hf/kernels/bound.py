"""How many windows, and how many positions, any packing needs. Cost: one pass over the leaves."""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel


@kernel
def certificate(end, shared, max_length):
    """Least number of windows and of positions, as `dagpack_hf.pack.lower_bound` derives them.

    Args:
        end: `int64[L]`, tokens of each leaf's path, all at most `max_length`.
        shared: `int64[L]`, tokens that each path shares with the one before.
        max_length: tokens of a window.

    Returns:
        Windows and positions.
    """
    leaves = len(end)
    # of the nodes on the path to the last leaf, the virtual root first
    tokens, spent = np.zeros(leaves + 1, np.int64), np.zeros(leaves + 1, np.int64)
    longest, clique = np.zeros(leaves + 1, np.int64), np.zeros(leaves + 1, np.int64)
    top = 0
    for leaf in range(leaves + 1):
        cut = shared[leaf] if leaf < leaves else 0
        while tokens[top] > cut:
            held = max(1, clique[top], -(-spent[top] // max(max_length - tokens[top], 1)))
            if tokens[top - 1] < cut:
                above, begin = top, cut
            else:
                above, begin = top - 1, tokens[top - 1]
            below = spent[top] + (tokens[top] - begin) * held
            members = max(clique[top], 1)
            if members == 1 and 2 * longest[top] <= max_length + begin:
                members = 0
            if above == top:  # the branch point at `cut` is new: it takes the place of its first child
                tokens[top], spent[top], clique[top] = cut, below, members
            else:
                spent[above] += below
                longest[above] = max(longest[above], longest[top])
                clique[above] += members
                top = above
        if leaf < leaves:
            top += 1
            tokens[top], spent[top], clique[top], longest[top] = end[leaf], 0, 1, end[leaf]
    windows = max(1, clique[0], -(-spent[0] // max_length)) if leaves else 0
    return windows, spent[0]

"""Cutting a forest at a depth.

Nodes are cut into *stretches* of tokens with equal tallies, and none crosses the limit. Cost: linear in these.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel


@inlined
def count_above(node, parent, first, count):
    """Count of the token before a node, 0 at a root."""
    above = parent[node]
    return count[first[above + 1] - 1] if above >= 0 else np.int32(0)


@kernel
def first_beyond(node, depth, first, length, limit):
    """The first stretch of a node beyond the limit, or one past its last."""
    stretch = first[node]
    end = np.int64(depth[node])
    while stretch < first[node + 1] and end < limit:
        end += length[stretch]
        stretch += 1
    return stretch


@kernel
def count_beyond(parent, depth, first, length, count, limit):
    """Runs of targets that begin beyond the limit, and targets there.

    Args:
        parent: `int32[N]`, parent node, -1 for a root.
        depth: `int32[N]`, tokens above it.
        first: `int64[N + 1]`, the first stretch of each node.
        length: `int64[S]`, tokens of each stretch.
        count: `int32[S]`, how many sequences have each of its tokens as a target.
        limit: tokens that a path may have.
    """
    runs = targets = 0
    for node in range(len(parent)):
        begin = first_beyond(node, depth, first, length, limit)
        if begin == first[node + 1]:
            continue
        before = count[begin - 1] if begin > first[node] else count_above(node, parent, first, count)
        for stretch in range(begin, first[node + 1]):
            targets += count[stretch] * length[stretch]
            if before == 0:
                runs += count[stretch]
            before = count[stretch]
    return runs, targets


@kernel
def take_out_run(node, beyond, parent, first, length, original, count, weight):
    """Take the sequences that reach across the limit out of the run of targets before it.

    Going up, what crosses is the tally with the smallest count so far, of equal ones the last.

    Args:
        node: the node of the first token beyond the limit.
        beyond: the stretch of this token.
        parent: as in `count_beyond`.
        first: as in `count_beyond`.
        length: as in `count_beyond`.
        original: `int32[S]`, the counts before anything was taken out, which say where runs end.
        count: `int32[S]`, counts to change.
        weight: `float64[S]`, weights to change, or empty.

    Returns:
        Targets taken out.
    """
    weighted = len(weight) > 0
    stretch = beyond
    least = count[stretch]
    least_weight = weight[stretch] if weighted else 0.0
    taken = 0
    while True:
        if stretch == first[node]:
            node = parent[node]
            if node < 0:
                return taken
            stretch = first[node + 1]
        stretch -= 1
        if original[stretch] == 0:
            return taken
        if count[stretch] <= least:
            least = count[stretch]
            least_weight = weight[stretch] if weighted else 0.0
        count[stretch] -= least
        if weighted:
            weight[stretch] = max(weight[stretch] - least_weight, 0.0)
        taken += least * length[stretch]


@kernel
def cut_runs(parent, depth, first, length, original, limit, drop, count, weight):
    """Sequences whose targets reach across the limit, and what dropping them takes from before it.

    Args:
        parent: as in `count_beyond`.
        depth: as in `count_beyond`.
        first: as in `count_beyond`.
        length: as in `count_beyond`.
        original: `int32[S]`, the counts.
        limit: as in `count_beyond`.
        drop: whether to take them out.
        count: `int32[S]`, a copy of the counts, to change.
        weight: `float64[S]`, a copy of the weights, to change, or empty.

    Returns:
        Sequences that cross the limit, and targets taken out.
    """
    crossing = taken = 0
    for node in range(len(parent)):
        if depth[node] > limit:
            continue
        beyond = first_beyond(node, depth, first, length, limit)
        if beyond == first[node + 1]:
            continue
        before = original[beyond - 1] if beyond > first[node] else count_above(node, parent, first, original)
        across = min(before, original[beyond])
        crossing += across
        if across > 0 and drop:
            taken += take_out_run(node, beyond, parent, first, length, original, count, weight)
    return crossing, taken


@kernel
def kept_lengths(parent, depth, first, length, count, limit):
    """Tokens of each stretch that stay: those within the limit; of a path that was cut, none after its last target."""
    n = len(parent)
    kept = np.zeros(len(length), np.int64)
    is_cut = np.zeros(n, np.bool_)
    needed = np.zeros(n, np.bool_)
    for step in range(n):
        node = n - 1 - step
        stop = first_beyond(node, depth, first, length, limit)
        is_cut[node] |= stop < first[node + 1]
        if is_cut[node] and not needed[node]:
            while stop > first[node] and count[stop - 1] == 0:
                stop -= 1
        for stretch in range(first[node], stop):
            kept[stretch] = length[stretch]
        if parent[node] >= 0:
            is_cut[parent[node]] |= is_cut[node]
            needed[parent[node]] |= stop > first[node]
    return kept

"""Cutting a forest at a depth.

Cost: linear in nodes; tokens are read beyond the limit and in the runs that cross it.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel


@inlined
def count_above(node, parent, start, length, count):
    """Count of the token before a node, 0 at a root."""
    above = parent[node]
    return count[start[above] + length[above] - 1] if above >= 0 else np.int32(0)


@kernel
def count_beyond(parent, start, length, depth, count, limit):
    """Runs of targets that begin beyond the limit, and targets there.

    Args:
        parent: `int32[N]`, parent node, -1 for a root.
        start: `int64[N]`, first token of each node.
        length: `int32[N]`, its tokens.
        depth: `int32[N]`, tokens above it.
        count: `int32[U]`, how many sequences have each token as a target.
        limit: tokens that a path may have.
    """
    runs = targets = 0
    for node in range(len(parent)):
        within = max(limit - depth[node], 0)
        if within >= length[node]:
            continue
        at = start[node] + within
        before = count[at - 1] if within else count_above(node, parent, start, length, count)
        for token in range(at, start[node] + length[node]):
            targets += count[token]
            if before == 0:
                runs += count[token]
            before = count[token]
    return runs, targets


@kernel
def take_out_run(node, limit, parent, start, length, depth, original, count, weight):
    """Take the sequences that reach across the limit out of the run of targets before it.

    Going up, what crosses is the tally with the smallest count so far, of equal ones the last.

    Args:
        node: the node of the first token beyond the limit.
        limit: as in `count_beyond`.
        parent: as in `count_beyond`.
        start: as in `count_beyond`.
        length: as in `count_beyond`.
        depth: as in `count_beyond`.
        original: `int32[U]`, the counts before anything was taken out, which say where runs end.
        count: `int32[U]`, counts to change.
        weight: `float64[U]`, weights to change, or empty.

    Returns:
        Targets taken out.
    """
    weighted = len(weight) > 0
    token = start[node] + limit - depth[node]
    least = count[token]
    least_weight = weight[token] if weighted else 0.0
    taken = 0
    while True:
        if token == start[node]:
            node = parent[node]
            if node < 0:
                return taken
            token = start[node] + length[node]
        token -= 1
        if original[token] == 0:
            return taken
        if count[token] <= least:
            least = count[token]
            least_weight = weight[token] if weighted else 0.0
        count[token] -= least
        if weighted:
            weight[token] = max(weight[token] - least_weight, 0.0)
        taken += least


@kernel
def cut_runs(parent, start, length, depth, original, limit, drop, count, weight):
    """Sequences whose targets reach across the limit, and what dropping them takes from before it.

    Args:
        parent: as in `count_beyond`.
        start: as in `count_beyond`.
        length: as in `count_beyond`.
        depth: as in `count_beyond`.
        original: `int32[U]`, the counts.
        limit: as in `count_beyond`.
        drop: whether to take them out.
        count: `int32[U]`, a copy of the counts, to change.
        weight: `float64[U]`, a copy of the weights, to change, or empty.

    Returns:
        Sequences that cross the limit, and targets taken out.
    """
    crossing = taken = 0
    for node in range(len(parent)):
        if depth[node] > limit or depth[node] + length[node] <= limit:
            continue
        at = start[node] + limit - depth[node]
        before = original[at - 1] if limit > depth[node] else count_above(node, parent, start, length, original)
        across = min(before, original[at])
        crossing += across
        if across > 0 and drop:
            taken += take_out_run(node, limit, parent, start, length, depth, original, count, weight)
    return crossing, taken


@inlined
def length_to_last_target(first, size, count):
    """Tokens of a stretch up to its last target."""
    while size > 0 and count[first + size - 1] == 0:
        size -= 1
    return size


@kernel
def kept_lengths(parent, start, length, depth, count, limit):
    """Tokens of each node that stay: those within the limit; of a path that was cut, none after its last target."""
    n = len(parent)
    kept = np.empty(n, np.int32)
    is_cut = np.zeros(n, np.bool_)
    needed = np.zeros(n, np.bool_)
    for step in range(n):
        node = n - 1 - step
        is_cut[node] |= depth[node] + length[node] > limit
        size = np.int64(min(max(limit - depth[node], 0), length[node]))
        if is_cut[node] and not needed[node]:
            size = length_to_last_target(start[node], size, count)
        kept[node] = size
        if parent[node] >= 0:
            is_cut[parent[node]] |= is_cut[node]
            needed[parent[node]] |= size > 0
    return kept

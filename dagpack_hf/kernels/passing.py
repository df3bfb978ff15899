"""Sequences that pass through tokens, from how many train them. Cost: linear in nodes and stretches."""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel


@kernel
def count_passing(parent, first, count):
    """Sequences that pass through each stretch, if each ends where fewer train what comes next.

    Args:
        parent: `int32[N]`, parent node, before its children, -1 for a root.
        first: `int64[N + 1]`, the first stretch of each node.
        count: `int32[S]`, how many sequences train each token of a stretch.

    Returns:
        `int32[S]`.
    """
    passing = np.zeros(len(count), np.int32)
    passing_below = np.zeros(len(parent), np.int32)
    trained_below = np.zeros(len(parent), np.int32)
    for back in range(len(parent)):
        node = len(parent) - 1 - back
        total = passing_below[node]
        trained = trained_below[node]
        for stretch in range(first[node + 1] - 1, first[node] - 1, -1):
            total += max(count[stretch] - trained, np.int32(0))
            trained = count[stretch]
            passing[stretch] = total
        if parent[node] >= 0:
            passing_below[parent[node]] += total
            trained_below[parent[node]] += trained
    return passing

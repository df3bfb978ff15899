"""Splitting of branch points. Cost: linear in the nodes but for the sorting of siblings; 24 bytes per node besides."""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel
from dagpack_hf.kernels.preorder import link_children, next_in_preorder


@inlined
def count_trained(node, child, sibling, begins_target):
    """Children of a node that begin with a target."""
    count = 0
    at = child[node]
    while at >= 0:
        count += begins_target[at]
        at = sibling[at]
    return count


@inlined
def first_trained(node, child, sibling, begins_target):
    """The heaviest child that begins with a target, -1 for none."""
    at = child[node]
    while at >= 0 and not begins_target[at]:
        at = sibling[at]
    return at


@inlined
def hang_children(node, segment, hangs_from, child, sibling, begins_target, context_only):
    """Hang the children of a node, or only those that begin with context, from a segment."""
    at = child[node]
    while at >= 0:
        if not (context_only and begins_target[at]):
            hangs_from[at] = segment
        at = sibling[at]


@kernel
def split_branches(parent, start, length, depth, begins_target, ends_target):
    """Segments of a forest, parents before children.

    Args:
        parent: `int64[N]`, parent node, -1 for a root.
        start: `int64[N]`, first token of each node.
        length: `int64[N]`, its tokens.
        depth: `int64[N]`, tokens above it.
        begins_target: `bool[N]`, whether its first token is a target.
        ends_target: `bool[N]`, whether its last token is a target.

    Returns:
        `int64[5, M]`: parent, start, length, depth and target of each segment.
    """
    n = len(parent)
    weight = np.empty(n + 1, np.int64)
    child = np.empty(n + 1, np.int64)
    sibling = np.empty(n + 1, np.int64)
    link_children(n, parent, length, weight, child, sibling)

    size = n
    for node in range(n):
        copies = count_trained(node, child, sibling, begins_target)
        size += copies if copies > 1 else 0
    segments = np.empty((5, size), np.int64)
    hangs_from = np.full(n, -1, np.int64)
    at = 0
    for node in range(n):
        last = start[node] + length[node] - 1
        end = depth[node] + length[node]
        trained = first_trained(node, child, sibling, begins_target)
        if count_trained(node, child, sibling, begins_target) <= 1:
            target = start[trained] if trained >= 0 else -1
            write_segment(segments, at, hangs_from[node], start[node], length[node], depth[node], target)
            hang_children(node, at, hangs_from, child, sibling, begins_target, False)
            at += 1
            continue
        target = last if length[node] > 1 and ends_target[node] else -1
        write_segment(segments, at, hangs_from[node], start[node], length[node] - 1, depth[node], target)
        hang_children(node, at + 1, hangs_from, child, sibling, begins_target, True)
        trunk = at
        at += 1
        while trained >= 0:
            if begins_target[trained]:
                hangs_from[trained] = at
                write_segment(segments, at, trunk, last, 1, end - 1, start[trained])
                at += 1
            trained = sibling[trained]
    return segments


@inlined
def write_segment(segments, at, parent, start, length, depth, target):
    """Write one column of the segments."""
    segments[0, at] = parent
    segments[1, at] = start
    segments[2, at] = length
    segments[3, at] = depth
    segments[4, at] = target


@kernel
def renumber_in_preorder(segments):
    """The same segments numbered in preorder, heavy child first.

    Args:
        segments: `int64[5, M]`, parents before children.

    Returns:
        `int64[5, M]`.
    """
    n = segments.shape[1]
    parent = segments[0]
    weight = np.empty(n + 1, np.int64)
    child = np.empty(n + 1, np.int64)
    sibling = np.empty(n + 1, np.int64)
    link_children(n, parent, segments[2], weight, child, sibling)
    new_id = weight  # is not needed any more
    ordered = np.empty_like(segments)
    node = child[n]
    at = 0
    while node >= 0:
        new_id[node] = at
        above = parent[node]
        ordered[0, at] = new_id[above] if above >= 0 else -1
        for column in range(1, 5):
            ordered[column, at] = segments[column, node]
        at += 1
        node = next_in_preorder(node, parent, child, sibling)
    return ordered

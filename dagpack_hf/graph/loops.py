"""The compiled loops of the graph: numbering the vertices of a tree, and the walk.

Cost: 0.1 to 0.3 µs for each position or edge, most of it waiting for memory; compiled on first use (2 s) and cached.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel
from dagpack_hf.kernels.tally import FREE, new_changes, slot_of, with_room


@kernel
def number_vertices(state, node, is_start, is_merged, num_nodes):
    """The vertex of each position: its state, or below a state where paths are not merged, the path that led there.

    Args:
        state: `int32[P]`, at each position.
        node: `int32[P]`, likewise.
        is_start: `bool[P]`, whether a path begins there.
        is_merged: `bool[S]`, whether paths that reach a state are merged.
        num_nodes: one more than the largest node.

    Returns:
        `int64[P]`: states keep their numbers, and the vertices of trees follow in order of their first appearance.
    """
    vertex = np.empty(len(state), np.int64)
    known, numbers = new_changes(64)
    used = 0
    in_tree = False
    for at in range(len(state)):
        if is_start[at]:
            in_tree = False
        if not in_tree and is_merged[state[at]]:
            vertex[at] = state[at]
            continue
        in_tree = True
        above = np.int64(0) if is_start[at] else vertex[at - 1] + 1
        key = above * num_nodes + np.int64(node[at])
        slot = slot_of(known, key)
        if known[slot] == FREE:
            known[slot] = key
            numbers[slot] = len(is_merged) + used
            used += 1
            vertex[at] = len(is_merged) + used - 1
            known, numbers = with_room(known, numbers, used)
        else:
            vertex[at] = numbers[slot]
    return vertex


@kernel
def cross_edges(first, node, target, start, start_node, root_tokens, node_tokens, most_below, max_path):
    """Cross every edge once, depth first.

    Args:
        first: `int64[V + 1]`; the edges out of vertex `v` are `first[v]` to `first[v + 1]`, the latter not included.
        node: `int32[E]`, the node that each edge leads to.
        target: `int64[E]`, its vertex.
        start: `int64[R]`, the vertices where paths begin.
        start_node: `int32[R]`, their nodes.
        root_tokens: `int64[N]`, tokens of each node if it is a root.
        node_tokens: `int64[N]`, tokens of each node if it is none.
        most_below: `int64[V]`, tokens of the longest node below each vertex, 0 where there is none.
        max_path: tokens that a path may have.

    Returns:
        `parent: int64[W]`, `walked: int32[W]` and `edge: int64[W]`: for each entry of the walk, in preorder, the
        entry above it (-1 for a root), its node, and the edge that was crossed (-1 for a root).
    """
    size = len(first) - 1
    parent = np.empty(2 * len(node) + len(start), np.int64)
    walked = np.empty(len(parent), np.int32)
    edge = np.empty(len(parent), np.int64)
    root = np.empty(len(start) + size, np.int64)
    root_node = np.empty(len(root), np.int32)
    root[: len(start)] = start
    root_node[: len(start)] = start_node
    following = first[:size].copy()
    waits = np.zeros(size, np.bool_)
    stack = np.empty(size + 1, np.int64)
    entry_of = np.empty(size + 1, np.int64)
    length = np.empty(size + 1, np.int64)
    roots = len(start)
    used = 0
    tree = 0
    while tree < roots:
        top = root[tree]
        if following[top] < first[top + 1]:
            parent[used], walked[used], edge[used] = -1, root_node[tree], -1
            stack[0], entry_of[0], length[0] = top, used, root_tokens[root_node[tree]]
            used += 1
            depth = 0
            while depth >= 0:
                at = following[stack[depth]]
                if at == first[stack[depth] + 1]:
                    depth -= 1
                    continue
                following[stack[depth]] += 1
                parent[used], walked[used], edge[used] = entry_of[depth], node[at], at
                used += 1
                below = target[at]
                if following[below] != first[below] or first[below] == first[below + 1]:
                    continue
                tokens = length[depth] + node_tokens[node[at]]
                if tokens + most_below[below] <= max_path:
                    depth += 1
                    stack[depth], entry_of[depth], length[depth] = below, used - 1, tokens
                elif not waits[below]:
                    waits[below] = True
                    root[roots], root_node[roots] = below, node[at]
                    roots += 1
        tree += 1
    return parent[:used].copy(), walked[:used].copy(), edge[:used].copy()

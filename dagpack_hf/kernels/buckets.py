"""Which example brings which leaf. Cost: one step for each forest node that an example passes; no token is compared.

A sequence that was merged into a forest never leaves it inside a node, so only the first token below a node is looked
up, by bisection among its children, which are ordered by it.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel


@inlined
def find_child(node, token, nodes):
    """The child of a node (-1: the root) that begins with a token, -1 if there is none."""
    first_token, _, child_begin, children = nodes
    low, high = child_begin[node + 1], child_begin[node + 2]
    while low < high:
        middle = (low + high) >> 1
        if first_token[children[middle]] < token:
            low = middle + 1
        else:
            high = middle
    if low < child_begin[node + 2] and first_token[children[low]] == token:
        return children[low]
    return -1


@kernel
def walk_down(node, used, at, stop, values, nodes):
    """Follow `values[at:stop]` down from a place as far as the forest goes.

    Args:
        node: node of the place, -1 for the root.
        used: its tokens before the place.
        at: first token to follow.
        stop: one past the last one.
        values: `int32`, tokens of the examples.
        nodes: a `NodeIndex` of `buckets`.

    Returns:
        Node and tokens before the place that was reached, and whether all tokens were followed.
    """
    length = nodes[1]
    while at < stop:
        room = length[node] - used if node >= 0 else 0
        if room > 0:
            step = min(room, stop - at)
            used += step
            at += step
            continue
        child = find_child(node, values[at], nodes)
        if child < 0:
            return node, used, False
        node = child
        used = 0
    return node, used, True


@kernel
def first_visitors(order, example_begin, begin, end, owner, hangs_from, values, nodes):
    """For each node of a forest the place in `order` of the first example that reaches its end, if it is a leaf.

    Args:
        order: `int64[E]`, examples in the order in which they come.
        example_begin: `int64[E + 1]`, first stretch of each example.
        begin: `int64[S]`, first token of each stretch in `values`.
        end: `int64[S]`, one past its last token.
        owner: `int64[S]`, the stretch it hangs from, -1 for none.
        hangs_from: `int64[S]`, the token it hangs from.
        values: as in `walk_down`.
        nodes: as in `walk_down`.

    Returns:
        `int64[N]`, -1 for a node that is no leaf.
    """
    _, length, child_begin, _ = nodes
    visitor = np.full(len(length), -1, np.int64)
    place = np.full(len(begin), -1, np.int64)
    used = np.zeros(len(begin), np.int64)
    reachable = np.ones(len(begin), np.bool_)
    for rank in range(len(order)):
        example = order[rank]
        for stretch in range(example_begin[example], example_begin[example + 1]):
            above = owner[stretch]
            if above >= 0:
                stop = hangs_from[stretch] + 1
                place[stretch], used[stretch], reachable[stretch] = walk_down(
                    place[above], used[above], begin[above], stop, values, nodes
                )
                reachable[stretch] &= reachable[above]
            if not reachable[stretch]:
                continue
            node, into, _ = walk_down(place[stretch], used[stretch], begin[stretch], end[stretch], values, nodes)
            if node < 0 or into < length[node] or visitor[node] >= 0:
                continue
            if child_begin[node + 1] == child_begin[node + 2]:
                visitor[node] = rank
    return visitor

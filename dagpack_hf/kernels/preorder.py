"""Trees in preorder, heavy child first.

A tree is an array of parents that come before their children. Its children are kept as linked lists: `child[v]` is
the first child of `v`, `sibling[v]` the next one, and the roots are the children of `n`, one past the last node. The
lists are sorted by insertion if they are short, else by radix (equal nodes stay in order); most are in order already.

Cost: O(n), 24 bytes per node, and 16 more for each node of the longest list.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel

SHORT = 32
"""Lists of up to so many nodes are sorted by insertion, longer ones by radix."""

DIGIT = 11
"""Bits of a weight that one pass of the radix sort looks at."""


@inlined
def length_unless_sorted(first, sibling, weight):
    """Number of nodes of a list, 0 if it is in order."""
    count = 1
    falls = True
    node = first
    while sibling[node] >= 0:
        falls = falls and weight[sibling[node]] <= weight[node]
        node = sibling[node]
        count += 1
    return 0 if falls else count


@kernel
def sort_short_list(first, sibling, weight):
    """Sort a list by insertion; arguments and result as in `sort_list`."""
    node = sibling[first]
    sibling[first] = -1
    while node >= 0:
        after = sibling[node]
        if weight[node] > weight[first]:
            sibling[node] = first
            first = node
        else:
            at = first
            while sibling[at] >= 0 and weight[sibling[at]] >= weight[node]:
                at = sibling[at]
            sibling[node] = sibling[at]
            sibling[at] = node
        node = after
    return first


@kernel
def sort_long_list(first, count, sibling, weight):
    """Sort a list of `count` nodes by radix, from the lowest digit up; arguments and result as in `sort_list`."""
    nodes = np.empty(count, np.int64)
    sorted_nodes = np.empty(count, np.int64)
    largest = 0
    for index in range(count):
        nodes[index] = first
        largest = max(largest, weight[first])
        first = sibling[first]
    digits = 1 << DIGIT
    begin = np.empty(digits + 1, np.int64)
    shift = 0
    while largest >> shift > 0:
        begin[:] = 0
        for node in nodes:
            begin[digits - (weight[node] >> shift & digits - 1)] += 1
        for digit in range(digits):
            begin[digit + 1] += begin[digit]
        for node in nodes:
            digit = digits - 1 - (weight[node] >> shift & digits - 1)
            sorted_nodes[begin[digit]] = node
            begin[digit] += 1
        nodes, sorted_nodes = sorted_nodes, nodes
        shift += DIGIT
    for index in range(count - 1):
        sibling[nodes[index]] = nodes[index + 1]
    sibling[nodes[count - 1]] = -1
    return nodes[0]


@kernel
def sort_list(first, sibling, weight):
    """Sort a list by descending weight, equal nodes in the order they are in; return its first node."""
    count = length_unless_sorted(first, sibling, weight)
    if count == 0:
        return first
    if count <= SHORT:
        return sort_short_list(first, sibling, weight)
    return sort_long_list(first, count, sibling, weight)


@kernel
def link_children(n, parent, length, weight, child, sibling):
    """Add up weights and link the children of each node, heavy child first, equal ones by ascending number.

    Args:
        n: number of nodes.
        parent: `int64[n]`, -1 for a root; parents come before children.
        length: `int64[n]`, tokens of each node.
        weight: `int64[n + 1]`, on return the tokens of each node's subtree.
        child: `int64[n + 1]`, on return the first child, -1 for none.
        sibling: `int64[n + 1]`, on return the next sibling, -1 for none.
    """
    for node in range(n + 1):
        weight[node] = length[node] if node < n else 0
        child[node] = -1
    sibling[n] = -1
    for step in range(n + 1):
        node = n - 1 - step if step < n else n
        if child[node] >= 0:
            child[node] = sort_list(child[node], sibling, weight)
        if node < n:
            above = parent[node] if parent[node] >= 0 else n
            weight[above] += weight[node]
            sibling[node] = child[above]
            child[above] = node


@inlined
def next_in_preorder(node, parent, child, sibling):
    """The node after this one, -1 after the last."""
    if child[node] >= 0:
        return child[node]
    while node >= 0 and sibling[node] < 0:
        node = parent[node]
    return sibling[node] if node >= 0 else -1

"""The least number of windows of a tiny forest, exactly: dynamic programming over sets of leaves.

Independent of the package: a forest is a list of parents and a list of lengths.
"""

from __future__ import annotations


def fewest_windows(parent: list[int], length: list[int], max_length: int) -> int:
    """Windows of an optimal packing; at most about ten leaves.

    Args:
        parent: parent of each node, -1 for a root.
        length: tokens of each node.
        max_length: tokens of a window.
    """
    leaves = sorted(set(range(len(parent))) - set(parent))
    paths = []
    for leaf in leaves:
        nodes, node = set(), leaf
        while node >= 0:
            nodes.add(node)
            node = parent[node]
        paths.append(nodes)
    everything = (1 << len(leaves)) - 1
    union: list[set[int]] = [set()]
    for subset in range(1, everything + 1):
        lowest = (subset & -subset).bit_length() - 1
        union.append(union[subset & (subset - 1)] | paths[lowest])
    fits = [sum(length[node] for node in nodes) <= max_length for nodes in union]

    fewest = [0] * (everything + 1)
    for subset in range(1, everything + 1):
        lowest = subset & -subset
        rest = subset ^ lowest
        best, others = len(leaves) + 1, rest  # the window that holds the lowest leaf, with any of the others
        while True:
            if fits[others | lowest]:
                best = min(best, 1 + fewest[rest ^ others])
            if not others:
                break
            others = (others - 1) & rest
        fewest[subset] = best
    return fewest[everything]

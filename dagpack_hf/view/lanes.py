"""Where the entries of a tree stand in a figure with one row for each entry.

Rows are the tree's preorder, and lanes are columns, as in the graph of a version-control log: the last child of an
entry stays in its parent's lane, the others stand one lane to the right. With the child of the largest subtree last,
each step to the right at least halves the subtree, so a tree of n entries needs at most log2(n) + 1 lanes, whatever
its shape. The other children keep the order of the file.

Cost: linear in entries, no recursion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of the figure.

    Attributes:
        entry: Index of the entry.
        lane: Column, from 0.
        parent: Row of the parent, -1 for a root.
    """

    entry: int
    lane: int
    parent: int


def tree_rows(parents: Sequence[int]) -> list[Row]:
    """Place every node of a forest.

    Args:
        parents: For each node the index of its parent, -1 for a root; no cycles.

    Returns:
        The rows from top to bottom.

    Example:
        >>> [(row.entry, row.lane, row.parent) for row in tree_rows([-1, 0, 0, 1])]
        [(0, 0, -1), (2, 1, 0), (1, 0, 0), (3, 0, 2)]
    """
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for node, parent in enumerate(parents):
        (roots if parent < 0 else children[parent]).append(node)
    sizes = _subtree_sizes(children, roots)
    rows: list[Row] = []
    pending = [(root, 0, -1) for root in reversed(roots)]
    while pending:
        node, lane, parent = pending.pop()
        here = len(rows)
        rows.append(Row(node, lane, parent))
        if not children[node]:
            continue
        heavy = max(children[node], key=lambda child: sizes[child])
        pending.append((heavy, lane, here))
        pending += [(child, lane + 1, here) for child in reversed(children[node]) if child != heavy]
    return rows


def _subtree_sizes(children: list[list[int]], roots: list[int]) -> list[int]:
    order = list(roots)
    for node in order:
        order += children[node]
    sizes = [1] * len(children)
    for node in reversed(order):
        sizes[node] += sum(sizes[child] for child in children[node])
    return sizes

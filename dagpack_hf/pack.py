"""Which leaves go into which window.

Cutting inside a segment never saves a window, so a packing is a map from leaves to windows; the size of a window is
the number of tokens in the union of its leaves' root paths. This is virtual-machine packing with page sharing on a
tree (Sindelar, Sitaraman, Shenoy: Sharing-aware algorithms for virtual machine colocation, SPAA 2011).

Two packings are made and the better one is kept: leaves in depth-first order, a new window when one is full (*walk*),
and *bottom up*, where at every node the bundles of the children are packed by best fit into the room that is left
below it. The certificate bounds from below how many windows any packing needs.

Cost: O(nodes) for walk and certificate, O(L log L) for bottom up, in Python over nodes and leaves, never over tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from dagpack_hf.segments import Segments
from dagpack_hf.trie import TokenForest

Windows = list[list[int]]
"""For each window, its leaf segments in preorder."""


def pack_windows(segments: Segments, max_length: int) -> Windows:
    """Put every leaf into one window.

    Args:
        segments: segments of a forest whose paths all have at most `max_length` tokens.
        max_length: tokens of a window.

    Returns:
        The leaves of each window, in preorder, windows ordered by their first leaf.
    """
    candidates = [pack_walk(segments, max_length), pack_bottom_up(segments, max_length)]
    return min(candidates, key=lambda windows: (len(windows), executed_tokens(segments, windows)))


def pack_walk(segments: Segments, max_length: int) -> Windows:
    """Leaves in depth-first order, a new window when the next leaf does not fit."""
    parent, length = segments.parent.tolist(), segments.length.tolist()
    in_window = [-1] * len(segments)
    windows: Windows = []
    free = 0
    for leaf in segments.leaves.tolist():
        new = _new_tokens(leaf, parent, length, in_window, len(windows) - 1)
        if not windows or new > free:
            windows.append([])
            free = max_length
            new = _new_tokens(leaf, parent, length, in_window, len(windows) - 1)
        windows[-1].append(leaf)
        free -= new
        node = leaf
        while node >= 0 and in_window[node] != len(windows) - 1:
            in_window[node] = len(windows) - 1
            node = parent[node]
    return windows


def pack_bottom_up(segments: Segments, max_length: int) -> Windows:
    """At every node, best fit of the children's bundles into bins of the room below it; each bin is a bundle then."""
    parent, length, depth = segments.parent.tolist(), segments.length.tolist(), segments.depth.tolist()
    below: dict[int, list[tuple[int, list[int]]]] = {}
    for node in range(len(segments) - 1, -1, -1):
        bundles = below.pop(node, None)
        packed = [(0, [node])] if bundles is None else _best_fit(bundles, max_length - depth[node] - length[node])
        below.setdefault(parent[node], []).extend((size + length[node], leaves) for size, leaves in packed)
    return sorted(sorted(leaves) for _, leaves in _best_fit(below.get(-1, []), max_length) if leaves)


def lower_bound(forest: TokenForest, max_length: int) -> int:
    """Number of windows that any packing of the forest needs, whatever it does at branch points.

    With `c(v)` windows that hold node `v` at least and `E(v)` positions spent below and in `v` at least:
    `c(v) = max(1, max c(child), ceil(sum E(child) / (max_length - end(v))))` and
    `E(v) = length(v) * c(v) + sum E(child)`.
    """
    parent, length, depth = forest.parent.tolist(), forest.length.tolist(), forest.depth.tolist()
    spent = [0] * (forest.num_nodes + 1)  # the last entry is the virtual root
    copies = [1] * (forest.num_nodes + 1)
    for node in range(forest.num_nodes - 1, -1, -1):
        if spent[node]:
            copies[node] = max(copies[node], -(-spent[node] // (max_length - depth[node] - length[node])))
        above = parent[node]
        spent[above] += length[node] * copies[node] + spent[node]
        copies[above] = max(copies[above], copies[node])
    return max(-(-spent[-1] // max_length), copies[-1] if forest.num_nodes else 0)


def executed_tokens(segments: Segments, windows: Windows) -> int:
    """Positions of all windows, replayed ancestors included."""
    parent, length = segments.parent.tolist(), segments.length.tolist()
    in_window = [-1] * len(segments)
    total = 0
    for index, leaves in enumerate(windows):
        for leaf in leaves:
            node = leaf
            while node >= 0 and in_window[node] != index:
                in_window[node] = index
                total += length[node]
                node = parent[node]
    return total


def _new_tokens(leaf: int, parent: list[int], length: list[int], in_window: list[int], window: int) -> int:
    new, node = 0, leaf
    while node >= 0 and in_window[node] != window:
        new += length[node]
        node = parent[node]
    return new


def _best_fit(bundles: list[tuple[int, list[int]]], capacity: int) -> list[tuple[int, list[int]]]:
    """Best fit, largest first; all in one bin if they fit."""
    total = sum(size for size, _ in bundles)
    if total <= capacity:
        merged: list[int] = max((leaves for _, leaves in bundles), key=len, default=[])
        for _, leaves in bundles:
            if leaves is not merged:
                merged.extend(leaves)
        return [(total, merged)]
    bins: list[tuple[int, list[int]]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for size, leaves in sorted(bundles, key=lambda bundle: (-bundle[0], bundle[1][0])):
        at = bisect_left(free, (size, -1))
        if at == len(free):
            bins.append((size, leaves))
            insort(free, (capacity - size, len(bins) - 1))
        else:
            room, index = free.pop(at)
            bins[index][1].extend(leaves)
            bins[index] = (bins[index][0] + size, bins[index][1])
            insort(free, (room - size, index))
    return bins

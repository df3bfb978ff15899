"""Which leaves go into which window.

Cutting inside a segment never saves a window, so a packing is a map from leaves to windows; the size of a window is
the number of tokens in the union of its leaves' root paths. This is virtual-machine packing with page sharing on a
tree (Sindelar, Sitaraman, Shenoy: Sharing-aware algorithms for virtual machine colocation, SPAA 2011).

Three packings are made: leaves in depth-first order, a new window when one is full (*walk*); *bottom up*, where at
every node the bundles of the children are packed by best fit into the room that is left below it; and *nearest*,
where each leaf goes where it adds the fewest tokens among the windows of its neighbours. Then windows are
*dissolved*, emptiest first, as long as their leaves fit elsewhere, and the best result is kept. The certificate
bounds from below how many windows any packing needs.

Cost: O(nodes) for walk and certificate, O(L log L) for bottom up, at most `2 * REACH` looks for each leaf placed by
nearest and dissolve; in Python over nodes and leaves, never over tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from dagpack_hf.segments import Segments
from dagpack_hf.trie import TokenForest

REACH = 64
"""Neighbours on either side whose windows are looked at when a leaf is placed."""

PATIENCE = 32
"""Windows in a row that cannot be dissolved before the attempt ends."""

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
    starts = [pack(segments, max_length) for pack in (pack_walk, pack_bottom_up, pack_nearest)]
    candidates = starts + [dissolve(segments, max_length, windows) for windows in starts[1:]]
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


def pack_nearest(segments: Segments, max_length: int) -> Windows:
    """Leaves in depth-first order, each into the window of a neighbour where it adds the fewest tokens."""
    line = _LeafLine.of(segments)
    window_of = [-1] * len(line.leaf)
    free: list[int] = []
    by_free: list[tuple[int, int]] = []  # (room left, window), ascending
    for index, end in enumerate(line.end):
        window, added = line.cheapest(index, window_of, free)
        if window < 0:
            added = end
            at = bisect_left(by_free, (end, -1))
            if at == len(by_free):
                free.append(max_length)
                by_free.append((max_length, len(free) - 1))
            window = by_free[at][1]
        by_free.pop(bisect_left(by_free, (free[window], window)))
        free[window] -= added
        insort(by_free, (free[window], window))
        window_of[index] = window
    return line.windows(window_of)


def dissolve(segments: Segments, max_length: int, windows: Windows) -> Windows:
    """Empty windows, emptiest first, by placing their leaves where they add the fewest tokens; keep what vanishes."""
    line = _LeafLine.of(segments)
    position = {leaf: index for index, leaf in enumerate(line.leaf)}
    members = [[position[leaf] for leaf in leaves] for leaves in windows]
    window_of = [0] * len(line.leaf)
    for window, indices in enumerate(members):
        for index in indices:
            window_of[index] = window
    free = [max_length - size for size in window_sizes(segments, windows)]
    failures = 0
    for window in sorted(range(len(windows)), key=lambda each: -free[each]):
        room, free[window] = free[window], -1
        moves = _move_out(line, members[window], window_of, free)
        if moves is None:
            free[window] = room
            failures += 1
            if failures == PATIENCE:
                break
        else:
            for index in moves:
                members[window_of[index]].append(index)
            failures = 0
    return line.windows(window_of)


def _move_out(line: _LeafLine, indices: list[int], window_of: list[int], free: list[int]) -> list[int] | None:
    """Place leaves elsewhere, longest first; `None`, and nothing changed, if one of them has no place."""
    source = window_of[indices[0]]
    moved: list[tuple[int, int]] = []
    for index in sorted(indices, key=lambda each: -line.end[each]):
        target, added = line.cheapest(index, window_of, free)
        if target < 0:
            added = line.end[index]
            target = min((w for w in range(len(free)) if free[w] >= added), key=free.__getitem__, default=-1)
        if target < 0:
            for back, tokens in moved:
                free[window_of[back]] += tokens
                window_of[back] = source
            return None
        moved.append((index, added))
        window_of[index] = target
        free[target] -= added
    return [index for index, _ in moved]


@dataclass(frozen=True)
class _LeafLine:
    """Leaves in depth-first order, with what each shares with the one before.

    Args:
        leaf: leaf segments.
        end: tokens of each leaf's path.
        shared: tokens that each leaf's path shares with that of the leaf before; 0 for the first.
    """

    leaf: list[int]
    end: list[int]
    shared: list[int]

    @classmethod
    def of(cls, segments: Segments) -> _LeafLine:
        leaves = segments.leaves
        end = (segments.depth + segments.length)[leaves]
        unseen = np.concatenate([[0], leaves[:-1] + 1]).astype(np.int64)  # in preorder, where a leaf's own part begins
        return cls(leaves.tolist(), end.tolist(), segments.depth[unseen].tolist() if len(leaves) else [])

    def cheapest(self, index: int, window_of: list[int], free: list[int]) -> tuple[int, int]:
        """Window of a near leaf that has room and gets the fewest new tokens, and that number; -1 if there is none."""
        end = self.end[index]
        best, added = -1, end
        for step in (-1, 1):
            share, at = end, index
            for _ in range(REACH):
                border = at if step < 0 else at + 1
                share = min(share, self.shared[border]) if border < len(self.leaf) else 0
                at += step
                if not share or end - share > added:
                    break
                window = window_of[at]
                room = free[window] if window >= 0 else -1
                if room >= end - share and (best < 0 or end - share < added or room < free[best]):
                    best, added = window, end - share
        return best, added

    def windows(self, window_of: list[int]) -> Windows:
        """Leaves of each window, windows by their first leaf."""
        found: dict[int, list[int]] = {}
        for leaf, window in zip(self.leaf, window_of, strict=True):
            found.setdefault(window, []).append(leaf)
        return list(found.values())


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
    return sum(window_sizes(segments, windows))


def window_sizes(segments: Segments, windows: Windows) -> list[int]:
    """Positions of each window, replayed ancestors included."""
    parent, length = segments.parent.tolist(), segments.length.tolist()
    in_window = [-1] * len(segments)
    sizes = [0] * len(windows)
    for index, leaves in enumerate(windows):
        for leaf in leaves:
            node = leaf
            while node >= 0 and in_window[node] != index:
                in_window[node] = index
                sizes[index] += length[node]
                node = parent[node]
    return sizes


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

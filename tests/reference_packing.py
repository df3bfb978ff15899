"""The plan in plain Python, over segments and lists, for `tests/test_pack.py` to compare with.

Where windows have equally much room, best fit takes the one whose room changed last.
"""

from __future__ import annotations

from dagpack_hf.segments import Segments
from dagpack_hf.trie import TokenForest

REACH = 64
PATIENCE = 32

Windows = list[list[int]]
"""For each window, its leaf segments in preorder."""


def path(segments: Segments, leaf: int) -> list[int]:
    """Segments from a leaf to its root."""
    found = []
    while leaf >= 0:
        found.append(leaf)
        leaf = int(segments.parent[leaf])
    return found


def size(segments: Segments, leaves) -> int:
    """Tokens in the union of the root paths."""
    return sum(int(segments.length[node]) for node in {node for leaf in leaves for node in path(segments, int(leaf))})


def walk(segments: Segments, max_length: int) -> Windows:
    windows: Windows = []
    for leaf in segments.leaves.tolist():
        if windows and size(segments, [*windows[-1], leaf]) <= max_length:
            windows[-1].append(leaf)
        else:
            windows.append([leaf])
    return windows


def bottom_up(segments: Segments, max_length: int) -> Windows:
    """A segment of no tokens is no branch point of its own: what is below it belongs to its parent."""
    parent, length, depth = segments.parent.tolist(), segments.length.tolist(), segments.depth.tolist()
    below: dict[int, list[tuple[int, list[int]]]] = {}
    for node in range(len(segments) - 1, -1, -1):
        bundles = below.pop(node, None)
        if bundles is None:
            bundles = [(0, [node])]
        elif length[node]:
            bundles = best_fit(bundles, max_length - depth[node] - length[node])
        below.setdefault(parent[node], []).extend((tokens + length[node], leaves) for tokens, leaves in bundles)
    return sorted(sorted(leaves) for _, leaves in best_fit(below.get(-1, []), max_length) if leaves)


def best_fit(bundles: list[tuple[int, list[int]]], capacity: int) -> list[tuple[int, list[int]]]:
    """Best fit, largest first; all in one bin if they fit."""
    if sum(tokens for tokens, _ in bundles) <= capacity:
        return [(sum(tokens for tokens, _ in bundles), [leaf for _, leaves in bundles for leaf in leaves])]
    bins: list[tuple[int, list[int]]] = []
    for tokens, leaves in sorted(bundles, key=lambda bundle: (-bundle[0], bundle[1][0])):
        fitting = [index for index, (used, _) in enumerate(bins) if used + tokens <= capacity]
        if fitting:
            index = max(fitting, key=lambda each: bins[each][0])
            bins[index] = (bins[index][0] + tokens, bins[index][1] + leaves)
        else:
            bins.append((tokens, leaves))
    return bins


class Line:
    """Leaves in depth-first order with the windows they are in, and the room of the windows."""

    def __init__(self, segments: Segments, windows: Windows, max_length: int) -> None:
        self.leaf = segments.leaves.tolist()
        paths = [path(segments, leaf)[::-1] for leaf in self.leaf]
        self.end = [sum(int(segments.length[node]) for node in nodes) for nodes in paths]
        self.shared = [0] * len(paths)
        for index in range(1, len(paths)):
            common = set(paths[index - 1]) & set(paths[index])
            self.shared[index] = sum(int(segments.length[node]) for node in common)
        self.max_length = max_length
        self.room: list[int] = []
        self.changed: list[int] = []
        self.clock = 0
        self.window_of = [-1] * len(paths)
        for leaves in windows:
            for leaf in leaves:
                self.window_of[self.leaf.index(leaf)] = len(self.room)
            self.set_room(len(self.room), max_length - size(segments, leaves))

    def set_room(self, window: int, room: int) -> None:
        if window == len(self.room):
            self.room.append(0)
            self.changed.append(0)
        self.clock += 1
        self.room[window], self.changed[window] = room, self.clock

    def cheapest(self, index: int) -> tuple[int, int]:
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
                window = self.window_of[at]
                room = self.room[window] if window >= 0 else -1
                if room >= end - share and (best < 0 or end - share < added or room < self.room[best]):
                    best, added = window, end - share
        return best, added

    def place(self, index: int) -> tuple[int, int]:
        """Put a leaf where it adds the fewest tokens, else where it fits best; the window (-1 for none) and tokens."""
        window, added = self.cheapest(index)
        if window < 0:
            added = self.end[index]
            fitting = [each for each, room in enumerate(self.room) if room >= added]
            window = min(fitting, key=lambda each: (self.room[each], -self.changed[each]), default=-1)
        if window >= 0:
            self.set_room(window, self.room[window] - added)
            self.window_of[index] = window
        return window, added

    def windows(self) -> Windows:
        found: dict[int, list[int]] = {}
        for leaf, window in zip(self.leaf, self.window_of, strict=True):
            found.setdefault(window, []).append(leaf)
        return list(found.values())


def nearest(segments: Segments, max_length: int) -> Windows:
    line = Line(segments, [], max_length)
    for index in range(len(line.leaf)):
        window, added = line.place(index)
        if window < 0:
            line.window_of[index] = len(line.room)
            line.set_room(len(line.room), max_length - added)
    return line.windows()


def dissolve(segments: Segments, max_length: int, windows: Windows) -> Windows:
    line = Line(segments, windows, max_length)
    failures = 0
    for window in sorted(range(len(windows)), key=lambda each: -line.room[each]):
        room, line.room[window] = line.room[window], -1
        members = [index for index in range(len(line.leaf)) if line.window_of[index] == window]
        moved: list[tuple[int, int]] = []
        for index in sorted(members, key=lambda each: -line.end[each]):
            target, added = line.place(index)
            if target < 0:
                break
            moved.append((index, added))
        if len(moved) == len(members):
            failures = 0
            continue
        for index, added in moved:
            line.set_room(line.window_of[index], line.room[line.window_of[index]] + added)
            line.window_of[index] = window
        line.set_room(window, room)
        failures += 1
        if failures == PATIENCE:
            break
    return line.windows()


def lower_bound(forest: TokenForest, max_length: int) -> tuple[int, int]:
    """Least windows and positions, node by node, with sets of leaves that conflict listed one by one."""
    parent, length = forest.parent.tolist(), forest.length.tolist()
    end = (forest.depth + forest.length).tolist()
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parent))}
    for node in range(len(parent)):
        children[parent[node]].append(node)
    spent, copies = {}, {}
    clique: dict[int, list[int]] = {}  # ends of leaves below a node of which no two share a window
    for node in [*range(len(parent) - 1, -1, -1), -1]:
        below, reach = children[node], end[node] if node >= 0 else 0
        members = [
            member
            for child in below
            for member in (clique[child] if len(clique[child]) > 1 else clique[child][:1])
            if len(clique[child]) > 1 or 2 * member > max_length + reach
        ]
        longest = max((max(clique[child]) for child in below), default=reach)
        clique[node] = members if len(members) > 1 else [longest]
        spent[node] = sum(length[child] * copies[child] + spent[child] for child in below)
        room = max(max_length - reach, 1)
        copies[node] = max([1, len(clique[node]), -(-spent[node] // room), *(copies[child] for child in below)])
    return (copies[-1] if parent else 0), spent[-1]

"""Which leaves go into which window.

Cutting inside a segment never saves a window, so a packing is a map from leaves to windows; the size of a window is
the number of tokens in the union of its leaves' root paths. This is virtual-machine packing with page sharing on a
tree (Sindelar, Sitaraman, Shenoy: Sharing-aware algorithms for virtual machine colocation, SPAA 2011).

Three packings are made: leaves in depth-first order, a new window when one is full (*walk*); *bottom up*, where at
every branch point the bundles below it are packed by best fit into the room that is left there; and *nearest*, where
each leaf goes where it adds the fewest tokens among the windows of its neighbours. Then windows are *dissolved*,
emptiest first, as long as their leaves fit elsewhere, and the best result is kept. Ruin and recreate can go on from
there for as long as one likes. The certificate bounds from below how many windows any packing needs.

Cost: 2 to 40 ms for 8,000 to 60,000 leaves, O(L log L), compiled (`plan` and `bottom_up` of `dagpack_hf.kernels`);
nothing is per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.bottom_up import bottom_up
from dagpack_hf.kernels.bound import certificate
from dagpack_hf.kernels.plan import dissolve as dissolve_windows
from dagpack_hf.kernels.plan import group_by_window, nearest, number_by_first_leaf, sizes_of, walk
from dagpack_hf.kernels.rooms import no_rooms
from dagpack_hf.kernels.search import improve
from dagpack_hf.segments import Segments
from dagpack_hf.trie import TokenForest

STRATEGIES = ("best", "dfs")

ITERATIONS = 64
"""Iterations of ruin and recreate between two looks at the clock."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """The leaves of each window; windows are ordered by their first leaf.

    Args:
        leaf: `int64[L]`, leaf segments, in preorder within each window.
        offset: `int64[W + 1]`; window `w` has `leaf[offset[w] : offset[w + 1]]`.
    """

    leaf: IntArray
    offset: IntArray

    @classmethod
    def from_assignment(cls, leaves: IntArray, window_of: IntArray) -> Windows:
        """Windows from the window of each leaf.

        Args:
            leaves: `int64[L]`, the leaf segments in preorder.
            window_of: `int64[L]`, for each leaf a number of its window, at least 0; a number that no leaf has is no
                window.
        """
        numbers = np.array(window_of, np.int64)
        windows = number_by_first_leaf(numbers, int(numbers.max(initial=-1)) + 1)
        order, offset = group_by_window(numbers, windows)
        return cls(np.asarray(leaves, np.int64)[order], offset)

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __iter__(self) -> Iterator[IntArray]:
        return (self.of(window) for window in range(len(self)))

    def of(self, window: int) -> IntArray:
        """The leaves of one window, in preorder."""
        return self.leaf[self.offset[window] : self.offset[window + 1]]


@dataclass(frozen=True)
class LeafLine:
    """Leaves in preorder, with what each shares with the one before: all of a tree that matters for packing.

    Args:
        leaf: `int64[L]`, the leaves.
        end: `int64[L]`, tokens of each leaf's path.
        shared: `int64[L]`, tokens that each leaf's path shares with that of the leaf before; 0 for the first.
    """

    leaf: IntArray
    end: IntArray
    shared: IntArray

    @classmethod
    def of(cls, tree: Segments | TokenForest) -> LeafLine:
        """The leaf line of a tree in preorder."""
        leaves = tree.leaves
        depth, length = tree.depth, tree.length
        unseen = leaves[:-1] + 1  # in preorder, where the own part of the next leaf begins
        shared = np.zeros(len(leaves), np.int64)
        shared[1:] = depth[unseen]
        return cls(leaves, depth[leaves].astype(np.int64) + length[leaves], shared)

    def __len__(self) -> int:
        return len(self.leaf)

    def check_fit(self, max_length: int) -> None:
        """Refuse paths that are longer than a window."""
        longest = int(self.end.max(initial=0))
        if longest > max_length:
            raise ValueError(
                f"The longest path has {longest} tokens, a window only max_length={max_length}. Raise max_length or "
                "cut the paths first (limit_paths)."
            )

    def windows(self, window_of: IntArray) -> Windows:
        """Windows from the window of each leaf."""
        return Windows.from_assignment(self.leaf, window_of)

    def assignment(self, windows: Windows) -> IntArray:
        """The window of each leaf, the inverse of `windows`."""
        window_of = np.empty(len(self), np.int64)
        window_of[np.searchsorted(self.leaf, windows.leaf)] = np.repeat(
            np.arange(len(windows)), np.diff(windows.offset)
        )
        return window_of


def pack_windows(
    segments: Segments, max_length: int, *, strategy: str = "best", effort: float = 0.0, seed: int = 0
) -> Windows:
    """Put every leaf into one window.

    Args:
        segments: segments of a forest whose paths all have at most `max_length` tokens.
        max_length: tokens of a window.
        strategy: `"best"`: the best of walk, bottom up and nearest, the latter two dissolved; fewest windows, then
            fewest positions. `"dfs"`: the walk alone, whose windows are stretches of the depth-first order.
        effort: seconds of ruin and recreate after that. It ends early where the bound on the segments is reached, and
            its result is never worse. The clock is read after every 64 iterations: what comes of as many iterations
            depends on the seed alone, but how many there are depends on the machine.
        seed: of ruin and recreate.

    Returns:
        The leaves of each window, in preorder, windows ordered by their first leaf.

    Raises:
        ValueError: a path is longer than a window, or the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be {' or '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
    line = LeafLine.of(segments)
    line.check_fit(max_length)
    window_of = walk(line.end, line.shared, max_length)
    if strategy == "best":
        candidates = [window_of, *(_dissolved(line, max_length, start(line, max_length)) for start in _STARTS)]
        window_of = min(candidates, key=lambda each: _cost(line, each))
    if effort > 0:
        window_of = _search(line, max_length, window_of, effort, seed)
    return line.windows(window_of)


def pack_walk(segments: Segments, max_length: int) -> Windows:
    """Leaves in depth-first order, a new window when the next leaf does not fit."""
    line = LeafLine.of(segments)
    return line.windows(walk(line.end, line.shared, max_length))


def pack_bottom_up(segments: Segments, max_length: int) -> Windows:
    """At every branch point, best fit of the bundles below it into the room there; each bin is a bundle then."""
    line = LeafLine.of(segments)
    return line.windows(_bottom_up(line, max_length))


def pack_nearest(segments: Segments, max_length: int) -> Windows:
    """Leaves in depth-first order, each into the window of a neighbour where it adds the fewest tokens."""
    line = LeafLine.of(segments)
    return line.windows(_nearest(line, max_length))


def dissolve(segments: Segments, max_length: int, windows: Windows) -> Windows:
    """Empty windows, emptiest first, by placing their leaves where they add the fewest tokens; keep what vanishes."""
    line = LeafLine.of(segments)
    return line.windows(_dissolved(line, max_length, line.assignment(windows)))


def lower_bound(forest: TokenForest, max_length: int) -> int:
    """Number of windows that any packing of the forest needs, whatever it does at branch points.

    A window holds a token only together with all tokens before it, and every token is in some window. Hence some
    window holds each leaf's whole path; and a window that holds the leaves of a set has room for the union of their
    paths, each token of it once at least. Writing a token twice, as at branch points, or cutting inside a node only
    costs more. With `T` tokens in a window, and `end(v)` tokens from the root to the end of node `v`, at least `c(v)`
    windows hold node `v`, and at least `E(v)` positions are spent on `v` and what is below it:

        c(v) = max(1, a(v), ceil(sum E(child) / (T - end(v))))
        E(v) = length(v) * c(v) + sum E(child)

    The last term of `c`: what is below `v` is only in windows that hold `v`, and in each there is room for
    `T - end(v)` positions below it. `a(v)` is the size of a set of leaves below `v` of which no two share a window.
    Two leaves `x` and `y` that part at node `u` take at least `end(x) + end(y) - end(u)` positions together, which is
    more than `T` if each is longer than `(T + end(u)) / 2`. The set of `u` is made of those of its children: the whole
    set of a child if it has two members or more, for these are longer than `(T + end(w)) / 2` with a node `w` below
    `u`, where `end` is larger; else the child's longest leaf, if that is longer than `(T + end(u)) / 2`. So any two
    members conflict where they part. A leaf's set is the leaf. That `c(v)` is at least the `c` of each child follows:
    from `sum E > (k - 1) * (T - end)` at a child with `c = k` the same comes at `v`, and `a` does not fall either.

    All trees hang from a virtual root with `end = 0`; its `c` is the bound.

    Raises:
        ValueError: a path is longer than a window.
    """
    return _certificate(forest, max_length)[0]


def least_executed_tokens(forest: TokenForest, max_length: int) -> int:
    """Positions that any packing into windows of this length executes at least: `sum E(root)` of `lower_bound`.

    It needs no packing, so it tells what another window length would give.

    Raises:
        ValueError: a path is longer than a window.
    """
    return _certificate(forest, max_length)[1]


def executed_tokens(segments: Segments, windows: Windows) -> int:
    """Positions of all windows, replayed ancestors included."""
    return int(window_sizes(segments, windows).sum())


def window_sizes(segments: Segments, windows: Windows) -> IntArray:
    """`int64[W]`, positions of each window, replayed ancestors included."""
    line = LeafLine.of(segments)
    return sizes_of(line.end, line.shared, line.assignment(windows), len(windows))


def _bottom_up(line: LeafLine, max_length: int) -> IntArray:
    room = min(max_length, _total(line))
    return bottom_up(line.end, line.shared, np.ones(len(line)), no_rooms(len(line), room), room)[0]


def _nearest(line: LeafLine, max_length: int) -> IntArray:
    room = min(max_length, _total(line))
    return nearest(line.end, line.shared, np.arange(len(line)), no_rooms(len(line), room), room)[0]


_STARTS = (_bottom_up, _nearest)


def _dissolved(line: LeafLine, max_length: int, window_of: IntArray) -> IntArray:
    windows = number_by_first_leaf(window_of, int(window_of.max(initial=-1)) + 1)
    dissolve_windows(line.end, line.shared, window_of, windows, min(max_length, _total(line)))
    return window_of


def _search(line: LeafLine, max_length: int, window_of: IntArray, effort: float, seed: int) -> IntArray:
    bound = certificate(line.end, line.shared, max_length)[0]
    before = _cost(line, window_of)
    found = window_of.copy()
    windows = number_by_first_leaf(found, int(found.max(initial=-1)) + 1)
    size = sizes_of(line.end, line.shared, found, windows)
    random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    stop = time.monotonic() + effort
    while windows > bound and time.monotonic() < stop:
        windows = improve(line.end, line.shared, found, size, random, ITERATIONS, max_length)
    return found if _cost(line, found) < before else window_of


def _cost(line: LeafLine, window_of: IntArray) -> tuple[int, int]:
    """Windows and positions."""
    size = sizes_of(line.end, line.shared, window_of, int(window_of.max(initial=-1)) + 1)
    return int(np.count_nonzero(size)), int(size.sum())


def _certificate(forest: TokenForest, max_length: int) -> tuple[int, int]:
    line = LeafLine.of(forest)
    line.check_fit(max_length)
    return certificate(line.end, line.shared, max_length)


def _total(line: LeafLine) -> int:
    """Tokens of all segments: no window is larger, whatever `max_length`."""
    return int((line.end - line.shared).sum())

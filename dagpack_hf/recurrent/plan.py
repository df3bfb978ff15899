"""How states pass along the rows of a batch, read off `subtree_end`.

A recurrent layer computes along a flat row; on a packed row each position must go on from its parent instead. The plan
says in which order to lay positions out so that stock functions, which know flat sequences only, do that:

* *runs*, for convolutions: positions each of which is the child of the one before, after their last ancestors;
* *cells*, for scans: pieces of paths between multiples of a depth. States are needed only at these depths. As a rule
  the cells are the chunks that the flat sequence is computed in, so that rounding is the same too. What lies between
  such a depth and a branch point below it is computed once for each branch; where that is much, cells are shorter;
* *chains*: cells in a row without a branch, joined. Those with as many chains above them are a *level* and can be
  computed in one call, from the states at the ends of their parents.

Nothing here knows torch, so a plan can be made beside the row, in the workers that load data, and costs the training
process nothing.

Cost: for all kinds of layers together 1.7 ms for a row of 8192 positions with 757 leaves, 7 ms for one of 32768 with
3054, on one core.

Shape suffixes: `B` rows, `T` positions of a row, `N = B * T` positions of the batch, `S` cells, `M` places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from dagpack_hf.kernels import recurrent as loops

CELL = 64
"""Depths of a cell; the chunk of the delta rule wherever it is implemented."""

SHORTEST = 16
"""Depths of a cell where branches are short."""

COPIES = 1.25
"""How many positions longer cells of chains may have for each position of the row."""

PLACES = 1.125
"""How many places longer cells may have for each position of the row where all are padded to one length."""

WASTE = 256
"""Positions by which the short chains of a call may be padded, all together; about what one call more costs."""

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions laid out otherwise.

    Attributes:
        position_M (`numpy.ndarray`, int64):
            The position at each place; any where the place is empty.
        empty (`numpy.ndarray`, int64):
            Places that hold no position.
        place_N (`numpy.ndarray`, int64):
            Where to find the result of each position; that of padding is any.
    """

    position_M: np.ndarray
    empty: np.ndarray
    place_N: np.ndarray


@dataclass(frozen=True, eq=False)
class CellLayout:
    """Cells of one length one after another, by the number of cells above them.

    Attributes:
        layout (`Layout`):
            `S * length` places.
        steps (`list` of `numpy.ndarray`, int64):
            For each number of cells above, the parents of its cells, as indices among those with one cell less above.
    """

    layout: Layout
    steps: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Call:
    """Chains that are computed in one call, padded to the longest.

    Attributes:
        shape (`tuple[int, int]`):
            Chains and positions of each.
        lengths (`numpy.ndarray`, int64):
            Positions of each chain.
        parents (`numpy.ndarray`, int64, *optional*):
            The chain from whose end each goes on, as index among all chains of the level before. `None` at roots.
        goes_on (`bool`):
            Whether a later level needs the states at the ends.
    """

    shape: tuple[int, int]
    lengths: np.ndarray
    parents: np.ndarray | None
    goes_on: bool


@dataclass(frozen=True, eq=False)
class ChainLayout:
    """Chains of cells.

    Attributes:
        layout (`Layout`):
            The places of all calls one after another.
        levels (`list` of `list` of [`Call`]):
            The calls of each level.
    """

    layout: Layout
    levels: list[list[Call]]


class StatePlan:
    """How states pass along the rows of one batch.

    Layouts are made when they are first asked for, and kept.

    Args:
        subtree_end (`numpy.ndarray` of shape `(B, T)`, integer):
            One past the last position of each position's subtree.
        lengths (`numpy.ndarray` of shape `(B,)`, integer, *optional*):
            Positions of each row before its padding, of which nothing is computed. Without it, trees of one position
            at the end of a row count as padding.

    Raises:
        ValueError: If the shapes do not fit, a `subtree_end` is not in `i + 1 .. T`, or a length not in `0 .. T`.

    Example:
        >>> plan = StatePlan(np.array([[4, 3, 3, 4, 5]]))  # a root with the branches 1, 2 and 3; padding
        >>> plan.parent_N
        array([-1,  0,  1,  0, -2])
        >>> plan.runs(above=1).position_M
        array([0, 0, 1, 2, 0, 3, 4])
    """

    def __init__(self, subtree_end: np.ndarray, lengths: np.ndarray | None = None):
        end_BT = np.ascontiguousarray(subtree_end, np.int64)
        if end_BT.ndim != 2:
            raise ValueError(f"subtree_end must have shape (batch, length), got {end_BT.shape}")
        rows, width = end_BT.shape
        length_B = np.full(rows, -1) if lengths is None else np.asarray(lengths, np.int64)
        if length_B.shape != (rows,) or length_B.max(initial=0) > width:
            raise ValueError(f"lengths must be one for each of {rows} rows and at most {width}, got {lengths}")
        if rows and not (_above(end_BT) and end_BT.max(initial=0) <= width):
            raise ValueError(f"subtree_end must lie in i + 1 .. {width} at each position i, padding included")
        self.shape = (rows, width)
        self.parent_N, self.depth_N = loops.link_positions(end_BT, length_B.astype(np.int64))
        self._made: dict[tuple[Any, ...], Any] = {}

    @property
    def is_empty(self) -> bool:
        """Whether all is padding; there are no cells and no chains then."""
        return not (self.parent_N != loops.PADDING).any()

    def runs(self, above: int) -> Layout:
        """Each position after its parent, as far as `above` ancestors before any position.

        Args:
            above (`int`):
                Ancestors that are put before a run, such as the length of a convolution less one.

        Returns:
            [`Layout`]: Places are empty where there are fewer ancestors.
        """
        return self._once(("runs", above), lambda: _layout(*loops.lay_out_runs(self.parent_N, above)))

    def cells(self, length: int) -> CellLayout:
        """Cells, for scans whose state after a cell is known from that before it.

        Args:
            length (`int`):
                Depths of a cell.

        Returns:
            [`CellLayout`]: Those that end at a leaf before `length` have empty places at their end.
        """
        return self._once(("cells", length), lambda: _cell_layout(length, *self._cut(length)))

    def chains(self, length: int) -> ChainLayout:
        """Chains of cells, for scans that take the state before a chain and give that at its end.

        Args:
            length (`int`):
                Depths of a cell.

        Returns:
            [`ChainLayout`]: The places of each call.
        """
        return self._once(("chains", length), lambda: _chain_layout(length, *self._cut(length)))

    def cell_length(self, longest: int) -> int:
        """The longest cells that do not copy much.

        Args:
            longest (`int`):
                Depths of a cell at most, such as the chunk of a model.

        Returns:
            `int`: `longest` halved until cells have at most [`PLACES`] places for each position, or [`SHORTEST`].
        """
        return self._once(("length", longest), lambda: self._shortened(longest, padded=True))

    def chain_length(self) -> int:
        """The longest cells of chains that do not copy much.

        Returns:
            `int`: [`CELL`], halved until cells have at most [`COPIES`] positions for each position, or [`SHORTEST`].
        """
        return self._once(("length",), lambda: self._shortened(CELL, padded=False))

    def _shortened(self, length: int, padded: bool) -> int:
        positions = np.count_nonzero(self.parent_N != loops.PADDING)
        while length >= 2 * SHORTEST:
            cells, filled = loops.count_cells(self.parent_N, self.depth_N, length)
            if cells * length <= PLACES * positions if padded else filled <= COPIES * positions:
                return length
            length //= 2
        return length

    def _cut(self, length: int) -> tuple[np.ndarray, ...]:
        return self._once(("cut", length), lambda: loops.cut_cells(self.parent_N, self.depth_N, length))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _above(end_BT: np.ndarray) -> bool:
    return bool((end_BT > np.arange(end_BT.shape[1])).all())


def _layout(position_M: np.ndarray, place_N: np.ndarray) -> Layout:
    empty = np.flatnonzero(position_M < 0)
    position_M[empty] = 0
    return Layout(position_M=position_M, empty=empty, place_N=place_N)


def _sizes(first_S: np.ndarray, positions: int) -> np.ndarray:
    return np.diff(np.append(first_S, positions))


def _place_cells(
    start_S: np.ndarray, places: int, first_S: np.ndarray, position: np.ndarray, cell_N: np.ndarray, rank_N: np.ndarray
) -> Layout:
    """Lay cells out from the places `start_S`."""
    position_M = np.full(places, -1)
    position_M[np.repeat(start_S - first_S, _sizes(first_S, len(position))) + np.arange(len(position))] = position
    place_N = np.zeros(len(cell_N), np.int64)
    inside = cell_N >= 0
    place_N[inside] = start_S[cell_N[inside]] + rank_N[inside]
    return _layout(position_M, place_N)


def _cell_layout(
    length: int,
    above_S: np.ndarray,
    first_S: np.ndarray,
    position: np.ndarray,
    cell_N: np.ndarray,
    rank_N: np.ndarray,
) -> CellLayout:
    count = len(above_S)
    step_S = loops.cell_depths(above_S)
    order = np.argsort(step_S, kind="stable")
    place_S = np.empty(count, np.int64)
    place_S[order] = np.arange(count)
    layout = _place_cells(place_S * length, count * length, first_S, position, cell_N, rank_N)
    begin = np.searchsorted(step_S[order], np.arange(step_S.max(initial=0) + 2))
    parents = place_S[above_S[order]]
    steps = [
        parents[start:stop] - begin[step - 1] if step else np.zeros(stop - start, np.int64)
        for step, (start, stop) in enumerate(pairwise(begin.tolist()))
    ]
    return CellLayout(layout=layout, steps=steps)


def _chain_layout(
    size: int, above_S: np.ndarray, first_S: np.ndarray, position: np.ndarray, cell_N: np.ndarray, rank_N: np.ndarray
) -> ChainLayout:
    chain_S, within_S, parent, level, length = loops.link_chains(above_S, _sizes(first_S, len(position)))
    order = np.lexsort((-length, level))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    edges = loops.group_chains(level[order], length[order], size, WASTE // size)
    level_begin = np.searchsorted(level[order], np.arange(level.max(initial=0) + 1))
    start = np.zeros(len(order), np.int64)
    levels: list[list[Call]] = []
    places = 0
    for low, high in pairwise(edges.tolist()):
        members = order[low:high]
        longest, at = int(length[members[0]]), int(level[members[0]])
        start[members] = places + longest * np.arange(high - low)
        places += longest * int(high - low)
        if at == len(levels):
            levels.append([])
        parents = rank[parent[members]] - level_begin[at - 1] if at else None
        levels[at].append(Call((int(high - low), longest), length[members], parents, at < level[order[-1]]))
    return ChainLayout(_place_cells(start[chain_S] + within_S, places, first_S, position, cell_N, rank_N), levels)

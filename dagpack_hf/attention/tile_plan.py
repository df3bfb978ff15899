"""What the tile backend computes for a row, read off `subtree_end`.

A row is cut into tiles of queries. What the queries of a tile see falls into two parts:

* keys that all of them see, which need no mask: their common ancestors;
* keys that some of them see, mostly the tile itself, under a small mask.

Where to cut follows the tree. A *stretch* runs from a position to the next leaf, so each of its positions is the child
of the one before. A very long stretch is a tile of its own, whose causal pairs need no mask, unless there is a sliding
window. A long one is cut into equal tiles. Short ones are put together up to `POOL` positions, as long as their paths
part less than that above; together they count as a stretch. The common ancestors of a stretch are one part for all its
tiles, and for those of the next stretches while they are the same: the branches of a star get the trunk in one part
with many queries. What a tile sees of its own stretch is another. Where either is only a few keys, it goes under the
mask with the tile itself.

Under a sliding window of depth, keys out of reach of the whole tile are left out, and those in reach of some of its
queries go under the mask.

Every choice is checked against the rule of [`visible`] and none trusts the shape of the tree, so the plan is exact for
any vectors; the tree only decides how much is computed.

Cost: some 50 us for each tile, of which there are at most `T / 32`; the masks, `T` rows of at most 1,024 pairs, as
bool and in the dtype of the scores.

Shape suffixes: `B` rows, `T` positions, `Q` queries of a tile, `K` keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

TILE = 256
"""Queries of a tile that a long stretch is cut into, at most."""

POOL = 128
"""Queries of a tile that is put together, at most: what is seen by some of them only grows with it."""

WHOLE = 768
"""Positions of a stretch that is not cut, at least. Above this length the kernel takes 256 queries at once, and skips
most of what a causal part does not show."""

Keys = slice | Tensor
"""Keys of a part: a slice where they lie together, else their indices."""


@dataclass(frozen=True, eq=False)
class Part:
    """Queries of a row and keys, all pairs of which are computed in one call.

    Attributes:
        queries (`slice`):
            The queries.
        keys (`slice` or `torch.Tensor` of shape `(K,)`, int64):
            The keys.
        mask_QK (`torch.Tensor` of shape `(Q, K)`, bool, *optional*):
            Which pairs are visible; all without it.
        is_causal (`bool`, *optional*, defaults to `False`):
            Whether the keys are the queries, and each sees itself and those before it. There is no mask then.
    """

    queries: slice
    keys: Keys
    mask_QK: Tensor | None = None
    is_causal: bool = False
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as what is added to the scores, made once for all layers."""
        if self.mask_QK is None:
            return None
        if dtype not in self._bias:
            bias_QK = torch.zeros(self.mask_QK.shape, dtype=dtype, device=self.mask_QK.device)
            self._bias[dtype] = bias_QK.masked_fill_(~self.mask_QK, float("-inf"))
        return self._bias[dtype]


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The parts of a row.

    Attributes:
        own (`list` of [`Part`]):
            One for each tile: every query once, with itself among its keys.
        common (`list` of [`Part`]):
            What is seen besides, all without a mask. No key meets a query in two parts.
    """

    own: list[Part]
    common: list[Part]


def plan_of(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None = None) -> list[RowPlan]:
    """Plan each row.

    Args:
        subtree_end_BT (`torch.Tensor` of shape `(B, T)`, integer):
            One past the last position of each position's subtree.
        position_ids_BT (`torch.Tensor` of shape `(B, T)`, integer):
            Depth of each position.
        window (`int`, *optional*):
            Sliding window in tokens of depth.

    Returns:
        `list` of [`RowPlan`]: One for each row, with its tensors on the device of the vectors.
    """
    device = subtree_end_BT.device
    rows = zip(subtree_end_BT.cpu().numpy(), position_ids_BT.cpu().numpy(), strict=True)
    return [_plan_row(_Row(end_T, depth_T, _effective(window, depth_T)), device) for end_T, depth_T in rows]


def _effective(window: int | None, depth_T: np.ndarray) -> int | None:
    """The window, unless all of the row is within it."""
    return None if window is None or window > depth_T.max() else window


def _plan_row(row: _Row, device: torch.device) -> RowPlan:
    own: list[Part] = []
    common: list[Part] = []
    shared: list[tuple[int, int, np.ndarray]] = []  # first query, end, and keys of parts that may grow
    whole = WHOLE if row.window is None else len(row.end_T) + 1
    for above, start, stop in tiles(row.end_T, TILE, POOL, whole):
        queries = slice(start, stop)
        few = POOL if stop - start < whole else 0
        partly_K, wholly_K = row.keys_between(0, above, start, stop, few)
        if len(wholly_K):
            grows = shared and shared[-1][1] == start and np.array_equal(shared[-1][2], wholly_K)
            shared.append((shared.pop()[0] if grows else start, stop, wholly_K))
        near_K, far_K = row.keys_between(above, start, start, stop, 2 * TILE)
        if len(far_K):
            common.append(Part(queries, _as_keys(far_K, device)))
        above_K = np.concatenate([partly_K, near_K])
        if not len(above_K) and row.is_chain(start, stop):
            own.append(Part(queries, queries, is_causal=True))
        else:
            keys_K = np.concatenate([above_K, np.arange(start, stop)])
            mask_QK = torch.from_numpy(row.mask(start, stop, keys_K)).to(device)
            own.append(Part(queries, _as_keys(keys_K, device), mask_QK))
    common += [Part(slice(start, stop), _as_keys(keys_K, device)) for start, stop, keys_K in shared]
    return RowPlan(own=own, common=common)


@dataclass(frozen=True, eq=False)
class _Row:
    """The rule for one row: its vectors and the window."""

    end_T: np.ndarray
    depth_T: np.ndarray
    window: int | None

    def is_chain(self, start: int, stop: int) -> bool:
        """Whether each position of `start .. stop` sees all of those before it."""
        reach = self.window is None or np.ptp(self.depth_T[start:stop]) < self.window
        return bool(reach and self.end_T[start:stop].min() >= stop)

    def keys_between(self, low: int, high: int, start: int, stop: int, few: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of `low .. high` that only some queries of `start .. stop` may see, and keys that all see.

        If those that all see are no more than `few`, they stand with the others.
        """
        keys_K = low + np.flatnonzero(self.end_T[low:high] > start)
        wholly_K = self.end_T[keys_K] >= stop
        if self.window is not None:
            depth_Q = self.depth_T[start:stop]
            in_reach_K = depth_Q.min() - self.depth_T[keys_K] < self.window
            keys_K, wholly_K = keys_K[in_reach_K], wholly_K[in_reach_K]
            wholly_K &= depth_Q.max() - self.depth_T[keys_K] < self.window
        if wholly_K.sum() <= few:
            wholly_K[:] = False
        return keys_K[~wholly_K], keys_K[wholly_K]

    def mask(self, start: int, stop: int, keys_K: np.ndarray) -> np.ndarray:
        """Which of the keys each query of `start .. stop` sees."""
        query_Q1 = np.arange(start, stop)[:, None]
        mask_QK = (keys_K <= query_Q1) & (query_Q1 < self.end_T[keys_K])
        if self.window is not None:
            mask_QK &= self.depth_T[query_Q1] - self.depth_T[keys_K] < self.window
        return mask_QK


def tiles(end_T: np.ndarray, tile: int, pool: int, whole: int) -> Iterator[tuple[int, int, int]]:
    """Cut a row into tiles, see above.

    Args:
        end_T (`numpy.ndarray` of shape `(T,)`, integer):
            `subtree_end` of the row.
        tile (`int`):
            Positions at most of a tile that a stretch is cut into.
        pool (`int`):
            Positions at most of a tile of several stretches.
        whole (`int`):
            Positions at least of a stretch that is not cut.

    Yields:
        `tuple` of `int`: Start of the stretch, and start and stop of the tile; from the first position to the last. A
        tile of several stretches counts as a stretch.
    """
    length = len(end_T)
    ancestors_T = np.arange(length) - np.cumsum(np.bincount(end_T, minlength=length + 1))[:length]
    stops = np.flatnonzero(end_T == np.arange(1, length + 1)) + 1
    pooled, pool_depth, shallowest = 0, 0, 0  # the pool is `pooled .. start`
    start = 0
    for stop, depth in zip(stops.tolist(), ancestors_T[np.append(0, stops[:-1])].tolist(), strict=True):
        shallowest = min(shallowest, depth)
        long = stop - start >= max(pool // 4, 1)
        if pooled < start and (long or stop - pooled > pool or pool_depth - shallowest > pool):
            yield pooled, pooled, start
            pooled = start
        if pooled == start:
            pool_depth = shallowest = depth
        if long:
            pieces = 1 if stop - start >= whole else -(-(stop - start) // tile)
            edges = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
            yield from ((start, *piece) for piece in pairwise(edges))
            pooled = stop
        start = stop
    if pooled < start:
        yield pooled, pooled, start


def _as_keys(keys_K: np.ndarray, device: torch.device) -> Keys:
    first, last = int(keys_K[0]), int(keys_K[-1])
    if last - first + 1 == len(keys_K):
        return slice(first, last + 1)
    return torch.from_numpy(keys_K).to(device)

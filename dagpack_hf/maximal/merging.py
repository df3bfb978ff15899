"""Which lists of all sources become rows.

Cost: a few passes of numpy over the nodes and a sort of their digests, a sixteenth of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagpack_hf.maximal.source import SourcePart


@dataclass(frozen=True)
class Rows:
    """Which lists become rows.

    Attributes:
        parts: The parts, in order.
        first_node: int32 [P + 1], where each part's nodes begin in the arrays over all parts.
        end_part: int32 [R], for each row its part.
        end: int32 [R], for each row its turn in the part.
        group: int32 [N], for each node the first node with the same list.
        is_target: bool [N], whether the list of a *first* node ends with a target.
        targets: Number of targets.
        unprompted: Number of targets whose prompt is not known.
        repeated: Turns that are no targets because an earlier one has the same key.
        equal: Turns that are no targets because an earlier one has the same list and tools.
    """

    parts: Sequence[SourcePart]
    first_node: np.ndarray
    end_part: np.ndarray
    end: np.ndarray
    group: np.ndarray
    is_target: np.ndarray
    targets: int = 0
    unprompted: int = 0
    repeated: int = 0
    equal: int = 0


def merge(parts: Sequence[SourcePart]) -> Rows:
    """Find the maximal lists of all parts.

    Args:
        parts: In the order in which turns and rows count as first.

    Returns:
        The rows, in the order of their last turns.
    """
    first_node = np.cumsum([0, *(len(part.parents) for part in parts)], dtype=np.int32)
    turns = np.array([len(part.ends) for part in parts], np.int64)
    shift = first_node[:-1]
    part_of_turn = np.repeat(np.arange(len(parts)), turns)
    turn_of_part = np.concatenate([np.arange(count) for count in turns]) if len(parts) else np.zeros(0, np.int64)
    ends = _concatenate([part.ends + start for part, start in zip(parts, shift, strict=True)])
    keys = _concatenate([part.keys for part in parts], (0, 2), np.uint64)
    parents = _concatenate(
        [np.where(part.parents < 0, -1, part.parents + start) for part, start in zip(parts, shift, strict=True)]
    )
    every = np.arange(len(keys), dtype=np.int32)
    kept = every[_first_of_equal(keys, every) == every]
    used = _used(first_node, parents, part_of_turn, ends, kept)
    group = np.full(len(parents), -1, np.int32)
    nodes = np.flatnonzero(used).astype(np.int32)
    group[nodes] = nodes[_first_of_equal(_concatenate([part.digests for part in parts], (0, 2), np.uint64), nodes)]
    inner = np.zeros(len(parents), bool)
    below = nodes[parents[nodes] >= 0]
    inner[group[parents[below]]] = True
    _, first = np.unique(group[ends[kept]], return_index=True)
    targets = kept[np.sort(first)]
    is_target = np.zeros(len(parents), bool)
    is_target[group[ends[targets]]] = True
    rows = targets[~inner[group[ends[targets]]]]
    unprompted = _concatenate([part.unprompted for part in parts], 0, bool)
    return Rows(
        parts,
        first_node,
        part_of_turn[rows].astype(np.int32),
        turn_of_part[rows].astype(np.int32),
        group,
        is_target,
        targets=len(targets),
        unprompted=int(unprompted[targets].sum()),
        repeated=len(keys) - len(kept),
        equal=len(kept) - len(targets),
    )


def _concatenate(arrays: list[np.ndarray], shape: Any = 0, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(shape, dtype)


def _first_of_equal(pairs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return for each chosen pair the place among the chosen ones of the first that is equal to it.

    Pairs are digests, so their first bits deal them evenly into buckets, which are sorted one by one to save memory.

    Args:
        pairs: uint64 [N, 2].
        chosen: int32 [M], indices of pairs.

    Returns:
        int32 [M].
    """
    first = np.empty(len(chosen), np.int32)
    buckets = (pairs[:, 0] >> np.uint64(60)).astype(np.uint8)[chosen]
    for bucket in range(16):
        places = np.flatnonzero(buckets == bucket).astype(np.int32)
        own = pairs[chosen[places]]
        order = np.lexsort((own[:, 1], own[:, 0]))  # stable: equal pairs stay in their order
        own = own[order]
        starts = np.ones(len(own), bool)
        starts[1:] = (own[1:] != own[:-1]).any(1)
        first[places[order]] = places[order[starts][np.cumsum(starts) - 1]]
    return first


def _used(
    first_node: np.ndarray, parents: np.ndarray, part_of_turn: np.ndarray, ends: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """Mark the nodes on the lists of kept turns; where all turns of a part are kept, these are all of its nodes."""
    lost = np.ones(len(ends), bool)
    lost[kept] = False
    used = np.ones(len(parents), bool)
    some_lost = np.zeros(len(first_node) - 1, bool)
    some_lost[part_of_turn[lost]] = True
    for part in np.flatnonzero(some_lost):
        used[first_node[part] : first_node[part + 1]] = False
    return used | _ancestors(parents, ends[kept[some_lost[part_of_turn[kept]]]])


def _ancestors(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Mark nodes and all that comes before them in their lists."""
    used = np.zeros(len(parents), bool)
    front = np.unique(nodes)
    while len(front):
        used[front] = True
        front = parents[front]
        front = np.unique(front[front >= 0])
        front = front[~used[front]]
    return used

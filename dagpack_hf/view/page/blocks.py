"""The token tree cut into blocks: tokens that are alike, so that a picture needs one rectangle for each.

A block ends where a node, a message, a run of targets, a segment or the path of a file ends. Nodes stand in the
picture as sessions do: children in the order of their first entry.

Cost: a few numbers for each block; linear in blocks times the windows and files they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.trie import TokenForest
from dagpack_hf.view.page.model import NO_ENTRY, Block, Node
from dagpack_hf.view.page.plan import Plan
from dagpack_hf.view.page.walk import Range

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a token tree.

    Args:
        nodes: The nodes.
        blocks: Their blocks.
        window_sets: Sets of windows that blocks refer to.
        file_sets: Sets of files that blocks refer to.
        of_entry: For each entry its tokens as ranges of blocks.
        of_file: For each file the same.
    """

    nodes: tuple[Node, ...]
    blocks: tuple[Block, ...]
    window_sets: tuple[tuple[int, ...], ...]
    file_sets: tuple[tuple[int, ...], ...]
    of_entry: dict[int, tuple[Range, ...]]
    of_file: dict[int, tuple[Range, ...]]


def cut_blocks(plan: Plan, entries: Mapping[int, Sequence[Range]], files: Mapping[int, Sequence[Range]]) -> Blocks:
    """Cut a packed token tree.

    Args:
        plan: The tree and its windows.
        entries: For each entry its tokens, as ranges in node order.
        files: For each file the same.
    """
    forest, segments = plan.forest, plan.segments
    ranges = [each for found in (*entries.values(), *files.values()) for each in found]
    ends = np.array(ranges, np.int64).reshape(-1)
    start = np.unique(np.concatenate([forest.start, forest.tally.end, segments.start, ends]))
    total = forest.num_tokens
    start = start[start < total]
    length = np.diff(start, append=total)
    of_entry = {entry: _block_ranges(start, found) for entry, found in entries.items()}
    of_file = {file: _block_ranges(start, found) for file, found in files.items()}
    owner = _first_owners(len(start), of_entry)
    trainer, held = _windows_of(plan, start)
    window_sets, window_set = _number(held)
    file_sets, file_set = _number(_members(len(start), of_file))
    node = np.searchsorted(forest.start, start, side="right") - 1
    target = forest.tally.is_target(start) if len(start) else np.zeros(0, bool)
    position = forest.depth[node] + start - forest.start[node]
    columns = (node, position, length, owner, target, trainer, window_set, file_set)
    blocks = tuple(Block(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
    nodes = place_nodes(forest, _first_entries(forest.num_nodes, node, owner))
    return Blocks(nodes, blocks, window_sets, file_sets, of_entry, of_file)


def place_nodes(forest: TokenForest, first_entry: LongArray) -> tuple[Node, ...]:
    """Place the nodes of a forest: one lane for each leaf, children in the order of their first entry.

    Args:
        forest: The forest.
        first_entry: `int64[N]`, the first entry of each node.
    """
    parents = forest.parent.tolist()
    first = first_entry.tolist()
    lanes = [0] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        lanes[node] = max(lanes[node], 1)
        if parents[node] >= 0:
            lanes[parents[node]] += lanes[node]
            first[parents[node]] = min(first[parents[node]], first[node])
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    top = [0] * len(parents)
    for parent in (-1, *range(len(parents))):
        at = top[parent] if parent >= 0 else 0
        for child in sorted(children.get(parent, ()), key=lambda child: (first[child], child)):
            top[child] = at
            at += lanes[child]
    columns = (parents, forest.depth.tolist(), forest.length.tolist(), top, lanes)
    return tuple(Node(*row) for row in zip(*columns, strict=True))


def _block_ranges(start: LongArray, ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges of tokens as ranges of blocks, joined where they touch."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    at = np.searchsorted(start, np.array(merged, np.int64).reshape(-1, 2))
    return tuple((int(low), int(high)) for low, high in at)


def _first_owners(count: int, ranges: Mapping[int, Sequence[Range]]) -> LongArray:
    """For each block the first thing that has it, `NO_ENTRY` for none."""
    owner = np.full(count, NO_ENTRY, np.int64)
    for each in sorted(ranges, reverse=True):
        for low, high in ranges[each]:
            owner[low:high] = each
    return owner


def _members(count: int, ranges: Mapping[int, Sequence[Range]]) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(count)]
    for each in sorted(ranges):
        for low, high in ranges[each]:
            for block in range(low, high):
                members[block].append(each)
    return members


def _windows_of(plan: Plan, start: LongArray) -> tuple[LongArray, list[list[int]]]:
    """For each block the first window that holds it, and all that do."""
    segments = plan.segments
    low = np.searchsorted(start, segments.start)
    high = np.searchsorted(start, segments.start + segments.length)
    members: list[list[int]] = [[] for _ in start]
    for window, held in plan.held():
        for segment in held.tolist():
            for block in range(low[segment], high[segment]):
                if not members[block] or members[block][-1] != window:  # copies of a branch point are one token
                    members[block].append(window)
    return np.array([found[0] if found else -1 for found in members], np.int64), members


def _number(members: list[list[int]]) -> tuple[tuple[tuple[int, ...], ...], npt.NDArray[np.int64]]:
    """The distinct sets, and the number of each one's."""
    numbers: dict[tuple[int, ...], int] = {}
    of = [numbers.setdefault(tuple(each), len(numbers)) for each in members]
    return tuple(numbers), np.array(of, np.int64)


def _first_entries(nodes: int, node: LongArray, owner: LongArray) -> LongArray:
    """For each node the first entry among its blocks."""
    first = np.full(nodes, np.iinfo(np.int64).max)
    known = owner != NO_ENTRY
    np.minimum.at(first, node[known], owner[known])
    return first

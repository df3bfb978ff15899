"""Entries -> entry tree: who hangs below whom.

pi appends to a file, so a parent stands before its children. An entry's parent is therefore the nearest entry *before*
it with that id; only when there is none is one after it taken (files merged by hand). Under this rule a duplicate id
cannot close a cycle, and each turn keeps the parent it was written under, where pi, which keeps the last entry of an
id, hangs. What cycles remain (an entry that is its own parent, parents that stand after their children) are cut at
the entry that closes them.

Cost: linear in entries, no recursion; one integer per entry.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from dagpack_hf.pi.reader import Problem, SessionFile


@dataclass(frozen=True)
class EntryTree:
    """The tree over a file's entries; several roots are normal.

    Attributes:
        entries: The entries in file order.
        parents: For each entry the index of its parent, -1 for a root.
        duplicates: Ids that several entries have.
        problems: Missing parents, duplicate ids and cycles, by line; none of them costs an entry.
    """

    entries: list[dict[str, Any]]
    parents: list[int]
    duplicates: set[str]
    problems: list[Problem]

    def path(self, index: int) -> list[int]:
        """Return the indices from the root to an entry, both included."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.parents[index]
        path.reverse()
        return path

    def leaves(self) -> list[int]:
        """Return the entries that no entry hangs below: the ends of the branches, in file order."""
        inner = set(self.parents)
        return [index for index in range(len(self.entries)) if index not in inner]


def build_tree(session: SessionFile) -> EntryTree:
    """Link each entry to its parent.

    Args:
        session: The file as read.

    Returns:
        A tree without cycles.
    """
    first: dict[str, int] = {}
    positions: dict[str, list[int]] = {}
    problems: list[Problem] = []
    for index, entry in enumerate(session.entries):
        earlier = first.setdefault(entry["id"], index)
        if earlier != index:
            positions.setdefault(entry["id"], [earlier]).append(index)
            problems.append(Problem(session.lines[index], "duplicate entry id", skipped=False))
    parents = []
    for index, entry in enumerate(session.entries):
        parent = _parent(index, entry.get("parentId"), first, positions)
        if parent is None:
            problems.append(Problem(session.lines[index], "parent is not in the file", skipped=False))
        parents.append(-1 if parent is None else parent)
    for index in _cut_cycles(parents):
        problems.append(Problem(session.lines[index], "entry is its own ancestor", skipped=False))
    problems.sort(key=lambda problem: problem.line)
    return EntryTree(session.entries, parents, set(positions), problems)


def _parent(index: int, parent_id: Any, first: dict[str, int], positions: dict[str, list[int]]) -> int | None:
    """Return the parent's index, -1 for a root, `None` for one that is not there.

    Args:
        index: The entry.
        parent_id: What it says its parent is.
        first: For each id the first entry that has it.
        positions: For each id that several entries have all of them.
    """
    if parent_id is None or parent_id == "":
        return -1
    if type(parent_id) is not str:
        return None
    if parent_id not in positions:
        return first.get(parent_id)
    same = positions[parent_id]
    before = bisect_left(same, index)
    return same[before - 1] if before else same[0]


def _cut_cycles(parents: list[int]) -> list[int]:
    """Turn one entry of each cycle into a root, in place; return these entries."""
    cut = []
    seen = [0] * len(parents)
    for start in range(len(parents)):
        index, walk = start, start + 1
        while index >= 0 and not seen[index]:
            seen[index] = walk
            parent = parents[index]
            if parent >= 0 and seen[parent] == walk:
                parents[index] = -1
                cut.append(index)
            index = parents[index]
    return cut

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
        problems: Missing parents, duplicate ids and cycles, by line; none of them costs an entry.
    """

    entries: list[dict[str, Any]]
    parents: list[int]
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
    positions: dict[str, list[int]] = {}
    problems: list[Problem] = []
    for index, entry in enumerate(session.entries):
        same = positions.setdefault(entry["id"], [])
        same.append(index)
        if len(same) > 1:
            problems.append(Problem(session.lines[index], "duplicate entry id", skipped=False))
    parents = []
    for index, entry in enumerate(session.entries):
        parent = _parent(index, entry.get("parentId"), positions)
        if parent is None:
            problems.append(Problem(session.lines[index], "parent is not in the file", skipped=False))
        parents.append(-1 if parent is None else parent)
    for index in _cut_cycles(parents):
        problems.append(Problem(session.lines[index], "entry is its own ancestor", skipped=False))
    problems.sort(key=lambda problem: problem.line)
    return EntryTree(session.entries, parents, problems)


def _parent(index: int, parent_id: Any, positions: dict[str, list[int]]) -> int | None:
    """Return the parent's index, -1 for a root, `None` for one that is not there."""
    if parent_id is None or parent_id == "":
        return -1
    same = positions.get(parent_id) if isinstance(parent_id, str) else None
    if not same:
        return None
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

"""What a page shows, as plain data: files, entries, the token tree cut into blocks, windows, figures.

Everything refers to everything else by number: entries, nodes, blocks and windows by their place in their list. Texts
have passed `Texts`, so nothing in them acts. `to_json` leaves out what has its default value and writes blocks as
columns, which halves the page.

Cost: about 250 bytes of JSON for each entry beside its texts, 25 for each block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

NO_ENTRY = -1
"""Stands for the entry of tokens that come from no single one: a prompt that several entries make, or the caller."""


@dataclass(frozen=True)
class Part:
    """A piece of an entry.

    Args:
        kind: `text`, `thinking`, `call`, `result`, `section`, `tools`, `image`, `error` or `note`.
        title: Name of the tool, section or field.
        text: What it says.
        cut: Characters that were left out at its end.
    """

    kind: str
    title: str = ""
    text: str = ""
    cut: int = 0


@dataclass(frozen=True)
class Entry:
    """An entry of a session.

    Args:
        file: Its file.
        parent: The entry it hangs from, -1 for a root.
        kind: A key of `view.entries.KINDS`.
        name: Role or type, in a word or two.
        caption: A line of what it says.
        id: Its id in the file.
        label: The label it has in the end.
        status: For a turn whether it is trained, or why not; empty for other entries.
        details: Model, time and the like, by name.
        parts: What it says.
        blocks: Its tokens as ranges of blocks, `(first, one past the last)`.
        tokens: Distinct tokens.
        targets: Of those the ones that are trained.
        position: Position of its first token in its path, -1 if it has none.
    """

    file: int
    parent: int
    kind: str
    name: str
    caption: str = ""
    id: str = ""
    label: str = ""
    status: str = ""
    details: tuple[tuple[str, str], ...] = ()
    parts: tuple[Part, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    targets: int = 0
    position: int = -1


@dataclass(frozen=True)
class File:
    """A session file.

    Args:
        name: File name.
        title: Name that its user gave to the session.
        cwd: Its working directory.
        first: Its first entry.
        count: Number of its entries.
        turns: Assistant entries.
        trained: Of those the ones that are trained in this file.
        tokens: Distinct tokens of its paths.
        shared: Of those the ones that other files have too.
    """

    name: str
    title: str
    cwd: str
    first: int
    count: int
    turns: int
    trained: int
    tokens: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Node:
    """A stretch of the token tree without a branch.

    Args:
        parent: The node before it, -1 for a root.
        depth: Tokens above it.
        length: Its tokens.
        top: Leaves above its first one in the picture.
        lanes: Leaves below it, itself if it is one.
    """

    parent: int
    depth: int
    length: int
    top: int
    lanes: int


@dataclass(frozen=True)
class Block:
    """Tokens of a node that are alike: of one entry, all targets or none, in the same windows and files.

    Args:
        node: Their node.
        position: Position of the first in its path.
        length: How many.
        entry: The first entry that they come from, `NO_ENTRY` for none.
        target: Whether they are trained.
        window: The window that trains them, or that computes them first; -1 for none.
        windows: The set of windows that compute them.
        files: The set of files they are part of.
    """

    node: int
    position: int
    length: int
    entry: int
    target: bool
    window: int
    windows: int
    files: int


@dataclass(frozen=True)
class Window:
    """A window.

    Args:
        size: Positions that it computes.
        trained: Targets that it trains.
        replay: Positions that an earlier window computes too, and copies at branch points.
    """

    size: int
    trained: int
    replay: int


@dataclass(frozen=True)
class Page:
    """All of it.

    Args:
        title: What is shown.
        figures: Counts for the head of the page, by name.
        notes: What was left out or approximated, in sentences.
        files: The session files.
        entries: Their entries, file by file.
        nodes: The token tree.
        blocks: Its blocks, in the order of nodes.
        windows: The windows.
        window_sets: Sets of windows, sorted.
        file_sets: Sets of files, sorted.
    """

    title: str
    figures: dict[str, int | float | str | bool]
    notes: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    entries: tuple[Entry, ...] = ()
    nodes: tuple[Node, ...] = ()
    blocks: tuple[Block, ...] = ()
    windows: tuple[Window, ...] = ()
    window_sets: tuple[tuple[int, ...], ...] = ()
    file_sets: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the page as JSON has it."""
        return {
            "title": self.title,
            "figures": self.figures,
            "notes": list(self.notes),
            "files": [_without_defaults(file) for file in self.files],
            "entries": [_without_defaults(entry) for entry in self.entries],
            "nodes": _columns(self.nodes, Node),
            "blocks": _columns(self.blocks, Block),
            "windows": [_without_defaults(window) for window in self.windows],
            "windowSets": [list(windows) for windows in self.window_sets],
            "fileSets": [list(files) for files in self.file_sets],
        }


def _columns(rows: tuple[Any, ...], kind: type) -> dict[str, list[int]]:
    return {each.name: [int(getattr(row, each.name)) for row in rows] for each in fields(kind)}


def _without_defaults(value: Any) -> dict[str, Any]:
    found = {}
    for each in fields(value):
        item = getattr(value, each.name)
        if item != each.default:
            found[each.name] = [_without_defaults(part) for part in item] if each.name == "parts" else item
    return found

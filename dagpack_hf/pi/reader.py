"""Session file -> header and entries, with everything that could not be used listed by file, line and reason.

All versions of pi's sessions are read: 1 and 2 are migrated in memory as pi does on disk, and from 3 on the number
says little (pi changed the content without changing it), so nothing is inferred from it. Files that pi refuses or
loses are read where their meaning is plain: a header that is late, doubled, without an id or missing (the id is then
taken from the file's name), and a title line before it, as oh-my-pi writes. The files of pi-agent-core's own harness
(version 4, lines with `kind`) are another format and are refused.

Cost: the text of one line at a time; the decoded entries are kept, whole or, for loading, without images and without
what never reaches a model, such as costs and the `details` of tool results.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any, Literal

from dagpack_hf.pi.images import Places, drop_images, refer_to_images
from dagpack_hf.pi.lean import decode_lean
from dagpack_hf.pi.lines import ENTRY_TYPES, Problem, decode_any, read_values
from dagpack_hf.pi.migrate import CURRENT_VERSION, migrate, version_number
from dagpack_hf.pi.stored import OFFSET, Source, StoredContent

__all__ = ["Problem", "SessionError", "SessionFile", "read_session"]

UNREADABLE = "unreadable"
"""Type of an entry that could not be used and only keeps its place in the tree."""
_PATIENCE = 32
"""Values without a header or an entry after which a file is taken for something else."""
_ROLES = ("user", "assistant", "toolResult")
_NAMES = frozenset(("type", "id", "parentId", "role", "api", "provider", "model", "stopReason", "toolName"))
_DEEPEST = 200
_DEEP_LINE = 1800
"""Bytes up to which a line cannot be nested so deeply (decoders give up at a thousand levels) and is not looked at."""
_LARGE = 16 * 1024 * 1024
"""Bytes above which a file's contents do not all stay in memory: those that were used are let go of,"""
_LONG = 2048
"""and those of lines of more bytes are only read when they are needed."""
_FILE_ID = re.compile(r"_([A-Za-z0-9._-]+)$")


class SessionError(ValueError):
    """A session file, or one of its lines, that cannot be used.

    Attributes:
        path: The file.
        line: Line number from 1, `None` for the file as a whole.
        reason: What is wrong, in words that are the same for all files with this fault.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {reason}")
        self.path = str(path)
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return SessionError, (self.path, self.line, self.reason)


@dataclass(frozen=True)
class SessionFile:
    """What a session file holds.

    Attributes:
        path: The file, as it was given.
        header: The header line.
        entries: The entries in file order; each has a string `id` and a string `type`. One whose line could not be
            used but has an id keeps its place, with type `UNREADABLE` and nothing else.
        lines: Line number of each entry.
        problems: What is wrong in the file, in line order.
        images: Where the images are that entries refer to.
        source: Where contents can be read again that were let go of; `None` if all stay in memory.
        dropped_images: Images whose data was dropped.
    """

    path: str
    header: dict[str, Any]
    entries: list[dict[str, Any]]
    lines: list[int]
    problems: list[Problem]
    images: Places = field(default_factory=dict)
    source: Source | None = None
    dropped_images: int = 0

    @property
    def session_id(self) -> str:
        """The session's id, as the header has it."""
        return self.header["id"]

    @property
    def cwd(self) -> str | None:
        """The working directory of the session, if the header has one."""
        cwd = self.header.get("cwd")
        return cwd if isinstance(cwd, str) else None

    @property
    def name(self) -> str | None:
        """The name its user gave to the session last, if any."""
        for entry in reversed(self.entries):
            if entry["type"] == "session_info" and isinstance(entry.get("name"), str):
                return entry["name"]
        title = self.header.get("title")
        return title if isinstance(title, str) else None


def read_session(path: str | Path, *, images: Literal["inline", "reference", "drop"] = "inline") -> SessionFile:
    """Read one session file.

    Args:
        path: The file.
        images: What stays of the data of images: all (`"inline"`), a reference that `images.ImageStore` resolves, or
            nothing. In the last two cases entries are kept lean: without costs, times and other things that never
            reach a model, and in large files with long contents as `StoredContent`, which is read when it is needed.

    Returns:
        Header, entries and problems.

    Raises:
        SessionError: If the file is no pi session.
        OSError: If the file cannot be read.
    """
    problems: list[Problem] = []
    places: Places = {}
    source = Source(str(path), images)
    beginning = _Beginning(path)
    entries: list[dict[str, Any]] = []
    lines: list[int] = []
    lean = images != "inline"
    large = lean and os.path.getsize(path) > _LARGE
    last, dropped = -1, 0
    for number, offset, length, value in read_values(path, problems, decode_lean if lean else decode_any):
        if length > _DEEP_LINE and type(value) is dict and _too_deep(value.get("message")):
            problems.append(Problem(number, f"tool calls or tools nested deeper than {_DEEPEST} levels"))
            value = _place(value)
            if value is None:
                continue
        if lean and type(value) is dict:
            message = value.get("message")
            found = 0
            if type(message) is not dict or message.get("role") != "assistant":
                found = drop_images(value) if images == "drop" else refer_to_images(value, offset, places)
                dropped += found if images == "drop" else 0
            if large:
                _share_names(value)
                if type(message) is dict:
                    message[OFFSET] = offset if offset != last else None
                    if offset != last and length > _LONG and not found and message.get("role") in _ROLES:
                        message["content"] = StoredContent(source, offset)
                last = offset
        if beginning.current:
            reason = _fault(value)
            if reason is not None:
                problems.append(Problem(number, reason))
                value = _place(value)
            if value is not None:
                entries.append(value)
                lines.append(number)
        else:
            beginning.add(number, value)
    header = beginning.finish(problems)
    if beginning.values:
        early = [(number, value, _fault(value)) for number, value in beginning.values]
        problems += [Problem(number, reason) for number, _, reason in early if reason is not None]
        kept = [(number, value if reason is None else _place(value)) for number, value, reason in early]
        entries = [value for _, value in kept if value is not None] + entries
        lines = [number for number, value in kept if value is not None] + lines
    problems.sort(key=lambda problem: problem.line)
    return SessionFile(str(path), header, entries, lines, problems, places, source if large else None, dropped)


class _Beginning:
    """The values of a file until its header shows that they need no migration; all values if they do.

    Args:
        path: The file.

    Attributes:
        current: Whether a header of version 3 or later has been read.
        values: Line number and value of what came before it and is no header.
    """

    def __init__(self, path: str | Path) -> None:
        self.current = False
        self.values: list[tuple[int, Any]] = []
        self._path = path
        self._header: dict[str, Any] | None = None
        self._header_line = 0
        self._header_place = 0
        self._title: dict[str, Any] | None = None
        self._is_session = False

    def add(self, number: int, value: Any) -> None:
        """Take the next value of the file."""
        if type(value) is dict and self._header is None:
            kind = value.get("type")
            if kind == "session":
                self._header, self._header_line, self._header_place = value, number, len(self.values)
                self._is_session = True
                version = version_number(value)
                self.current = version is None or version >= CURRENT_VERSION
                return
            if kind == "title" and "id" not in value and self._title is None and not self.values:
                self._title = value
                return
            if not self._is_session:
                _refuse_harness(self._path, number, value)
                self._is_session = kind in ENTRY_TYPES and "parentId" in value and isinstance(value.get("id"), str)
        self.values.append((number, value))
        if not self._is_session and len(self.values) >= _PATIENCE:
            self._refuse()

    def finish(self, problems: list[Problem]) -> dict[str, Any]:
        """Return the header, once all values are read; migrate them if they are old, and note what was assumed."""
        if not self._is_session:
            self._refuse()
        header = self._checked_header(problems)
        version = version_number(header)
        if version is not None and version < CURRENT_VERSION:
            values = [value for _, value in self.values]
            if version < 2 and any(isinstance(value, dict) and "parentId" in value for value in values):
                reason = "entries have parents but the header no version: linked in file order, as pi does"
                problems.append(Problem(self._header_line, reason, skipped=False))
            values.insert(self._header_place, header)
            migrate(values, version)
        return header if self._title is None else {**header, "title": self._title.get("title")}

    def _refuse(self) -> None:
        found = "the file holds no JSON line"
        if self.values or self._title is not None:
            found = "neither a session header nor an entry of a session"
        raise SessionError(self._path, None, f"not a pi session: {found}")

    def _checked_header(self, problems: list[Problem]) -> dict[str, Any]:
        """Return a header with an id."""
        if self._header is None:
            reason = "no session header; read as version 3, id from the file's name"
            problems.append(Problem(self.values[0][0], reason, skipped=False))
            return {"type": "session", "version": CURRENT_VERSION, "id": _id_from_name(self._path)}
        header = self._header
        found = []
        if self._header_place:
            found.append("session header is not the first line")
        if not isinstance(header.get("id"), str):
            found.append("session header without an id; taken from the file's name")
            header = {**header, "id": _id_from_name(self._path)}
        if version_number(header) is None:
            found.append("version in the header is no number; read as version 3")
        problems += [Problem(self._header_line, reason, skipped=False) for reason in found]
        return header


def _refuse_harness(path: str | Path, number: int, value: dict[str, Any]) -> None:
    if value.get("kind") == "header":
        reason = "written by pi-agent-core's own harness (version 4), not by pi: another format, which is not read"
        raise SessionError(path, number, reason)


def _id_from_name(path: str | Path) -> str:
    stem = Path(path).stem
    match = _FILE_ID.search(stem)
    return match[1] if match else stem


def _fault(entry: Any) -> str | None:
    """Say why a line cannot be an entry, or return `None`."""
    if type(entry) is not dict:
        return "not a JSON object"
    kind = entry.get("type")
    if type(kind) is not str:
        return "entry without a type"
    if kind == "session":
        return "second session header"
    if type(entry.get("id")) is not str:
        return "entry without an id"
    if kind == "message":
        message = entry.get("message")
        if type(message) is not dict or type(message.get("role")) is not str:
            return "message entry without a message that has a role"
    return None


def _place(value: Any) -> dict[str, Any] | None:
    """Return what stays of a line that cannot be used, `None` if nothing: others may hang below it."""
    if type(value) is not dict or type(value.get("id")) is not str or value.get("type") == "session":
        return None
    return {"type": UNREADABLE, "id": value["id"], "parentId": value.get("parentId")}


def _share_names(value: dict[str, Any]) -> None:
    """Keep one string for all equal names in entries, which is much of what a large file takes."""
    message = value.get("message")
    for holder in (value, message) if type(message) is dict else (value,):
        for key in _NAMES & holder.keys():
            name = holder[key]
            if type(name) is str:
                holder[key] = intern(name)


def _too_deep(message: Any) -> bool:
    """Say whether arguments or tools are nested so deeply that decoding them again may fail further on."""
    if type(message) is not dict:
        return False
    role, content = message.get("role"), message.get("content")
    if role == "assistant" and type(content) is list:
        calls = [block.get("arguments") for block in content if type(block) is dict and "arguments" in block]
        return any(_deeper_than(arguments, _DEEPEST) for arguments in calls)
    return role == "system" and _deeper_than(message.get("toolsAdded"), _DEEPEST)


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    while levels >= 0:
        inner: list[Any] = []
        for item in layer:
            if type(item) is dict:
                inner += [child for child in item.values() if type(child) is dict or type(child) is list]
            elif type(item) is list:
                inner += [child for child in item if type(child) is dict or type(child) is list]
        if not inner:
            return False
        layer = inner
        levels -= 1
    return True

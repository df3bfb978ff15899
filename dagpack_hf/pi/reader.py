r"""Session file -> header and entries, with every line that could not be used listed by file, line and reason.

The format is version 3 of pi's sessions: one JSON object per line, the first one the header. The version number says
little (pi changed the content without changing it), so nothing is inferred from it beyond refusing the versions that
need a migration first. Lines end at `\n` alone: pi writes U+2028 and U+0085 raw inside strings.

A bad line costs that line. Only a file without a usable header is refused as a whole.

Cost: the file is read line by line; the text of one line is held at a time, the decoded entries are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CURRENT_VERSION = 3


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


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file.

    Attributes:
        line: Line number from 1.
        reason: What is wrong.
        skipped: Whether the line was left out; `False` if it was repaired or used in part.
    """

    line: int
    reason: str
    skipped: bool = True


@dataclass(frozen=True)
class SessionFile:
    """What a session file holds.

    Attributes:
        path: The file, as it was given.
        header: The header line.
        entries: The entries in file order; each has a string `id` and a string `type`.
        lines: Line number of each entry.
        problems: What is wrong in the file, in line order.
    """

    path: str
    header: dict[str, Any]
    entries: list[dict[str, Any]]
    lines: list[int]
    problems: list[Problem]

    @property
    def session_id(self) -> str:
        """The session's id, as the header has it."""
        return self.header["id"]

    @property
    def cwd(self) -> str | None:
        """The working directory of the session, if the header has one."""
        cwd = self.header.get("cwd")
        return cwd if isinstance(cwd, str) else None


def read_session(path: str | Path) -> SessionFile:
    """Read one session file.

    Args:
        path: The file.

    Returns:
        Header, entries and problems.

    Raises:
        SessionError: If the file has no session header of a version that can be read.
        OSError: If the file cannot be read.
    """
    problems: list[Problem] = []
    header: dict[str, Any] | None = None
    entries: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, value in _parsed_lines(path, problems):
        if header is None:
            header = _checked_header(path, number, value)
            continue
        reason = _fault(value)
        if reason is not None:
            problems.append(Problem(number, reason))
            continue
        entries.append(value)
        lines.append(number)
    if header is None:
        raise SessionError(path, None, "no session header: the file is empty or holds no JSON line")
    return SessionFile(str(path), header, entries, lines, problems)


def _parsed_lines(path: str | Path, problems: list[Problem]) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = raw.decode(errors="replace")
                problems.append(Problem(number, "invalid UTF-8, replaced by U+FFFD", skipped=False))
            try:
                value = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                torn = not raw.endswith(b"\n")
                problems.append(Problem(number, "torn last line" if torn else "not JSON"))
                continue
            yield number, value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _checked_header(path: str | Path, number: int, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value.get("kind") == "header":
        raise SessionError(path, number, "written by pi-agent-core's own harness (version 4), not a pi session")
    if not isinstance(value, dict) or value.get("type") != "session" or not isinstance(value.get("id"), str):
        raise SessionError(path, number, "not a pi session: the first JSON line is no session header with an id")
    version = value.get("version", 1)
    if version in (1, 2):
        reason = f"session version {version} is older than {CURRENT_VERSION}: open it once in pi, which migrates it"
        raise SessionError(path, number, reason)
    try:
        known = float(version) >= CURRENT_VERSION
    except (TypeError, ValueError):
        known = False
    if not known:
        raise SessionError(path, number, "session header with a version that is no known number")
    return value


def _fault(entry: Any) -> str | None:
    """Say why a line cannot be an entry, or return `None`."""
    if not isinstance(entry, dict):
        return "not a JSON object"
    if not isinstance(entry.get("type"), str):
        return "entry without a type"
    if entry["type"] == "session":
        return "second session header"
    if not isinstance(entry.get("id"), str):
        return "entry without an id"
    message = entry.get("message")
    if entry["type"] == "message" and not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        return "message entry without a message that has a role"
    return None

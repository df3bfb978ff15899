r"""Bytes of a file -> JSON values, line by line, mending what can be mended.

Lines end at `\n` alone: pi writes U+2028 and U+0085 raw inside strings. A line that is no JSON value costs no more
than itself: NUL padding, byte order marks and invalid UTF-8 are mended, and where a torn line was glued to the one
after it (a crash of pi before 0.84.4) the entry at its end is recovered. Only what is there when the file is opened is
read, so a file that a running pi appends to is read up to its last whole line.

Cost: one line of text at a time. A damaged line is searched for entries at most 32 times, however it is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

ENTRY_TYPES = (
    "message",
    "compaction",
    "branch_summary",
    "custom_message",
    "context_edit",
    "custom",
    "label",
    "model_change",
    "thinking_level_change",
    "session_info",
    "usage",
)
"""Types of the entries that pi itself writes."""

# msgspec reads what the standard library reads, to the same values, or raises an error: it refuses lone surrogates and
# floats beyond the range, which are then read the slow way.
decode_any: Callable[[bytes], Any] = msgspec.json.Decoder().decode
_ENTRY_START = re.compile(r'\{"type": ?"(?:session|' + "|".join(ENTRY_TYPES) + ')"')
_BETWEEN = re.compile(r"[\0 \t\n\r\v\f]*")
_TRIES = 32
_PATIENCE = 1000
"""Damaged lines without a value among them after which a file is given up."""
_BUFFER = 1024 * 1024


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file.

    Attributes:
        line: Line number from 1.
        reason: What is wrong.
        skipped: Whether something was left out; `False` if it was mended or used as it is.
    """

    line: int
    reason: str
    skipped: bool = True


def read_values(
    path: str | os.PathLike[str], problems: list[Problem], decode: Callable[[bytes], Any] = decode_any
) -> Iterator[tuple[int, int, int, Any]]:
    """Yield the JSON values of a file.

    Args:
        path: The file.
        problems: Where to note lines that are damaged.
        decode: Decoder of whole lines. What it refuses with `msgspec.MsgspecError` is decoded the general way.

    Yields:
        Line number from 1, offset of the line's first byte, its length in bytes, and the value. Values that were glued
        together have the same line.

    Raises:
        OSError: If the file cannot be read.
    """
    with open(path, "rb", buffering=_BUFFER) as file:
        size = os.fstat(file.fileno()).st_size
        offset = 0
        readable = False
        for number, raw in enumerate(file, 1):
            if offset + len(raw) > size:
                raw = raw[: size - offset]
            try:
                if not raw.isascii():
                    str(raw, "utf-8")  # raises: a decoder does not look at what it skips
                value = decode(raw)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                values, found = _mend(raw, number)
                problems += found
                readable = readable or bool(values)
                if not readable and len(problems) >= _PATIENCE:
                    break
                for value in values:
                    yield number, offset, len(raw), value
            else:
                readable = True
                yield number, offset, len(raw), value
            offset += len(raw)
            if offset >= size:
                break


def line_values(raw: bytes, number: int) -> tuple[list[Any], list[Problem]]:
    """Return the JSON values of one line, and what is wrong with it."""
    try:
        return [decode_any(raw)], []
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _mend(raw, number)


def _mend(raw: bytes, number: int) -> tuple[list[Any], list[Problem]]:
    """Read what can be read of a line that is no JSON value as it stands."""
    body = raw.removeprefix(b"\xef\xbb\xbf").strip(b"\0 \t\r\n\v\f")
    if not body:
        return [], [Problem(number, "NUL bytes in place of a line")] if b"\0" in raw else []
    problems = [Problem(number, "NUL padding, removed", skipped=False)] if b"\0" in raw.replace(body, b"", 1) else []
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.decode(errors="replace")
        problems.append(Problem(number, "invalid UTF-8, replaced by U+FFFD", skipped=False))
    try:
        return [_decode(text)], problems
    except RecursionError:
        return [], [Problem(number, "not JSON: nested too deeply")]
    except ValueError:
        pass
    values, lost = _glued(text)
    if not values:
        return [], [Problem(number, "not JSON" if raw.endswith(b"\n") else "torn last line")]
    if lost:
        return values, [*problems, Problem(number, "torn entry; the rest of its line was read")]
    return values, [*problems, Problem(number, "several entries on one line", skipped=False)]


def _glued(text: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the entries in a text, one after the other, and whether anything lies between or after them."""
    values: list[dict[str, Any]] = []
    position = torn = 0
    while torn < _TRIES:
        position = _after_space(text, position)
        if position == len(text):
            break
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            value, end = None, position + 1
        if _looks_whole(value):
            values.append(value)
            position = end
            continue
        torn += 1
        start = _ENTRY_START.search(text, position + 1)
        if start is None:
            break
        position = start.start()
    return values, torn > 0


def _after_space(text: str, position: int) -> int:
    """Return the place of the next character that is neither white space nor NUL."""
    space = _BETWEEN.match(text, position)
    return position if space is None else space.end()


def _looks_whole(value: Any) -> bool:
    """Say whether a value is an entry or a header, not a part of one."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    return value["type"] == "session" or "timestamp" in value or "parentId" in value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_decode = _DECODER.decode

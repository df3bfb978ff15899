"""Text from session files, made safe and short enough for a figure.

Session files are untrusted: a text may hold markup, control characters, or characters that turn the reading direction
around, so that what is shown is not what is there.

Cost: linear in the characters that are looked at, at most `LOOK` of each text.
"""

from __future__ import annotations

import unicodedata
from xml.sax.saxutils import escape

LOOK = 400
"""Characters of a text that are looked at: more than any figure shows."""

_DROPPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
_SPACES = frozenset("\t\n\v\f\r\x85\u2028\u2029")
_MARKS_IN_A_ROW = 2


def clean(text: str) -> str:
    """Return the start of a text on one line, without control, format, private and unassigned characters.

    Format characters are the bidirectional overrides and the characters without width. Of a pile of combining marks
    the first two are kept. White space becomes single spaces.
    """
    kept: list[str] = []
    marks = 0
    for character in text[:LOOK]:
        if character in _SPACES:
            kept.append(" ")
            continue
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if category not in _DROPPED and marks <= _MARKS_IN_A_ROW:
            kept.append(character)
    return " ".join("".join(kept).split())


def cells(text: str) -> int:
    """Return the width of a text in a font of fixed width, in columns: wide East Asian characters take two."""
    return sum(_cells(character) for character in text)


def cut(text: str, width: int) -> str:
    """Return a text of at most `width` columns; one that is cut ends in an ellipsis."""
    if cells(text) <= width:
        return text
    used, kept = 1, []
    for character in text:
        used += _cells(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…" if width > 0 else ""


def xml(text: str) -> str:
    """Escape a text for XML content and attributes."""
    return escape(text, {'"': "&quot;", "'": "&#39;"})


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1

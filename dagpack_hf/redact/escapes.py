r"""Texts that hold other texts in escaped form: a log of JSON lines, a call's arguments as JSON text.

There a line break is the two characters `\n`, and a token behind it begins with the letter `n` for whoever looks at
letters. So lines with escapes are looked at twice: as they are, and as a view of the same length in which escapes are
white space.

Cost: a search for backslashes, and twice the scan for lines that have such escapes.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\+(?:[nrtbf]|u[0-9a-fA-F]{4})")
_WHITE = {length: "\n".rjust(length) for length in range(2, 64)}


def escape_views(text: str) -> list[tuple[int, str]]:
    r"""Return the lines of a text that have escapes, with white space for these, and where each begins.

    Example:
    >>> escape_views('{"text":"a\\nb"}\nno more')
    [(0, '{"text":"a \nb"}')]
    """
    views = []
    match = _ESCAPE.search(text) if "\\" in text else None
    while match:
        start = text.rfind("\n", 0, match.start()) + 1
        end = text.find("\n", match.end())
        end = len(text) if end < 0 else end
        views.append((start, _ESCAPE.sub(_white, text[start:end])))
        match = _ESCAPE.search(text, end)
    return views


def begins_in_escape(text: str, start: int) -> bool:
    """Whether a stretch begins with the letter of what may be an escape, so that to cut there would break it."""
    return start > 0 and text[start - 1] == "\\" and text[start : start + 1] in tuple("nrtbfu")


def _white(match: re.Match[str]) -> str:
    length = match.end() - match.start()
    return _WHITE.get(length) or "\n".rjust(length)

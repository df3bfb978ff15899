"""JSON text, changed string by string: what is not changed stays as it is written, to the byte.

Nothing is parsed but the strings: between them JSON has no quote. Keys of objects are strings like others, and the
value of a key knows its name.

Cost: one regular expression over the text; 45 MB/s for the messages of a session, whose strings are short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dagpack_hf.conversations import dumps

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_COLON = re.compile(r"\s*:")


class JsonString(NamedTuple):
    """One string in a JSON text.

    Attributes:
        start: Where its first quote is.
        end: One past its last quote.
        text: What it says, without quotes and escapes.
        name: The key whose value it is, `""` if it is a key itself or an item of a list.
    """

    start: int
    end: int
    text: str
    name: str


def json_strings(text: str) -> Iterator[JsonString]:
    """Yield the strings of a JSON text, keys too."""
    name, name_end = "", -1
    for match in _STRING.finditer(text):
        start, end = match.span()
        raw = match[0]
        value = json.loads(raw, strict=False) if "\\" in raw else raw[1:-1]
        named = name if name_end >= 0 and text[name_end:start].strip() == "" else ""
        yield JsonString(start, end, value, named)
        colon = _COLON.match(text, end)
        name, name_end = (value, colon.end()) if colon else ("", -1)


def map_json_strings(text: str, change: Callable[[str, str], str]) -> str:
    """Return a JSON text with its strings changed.

    Args:
        text: Valid JSON.
        change: Gets a string and the key whose value it is, and returns the new string.

    Returns:
        The same object where nothing is changed.

    Example:
    >>> map_json_strings('{"a": ["x", 1.50, "y"]}', lambda string, name: string.replace("x", "<X_1>"))
    '{"a": ["<X_1>", 1.50, "y"]}'
    """
    pieces, done = [], 0
    for each in json_strings(text):
        new = change(each.text, each.name)
        if new != each.text:
            pieces += [text[done : each.start], dumps(new)]
            done = each.end
    return text if not pieces else "".join([*pieces, text[done:]])

"""Characters that act on what shows them, or that nobody sees, as visible marks: `⟨ESC⟩`, `⟨U+202E⟩`.

Session files are untrusted. A terminal obeys control characters, bidirectional controls turn the reading direction
around, and characters without width hide text, so that what is shown is not what is there. Here each of them becomes
a mark in angle brackets; line breaks and tabs stay. `view.text.clean` drops them instead, for figures that have no
room. A joiner without width stays behind a character beyond ASCII, where emoji and several scripts need it.

Cost: one search by regular expression, 2 s for 100 million characters.
"""

from __future__ import annotations

import re

_NAMES = {0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0C: "FF", 0x0D: "CR", 0x1B: "ESC", 0x7F: "DEL", 0x9B: "CSI"}

_MARKED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters
    "\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"  # format characters
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\U000e0100-\U000e01ef"
    "\u2028\u2029"  # separators of lines and paragraphs
    "\ud800-\udfff\ufffe\uffff\ue000-\uf8ff\U000f0000-\U0010ffff]"  # no characters, and private ones
)
_JOINERS = "\u200c\u200d"

MARK = re.compile("⟨(?:[A-Z]{2,3}|U\\+[0-9A-F]{4,6})⟩")
"""What `visible` writes."""


def visible(text: str) -> str:
    r"""Return a text in which nothing acts and nothing hides.

    Example:
    >>> visible("\x1b[31mred\u202e\r\n")
    '⟨ESC⟩[31mred⟨U+202E⟩\n'
    """
    return _MARKED.sub(_mark, text.replace("\r\n", "\n"))


def _mark(match: re.Match[str]) -> str:
    if match[0] in _JOINERS and match.start() and not match.string[match.start() - 1].isascii():
        return match[0]
    code = ord(match[0])
    return f"⟨{_NAMES.get(code) or f'U+{code:04X}'}⟩"

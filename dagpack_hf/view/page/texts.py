"""The one door through which text gets into a page: redacted, made visible, cut, and counted.

Everything of a session that a page or the terminal shows passes `Texts`: messages, names, labels, paths. Redaction
sees each text whole, before it is cut.

Cost: that of `redact`, and `visible` for what is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from dagpack_hf.view.page.marks import visible

CAPTION = 160
"""Characters of a caption."""

DEFAULT_LIMIT = 6000
"""Characters of a text in a page, unless all are asked for."""


class Texts:
    """Text on its way into a page.

    Args:
        redact: Replaces what is private in a text.
        limit: Characters of a text that are shown; `None` for all.

    Attributes:
        cut_texts: Texts that were cut.
        cut_characters: Characters that were left out.
    """

    def __init__(self, redact: Callable[[str], str] | None = None, limit: int | None = DEFAULT_LIMIT) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} characters of a text leave nothing to show: use 1 or more, or None")
        self._redact = redact
        self._limit = limit
        self.cut_texts = 0
        self.cut_characters = 0

    def whole(self, text: str) -> tuple[str, int]:
        """Return a text over several lines, and how many of its characters are left out at the end."""
        text = self._redacted(text)
        cut = 0 if self._limit is None else max(len(text) - self._limit, 0)
        if cut:
            text = text[: self._limit]
            self.cut_texts += 1
            self.cut_characters += cut
        return visible(text), cut

    def line(self, text: str, width: int = CAPTION) -> str:
        """Return the start of a text on one line."""
        text = self._redacted(text)
        start = " ".join(text[: 4 * width].split())
        line = visible(start)
        return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1].rstrip() + "…"

    def _redacted(self, text: str) -> str:
        return text if self._redact is None else self._redact(text)

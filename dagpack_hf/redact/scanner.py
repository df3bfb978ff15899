"""All that is looked for, in one text; and which texts are known already.

Cost: 13 to 20 MB/s for code that is new, on one core, and a hash for a text that was seen: messages repeat in the rows
of branches. About 120 bytes are kept for each distinct text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from dagpack_hf.redact.deny import Deny, deny_patterns, find_denied
from dagpack_hf.redact.escapes import begins_in_escape, escape_views
from dagpack_hf.redact.findings import Finding, found, merge, without_placeholders
from dagpack_hf.redact.named import KIND as NAMED
from dagpack_hf.redact.named import RANK as NAMED_RANK
from dagpack_hf.redact.named import find_named, named_strength, secret_name
from dagpack_hf.redact.patterns import find_patterns
from dagpack_hf.redact.people import KIND as USER
from dagpack_hf.redact.people import People
from dagpack_hf.redact.tokens import find_tokens
from dagpack_hf.redact.values import Strength

_IMAGE_START = "data:"
_BASE64 = ";base64,"


class SecretScanner:
    """Finds what should not leave the machine in texts.

    It can be sent to other processes, without what it knows.

    Args:
        deny: Patterns of the user, as for `deny_patterns`.
        names: User names to look for.
    """

    def __init__(self, deny: Deny | None = None, names: Iterable[str] = ()) -> None:
        self._deny = deny_patterns(deny)
        self._people = People(names)
        self._seen: dict[str | int, tuple[Finding, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": {}}

    def find(self, text: str, name: str = "") -> tuple[Finding, ...]:
        """Return what a text holds: disjoint stretches, in order.

        Args:
            text: The text, without escapes of JSON.
            name: The key of a JSON object whose value it is.
        """
        if secret_name(name) is None:
            name = ""
        shown = f"{name}\0{text}" if name else text
        known: str | int = shown if len(shown) < 48 else xxhash.xxh3_128_intdigest(shown.encode("utf-8", "replace"))
        findings = self._seen.get(known)
        if findings is None:
            findings = self._seen[known] = tuple(self._find(text, name))
        return findings

    def _find(self, text: str, name: str) -> list[Finding]:
        if len(text) < 3 or _is_image(text):
            return []
        findings = self._look(text)
        views = escape_views(text)
        if views:
            findings = [each for each in findings if each.kind == USER or not begins_in_escape(text, each.start)]
        for start, view in views:
            findings += [each.moved(start) for each in self._look(view)]
        if name and (strength := named_strength(name, text, quoted=True)):
            findings.append(found(0, len(text), NAMED, NAMED_RANK, strength is Strength.STRONG))
        return without_placeholders(text, merge(findings))

    def _look(self, text: str) -> list[Finding]:
        lower = _lower(text)
        return [
            *find_denied(text, self._deny),
            *find_tokens(text),
            *find_named(text, lower),
            *find_patterns(text, lower),
            *self._people.find(text, lower),
        ]


def _is_image(text: str) -> bool:
    """Whether a text is nothing but the data of a file."""
    return text.startswith(_IMAGE_START) and _BASE64 in text[:100] and " " not in text[:200]


def _lower(text: str) -> str:
    """A text in lower case, of the same length: some letters have two in lower case."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(each.lower()[0] for each in text)

"""Patterns of the user: what else must not leave the machine, one regular expression on each line of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dagpack_hf.redact.findings import Finding

KIND = "DENIED"
RANK = 0

Deny = str | os.PathLike[str] | Sequence["str | re.Pattern[str]"]
"""A file of patterns, or patterns."""


def deny_patterns(deny: Deny | None) -> tuple[re.Pattern[str], ...]:
    """Return compiled patterns.

    Args:
        deny: A file with one regular expression (of Python) on each line, where empty lines and lines that begin with
            `#` say nothing; or a sequence of regular expressions. What a group named `secret` matches is replaced, or
            the whole match if there is none.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is no regular expression, or matches everywhere.
    """
    if deny is None:
        return ()
    if isinstance(deny, str | os.PathLike):
        lines = Path(deny).read_text("utf-8").splitlines()
        given = [(f"{os.fspath(deny)}:{number}", line) for number, line in enumerate(lines, 1)]
        return tuple(_compiled(place, line) for place, line in given if line.strip() and not line.startswith("#"))
    return tuple(_compiled(f"deny[{index}]", pattern) for index, pattern in enumerate(deny))


def _compiled(place: str, pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{place}: is no regular expression ({error.msg} at character {error.pos}); escape what is meant as it "
            "stands, with a backslash"
        ) from error
    if compiled.search("") is not None:
        raise ValueError(f"{place}: matches the empty text, so it would match everywhere; make it longer")
    return compiled


def find_denied(text: str, patterns: Iterable[re.Pattern[str]]) -> list[Finding]:
    """Return what patterns of the user match in a text."""
    found = []
    for pattern in patterns:
        group = "secret" if "secret" in pattern.groupindex else 0
        spans = (match.span(group) for match in pattern.finditer(text))
        found += [Finding(start, end, KIND, RANK) for start, end in spans if end > start >= 0]
    return found

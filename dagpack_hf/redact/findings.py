"""What a scan of one text returns: where something to hide stands, and of which kind it is. Never what it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PLACEHOLDER = re.compile(r"<[A-Z][A-Z0-9_]*_\d+>")
"""What stands in place of something that was replaced: `<GITHUB_PAT_1>`."""


class Finding(NamedTuple):
    """A stretch of a text that should not leave the machine.

    Attributes:
        start: First character.
        end: One past the last one.
        kind: What it is, as in the placeholder: `"GITHUB_PAT"`.
        rank: Of findings that overlap, the one of the lowest rank gives the kind.
        everywhere: Stretches in it whose text is to be replaced wherever it stands, also where nothing shows what it
            is: from where to where.
    """

    start: int
    end: int
    kind: str
    rank: int
    everywhere: tuple[tuple[int, int], ...] = ()

    def moved(self, offset: int) -> Finding:
        """Return the finding in a text that is longer by so many characters in front."""
        everywhere = tuple((start + offset, end + offset) for start, end in self.everywhere)
        return self._replace(start=self.start + offset, end=self.end + offset, everywhere=everywhere)


def found(start: int, end: int, kind: str, rank: int, everywhere: bool) -> Finding:
    """Return a finding that is to be replaced as a whole, everywhere or only here."""
    return Finding(start, end, kind, rank, ((start, end),) if everywhere else ())


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Return disjoint findings in order: those that overlap become one.

    Args:
        findings: In any order.

    Example:
    >>> merged = merge([Finding(4, 9, "PASSWORD", 4), Finding(0, 6, "JWT", 2), Finding(9, 12, "EMAIL", 5)])
    >>> [each[:3] for each in merged]
    [(0, 9, 'JWT'), (9, 12, 'EMAIL')]
    """
    merged: list[Finding] = []
    for finding in sorted(findings):
        if not merged or finding.start >= merged[-1].end:
            merged.append(finding)
            continue
        last = merged[-1]
        best = min(last, finding, key=lambda each: (each.rank, each.kind))
        everywhere = tuple(dict.fromkeys(last.everywhere + finding.everywhere))
        merged[-1] = Finding(last.start, max(last.end, finding.end), best.kind, best.rank, everywhere)
    return merged


def without_placeholders(text: str, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that touch no placeholder: what is replaced already is not found again."""
    if not findings or "<" not in text:
        return list(findings)
    places = [match.span() for match in PLACEHOLDER.finditer(text)]
    return [each for each in findings if not any(each.start < end and start < each.end for start, end in places)]

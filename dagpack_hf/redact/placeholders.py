"""What stands in place of what was found: equal text, equal placeholder, so that shared prefixes stay shared.

Placeholders are numbered by kind, in the order in which the texts of a data set first show what they stand for. So
they are the same in every run and for any number of processes, and say nothing about what they replace. A digest would
do without a first pass, but of a short password it can be guessed by trying, and a random key would give other
placeholders in every run.

What is found lies in memory while a data set is redacted, in objects that do not show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from dagpack_hf.redact.findings import Finding


class Hoard:
    """What was found in some texts, in order: counted by kind, and hidden from whoever prints it.

    Attributes:
        rows_with: In how many rows something was found.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._everywhere: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._total = 0
        self.rows_with = 0

    def __repr__(self) -> str:
        return f"Hoard({dict(self.distinct)})"

    @property
    def distinct(self) -> Counter[str]:
        """For each kind how many different ones there are."""
        return Counter(self._kinds.values())

    @property
    def places(self) -> Counter[str]:
        """For each kind in how many places they were found."""
        places: Counter[str] = Counter()
        for secret, count in self._counts.items():
            places[self._kinds[secret]] += count
        return places

    def first(self, keep: int = 3) -> dict[str, list[str]]:
        """For each kind the first places, as they were named."""
        first: dict[str, list[str]] = {}
        for secret, place in self._first.items():
            mine = first.setdefault(self._kinds[secret], [])
            if len(mine) < keep and place not in mine:
                mine.append(place)
        return first

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def total(self) -> int:
        """In how many places something was found."""
        return self._total

    def add(self, text: str, findings: Iterable[Finding], place: str) -> None:
        """Add what was found in a text."""
        for start, end, kind, _, everywhere in findings:
            secret = text[start:end]
            self._kinds.setdefault(secret, kind)
            self._first.setdefault(secret, place)
            self._counts[secret] += 1
            self._total += 1
            for low, high in everywhere:
                self._everywhere.setdefault(text[low:high], kind)

    def join(self, later: Hoard) -> None:
        """Add what was found in texts that come after these."""
        for secret, kind in later._kinds.items():
            self._kinds.setdefault(secret, kind)
            self._first.setdefault(secret, later._first[secret])
        for secret, kind in later._everywhere.items():
            self._everywhere.setdefault(secret, kind)
        self._counts += later._counts
        self._total += later._total
        self.rows_with += later.rows_with

    def placeholders(self) -> Placeholders:
        """Return a placeholder for everything that was found."""
        numbers: Counter[str] = Counter()
        names = {}
        for secret, kind in [*self._kinds.items(), *self._everywhere.items()]:
            if secret not in names:
                numbers[kind] += 1
                names[secret] = f"<{kind}_{numbers[kind]}>"
        return Placeholders(names, self._everywhere)


class Placeholders:
    """Puts placeholders into texts.

    Args:
        names: Placeholder of everything that was found.
        everywhere: What is replaced wherever it stands.
    """

    def __init__(self, names: dict[str, str], everywhere: Iterable[str]) -> None:
        self._names = names
        self._everywhere = sorted(everywhere, key=lambda secret: (-len(secret), secret))

    def __repr__(self) -> str:
        return f"Placeholders({len(self._names)})"

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": self._names, "_everywhere": self._everywhere}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self._everywhere:
            return None
        return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, self._everywhere))})(?![A-Za-z0-9])")

    def known(self, text: str) -> list[Finding]:
        """Return where a text holds what was found elsewhere."""
        if self._pattern is None:
            return []
        return [
            Finding(*match.span(), self._names[match[0]].rpartition("_")[0][1:], 99)
            for match in self._pattern.finditer(text)
        ]

    def put(self, text: str, findings: Sequence[Finding]) -> str:
        """Return a text with placeholders in place of disjoint findings.

        Where stretches that overlap were found as one, what is between them has no placeholder of its own yet; it gets
        that of its kind without a number.
        """
        return _replaced(text, findings, self._names)

    @staticmethod
    def hide(text: str, findings: Sequence[Finding]) -> str:
        """Return a text in which findings are placeholders without a number."""
        return _replaced(text, findings, {})


def _replaced(text: str, findings: Sequence[Finding], names: dict[str, str]) -> str:
    pieces, done = [], 0
    for start, end, kind, *_ in findings:
        pieces += [text[done:start], names.get(text[start:end], f"<{kind}_0>")]
        done = end
    return "".join([*pieces, text[done:]])

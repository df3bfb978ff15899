"""What a scan found, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dagpack_hf.redact.placeholders import Hoard
from dagpack_hf.redact.tokens import scanner_version


@dataclass(frozen=True)
class RedactionReport:
    """What was found, by kind, and whether it was replaced. What it is, is nowhere in it.

    Attributes:
        redacted: Whether it was replaced.
        rows: Rows, or texts, that were scanned.
        rows_with_findings: Those in which something was found.
        distinct: For each kind how many different ones there are.
        places: For each kind in how many places, repetitions in other rows counted.
        remaining: For each kind what a second scan found after the replacement.
        examples: For each kind the first places.
        scanner: Name and version of the rules.
    """

    redacted: bool = False
    rows: int = 0
    rows_with_findings: int = 0
    distinct: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    scanner: str = field(default_factory=scanner_version)

    @classmethod
    def of(cls, hoard: Hoard, rows: int, redacted: bool = False, remaining: Hoard | None = None) -> RedactionReport:
        """Return the numbers of what was found."""
        return cls(
            redacted=redacted,
            rows=rows,
            rows_with_findings=hoard.rows_with,
            distinct=dict(sorted(hoard.distinct.items())),
            places=dict(sorted(hoard.places.items())),
            remaining=dict(sorted(remaining.places.items())) if remaining else {},
            examples=dict(sorted((remaining or hoard).first().items())),
        )

    @property
    def found(self) -> int:
        """How many different ones were found."""
        return sum(self.distinct.values())

    @property
    def safe(self) -> bool:
        """Whether everything that was found is replaced, and a second scan found nothing."""
        return self.redacted and not self.remaining

    @property
    def still_there(self) -> str:
        """What a second scan found, and what to do."""
        kinds = ", ".join(
            f"{count:,} x {kind}{self._first(kind)}" for kind, count in (self.remaining or self.distinct).items()
        )
        return (
            f"a scan of what was redacted still finds {kinds}. Add a regular expression for it to the file of --deny "
            "(deny=), and try again"
        )

    def to_dict(self, examples: bool = False) -> dict[str, Any]:
        """Return the numbers for JSON, without the places, which name files and rows, unless they are asked for."""
        return {name: value for name, value in asdict(self).items() if examples or name != "examples"}

    def __str__(self) -> str:
        if not self.found:
            return f"no secrets or personal data found in {self.rows:,} rows"
        end = "replaced by placeholders" if self.redacted else "left as they are; --redact replaces them"
        head = f"{self.found:,} secrets and personal data in {self.rows_with_findings:,} of {self.rows:,} rows, {end}"
        lines = [self._line(kind) for kind in sorted(self.distinct, key=lambda kind: (-self.distinct[kind], kind))]
        lines += [f"  still there after the replacement: {n:,} x {kind}" for kind, n in self.remaining.items()]
        return "\n".join([head, *lines])

    def _line(self, kind: str) -> str:
        return f"  {self.distinct[kind]:,} x {kind} in {self.places[kind]:,} places{self._first(kind)}"

    def _first(self, kind: str) -> str:
        places = self.examples.get(kind)
        return f" ({', '.join(places)})" if places else ""

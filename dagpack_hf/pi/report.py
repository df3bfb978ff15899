"""What a load read and what it left out, by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_EXAMPLES = 3


@dataclass(frozen=True)
class LoadReport:
    """Counts of one load. Nothing that was left out is missing from them.

    Attributes:
        files: Session files read.
        skipped_files: Files that are no readable session, by reason.
        entries: Entries read, headers not counted.
        skipped_lines: Lines left out, by reason.
        repaired_lines: Lines that were used although something about them is wrong, by reason.
        examples: For each reason of the three above, the first places, as `file` or `file:line`.
        turns: Assistant entries.
        targets: Turns that are trained: each in exactly one row.
        untrained_turns: Turns that are no targets, by reason.
        duplicate_turns: Turns left out because the same turn is a target already, by reason.
        dropped_images: Images that placeholder text stands for.
        unrecorded_prompts: Targets whose system prompt and tools are neither in the file nor supplied.
    """

    files: int = 0
    skipped_files: dict[str, int] = field(default_factory=dict)
    entries: int = 0
    skipped_lines: dict[str, int] = field(default_factory=dict)
    repaired_lines: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    turns: int = 0
    targets: int = 0
    untrained_turns: dict[str, int] = field(default_factory=dict)
    duplicate_turns: dict[str, int] = field(default_factory=dict)
    dropped_images: int = 0
    unrecorded_prompts: int = 0

    @property
    def complete(self) -> bool:
        """Whether every file and every line was used as it is."""
        return not (self.skipped_files or self.skipped_lines or self.repaired_lines)

    def __str__(self) -> str:
        lines = [
            f"{self.files} session files, {self.entries} entries, {self.turns} turns, {self.targets} targets",
            *self._reasons("files skipped", self.skipped_files),
            *self._reasons("lines skipped", self.skipped_lines),
            *self._reasons("lines repaired", self.repaired_lines),
            *self._reasons("turns not trained", self.untrained_turns),
            *self._reasons("duplicate turns", self.duplicate_turns),
        ]
        if self.dropped_images:
            lines.append(f"  {self.dropped_images} images left out: placeholder text stands for them (images='keep')")
        if self.unrecorded_prompts:
            lines.append(
                f"  {self.unrecorded_prompts} targets without system prompt and tools: pi before 0.86 did not store "
                "them; supply them with system_prompt= and tools="
            )
        return "\n".join(lines)

    def _reasons(self, what: str, counts: dict[str, int]) -> list[str]:
        lines = []
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            places = ", ".join(self.examples.get(reason, ()))
            lines.append(f"  {what}: {count} x {reason}" + (f" ({places})" if places else ""))
        return lines


@dataclass
class Tally:
    """The counts while they are being made."""

    files: int = 0
    entries: int = 0
    turns: int = 0
    targets: int = 0
    dropped_images: int = 0
    skipped_files: Counter[str] = field(default_factory=Counter)
    skipped_lines: Counter[str] = field(default_factory=Counter)
    repaired_lines: Counter[str] = field(default_factory=Counter)
    unrecorded_prompts: int = 0
    untrained_turns: Counter[str] = field(default_factory=Counter)
    duplicate_turns: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally, which come after those of this one."""
        for name, value in vars(other).items():
            if name != "examples":
                setattr(self, name, getattr(self, name) + value)
        for reason, places in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine += places[: _EXAMPLES - len(mine)]

    def note(self, counts: Counter[str], reason: str, place: str) -> None:
        """Count one thing that is wrong, and keep its place if it is among the first of its kind."""
        counts[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(place)

    def report(self) -> LoadReport:
        """Return the counts as they stand."""
        return LoadReport(
            files=self.files,
            skipped_files=dict(self.skipped_files),
            entries=self.entries,
            skipped_lines=dict(self.skipped_lines),
            repaired_lines=dict(self.repaired_lines),
            examples={reason: list(places) for reason, places in self.examples.items()},
            turns=self.turns,
            targets=self.targets,
            untrained_turns=dict(self.untrained_turns),
            duplicate_turns=dict(self.duplicate_turns),
            dropped_images=self.dropped_images,
            unrecorded_prompts=self.unrecorded_prompts,
        )

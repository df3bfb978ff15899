"""What happened to the turns of a data set when it was rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dagpack_hf.render.conversation import RenderCounts


@dataclass
class RenderReport:
    """Turns that were rendered, and those that were not.

    Attributes:
        turns: trained turns in the trees.
        skipped: number of skipped turns by reason.
        examples: for each reason, the first turn it happened to.
        templates: verdict on each chat template that was used: exact, exact with named losses, or refused.
        variables: number of turns by the template's variables that were chosen for them.
        context_losses: number of turns by what the template leaves out of their context.
        control_tokens: control tokens that occur in plain text.
        windowed: contexts that were rendered in windows.
        checked: of those the ones that were compared with the full rendering.
        fallbacks: conversations that were rendered in full because that comparison failed.
    """

    turns: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    templates: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)
    context_losses: dict[str, int] = field(default_factory=dict)
    control_tokens: int = 0
    windowed: int = 0
    checked: int = 0
    fallbacks: int = 0

    def __str__(self) -> str:
        lines = [f"{self.turns:,} turns rendered"]
        lines += [
            f"{n:,} skipped: {reason} (for example {self.examples[reason]})" for reason, n in self.skipped.items()
        ]
        lines += [f"chat template: {verdict}" for verdict in self.templates if verdict != "exact"]
        lines += [f"{n:,} with {variable}" for variable, n in sorted(self.variables.items())]
        lines += [
            f"{n:,} in a context of which the template leaves out: {part}"
            for part, n in sorted(self.context_losses.items())
        ]
        if self.control_tokens:
            lines.append(
                f"{self.control_tokens:,} control tokens in plain text, as a server takes them "
                '(control_tokens="neutralize" makes text of them)'
            )
        if self.fallbacks:
            lines.append(f"{self.fallbacks:,} conversations rendered in full: windows did not give the same text")
        return "\n  ".join(lines)

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of one conversation."""
        for each in fields(RenderCounts):
            value = counts[each.name]
            if each.name == "examples":
                for reason, example in value.items():
                    self.examples.setdefault(reason, example)
            elif isinstance(value, Mapping):
                mine = getattr(self, each.name)
                for name, number in value.items():
                    mine[name] = mine.get(name, 0) + number
            else:
                setattr(self, each.name, getattr(self, each.name) + value)
        for verdict in counts["templates"]:
            if verdict not in self.templates:
                self.templates.append(verdict)

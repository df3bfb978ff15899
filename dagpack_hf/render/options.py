"""What can be chosen when conversations are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles whose messages can be trained."""

_CHOICES = {
    "thinking": ("keep", "drop"),
    "control_tokens": ("keep", "neutralize"),
    "on_error": ("raise", "skip"),
}


@dataclass(frozen=True)
class RenderOptions:
    """Options of `tokenize_conversations`, where each is described.

    Raises:
        ValueError: an option has a value that it cannot have.
    """

    template: str = "original"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinking: str = "keep"
    loss_on_thinking: bool = True
    loss_roles: Sequence[str] = ("assistant",)
    control_tokens: str = "keep"
    date: str | None = None
    windows: bool = True
    on_error: str = "raise"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}.")
        if isinstance(self.loss_roles, str) or not self.loss_roles or set(self.loss_roles) - set(ROLES):
            raise ValueError(f"loss_roles must be a list of some of {', '.join(ROLES)}, got {self.loss_roles!r}.")
        object.__setattr__(self, "loss_roles", tuple(self.loss_roles))
        if self.date is not None:
            parse_date(self.date)


def parse_date(text: str) -> datetime:
    """Read an ISO 8601 date or time.

    Raises:
        ValueError: the text is none.
    """
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise ValueError(f"date must be an ISO 8601 date such as '2026-01-31', got {text!r}.") from error


def template_source(tokenizer: PreTrainedTokenizerBase, template: str, has_tools: bool) -> str:
    """Text of the chat template.

    Args:
        tokenizer: the tokenizer, with its own template.
        template: `"original"`, `"training"`, the path of a file, or the text of a template.
        has_tools: whether there are tools; a tokenizer can have a template of its own for that case.

    Raises:
        ValueError: there is no such template.
    """
    if template == "original":
        if not tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template. Give the one that the model is served with: template= with the "
                "path of a .jinja file."
            )
        return tokenizer.get_chat_template(None, [{}] if has_tools else None)
    if template == "training":
        from trl.chat_template_utils import get_training_chat_template

        return get_training_chat_template(tokenizer) or template_source(tokenizer, "original", has_tools)
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"template={template!r} is neither 'original' nor 'training' nor a readable file ({error})."
        ) from error

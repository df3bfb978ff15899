"""What a figure says about each entry of a session: its kind, and a line of its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagpack_hf.conversations import dumps
from dagpack_hf.pi.context import block_text, blocks, content_text, mapping
from dagpack_hf.view.text import LOOK

KINDS = {
    "trained": "turn, trained",
    "untrained": "turn, not trained",
    "user": "user",
    "tool": "tool result",
    "shell": "shell command of the user",
    "system": "system prompt",
    "summary": "compaction or branch summary",
    "other": "setting or note",
}
"""Kinds of entries, and what the legend calls them."""


@dataclass(frozen=True)
class Caption:
    """What stands beside an entry.

    Attributes:
        kind: A key of `KINDS`.
        name: Role or type, in a word or two.
        text: A line of what it says, not cleaned.
    """

    kind: str
    name: str
    text: str


def caption(entry: Mapping[str, Any], trained: bool) -> Caption:
    """Describe one entry.

    Args:
        entry: The entry.
        trained: Whether it is a turn that is trained.
    """
    kind = entry["type"]
    if kind == "message":
        return _message(entry["message"], trained)
    if kind in ("compaction", "branch_summary"):
        return Caption("summary", kind.replace("_", " "), _text(entry, "summary"))
    if kind == "custom_message":
        return Caption("user", _text(entry, "customType") or "custom message", content_text(entry.get("content")))
    return Caption("other", kind.removesuffix("_change").replace("_", " "), _note(entry))


def _message(message: Mapping[str, Any], trained: bool) -> Caption:
    role = message["role"]
    if role == "assistant":
        stop_reason = message.get("stopReason")
        ended = "" if stop_reason in ("stop", "toolUse") else f"[{stop_reason}] "
        return Caption("trained" if trained else "untrained", "assistant", ended + _reply(message))
    if role == "toolResult":
        failed = "[error] " if message.get("isError") is True else ""
        name = _text(message, "toolName") or "tool"
        return Caption("tool", f"{name} result", failed + content_text(message.get("content")))
    if role == "bashExecution":
        return Caption("shell", "shell", f"$ {_text(message, 'command')}")
    if role == "system":
        return Caption("system", "system", content_text(message.get("content")) or _sections(message))
    return Caption("user" if role == "user" else "other", role, content_text(message.get("content")))


def _reply(message: Mapping[str, Any]) -> str:
    """Text of a reply, then its calls; its thinking if it has neither."""
    content = blocks(message.get("content"))
    parts = [block_text(block) for block in content if block.get("type") == "text"]
    parts += [
        f"{block_text(block, 'name')} {dumps(block.get('arguments'))[:LOOK]}"
        for block in content
        if block.get("type") == "toolCall"
    ]
    parts = [part for part in parts if part.strip()]
    return "  ".join(parts or [block_text(block, "thinking") for block in content])


def _sections(message: Mapping[str, Any]) -> str:
    names = ", ".join(mapping(message.get("sections")))
    tools = message.get("toolsAdded")
    return f"{names}{f'; {len(tools)} tools' if isinstance(tools, list) and tools else ''}"


def _note(entry: Mapping[str, Any]) -> str:
    """The texts of an entry's own fields, which no other rule covers."""
    known = ("name", "label", "provider", "modelId", "thinkingLevel", "customType", "targetId")
    return " ".join(_text(entry, name) for name in known if _text(entry, name))


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""

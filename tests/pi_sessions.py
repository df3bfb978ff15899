"""Builds small pi session files for the tests: one method for each entry type, ids counted up from e1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = {"api": "openai-completions", "provider": "local", "model": "tiny"}


def text(value: str) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": value}


def thinking(value: str, signature: str | None = "reasoning_content") -> dict[str, Any]:
    """Return a thinking block."""
    block = {"type": "thinking", "thinking": value}
    return block if signature is None else {**block, "thinkingSignature": signature}


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call block."""
    return {"type": "toolCall", "id": call_id, "name": name, "arguments": arguments}


def image(data: str = "aGk=") -> dict[str, Any]:
    """Return an image block."""
    return {"type": "image", "data": data, "mimeType": "image/png"}


def tool(name: str, description: str = "") -> dict[str, Any]:
    """Return a tool declaration."""
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": {}}}


def schema(name: str, description: str = "") -> dict[str, Any]:
    """Return the function schema of `tool(name, description)`."""
    return {"type": "function", "function": tool(name, description)}


class SessionBuilder:
    """A session file in the making; every method that adds an entry returns its id.

    An entry hangs below the last one unless `parent` names another (or is `None` for a root).
    """

    def __init__(self, session_id: str = "s1", *, cwd: str = "/home/user/project", version: Any = 3) -> None:
        self.lines: list[dict[str, Any]] = [
            {"type": "session", "version": version, "id": session_id, "timestamp": stamp(0), "cwd": cwd}
        ]
        self._last: str | None = None
        self._count = 0

    def entry(self, kind: str, *, parent: str | None = "", entry_id: str | None = None, **fields: Any) -> str:
        """Add an entry of any type."""
        self._count += 1
        entry_id = entry_id or f"e{self._count}"
        parent_id = self._last if parent == "" else parent
        self.lines.append(
            {"type": kind, "id": entry_id, "parentId": parent_id, "timestamp": stamp(self._count), **fields}
        )
        self._last = entry_id
        return entry_id

    def message(self, role: str, content: Any, *, parent: str | None = "", **fields: Any) -> str:
        """Add a message entry."""
        return self.entry("message", parent=parent, message={"role": role, "content": content, **fields})

    def system(self, content: str = "", **fields: Any) -> str:
        """Add a system message."""
        return self.message("system", content, **fields)

    def user(self, content: Any, **fields: Any) -> str:
        """Add a user message."""
        return self.message("user", [text(content)] if isinstance(content, str) else content, **fields)

    def assistant(self, *content: Any, stop: str | None = None, **fields: Any) -> str:
        """Add an assistant message; strings are text blocks."""
        given = [text(block) if isinstance(block, str) else block for block in content]
        calls = any(block["type"] == "toolCall" for block in given)
        return self.message(
            "assistant",
            given,
            **{**MODEL, "stopReason": stop or ("toolUse" if calls else "stop"), "durationMs": 5, **fields},
        )

    def result(self, call_id: str, *content: Any, name: str = "read", **fields: Any) -> str:
        """Add a tool result; strings are text blocks."""
        given = [text(block) if isinstance(block, str) else block for block in content]
        return self.message("toolResult", given, toolCallId=call_id, toolName=name, isError=False, **fields)

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_bytes(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in self.lines))
        return path


def stamp(count: int) -> str:
    """Return the timestamp of the nth entry."""
    return f"2026-01-01T00:{count // 60:02d}:{count % 60:02d}.000Z"

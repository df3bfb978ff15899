"""What an entry of a session says, piece by piece: thinking, text, calls, results, sections of a prompt.

Cost: linear in the text of the entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dagpack_hf.conversations import dumps
from dagpack_hf.pi.context import block_text, blocks, mapping, named_tools
from dagpack_hf.view.page.model import Part
from dagpack_hf.view.page.texts import Texts

_DETAILS = (
    ("model", "model"),
    ("provider", "provider"),
    ("stopReason", "stop reason"),
    ("thinkingLevel", "thinking"),
    ("tokensBefore", "tokens before"),
)
_OWN = frozenset(("type", "id", "parentId", "timestamp", "message", "content", "summary", "systemMessage"))


def entry_parts(entry: Mapping[str, Any], texts: Texts) -> tuple[Part, ...]:
    """Return the pieces of an entry; those without text are left out."""
    found = []
    for kind, title, text in _pieces(entry):
        shown, cut = texts.whole(text)
        if shown.strip() or title:
            found.append(Part(kind, texts.line(title), shown, cut))
    return tuple(found)


def entry_details(entry: Mapping[str, Any], texts: Texts) -> tuple[tuple[str, str], ...]:
    """Return what is known about an entry, by name."""
    message = mapping(entry.get("message"))
    found = [("time", entry.get("timestamp"))]
    found += [(name, message.get(key, entry.get(key))) for key, name in _DETAILS]
    return tuple((name, texts.line(str(value))) for name, value in found if isinstance(value, str | int) and value)


def _pieces(entry: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Kind, title and text of each piece."""
    kind = entry["type"]
    if kind == "message":
        yield from _message(entry["message"])
    elif kind == "custom_message":
        yield from _blocks(entry.get("content"), "text", "")
    elif kind in ("compaction", "branch_summary"):
        if isinstance(entry.get("systemMessage"), Mapping):
            yield from _system(entry["systemMessage"])
        yield "text", "summary", block_text(entry, "summary")
    else:
        for name, value in entry.items():
            if name not in _OWN:
                yield "note", name, value if isinstance(value, str) else dumps(value)


def _message(message: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    role = message["role"]
    if role == "system":
        yield from _system(message)
    elif role == "bashExecution":
        yield "call", "shell", f"$ {block_text(message, 'command')}"
        yield "result", _exit(message), block_text(message, "output")
    elif role in ("branchSummary", "compactionSummary"):
        yield "text", "summary", block_text(message, "summary")
    elif role == "toolResult":
        title = block_text(message, "toolName") or "tool"
        yield from _blocks(message.get("content"), "result", f"{title}, failed" if message.get("isError") else title)
    else:
        yield from _blocks(message.get("content"), "text", "")
        if message.get("errorMessage"):
            yield "error", "", block_text(message, "errorMessage")


def _blocks(content: Any, kind: str, title: str) -> Iterator[tuple[str, str, str]]:
    for block in blocks(content):
        what = block.get("type")
        if what == "text":
            yield kind, title, block_text(block)
        elif what == "thinking":
            yield "thinking", "", block_text(block, "thinking")
        elif what == "toolCall":
            yield "call", block_text(block, "name"), arguments_text(block.get("arguments"))
        elif what == "image":
            size = len(block_text(block, "data")) * 3 // 4
            yield "image", block_text(block, "mimeType") or "image", f"{size:,} bytes, not shown"
        else:
            yield "note", str(what), dumps(block)


def _system(message: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield from _blocks(message.get("content"), "text", "")
    for name, text in mapping(message.get("sections")).items():
        yield "section", name, text if isinstance(text, str) else dumps(text)
    for key, title in (("toolsAdded", "tools"), ("toolsRemoved", "tools removed")):
        tools = list(named_tools(message.get(key)))
        if tools:
            yield "tools", title, "\n".join(f"{tool['name']}: {tool.get('description') or ''}" for tool in tools)


def arguments_text(arguments: Any) -> str:
    r"""Return the arguments of a call as people read them: one to a line, texts as they are.

    Example:
    >>> print(arguments_text({"path": "a.py", "limit": 3, "edits": "one\ntwo"}))
    path: a.py
    limit: 3
    edits:
      one
      two
    """
    if not isinstance(arguments, Mapping):
        return dumps(arguments)
    lines = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else dumps(value)
        indented = "\n  ".join(["", *text.split("\n")])
        lines.append(f"{name}:{indented}" if "\n" in text else f"{name}: {text}")
    return "\n".join(lines)


def _exit(message: Mapping[str, Any]) -> str:
    code = message.get("exitCode")
    return f"exit code {code}" if isinstance(code, int) and code else "output"

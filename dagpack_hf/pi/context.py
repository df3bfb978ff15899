"""A path in the entry tree -> the list of pi messages it stands for.

The rules are those of pi's `buildSessionContext`: the last compaction of a path replaces what it summarised, branch
summaries and extension messages become user messages, shell commands of the user become user messages unless they are
excluded, and of several edits of one entry the last one on the path counts.

Design: contexts are persistent linked lists. An entry usually extends its parent's context by one item, so siblings
and descendants share the links; only a compaction, an edit, and an entry that is edited are projected from the whole
path. The state of the system prompt (text, sections, tools) travels along the links.

Cost: one link for each entry, plus one path for each compaction and each edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagpack_hf.pi.tree import EntryTree

COMPACTION_SUMMARY = (
    "The conversation history before this point was compacted into the following summary:\n\n<summary>\n{}\n</summary>"
)
BRANCH_SUMMARY = (
    "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n{}</summary>"
)
_EDITABLE = ("user", "assistant", "toolResult", "custom")


@dataclass(frozen=True, eq=False)
class SystemPrompt:
    """The system prompt and tools after replaying the system messages up to some point.

    Attributes:
        texts: Base texts, in order.
        sections: Section texts by name, in the order they first came.
        tools: Tool declarations by name, in the order they are offered.
        entries: Ids of the entries it was replayed from.
    """

    texts: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    entries: tuple[str, ...] = ()

    def replay(self, message: Mapping[str, Any], entry: str) -> SystemPrompt:
        """Return the state after one more system message."""
        text = content_text(message.get("content"))
        sections = dict(self.sections)
        for name, value in mapping(message.get("sections")).items():
            if value is None:
                sections.pop(name, None)
            elif isinstance(value, str):
                sections[name] = value
        tools = dict(self.tools)
        for tool in named_tools(message.get("toolsRemoved")):
            tools.pop(tool["name"], None)
        for tool in named_tools(message.get("toolsAdded")):
            tools[tool["name"]] = tool
        return SystemPrompt((*self.texts, text) if text else self.texts, sections, tools, (*self.entries, entry))

    def text(self) -> str:
        """Return the prompt as it is sent: base texts, then sections, empty ones left out."""
        return "\n\n".join(part for part in ("\n\n".join(self.texts), *self.sections.values()) if part)

    def schemas(self) -> list[dict[str, Any]] | None:
        """Return the tools as function schemas, `None` if there are none."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description"),
                    "parameters": tool.get("parameters"),
                },
            }
            for tool in self.tools.values()
        ] or None


NO_SYSTEM_PROMPT = SystemPrompt()


@dataclass(frozen=True, eq=False)
class Context:
    """The last item of a context, linked to the items before it.

    Attributes:
        parent: The item before.
        message: A pi message of role system, user, assistant or toolResult.
        entry: Id of the entry it comes from.
        system: The system prompt after this item.
    """

    parent: Context | None
    message: Mapping[str, Any]
    entry: str
    system: SystemPrompt

    def items(self) -> list[Context]:
        """Return the items from the first to this one."""
        items: list[Context] = []
        item: Context | None = self
        while item is not None:
            items.append(item)
            item = item.parent
        items.reverse()
        return items


class ContextBuilder:
    """Contexts of one session file.

    Args:
        tree: The file's entry tree.
    """

    def __init__(self, tree: EntryTree) -> None:
        self._tree = tree
        self._contexts: dict[int, Context | None] = {-1: None}
        self._links: dict[tuple[Context | None, int, int, int], Context] = {}
        self._edited = {
            entry.get("targetId")
            for entry in tree.entries
            if entry["type"] == "context_edit" and isinstance(entry.get("targetId"), str)
        }

    def at(self, index: int) -> Context | None:
        """Return the context with an entry as leaf; -1, or a path without messages, gives `None`."""
        pending = []
        while index not in self._contexts:
            pending.append(index)
            index = self._tree.parents[index]
        context = self._contexts[index]
        for step in reversed(pending):
            entry = self._tree.entries[step]
            if entry["type"] in ("compaction", "context_edit") or entry["id"] in self._edited:
                context = self._project(self._tree.path(step))
            else:
                context = self._extend(context, step, -1)
            self._contexts[step] = context
        return context

    def _project(self, path: list[int]) -> Context | None:
        """Build the context of a path from nothing."""
        selected = self._selected(path)
        edits: dict[str, int] = {}
        for index in selected:
            target = self._tree.entries[index].get("targetId")
            if self._tree.entries[index]["type"] == "context_edit" and isinstance(target, str):
                edits[target] = index
        context: Context | None = None
        for place, index in enumerate(selected):
            entry = self._tree.entries[index]
            if entry["type"] != "compaction" or place == 0:
                context = self._extend(context, index, edits.get(entry["id"], -1))
        return context

    def _selected(self, path: list[int]) -> list[int]:
        """Return the entries that count: all, or the last compaction, what it kept, and what came after."""
        entries = self._tree.entries
        compactions = [place for place, index in enumerate(path) if entries[index]["type"] == "compaction"]
        last = compactions[-1] if compactions else -1
        if last < 0:
            return path
        kept_id = entries[path[last]].get("firstKeptEntryId")
        first = next((place for place in range(last) if entries[path[place]]["id"] == kept_id), last)
        kept = [index for index in path[first:last] if _role(entries[index]) != "system"]
        return [path[last], *kept, *path[last + 1 :]]

    def _extend(self, context: Context | None, index: int, edit: int) -> Context | None:
        entry = self._tree.entries[index]
        replacement = self._tree.entries[edit].get("replacement") if edit >= 0 else None
        if edit >= 0 and not isinstance(replacement, Mapping):
            return context
        for part, message in enumerate(_entry_messages(entry)):
            key = (context, index, edit, part)
            link = self._links.get(key)
            if link is None:
                edited = message if replacement is None else _replaced(message, replacement)
                link = self._links[key] = _linked(context, edited, entry["id"])
            context = link
        return context


def _role(entry: Mapping[str, Any]) -> str | None:
    return entry["message"]["role"] if entry["type"] == "message" else None


def _entry_messages(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what one entry adds to a context; roles other than the model's own still under pi's names."""
    kind = entry["type"]
    if kind == "message":
        yield from _known(entry["message"])
    elif kind == "custom_message":
        yield {"role": "custom", "content": entry.get("content")}
    elif kind == "branch_summary" and entry.get("summary"):
        yield {"role": "summary", "content": BRANCH_SUMMARY.format(entry["summary"])}
    elif kind == "compaction":
        if isinstance(entry.get("systemMessage"), Mapping):
            yield {**entry["systemMessage"], "role": "system"}
        yield {"role": "summary", "content": COMPACTION_SUMMARY.format(entry.get("summary") or "")}


def _known(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a stored message if it is of a kind that reaches the model."""
    role = message["role"]
    if role == "bashExecution":
        if not message.get("excludeFromContext"):
            yield {"role": "summary", "content": _shell_text(message)}
    elif role in ("system", *_EDITABLE):
        yield message
    elif role == "branchSummary":
        yield {"role": "summary", "content": BRANCH_SUMMARY.format(message.get("summary") or "")}
    elif role == "compactionSummary":
        yield {"role": "summary", "content": COMPACTION_SUMMARY.format(message.get("summary") or "")}


def _replaced(message: Mapping[str, Any], replacement: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] not in _EDITABLE:
        return message
    return {**message, "content": replacement.get("content")}


def _linked(context: Context | None, message: Mapping[str, Any], entry: str) -> Context:
    """Append a message; text that pi wraps itself, and custom messages, become a user message of text blocks."""
    role, content = message["role"], message.get("content")
    if role in ("summary", "custom"):
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        message = {"role": "user", "content": blocks}
    elif role in ("assistant", "toolResult") and isinstance(content, str):
        message = {**message, "content": [{"type": "text", "text": content}]}
    system = NO_SYSTEM_PROMPT if context is None else context.system
    return Context(context, message, entry, system.replay(message, entry) if role == "system" else system)


def _shell_text(message: Mapping[str, Any]) -> str:
    output = message.get("output")
    text = f"Ran `{message.get('command')}`\n" + (f"```\n{output}\n```" if output else "(no output)")
    if message.get("cancelled"):
        text += "\n\n(command cancelled)"
    elif message.get("exitCode"):
        text += f"\n\nCommand exited with code {message['exitCode']}"
    if message.get("truncated") and message.get("fullOutputPath"):
        text += f"\n\n[Output truncated. Full output: {message['fullOutputPath']}]"
    return text


def blocks(content: Any) -> list[Mapping[str, Any]]:
    """Return the content blocks of a message; what is no block is left out."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []


def block_text(block: Mapping[str, Any], key: str = "text") -> str:
    """Return a block's text, empty if it has none."""
    text = block.get(key)
    return text if isinstance(text, str) else ""


def content_text(content: Any) -> str:
    """Join the text blocks of a content with newlines."""
    return "\n".join(block_text(block) for block in blocks(content) if block.get("type") == "text")


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def named_tools(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the tools of a list that have a name."""
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            yield tool

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagpack_hf.pi.stored import OFFSET, StoredContent
from dagpack_hf.pi.tree import EntryTree

COMPACTION_SUMMARY = (
    "The conversation history before this point was compacted into the following summary:\n\n<summary>\n{}\n</summary>"
)
BRANCH_SUMMARY = (
    "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n{}</summary>"
)
_EDITABLE = ("user", "assistant", "toolResult", "custom")
_SETTINGS = frozenset(("custom", "label", "model_change", "thinking_level_change", "session_info", "usage"))
_CHAT = frozenset(("user", "assistant", "toolResult"))
_AS_STORED = frozenset((*_EDITABLE, "system"))


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


class Context:
    """The last item of a context, linked to the items before it.

    Attributes:
        parent: The item before.
        message: A pi message of role system, user, assistant or toolResult.
        entry: Id of the entry it comes from.
        system: The system prompt after this item.
    """

    __slots__ = ("entry", "message", "parent", "system")

    def __init__(self, parent: Context | None, message: Mapping[str, Any], entry: str, system: SystemPrompt) -> None:
        self.parent = parent
        self.message = message
        self.entry = entry
        self.system = system

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
        self._contexts: list[Context | None] = [None] * len(tree.entries)
        self._known = bytearray(len(tree.entries))
        # Only an edit builds much of a context a second time, and then its links are looked for.
        self._shares = any(entry["type"] == "context_edit" for entry in tree.entries)
        self._links: dict[tuple[Context | None, int, int, int], Context] = {}
        self._edited = {
            entry.get("targetId")
            for entry in tree.entries
            if entry["type"] == "context_edit" and isinstance(entry.get("targetId"), str)
        }

    def at(self, index: int) -> Context | None:
        """Return the context with an entry as leaf; -1, or a path without messages, gives `None`."""
        pending = []
        while index >= 0 and not self._known[index]:
            pending.append(index)
            index = self._tree.parents[index]
        context = self._contexts[index] if index >= 0 else None
        for step in reversed(pending):
            entry = self._tree.entries[step]
            kind = entry["type"]
            if kind == "message" and not self._shares:
                context = _with_message(context, entry["message"], entry["id"])
            elif kind in _SETTINGS:
                pass
            elif kind in ("compaction", "context_edit") or entry["id"] in self._edited:
                context = self._project(step)
            else:
                context = self._extend(context, step, -1)
            self._contexts[step] = context
            self._known[step] = True
        return context

    def _project(self, leaf: int) -> Context | None:
        """Build the context of a path from nothing."""
        selected = self._selected(leaf)
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

    def _selected(self, leaf: int) -> list[int]:
        """Return the entries that count: all, or the last compaction, what it kept, and what came after."""
        entries, parents = self._tree.entries, self._tree.parents
        after: list[int] = []
        index = leaf
        while index >= 0 and entries[index]["type"] != "compaction":
            after.append(index)
            index = parents[index]
        if index < 0:
            return after[::-1]
        compaction = index
        kept_id = entries[compaction].get("firstKeptEntryId")
        kept: list[int] = []
        found = 0
        while (index := parents[index]) >= 0:
            kept.append(index)
            if entries[index]["id"] == kept_id:
                found = len(kept)  # of several entries with this id the first on the path counts
                if kept_id not in self._tree.duplicates:
                    break
        kept = [index for index in kept[:found] if _role(entries[index]) != "system"]
        return [compaction, *kept[::-1], *after[::-1]]

    def _extend(self, context: Context | None, index: int, edit: int) -> Context | None:
        entry = self._tree.entries[index]
        replacement = self._tree.entries[edit].get("replacement") if edit >= 0 else None
        if edit >= 0 and not isinstance(replacement, Mapping):
            return context
        messages = _entry_messages(entry)
        if not self._shares:
            for message in messages:
                context = _linked(context, message, entry["id"])
            return context
        for part, message in enumerate(messages):
            key = (context, index, edit, part)
            link = self._links.get(key)
            if link is None:
                edited = message if replacement is None else _replaced(message, replacement)
                link = self._links[key] = _linked(context, edited, entry["id"])
            context = link
        return context


def _role(entry: Mapping[str, Any]) -> str | None:
    return entry["message"]["role"] if entry["type"] == "message" else None


def _entry_messages(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what one entry adds to a context; roles other than the model's own still under pi's names."""
    kind = entry["type"]
    if kind == "message":
        return _known(entry["message"])
    if kind == "custom_message":
        return [{"role": "custom", "content": entry.get("content")}]
    if kind == "branch_summary" and entry.get("summary"):
        return [_summary(BRANCH_SUMMARY, entry)]
    if kind == "compaction":
        system = entry.get("systemMessage")
        replayed = [{**system, "role": "system"}] if isinstance(system, Mapping) else []
        return [*replayed, _summary(COMPACTION_SUMMARY, entry)]
    return ()


def _with_message(context: Context | None, message: Mapping[str, Any], entry: str) -> Context | None:
    """Append a stored message, if it is of a kind that reaches the model."""
    if message["role"] in _CHAT and type(message.get("content")) in (list, StoredContent):
        return Context(context, message, entry, NO_SYSTEM_PROMPT if context is None else context.system)
    for known in _known(message):
        context = _linked(context, known, entry)
    return context


def _known(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a stored message if it is of a kind that reaches the model."""
    role = message["role"]
    if role in _AS_STORED:
        return (message,)
    if role == "bashExecution" and not message.get("excludeFromContext"):
        return [{"role": "summary", "content": _shell_text(message)}]
    if role == "branchSummary":
        return [_summary(BRANCH_SUMMARY, message)]
    if role == "compactionSummary":
        return [_summary(COMPACTION_SUMMARY, message)]
    return ()


def _summary(form: str, source: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "summary", "content": form.format(source.get("summary") or "")}


def _replaced(message: Mapping[str, Any], replacement: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] not in _EDITABLE:
        return message
    return {**message, "content": replacement.get("content"), OFFSET: None}


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
    if type(content) is list:
        return [block for block in content if type(block) is dict]
    if isinstance(content, StoredContent):
        return blocks(content.read())
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def block_text(block: Mapping[str, Any], key: str = "text") -> str:
    """Return a block's text, empty if it has none."""
    text = block.get(key)
    return text if type(text) is str else ""


def content_text(content: Any) -> str:
    """Join the text blocks of a content with newlines."""
    return "\n".join([block_text(block) for block in blocks(content) if block.get("type") == "text"])


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def named_tools(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the tools of a list that have a name."""
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            yield tool

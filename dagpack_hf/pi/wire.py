"""pi messages -> the request: the messages a model was sent, in the form chat templates and chat-completions take.

The rules are those pi applies for each request, for the model of that request:

    * failed turns (error, aborted) are left out, and so are replies without text and calls;
    * a tool call without a result is answered `No result provided` before the next turn or at the end;
    * images that tools return follow the run of results in one user message; a model without image input reads a
      placeholder instead of each run of images;
    * thinking is sent back to the model that thought it; for other models pi drops it (before 1.x: sends it as text);
    * later system messages either are folded into the first one (the default), or stay where they are as updates.

Lone surrogates, which no tokenizer takes, are in no message; pi drops them from all texts but thinking and arguments.

Design: a fold over the context with an immutable state. Every state is remembered with the context item it belongs to,
so a turn costs what its branch adds, not its whole path. What a request needs at its end (answers to open calls,
pending images) is appended to a state without changing it. Requests are lists of a `MessageTree`, which holds each
message once.

Cost: one state for each entry, model and system prompt that occur, one JSON text for each message. In large files the
content of a message is let go of once it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dagpack_hf.conversations import MessageTree
from dagpack_hf.pi.call_ids import chat_call_id
from dagpack_hf.pi.context import NO_SYSTEM_PROMPT, Context, SystemPrompt, block_text, blocks, content_text
from dagpack_hf.pi.images import spell_out
from dagpack_hf.pi.messages import (
    NO_OUTPUT,
    NO_RESULT,
    ONLY_IMAGE,
    TOOL_IMAGE,
    TOOL_IMAGES_FOLLOW,
    USER_IMAGE,
    assistant_message,
    content_parts,
    image_part,
    is_blank,
    read_reply,
    tool_message,
    update_text,
    without_images,
)
from dagpack_hf.pi.models import RequestModel, model_key
from dagpack_hf.pi.stored import OFFSET, Source, StoredContent

_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")

_State = tuple[
    int,
    tuple[tuple[str, str], ...],
    frozenset[str],
    tuple[dict[str, Any], ...],
    tuple[tuple[Mapping[str, Any], str], ...],
    tuple[tuple[str, str], ...],
    bool,
]
"""The request up to a context item: its last node, the calls that are open (id, tool) and the ids of those that have
been answered, images of tool results that follow, system messages that wait, renamed calls (old id, new id), and
whether anything has been sent. A plain tuple, for one is made for each message."""


class RequestWriter:
    """Requests of one session file.

    Args:
        tree: Gets the messages of the requests and the replies.
        source: The file, if contents of messages can be read from it again; they are then let go of.
        references: Whether messages may hold references to images.
    """

    def __init__(self, tree: MessageTree, source: Source | None = None, *, references: bool = True) -> None:
        self._tree = tree
        self._source = source
        self._folds: dict[tuple[RequestModel, SystemPrompt], _Fold] = {}
        self._replies = _Replies(tree, source, references)
        self._written: dict[tuple[bool, bool, bool], _Written] = {}

    def request(self, context: Context | None, model: RequestModel, system: SystemPrompt) -> int:
        """Return the request for a context.

        Args:
            context: The context of the turn.
            model: The model of the turn.
            system: The system prompt and tools of the turn.

        Returns:
            The request's last node in the tree, -1 for an empty request.
        """
        if model.system_updates and context is not None and system is context.system:
            system = NO_SYSTEM_PROMPT
        fold = self._folds.get((model, system))
        if fold is None:
            written = self._written.setdefault((model.images, model.parts, model.legacy), {})
            fold = self._folds[model, system] = _Fold(self._tree, model, system, self._replies, written, self._source)
        return fold.request(context)

    def reply(self, message: Mapping[str, Any], entry: str, request: int, model: tuple[str, str, str]) -> int:
        """Return an assistant message as the model wrote it, as the continuation of its request.

        Args:
            message: The stored assistant message.
            entry: Its entry id.
            request: The last node of the request.
            model: Its provider, API and model.

        Returns:
            The target's node: text, calls, and thinking wherever the session has it in readable form. Its text is that
            which later requests of the same model hold, unless pi does not send that model's thinking back.
        """
        return self._tree.append(request, self._replies.of(message, entry, model).text)


class _Reply(NamedTuple):
    """An assistant message: `text` as the model wrote it, and what it is made of.

    Attributes:
        message: The message.
        model: Provider, API and model.
        text: Its text in the tree.
        empty: Whether it has neither text nor calls.
        thinks: Whether there is thinking to read.
        signature: Signature of its first thought.
        calls: Id and tool of each call.
    """

    message: Mapping[str, Any]
    model: tuple[str, str, str]
    text: int
    empty: bool
    thinks: bool
    signature: str
    calls: list[tuple[str, str]]


class _Replies:
    """The replies of one session, each read once."""

    def __init__(self, tree: MessageTree, source: Source | None, references: bool) -> None:
        self._tree = tree
        self._source = source
        self._references = references
        self._known: dict[int, _Reply] = {}

    def of(self, message: Mapping[str, Any], entry: str, model: tuple[str, str, str] | None = None) -> _Reply:
        """Return what is known of a reply; `model` is its provider, API and model, if they have been read."""
        reply = self._known.get(id(message))
        if reply is None:
            content, thinking, signature, calls = read_reply(message)
            model = model or model_key(message)
            text = self.add(content, thinking, calls, entry, model[2])
            names = [(call, name) for call, name, _ in calls]
            empty = not content and not calls
            reply = self._known[id(message)] = _Reply(message, model, text, empty, bool(thinking), signature, names)
            _let_go(message, self._source)
        return reply

    def add(self, content: str, thinking: str, calls: Sequence[tuple[str, str, Any]], entry: str, model: str) -> int:
        """Add an assistant message; its arguments may hold anything, also what looks like an image reference."""
        text = self._tree.text(assistant_message(content, thinking, calls), entry, model)
        if self._references:
            self._tree.texts[text] = spell_out(self._tree.texts[text])
        return text


_Written = dict[int, tuple[Mapping[str, Any], int, list[dict[str, Any]]]]
"""User messages and tool results by identity: the message, its text (-1: it vanishes), and images that follow it."""


class _Fold:
    """Requests of one model with one system prompt.

    Args:
        tree: Gets the messages.
        model: The model.
        system: What a request begins with.
        replies: The replies of the session.
        written: The other messages that are in the form this model takes.
        source: Where contents can be read again.
    """

    def __init__(
        self,
        tree: MessageTree,
        model: RequestModel,
        system: SystemPrompt,
        replies: _Replies,
        written: _Written,
        source: Source | None,
    ) -> None:
        self._source = source
        self._tree = tree
        self._model = model
        self._key = model.key
        self._replies = replies
        self._written = written
        self._states: dict[Context | None, _State] = {None: (self._head(system), (), frozenset(), (), (), (), False)}

    def request(self, context: Context | None) -> int:
        pending: list[Context] = []
        item = context
        states = self._states
        while item not in states:
            assert item is not None
            pending.append(item)
            item = item.parent
        state = states[item]
        for item in reversed(pending):
            state = states[item] = self._step(state, item)
        return self._flushed(self._answered(state))[0]

    def _head(self, system: SystemPrompt) -> int:
        """Return what starts a request: the folded system message, if there is one."""
        text = system.text()
        entry = system.entries[0] if len(system.entries) == 1 else None
        return self._append(-1, {"role": "system", "content": text}, entry) if text else -1

    def _append(self, last: int, message: dict[str, Any], entry: str | None = None, model: str | None = None) -> int:
        return self._tree.append(last, self._tree.text(message, entry, model))

    def _step(self, state: _State, item: Context) -> _State:
        message = item.message
        role = message["role"]
        if role == "toolResult":
            return self._tool_result(state, message, item.entry)
        if role == "system":
            return self._system(state, message, item.entry) if self._model.system_updates else state
        state = self._answered(state)
        if role == "user":
            return self._user(self._flushed(state), message, item.entry)
        if message.get("stopReason") in ("error", "aborted"):
            return state
        return self._assistant_turn(self._flushed(state), message, item.entry)

    def _user(self, state: _State, message: Mapping[str, Any], entry: str) -> _State:
        known = self._written.get(id(message))
        if known is None:
            content = self._user_content(message.get("content"))
            text = self._tree.text({"role": "user", "content": content}, entry) if content is not None else -1
            known = self._written[id(message)] = message, text, []
            _let_go(message, self._source)
        last, calls, answered, images, held, renamed, _ = state
        if known[1] >= 0:
            last = self._tree.append(last, known[1])
        return last, calls, answered, images, held, renamed, True

    def _user_content(self, content: Any) -> str | list[dict[str, Any]] | None:
        """Return a user message's content as it is sent, `None` if nothing of it is."""
        if isinstance(content, StoredContent):
            content = content.read()
        if isinstance(content, str):
            return content
        given = blocks(content)
        if not self._model.images:
            given = without_images(given, USER_IMAGE)
        parts = content_parts(given, keep_empty=self._model.legacy)
        texts = [part["text"] for part in parts if part["type"] == "text"]
        one_string = len(texts) == len(parts) and (len(texts) == 1 or not self._model.parts)
        return ("\n".join(texts) if one_string else parts) if parts else None

    def _tool_result(self, state: _State, message: Mapping[str, Any], entry: str) -> _State:
        last, calls, answered, images, held, renamed, _ = state
        stored = block_text(message, "toolCallId")
        call = (dict(renamed).get(stored) or stored) if renamed else stored
        known = self._written.get(id(message)) if call == stored else None
        if known is None:
            content, own = self._tool_content(message.get("content"))
            text = self._tree.text(tool_message(call, block_text(message, "toolName"), content), entry)
            known = message, text, own
            if call == stored:
                self._written[id(message)] = known
            _let_go(message, self._source)
        last = self._tree.append(last, known[1])
        if known[2]:
            images = (*images, *known[2])
        return last, calls, answered | {call}, images, held, renamed, True

    def _tool_content(self, content: Any) -> tuple[str, list[dict[str, Any]]]:
        """Return a tool result's text as it is sent, and the images that follow it."""
        given = blocks(content)
        kinds = [block.get("type") for block in given]
        images = []
        if "image" in kinds:
            if self._model.images:
                images = [image_part(block) for block, kind in zip(given, kinds, strict=True) if kind == "image"]
            else:
                given = without_images(given, TOOL_IMAGE)
        text = block_text(given[0]) if kinds == ["text"] else content_text(given)
        if self._model.legacy:
            text = text or ONLY_IMAGE
        elif is_blank(text):
            text = ONLY_IMAGE if images else NO_OUTPUT
        return text, images

    def _answered(self, state: _State) -> _State:
        """Answer the open calls, then send the system messages that waited for it."""
        last, calls, answered, images, held, renamed, begun = state
        if not calls and not held:
            return state
        for call, name in calls:
            if call not in answered:
                last = self._append(last, tool_message(call, name, NO_RESULT))
        state = (last, (), frozenset(), images, (), renamed, begun)
        for message, entry in held:
            state = self._system_update(state, message, entry)
        return state

    def _flushed(self, state: _State) -> _State:
        """End a run of tool results: the images they returned follow in one user message."""
        last, calls, answered, images, held, renamed, begun = state
        if not images:
            return state
        parts = [{"type": "text", "text": TOOL_IMAGES_FOLLOW}, *images]
        return self._append(last, {"role": "user", "content": parts}), calls, answered, (), held, renamed, begun

    def _assistant_turn(self, state: _State, message: Mapping[str, Any], entry: str) -> _State:
        model = self._model
        reply = self._replies.of(message, entry)
        last, calls, answered, images, held, renamed, _ = state
        text, empty, names = reply.text, reply.empty, reply.calls
        if reply.model == self._key:
            if reply.thinks and not _sends_thinking(reply, model):
                content, _, _, made = read_reply(message)
                text = self._replies.add(content, "", made, entry, reply.model[2])
        elif reply.thinks or _renames(model, names):
            content, made, renamed = self._foreign(message, renamed)
            names = [(call, name) for call, name, _ in made]
            empty = not content and not made
            text = self._replies.add(content, "", made, entry, reply.model[2])
        if not empty:
            last = self._tree.append(last, text)
        if names:
            calls, answered = tuple(names), frozenset()
        return last, calls, answered, images, held, renamed, True

    def _foreign(
        self, message: Mapping[str, Any], renamed: tuple[tuple[str, str], ...]
    ) -> tuple[str, list[tuple[str, str, Any]], tuple[tuple[str, str], ...]]:
        """Return text and calls of another model's reply as this model gets them, and the calls renamed so far."""
        model = self._model
        content, _, _, calls = read_reply(message, aloud=model.legacy)
        if model.api != "openai-completions":
            return content, calls, renamed
        ids = {call: chat_call_id(call, model.provider, legacy=model.legacy) for call, _, _ in calls}
        changed = {call: new for call, new in ids.items() if new != call}
        if changed:
            renamed = tuple({**dict(renamed), **changed}.items())
        return content, [(ids[call], name, arguments) for call, name, arguments in calls], renamed

    def _system(self, state: _State, message: Mapping[str, Any], entry: str) -> _State:
        """Add a system message in place; between calls and their results it waits."""
        last, calls, answered, images, held, renamed, begun = state
        if calls:
            return last, calls, answered, images, (*held, (message, entry)), renamed, begun
        return self._system_update(state, message, entry)

    def _system_update(self, state: _State, message: Mapping[str, Any], entry: str) -> _State:
        last, calls, answered, images, held, renamed, begun = self._flushed(state)
        text = update_text(message) if begun else NO_SYSTEM_PROMPT.replay(message, entry).text()
        if text:
            last = self._append(last, {"role": "system", "content": text}, entry)
        return last, calls, answered, images, held, renamed, True


def _renames(model: RequestModel, calls: Sequence[tuple[str, str]]) -> bool:
    """Say whether another model's calls get other ids in requests of this one."""
    if model.api != "openai-completions":
        return False
    return any(chat_call_id(call, model.provider, legacy=model.legacy) != call for call, _ in calls)


def _let_go(message: Mapping[str, Any], source: Source | None) -> None:
    """Put a place in the file where a message's content was."""
    offset = message.get(OFFSET)
    if source is not None and offset is not None:
        message["content"] = StoredContent(source, offset)  # type: ignore[index]


def _sends_thinking(reply: _Reply, model: RequestModel) -> bool:
    """Say whether thinking goes back to the model with an earlier turn of its own.

    For chat-completions a thought's signature names the field it came in, and pi sends it back in that field; without
    a field it knows it sends none. All fields appear as `reasoning_content` here. A signature that is JSON holds the
    provider's own record of the thought, which pi returns.
    """
    signature = reply.signature
    if model.api != "openai-completions":
        return True
    return bool(signature) if model.legacy else signature in _REASONING_FIELDS or signature.startswith("[")

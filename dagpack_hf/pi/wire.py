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
pending images) is appended to a state without changing it.

Cost: one state and at most one `Message` for each entry, model and system prompt that occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dagpack_hf.conversations import Message
from dagpack_hf.pi.call_ids import chat_call_id
from dagpack_hf.pi.context import NO_SYSTEM_PROMPT, Context, SystemPrompt, block_text, blocks, content_text, mapping

USER_IMAGE = "(image omitted: model does not support images)"
TOOL_IMAGE = "(tool image omitted: model does not support images)"
_TOOL_IMAGES_FOLLOW = "Attached image(s) from tool result:"
_ONLY_IMAGE = "(see attached image)"
_NO_OUTPUT = "(no tool output)"
_NO_RESULT = "No result provided"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")
# JavaScript's trim(), which differs from str.strip() in U+001C..U+001F, U+0085 and U+FEFF.
_JS_SPACE = "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_JS_SPACE += "\u2028\u2029\u202f\u205f\u3000\ufeff"


@dataclass(frozen=True)
class RequestModel:
    """The model of a request, and how pi writes requests for it.

    Attributes:
        provider: Provider name, as in the session.
        api: API name, as in the session.
        name: Model id, as in the session.
        images: Whether it takes images; otherwise it reads placeholders.
        parts: Whether a user message of several parts stays a list; otherwise texts are joined by newlines.
        system_updates: Whether later system messages are sent in place instead of folded into the first one.
        legacy: Whether the request was made by pi before 1.x: it sent other models' thinking as text, kept empty text
            parts, and had no text of its own for an empty tool result.
    """

    provider: str
    api: str
    name: str
    images: bool = True
    parts: bool = True
    system_updates: bool = False
    legacy: bool = False

    def wrote(self, message: Mapping[str, Any]) -> bool:
        """Say whether this model wrote an assistant message."""
        return (self.provider, self.api, self.name) == model_key(message)


@dataclass(frozen=True)
class _State:
    """The request up to a context item."""

    last: Message | None
    calls: tuple[tuple[str, str], ...] = ()
    answered: frozenset[str] = frozenset()
    images: tuple[dict[str, Any], ...] = ()
    held: tuple[tuple[Mapping[str, Any], str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    begun: bool = False


class RequestWriter:
    """Requests of one session file.

    Args:
        unrecorded: The system prompt and tools of requests for which the file records none.
    """

    def __init__(self, unrecorded: SystemPrompt = NO_SYSTEM_PROMPT) -> None:
        self._unrecorded = unrecorded
        self._states: dict[tuple[Context, RequestModel, SystemPrompt], _State] = {}
        self._heads: dict[tuple[RequestModel, SystemPrompt], _State] = {}

    def request(self, context: Context | None, model: RequestModel) -> Message | None:
        """Return the last message of the request for a context, linked to the ones before it.

        Args:
            context: The context of the turn.
            model: The model of the turn.

        Returns:
            The last message, `None` for an empty request.
        """
        system = self.system_prompt(context)
        if model.system_updates and system is not self._unrecorded:
            system = NO_SYSTEM_PROMPT
        pending: list[Context] = []
        item = context
        while item is not None and (item, model, system) not in self._states:
            pending.append(item)
            item = item.parent
        state = self._head(model, system) if item is None else self._states[item, model, system]
        for item in reversed(pending):
            state = self._states[item, model, system] = _step(state, item, model)
        return _flushed(_answered(state)).last

    def system_prompt(self, context: Context | None) -> SystemPrompt:
        """Return the prompt and tools of a context's request."""
        return self._unrecorded if context is None or not context.system.entries else context.system

    def _head(self, model: RequestModel, system: SystemPrompt) -> _State:
        """Return the state that starts a request: the folded system message, if there is one."""
        state = self._heads.get((model, system))
        if state is None:
            text = system.text()
            entry = system.entries[0] if len(system.entries) == 1 else None
            first = Message(None, {"role": "system", "content": text}, entry=entry) if text else None
            state = self._heads[model, system] = _State(first)
        return state


def reply(message: Mapping[str, Any], entry: str, context: Message | None) -> Message:
    """Return an assistant message as the model wrote it, as the continuation of its request.

    Args:
        message: The stored assistant message.
        entry: Its entry id.
        context: The last message of the request.

    Returns:
        The target: text, calls, and thinking wherever the session has it in readable form. It equals the message that
        later requests of the same model hold, unless pi does not send that model's thinking back.
    """
    return Message(context, _assistant(message, _thinking(message), {}), entry=entry, model=model_key(message)[2])


def model_key(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return provider, API and model of an assistant message, empty where it has none."""
    provider, api, name = (block_text(message, key) for key in ("provider", "api", "model"))
    return provider, api, name


def _step(state: _State, item: Context, model: RequestModel) -> _State:
    message = item.message
    role = message["role"]
    if role == "system":
        return _system(state, message, item.entry) if model.system_updates else state
    if role == "toolResult":
        return _tool_result(state, message, item.entry, model)
    state = _answered(state)
    if role == "user":
        return _user(_flushed(state), message, item.entry, model)
    if message.get("stopReason") in ("error", "aborted"):
        return state
    return _assistant_turn(_flushed(state), message, item.entry, model)


def _append(state: _State, content: dict[str, Any], entry: str | None = None, name: str | None = None) -> _State:
    return replace(state, last=Message(state.last, content, entry=entry, model=name), begun=True)


def _user(state: _State, message: Mapping[str, Any], entry: str, model: RequestModel) -> _State:
    content = message.get("content")
    if isinstance(content, str):
        return _append(state, {"role": "user", "content": content}, entry)
    given = blocks(content)
    parts = _parts(given if model.images else _without_images(given, USER_IMAGE), keep_empty=model.legacy)
    return _append(state, _user_message(parts, model), entry) if parts else replace(state, begun=True)


def _user_message(parts: list[dict[str, Any]], model: RequestModel) -> dict[str, Any]:
    texts = [part["text"] for part in parts if part["type"] == "text"]
    one_string = len(texts) == len(parts) and (len(texts) == 1 or not model.parts)
    return {"role": "user", "content": "\n".join(texts) if one_string else parts}


def _parts(content: Sequence[Mapping[str, Any]], *, keep_empty: bool) -> list[dict[str, Any]]:
    """Turn pi's blocks into request parts; pi 1.x leaves empty texts out."""
    parts: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") == "image":
            parts.append(_image(block))
        elif block.get("type") == "text" and (block_text(block) or keep_empty):
            parts.append({"type": "text", "text": block_text(block)})
    return parts


def _image(block: Mapping[str, Any]) -> dict[str, Any]:
    url = f"data:{block.get('mimeType')};base64,{block.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _without_images(content: Sequence[Mapping[str, Any]], placeholder: str) -> list[Mapping[str, Any]]:
    """Put one placeholder for each run of images."""
    result: list[Mapping[str, Any]] = []
    in_run = False
    for block in content:
        if block.get("type") == "image":
            if not in_run:
                result.append({"type": "text", "text": placeholder})
            in_run = True
        else:
            result.append(block)
            in_run = block.get("text") == placeholder
    return result


def _tool_result(state: _State, message: Mapping[str, Any], entry: str, model: RequestModel) -> _State:
    stored = block_text(message, "toolCallId")
    call = dict(state.renamed).get(stored, stored)
    content = blocks(message.get("content"))
    if not model.images:
        content = _without_images(content, TOOL_IMAGE)
    images = tuple(_image(block) for block in content if block.get("type") == "image")
    text = content_text(content)
    if model.legacy:
        text = text or _ONLY_IMAGE
    elif not text.strip(_JS_SPACE):
        text = _ONLY_IMAGE if images else _NO_OUTPUT
    state = _append(state, _tool_message(call, block_text(message, "toolName"), text), entry)
    return replace(state, answered=state.answered | {call}, images=state.images + images)


def _tool_message(call: str, name: str, text: str) -> dict[str, Any]:
    named = {"name": name} if name else {}
    return {"role": "tool", "tool_call_id": call, **named, "content": text}


def _answered(state: _State) -> _State:
    """Answer the open calls, then send the system messages that waited for it."""
    for call, name in state.calls:
        if call not in state.answered:
            state = _append(state, _tool_message(call, name, _NO_RESULT))
    held = state.held
    state = replace(state, calls=(), answered=frozenset(), held=())
    for message, entry in held:
        state = _system_update(state, message, entry)
    return state


def _flushed(state: _State) -> _State:
    """End a run of tool results: the images they returned follow in one user message."""
    if not state.images:
        return state
    parts = [{"type": "text", "text": _TOOL_IMAGES_FOLLOW}, *state.images]
    return _append(replace(state, images=()), {"role": "user", "content": parts})


def _assistant_turn(state: _State, message: Mapping[str, Any], entry: str, model: RequestModel) -> _State:
    calls = _calls(message)
    renamed: dict[str, str] = {}
    if model.api == "openai-completions" and not model.wrote(message):
        names = {call: chat_call_id(call, model.provider, legacy=model.legacy) for call, _, _ in calls}
        renamed = {call: name for call, name in names.items() if name != call}
    if renamed:
        state = replace(state, renamed=tuple({**dict(state.renamed), **renamed}.items()))
    if calls:
        state = replace(state, calls=tuple((renamed.get(call, call), name) for call, name, _ in calls))
    content = _assistant(message, _sent_thinking(message, model), renamed, _thinks_aloud(message, model))
    state = replace(state, begun=True)
    if not content["content"] and not calls:
        return state
    return _append(state, content, entry, model_key(message)[2])


def _assistant(
    message: Mapping[str, Any], thinking: str, renamed: Mapping[str, str], thinking_as_text: bool = False
) -> dict[str, Any]:
    texts = []
    for block in blocks(message.get("content")):
        if block.get("type") == "text":
            texts.append(block_text(block))
        elif thinking_as_text and block.get("type") == "thinking" and not block.get("redacted"):
            texts.append(block_text(block, "thinking"))
    content: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(text for text in texts if text.strip(_JS_SPACE)),
    }
    if thinking:
        content["reasoning_content"] = thinking
    calls = _calls(message)
    if calls:
        content["tool_calls"] = [
            {"type": "function", "id": renamed.get(call, call), "function": {"name": name, "arguments": arguments}}
            for call, name, arguments in calls
        ]
    return content


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return id, tool name and arguments of each call."""
    calls = [block for block in blocks(message.get("content")) if block.get("type") == "toolCall"]
    return [(block_text(call, "id"), block_text(call, "name"), _arguments(call)) for call in calls]


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call.get("arguments")
    return {} if arguments is None else arguments


def _thinking_blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        block
        for block in blocks(message.get("content"))
        if block.get("type") == "thinking" and block_text(block, "thinking").strip(_JS_SPACE)
    ]


def _thinking(message: Mapping[str, Any]) -> str:
    """Return the thinking that is there to read."""
    return "\n".join(block_text(block, "thinking") for block in _thinking_blocks(message) if not block.get("redacted"))


def _sent_thinking(message: Mapping[str, Any], model: RequestModel) -> str:
    """Return the thinking that goes back to the model with an earlier turn of its own.

    For chat-completions a thought's signature names the field it came in, and pi sends it back in that field; without
    a field it knows it sends none. All fields appear as `reasoning_content` here. A signature that is JSON holds the
    provider's own record of the thought, which pi returns.
    """
    if not model.wrote(message):
        return ""
    thoughts = _thinking_blocks(message)
    if model.api == "openai-completions" and thoughts:
        signature = block_text(thoughts[0], "thinkingSignature")
        known = bool(signature) if model.legacy else signature in _REASONING_FIELDS or signature.startswith("[")
        return _thinking(message) if known else ""
    return _thinking(message)


def _thinks_aloud(message: Mapping[str, Any], model: RequestModel) -> bool:
    return model.legacy and not model.wrote(message)


def _system(state: _State, message: Mapping[str, Any], entry: str) -> _State:
    """Add a system message in place; between calls and their results it waits."""
    if state.calls:
        return replace(state, held=(*state.held, (message, entry)))
    return _system_update(state, message, entry)


def _system_update(state: _State, message: Mapping[str, Any], entry: str) -> _State:
    state = _flushed(state)
    text = _update_text(message) if state.begun else NO_SYSTEM_PROMPT.replay(message, entry).text()
    state = replace(state, begun=True)
    return _append(state, {"role": "system", "content": text}, entry) if text else state


def _update_text(message: Mapping[str, Any]) -> str:
    parts = [content_text(message.get("content"))]
    for name, text in mapping(message.get("sections")).items():
        if text is None:
            parts.append(f'Removed system prompt section "{name}".')
        elif isinstance(text, str):
            parts.append(f'Updated system prompt section "{name}":\n\n{text}')
    return "\n\n".join(part for part in parts if part)

r"""Turns and conversations -> plain objects in the forms that trainers read.

Forms:
    * `openai`: the request behind an assistant entry, as chat-completions servers take it, without the reply.
    * `messages`: request and reply as chat templates take them (transformers, TRL), with a `trained` flag for each
      message.
    * `sharegpt`: the same list as `{"from", "value"}` items of text, for trainers that put values into a template as
      they are.

Units: a *turn* is one target with the request as it was sent; a *conversation* is a row of `load_sessions`, one
maximal message list with all its targets.

ShareGPT values are what the chat templates of Hermes and Qwen models print between the marks of a message: thinking
as `<think>\n...\n</think>\n\n`, each call as `<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>`, each tool
result as `<tool_response>\n...\n</tool_response>`. Like those templates they hold no call ids and no names of results
(a result follows its call), and text that spells out such a tag itself cannot be told from one. Images are pi's
placeholder text. Everything else is kept, unstripped: one item for each message, also where roles do not alternate.

Cost: a turn is written out with its whole request, so the size of all turns of a session grows with the square of its
length; conversations repeat only what branches share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from datasets import Features, List, Value

from dagpack_hf.conversations import FEATURES, JsonText, dumps
from dagpack_hf.pi.messages import USER_IMAGE
from dagpack_hf.pi.options import Images, PathLike
from dagpack_hf.pi.sessions import load_sessions
from dagpack_hf.pi.turns import Turn, iter_turns

Format = Literal["openai", "messages", "sharegpt"]
Unit = Literal["turns", "conversations"]

_ROLES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
_TEXT = Value("string")
_TRAINED = List(Value("bool"))
_ITEMS = List({"from": _TEXT, "value": _TEXT})
_TURN = {"trained": _TRAINED, "session": _TEXT, "entry": _TEXT, "model": _TEXT, "timestamp": _TEXT}


def export_turns(
    paths: PathLike | Iterable[PathLike] | None = None,
    *,
    format: Format = "openai",
    unit: Unit = "turns",
    images: Images | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the turns, or the conversations, of session files in the form a trainer reads.

    Args:
        paths: As for `iter_turns`: a file, a folder, several of these, or `None` for pi's own folder.
        format: `"openai"`, `"messages"` or `"sharegpt"`.
        unit: `"turns"`, or, not for `"openai"`, `"conversations"`.
        images: As for `iter_turns`. By default `"keep"` for `"openai"`, where images are part of the request, and
            `"placeholder"` for the others, as in `load_sessions`. `"sharegpt"` has no place for images.
        **options: The other options of `iter_turns`, or, for conversations, of `load_sessions`.

    Yields:
        For each assistant entry (`openai`): `session`, `entry`, `model`, `stop_reason`, `trained`, `messages` and
        `tools`. Arguments of tool calls are JSON text; `trained` is true for the first occurrence of a turn that ended
        by itself. For each target (`messages`): `messages`, `tools`, `trained` (for each message, true for the last),
        `session`, `entry`, `model` and `timestamp`. For each conversation: the columns of `load_sessions`. `sharegpt`
        has `conversations` in place of `messages`, and `tools` as JSON text.

    Raises:
        ValueError: At once, for a form that does not exist.

    Example:
    >>> from dagpack_hf.sample import sample_sessions
    >>> turn = next(export_turns(sample_sessions(), format="messages"))
    >>> [message["role"] for message in turn["messages"]], turn["trained"]
    (['system', 'user', 'assistant'], [False, False, True])
    """
    _check(format, unit, images)
    images = images or ("keep" if format == "openai" else "placeholder")
    if unit == "conversations":
        return export_conversations(load_sessions(paths, images=images, **options), format)
    return _export_turns(iter_turns(paths, images=images, **options), format)


def export_conversations(
    conversations: Iterable[Mapping[str, Any]], format: Format = "messages"
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a conversational data set in the form a trainer reads.

    Args:
        conversations: What `load_sessions` returns, or some of its rows.
        format: `"messages"` or `"sharegpt"`.

    Yields:
        The rows; for `"sharegpt"` with `conversations` in place of `messages` and `tools` as JSON text.

    Raises:
        ValueError: At once, for a form that does not exist.
    """
    _check(format, "conversations")
    return map(conversation_to_sharegpt if format == "sharegpt" else dict, conversations)


def export_features(format: Format = "openai", unit: Unit = "turns") -> Features:
    """Return the columns of a form, to load or to save it without a guess about types.

    Columns of chat messages and tool schemas are JSON text in Arrow, where nested types would fill in every key of
    every row with null. ShareGPT items all have the same two keys, and are structs.

    Args:
        format: As for `export_turns`.
        unit: As for `export_turns`.

    Returns:
        The features, in the order of the keys.

    Raises:
        ValueError: For a form that does not exist.
    """
    _check(format, unit)
    if unit == "conversations":
        return _as_sharegpt(FEATURES) if format == "sharegpt" else FEATURES.copy()
    if format == "openai":
        text = dict.fromkeys(("session", "entry", "model", "stop_reason"), _TEXT)
        return Features({**text, "trained": Value("bool"), "messages": JsonText(), "tools": JsonText()})
    turn = Features({"messages": JsonText(), "tools": JsonText(), **_TURN})
    return _as_sharegpt(turn) if format == "sharegpt" else turn


def _as_sharegpt(features: Features) -> Features:
    rest = {name: feature for name, feature in features.items() if name not in ("messages", "tools")}
    return Features({"conversations": _ITEMS, "tools": _TEXT, **rest})


def _check(format: str, unit: str, images: str | None = None) -> None:
    for name, value, known in (("format", format, get_args(Format)), ("unit", unit, get_args(Unit))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use {', '.join(map(repr, known))}")
    if format == "openai" and unit == "conversations":
        raise ValueError(
            "format='openai' holds single requests: use unit='turns', or format='messages' for whole conversations"
        )
    if format == "sharegpt" and images not in (None, "placeholder"):
        raise ValueError(
            f"format='sharegpt' holds text only and images={images!r} asks for images: use images='placeholder', or "
            "format='messages' for images as parts of content"
        )


def _export_turns(turns: Iterable[Turn], format: Format) -> Iterator[dict[str, Any]]:
    if format == "openai":
        yield from map(turn_to_request, turns)
        return
    convert: Callable[[Turn], dict[str, Any]] = turn_to_messages if format == "messages" else turn_to_sharegpt
    yield from (convert(turn) for turn in turns if turn.trained)


def turn_to_request(turn: Turn) -> dict[str, Any]:
    """Return the request of a turn as chat-completions servers take it."""
    return {
        "session": turn.session,
        "entry": turn.entry,
        "model": turn.model,
        "stop_reason": turn.stop_reason,
        "trained": turn.trained,
        "messages": [_chat_completions(message) for message in turn.messages],
        "tools": turn.tools,
    }


def _chat_completions(message: dict[str, Any]) -> dict[str, Any]:
    """Write a chat-form message as the request has it: arguments as JSON text, results without a tool name."""
    if message["role"] == "tool":
        message.pop("name", None)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = dumps(call["function"]["arguments"])
    return message


def turn_to_messages(turn: Turn) -> dict[str, Any]:
    """Return a target turn in chat form: the request, and the reply as the one message that is trained."""
    request = turn.messages
    return {
        "messages": [*request, turn.reply],
        "tools": turn.tools,
        "trained": [False] * len(request) + [True],
        "session": turn.session,
        "entry": turn.entry,
        "model": turn.model,
        "timestamp": turn.timestamp,
    }


def turn_to_sharegpt(turn: Turn) -> dict[str, Any]:
    """Return a target turn in ShareGPT form."""
    return conversation_to_sharegpt(turn_to_messages(turn))


def conversation_to_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in chat form in ShareGPT form; what is neither `messages` nor `tools` stays as it is."""
    rest = {name: value for name, value in row.items() if name not in ("messages", "tools")}
    return {
        "conversations": [message_to_sharegpt(message) for message in row["messages"]],
        "tools": None if row["tools"] is None else dumps(row["tools"]),
        **rest,
    }


def message_to_sharegpt(message: Mapping[str, Any]) -> dict[str, str]:
    r"""Return a chat-form message as one ShareGPT item.

    Example:
    >>> message_to_sharegpt({"role": "tool", "tool_call_id": "call_1", "content": "a.py"})
    {'from': 'tool', 'value': '<tool_response>\na.py\n</tool_response>'}
    """
    role = message["role"]
    value = _text(message["content"])
    if role == "assistant":
        value = "\n".join(filter(None, [value, *map(_call, message.get("tool_calls", ()))]))
        if thinking := message.get("reasoning_content"):
            value = f"<think>\n{thinking}\n</think>\n\n{value}"
    elif role == "tool":
        value = f"<tool_response>\n{value}\n</tool_response>"
    return {"from": _ROLES[role], "value": value}


def _text(content: str | Iterable[Mapping[str, Any]]) -> str:
    """Return content as one text: texts of several parts on lines of their own, as pi joins them for such models."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else USER_IMAGE for part in content)


def _call(call: Mapping[str, Any]) -> str:
    """Return a call with the spaces that chat templates print."""
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"

"""Turns -> JSON lines: the request of every assistant entry, in chat-completions form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dagpack_hf.conversations import dumps
from dagpack_hf.pi.turns import Images, PathLike, Turn, iter_turns


def export_turns(
    paths: PathLike | Iterable[PathLike] | None = None, *, images: Images = "keep", **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield one object for each assistant entry of each file, with the request that produced it.

    Args:
        paths: As for `iter_turns`: a file, a folder, several of these, or `None` for pi's own folder.
        images: As for `iter_turns`; by default images stay where the model of the turn takes them.
        **options: The other options of `iter_turns`.

    Yields:
        `session`, `entry`, `model`, `stop_reason`, `trained`, `messages` and `tools`. `messages` and `tools` are the
        request as chat-completions servers take it: arguments of tool calls are JSON text. `trained` is true for the
        first occurrence of a turn that ended by itself.
    """
    for turn in iter_turns(paths, images=images, **options):
        yield turn_to_request(turn)


def turn_to_request(turn: Turn) -> dict[str, Any]:
    """Return the exported object of one turn."""
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

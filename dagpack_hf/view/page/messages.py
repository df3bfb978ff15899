"""Which message of a conversation a piece of its rendered context belongs to.

A chat template writes messages in their order, each with its own text in it, so the text of the next message is looked
for where the last one ended. A chunk begins with a control token (see `render.chunks`), so what a template writes
before the text of a message is its head; between two messages in one chunk it goes to the first. A chunk that is a
generation prompt begins the next turn. A message whose text is not found, since the template leaves it out or writes
it in another way, is passed over: its tokens go to the message before it. This is for showing only; what is trained is
known exactly.

Cost: a few searches for each message, in the chunks that are new.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from dagpack_hf.render.template import calls_of, text_of

_LOOK_AHEAD = 6
_START = 400
_SURE = 24
"""Characters that a text must have to be taken for that of a message further on."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Piece(NamedTuple):
    """A piece of a chunk: where it begins, and the message it belongs to."""

    start: int
    message: int


class MessageFinder:
    """Finds the messages of one conversation in the chunks of its contexts.

    Args:
        messages: The messages, in chat form.
        prompts: Chunks that the contexts of turns end in.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], prompts: Collection[str] = ()) -> None:
        self._turns = [message.get("role") == "assistant" for message in messages]
        self._prompts = prompts
        self._needles = [_needles(message) for message in messages]

    def pieces(self, chunk: str, current: int, end: int) -> list[Piece]:
        """Cut a chunk by messages.

        Args:
            chunk: The next chunk of a context.
            current: The message that the chunk before it belongs to, -1 at the beginning.
            end: One past the last message of the context.

        Returns:
            Pieces in order, the first from 0 on. A chunk at the very beginning in which no text is found belongs to
            message 0.
        """
        found: list[Piece] = []
        at, last = 0, current
        while (hit := self._next(chunk, at, last, end)) is not None:
            start, at, last = hit
            found.append(Piece(start if found else 0, last))
        if found:
            return found
        ahead = range(current + 1, min(end + 1, len(self._turns))) if chunk in self._prompts else ()
        return [Piece(0, next((message for message in ahead if self._turns[message]), max(current, 0)))]

    def _next(self, chunk: str, at: int, last: int, end: int) -> tuple[int, int, int] | None:
        """Where the text of a later message begins and ends, and which it is."""
        passed_text = False
        for message in range(last + 1, min(last + 1 + _LOOK_AHEAD, end)):
            hits = []
            for needle in self._needles[message]:
                if passed_text and len(needle) < _SURE:
                    continue
                start = chunk.find(needle[:_START], at)
                if start >= 0:
                    whole = chunk.startswith(needle, start)
                    hits.append((start, start + len(needle) if whole else len(chunk)))
            if hits:
                return min(hits)[0], max(stop for _, stop in hits), message
            passed_text |= bool(self._needles[message])
        return None


def _needles(message: dict[str, Any]) -> list[str]:
    """Texts of a message, any of which shows where it is."""
    texts = [text_of(message).strip()]
    texts += [message[key].strip() for key in _REASONING if isinstance(message.get(key), str)]
    for call in calls_of(message)[:1]:
        texts.append(str(call.get("name") or ""))
    escaped = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
    return [text for text in dict.fromkeys([*texts, *escaped]) if text]

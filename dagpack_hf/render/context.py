"""Contexts of the growing beginnings of a conversation, from one turn to the next.

Many templates render a message differently once others follow: earlier thinking is dropped at the next user message,
say. So each turn's context is rendered anew, in one of two ways.

* In full: the template renders all messages. Exact by definition, and a conversation of n turns costs n^2 messages.
* In windows: the template renders only what a change can reach, and the text before it is kept.

How a window works. A window is the messages H that every context begins with (system and first user message), a
*witness*, and the messages from some point s on. The witness is a short exchange that stands for all of the history
between H and s: it thinks, calls a tool and speaks if the history does, and ends as the history before s ends. When
the window is made, the text behind the witness must be the end of the known context; what comes before is the kept
text. From then on the window is rendered in place of the context, and used only while H and the witness read exactly
as they did: if a new message changes how history is rendered, it changes the witness, and the context is rendered in
full again.

Two windows are open at a time: one from the last user message on, for the moment when the next user message (or a
final answer) changes what came after it, and one from a recent round of tool calls on, for the many turns in between.
That this is right is a property of the template. `probe` renders synthetic conversations both ways before windows are
used at all, and `ConversationText` compares with the full rendering while it runs.

Cost. Two renderings of a window for each turn, and one in full whenever history has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dagpack_hf.render.template import ChatTemplate, Message, RenderError, Tools, calls_of, text_of, thought_of

WINDOWS = ("rounds", "users")
"""Which windows a template allows, the most first: from any round of tool calls on, or from user messages on only."""

_MARK = "dagpack witness 7c1e"
_ROUND_LIMIT = 16
"""Messages of a window, beyond which it is opened again nearer to the end."""
_ROUND_LENGTH = 6
"""Messages that a window on rounds begins with."""


@dataclass(frozen=True)
class ContextUpdate:
    """A context as the one before it, with another end.

    Args:
        keep: characters that are kept of the context before.
        text: what comes after them.
        windowed: messages that the template rendered for it; 0 if it rendered all of them.
    """

    keep: int
    text: str
    windowed: int = 0


@dataclass(frozen=True)
class _Window:
    """A place from which the template renders as it does in the whole context.

    Args:
        start: index of the first message in the window.
        base: characters of the context before that message.
        before: messages that stand for those before.
        head: their text, as it must stay.
    """

    start: int
    base: int
    before: list[Message]
    head: str


class ContextText:
    """Contexts of one conversation under fixed variables.

    Args:
        template: the chat template.
        messages: the prepared messages of the conversation.
        tools: JSON schemas of the tools that were offered.
        windows: `None` (all in full) or one of `WINDOWS`.
        calls: whether the template renders tool calls and results, for the witness.
        date: what the template's clock shows.
        variables: variables of the template.
        generation_prompt: whether contexts end with what asks the model for its turn.

    Attributes:
        end: index of the message whose context was rendered last, -1 if none was.
        windowed: whether that was rendered in a window.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Tools,
        *,
        windows: str | None = None,
        calls: bool = True,
        date: datetime | None = None,
        variables: dict[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> None:
        self.messages = messages
        self.end = -1
        self.windowed = False
        self._template = template
        self._tools = tools
        self._calls = calls
        self._windows = windows
        self._options = {"date": date, **(variables or {})}
        self._full = ""
        self._generation_prompt = generation_prompt
        self._users: _Window | None = None
        self._rounds: _Window | None = None
        self._current: _Window | None = None
        head = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        while head < len(messages) and messages[head].get("role") == "user":
            head += 1
        self._head = head
        self._first_call = _first(messages, calls_of)
        self._first_thought = _first(messages, thought_of)
        self._first_speech = _first(messages, lambda message: calls_of(message) and text_of(message).strip())

    def render(self, end: int) -> ContextUpdate:
        """Render the context of `messages[end]`; `end` must not fall from call to call.

        Raises:
            RenderError: the template fails.
        """
        new = self.messages[max(self.end, 0) : end]
        if any(not _within_round(message) for message in new):
            self._rounds = None
        update = self._through_window(end) or self._in_full(end)
        self.end, self.windowed = end, update.windowed > 0
        if self._windows is not None:
            self._open_windows(update)
        return update

    def completion(self, end: int, context: ContextUpdate) -> tuple[str, str]:
        """Render the context of `messages[end]` with that message, from where the context was rendered.

        Args:
            end: index of the turn.
            context: what `render` gave for it.

        Returns:
            The rendering without the turn, and with it. If the second begins with the first, the turn is what follows.
        """
        window = self._current
        if window is None:
            return self._full, self._render(self.messages[: end + 1])
        whole = self._render([*window.before, *self.messages[window.start : end + 1]])
        return window.head + context.text, whole

    def full(self, end: int) -> str:
        """Render the context of `messages[end]` from all messages, whatever was rendered before."""
        if not end and not self._generation_prompt:
            return ""
        return self._render(self.messages[:end], self._generation_prompt)

    def full_completion(self, end: int) -> str:
        """Render all messages up to `messages[end]`."""
        return self._render(self.messages[: end + 1])

    def _render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        return self._template.render(messages, self._tools, generation_prompt=generation_prompt, **self._options)

    def _in_full(self, end: int) -> ContextUpdate:
        text = self.full(end)
        keep = common_prefix(self._full, text)
        self._users = self._rounds = self._current = None
        self._full = text
        return ContextUpdate(keep, text[keep:])

    def _through_window(self, end: int) -> ContextUpdate | None:
        for window in (self._rounds, self._users):
            if window is None:
                continue
            messages = [*window.before, *self.messages[window.start : end]]
            try:
                text = self._render(messages, self._generation_prompt)
            except RenderError:  # in full it may not fail
                continue
            if text.startswith(window.head):
                self._current, self._full = window, ""
                return ContextUpdate(window.base, text[len(window.head) :], len(messages))
        return None

    def _open_windows(self, update: ContextUpdate) -> None:
        """Open windows that the next turns can use, where the text at hand proves them."""
        if self._current is None:
            update = ContextUpdate(0, self._full)
        user = self._last_user_start()
        if user is not None and (self._users is None or self._users.start < user):
            self._users = self._open(user, update) or self._users
        open_from = self._rounds or self._users
        start = 0 if open_from is None else open_from.start
        if self._windows == "rounds" and self.end - start > _ROUND_LIMIT:
            round_start = self._round_start(self.end - _ROUND_LENGTH)
            if round_start is not None and round_start > max(start, user or 0):
                self._rounds = self._open(round_start, update) or self._rounds

    def _open(self, start: int, update: ContextUpdate) -> _Window | None:
        """A window from `start` on, if its rendering ends as the known text does."""
        before = self._before(start)
        if before is None:
            return None
        try:
            text = self._render([*before, *self.messages[start : self.end]], self._generation_prompt)
        except RenderError:
            return None
        at = text.find(_MARK)
        if at < 0:
            return None
        at += len(_MARK)
        if not update.text.endswith(text[at:]):
            return None
        return _Window(start, update.keep + len(update.text) - (len(text) - at), before, text[:at])

    def _before(self, start: int) -> list[Message] | None:
        """Head and witness, ending as the history before `start` ends."""
        last = self.messages[start - 1]
        thought = _THOUGHT if self._first_thought < start else {}
        witness = self._witness_rounds(start, thought) if self._calls and self._first_call < start else []
        if last.get("role") == "assistant" and not last.get("tool_calls"):
            witness.append({"role": "assistant", "content": _MARK, **thought})
        elif last.get("role") == "tool" and witness:
            witness[-1] = {**witness[-1], "content": _MARK}
        else:
            return None
        return [*self.messages[: self._head], *witness]

    def _witness_rounds(self, start: int, thought: Message) -> list[Message]:
        """Rounds of the tool that was called first: one that thinks, and one that speaks, if the history has such."""
        name = calls_of(self.messages[self._first_call])[0].get("name")
        call = {"id": "witness01", "type": "function", "function": {"name": name, "arguments": {}}}
        result = {"role": "tool", "content": "seen", "tool_call_id": "witness01", "name": name}
        turns = [{"content": "", **thought}] if thought or self._first_speech >= start else []
        turns += [{"content": "Let me look."}] if self._first_speech < start else []
        return [message for turn in turns for message in ({"role": "assistant", **turn, "tool_calls": [call]}, result)]

    def _last_user_start(self) -> int | None:
        """Start of the last run of user messages behind the head."""
        at = self.end - 1
        while at >= self._head and self.messages[at].get("role") != "user":
            at -= 1
        if at < self._head:
            return None
        while self.messages[at - 1].get("role") == "user":
            at -= 1
        return at

    def _round_start(self, latest: int) -> int | None:
        """The last assistant message not behind `latest` that follows a tool result."""
        for at in range(latest, self._head, -1):
            if self.messages[at].get("role") == "assistant" and self.messages[at - 1].get("role") == "tool":
                return at
        return None


_THOUGHT = {"reasoning_content": "look", "thinking": "look"}


def _first(messages: Sequence[Message], has: Callable[[Message], Any]) -> int:
    """Index of the first message that has something, their number if none has."""
    return next((index for index, message in enumerate(messages) if has(message)), len(messages))


def _within_round(message: Message) -> bool:
    """Whether the message goes on with a round of tool calls."""
    return message.get("role") == "tool" or (message.get("role") == "assistant" and bool(calls_of(message)))


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix of two texts, compared in blocks."""
    limit = min(len(a), len(b))
    at, block = 0, 1 << 16
    while at < limit and a[at : at + block] == b[at : at + block]:
        at += block
    low, high = min(at, limit), min(at + block, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

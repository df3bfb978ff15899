"""Turns as text: what the model is fed, and what it has to write behind it.

With G the rendered context including the generation prompt and F the rendering with the turn, the turn is
C = F[len(G):], up to and including its stop token: without the scaffold before it, which the server writes, and
without what the template writes behind it, which nobody samples.

Where F does not begin with G (a template may drop earlier thinking as soon as the final answer is there), C is taken
from the same turn after a single question, and must then be the end of F as well.

Cost. Two renderings for each turn (see `context`), and a search for the turn's own strings in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dagpack_hf.render.arrival import check_arrival, lost_part, thought_end, turn_parts
from dagpack_hf.render.chunks import ChunkPath, ChunkTrie
from dagpack_hf.render.context import ContextText, ContextUpdate, common_prefix
from dagpack_hf.render.probe import Ending, TemplateFacts
from dagpack_hf.render.template import ChatTemplate, Message, RenderError, Tools, calls_of, text_of, thought_of

_CHECKED_SHARE = 0.2
"""Messages that are rendered only to check windows, as a share of those that windows render."""


class WindowError(Exception):
    """A context in windows is not what the template renders in full."""


@dataclass(frozen=True)
class TurnText:
    """One turn behind its context.

    Args:
        index: index of the message.
        context: node of the context in the conversation's `ChunkTrie`; -1 if the context is empty.
        last: last chunk of the context, with which the turn is tokenised.
        text: what the model has to write, the stop token last.
        thought: characters of `text` up to the end of the thinking, 0 if there is none.
        variables: variables of the template that were chosen for this turn.
        spliced: whether the text was taken from the same turn after a single question.
    """

    index: int
    context: int
    last: str
    text: str
    thought: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    spliced: bool = False


class ConversationText:
    """The turns of one conversation, in their order.

    Args:
        template: the chat template.
        facts: what the probe found out about it.
        messages: the prepared messages.
        tools: JSON schemas of the tools that were offered.
        trie: takes the contexts.
        date: what the template's clock shows.
        windows: whether contexts may be rendered in windows.

    Attributes:
        checked: contexts that were compared with their full rendering.
        windowed: contexts that were rendered in windows.
    """

    def __init__(
        self,
        template: ChatTemplate,
        facts: TemplateFacts,
        messages: Sequence[Message],
        tools: Tools,
        trie: ChunkTrie,
        *,
        date: datetime | None = None,
        windows: bool = True,
    ) -> None:
        self.messages = messages
        self.trie = trie
        self.checked = 0
        self.windowed = 0
        self._template = template
        self._facts = facts
        self._tools = tools
        self._date = date
        self._calls = not {"call", "tool result"} & facts.context_losses.keys()
        # A window stands for messages of the kinds that its witness has.
        known = self._calls or not any(message.get("role") == "tool" or calls_of(message) for message in messages)
        self._windows = facts.windows if windows and known else None
        self._contexts: dict[tuple[Any, ...], tuple[ContextText, ChunkPath]] = {}
        self._rendered = 0.0

    def turn(self, index: int, *, check: bool = False) -> TurnText:
        """Render the message `index` in its context. Indices must rise from call to call.

        Args:
            index: index of the message. One that no assistant wrote is rendered as it follows in the conversation.
            check: compare the context with its full rendering if it was rendered in a window. Some are compared in any
                case.

        Raises:
            RenderError: the turn cannot be rendered as at inference.
            WindowError: a comparison failed; render the conversation again without windows.
        """
        message = self.messages[index]
        if message.get("role") != "assistant":
            return self._other(index)
        if self._facts.refused is not None:
            reason, detail = self._facts.refused
            raise RenderError(reason, f"{detail}. So it is with every turn under this template")
        ending = self._facts.endings.get(bool(calls_of(message)))
        if ending is None:
            raise lost_part("call", self._facts.turn_losses.get("call", ""))
        choices = self._choices(message)
        for number, variables in enumerate(choices, 1):
            context, path = self._context(variables)
            update = self._advance(context, path, index)
            before, whole = self._completion(context, update, index)
            goes_on = whole.startswith(before)
            if goes_on or number == len(choices):
                break
            self._check(index, context, path, update, None, force=True)  # it may be the window that is at fault
        text = whole[len(before) :] if goes_on else None
        try:
            if text is None:
                text = self._splice(index, path.last, whole, variables)
            turn = self._behind(index, path, text, ending, variables, spliced=not goes_on)
        except RenderError:
            if not turn_parts(message) & self._facts.turn_losses.keys():
                self._check(index, context, path, update, text, force=True)  # here too
            raise
        self._check(index, context, path, update, text, force=check)
        return turn

    def finish(self) -> None:
        """Compare the last contexts that were rendered in windows, one for each choice of variables.

        Raises:
            WindowError: a comparison failed.
        """
        for context, path in self._contexts.values():
            if context.windowed:
                self._compare(context, path, context.end)

    def _advance(self, context: ContextText, path: ChunkPath, index: int) -> ContextUpdate:
        """Go on to the context of a message. When a window has served its time, its last context is compared."""
        end, windowed = context.end, context.windowed
        update = context.render(index)
        if windowed and not update.windowed:
            self._compare(context, path, end)
        path.replace(update.keep, update.text)
        return update

    def _completion(self, context: ContextText, update: ContextUpdate, index: int) -> tuple[str, str]:
        """The rendering without the turn and with it; if only the window fails, that is the window's fault."""
        try:
            return context.completion(index, update)
        except RenderError:
            if not update.windowed:
                raise
            context.full_completion(index)
            raise WindowError from None

    def _compare(self, context: ContextText, path: ChunkPath, end: int) -> None:
        self.checked += 1
        try:
            full = context.full(end)
        except RenderError as error:
            raise WindowError from error
        if path.text() != full:
            raise WindowError

    def _behind(
        self, index: int, path: ChunkPath, text: str, ending: Ending, variables: dict[str, Any], *, spliced: bool
    ) -> TurnText:
        """The turn behind its context, up to its stop token, if all of it is there."""
        if not text.endswith(ending.stop + ending.rest if ending.written else ending.rest):
            raise RenderError(
                "the turn does not end on its stop token", f"it ends in {text[-40:]!r}, not in {ending.stop!r}"
            )
        text = text[: len(text) - len(ending.rest)] + ("" if ending.written else ending.stop)
        message = self.messages[index]
        check_arrival(text, message)
        return TurnText(index, path.node, path.last, text, thought_end(text, message), variables, spliced)

    def _choices(self, message: Message) -> list[dict[str, Any]]:
        """Variables to try: thinking switched as the turn has it, or else left to the template."""
        switch = self._facts.switch
        if switch is None or switch in self._template.variables:
            return [{}]
        return [{switch: bool(thought_of(message).strip())}, {}]

    def _context(self, variables: dict[str, Any], *kind: str) -> tuple[ContextText, ChunkPath]:
        key = (*sorted(variables.items()), *kind)
        if key not in self._contexts:
            context = ContextText(
                self._template,
                self.messages,
                self._tools,
                windows=self._windows,
                calls=self._calls,
                date=self._date,
                variables=variables,
                generation_prompt=not kind,
            )
            self._contexts[key] = context, ChunkPath(self.trie)
        return self._contexts[key]

    def _check(
        self,
        index: int,
        context: ContextText,
        path: ChunkPath,
        update: ContextUpdate,
        text: str | None,
        *,
        force: bool,
    ) -> None:
        """Compare with the full rendering: always if `force`, else as often as it costs little."""
        if not update.windowed:
            return
        self.windowed += 1
        self._rendered += _CHECKED_SHARE * update.windowed
        if not force and self._rendered < index:
            return
        self._rendered -= index
        self._compare(context, path, index)
        before, whole = path.text(), context.full_completion(index)
        if whole.startswith(before) and whole[len(before) :] != text:
            raise WindowError

    def _splice(self, index: int, last: str, whole: str, variables: dict[str, Any]) -> str:
        """Text of a turn after a single question, if it is also the end of the rendering in its place."""
        start = [message for message in self.messages[:1] if message.get("role") == "system"]
        start = [*start, {"role": "user", "content": "Hello"}]
        options: dict[str, Any] = {"date": self._date, **variables}
        asked = self._template.render(start, self._tools, **options)
        before = self._template.render(start, self._tools, generation_prompt=True, **options)
        text = self._template.render([*start, self.messages[index]], self._tools, **options)
        prompt = before[common_prefix(asked, before) :]
        if text.startswith(before) and last.endswith(prompt) and whole.endswith(prompt + text[len(before) :]):
            return text[len(before) :]
        raise RenderError(
            "the chat template does not continue its own generation prompt",
            f"the context ends in {last[-60:]!r}, the rendering with the turn in {whole[-60:]!r}",
        )

    def _other(self, index: int) -> TurnText:
        """A message that no assistant wrote, at the end of the rendering with it."""
        context, path = self._context({}, "other")
        self._advance(context, path, index + 1)
        own = self._own_text(index)
        if not path.endswith(own):
            raise RenderError(
                "the chat template writes the message in another way", f"{own[:60]!r} is not the end of the rendering"
            )
        if text_of(self.messages[index]).strip() not in own:
            raise lost_part("text", "the template writes another text, or leaves it out")
        path = path.shortened(len(own))
        return TurnText(index, path.node, path.last, own)

    def _own_text(self, index: int) -> str:
        """What the template writes for a message, seen in a small context that ends as its own does."""
        before = _small_context(self.messages[:index])
        options: dict[str, Any] = {"date": self._date}
        whole = self._template.render([*before, self.messages[index]], self._tools, **options)
        if not before:
            return whole
        without = self._template.render(before, self._tools, **options)
        ends = [text[text.rfind(_MARK) :] for text in (without, whole)]
        return ends[1][common_prefix(*ends) :]


_MARK = "before the message"


def _small_context(messages: Sequence[Message]) -> list[Message]:
    """A few messages that end as a conversation does, a mark in the last; none for an empty conversation."""
    if not messages:
        return []
    last = messages[-1]
    if last.get("role") in ("system", "developer", "user"):
        return [{"role": last["role"], "content": _MARK}]
    call = {"id": "contextid", "type": "function", "function": {"name": "look", "arguments": {"at": _MARK}}}
    asked = {"role": "user", "content": "Hello"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    if last.get("role") == "tool":
        return [asked, called, {"role": "tool", "content": _MARK, "tool_call_id": "contextid", "name": "look"}]
    return [asked, called if calls_of(last) else {"role": "assistant", "content": _MARK}]

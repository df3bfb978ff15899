"""One conversation to one token tree: template, tokenizer and options put together.

Design. `ConversationRenderer` holds what conversations share: the compiled template, what the probe found out about it
and the tokenizer's memory of chunks. A conversation is text first (`turn`), then tokens (`tree`). Where a comparison
shows that contexts in windows are not what the template renders in full, the conversation is rendered again in full,
and so are those that come after it.

Cost. That of the distinct text: on a session of 431 turns 1/370 of rendering and tokenising every turn, 1/56 without
windows (`benchmarks/render.py`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dagpack_hf.render.arrival import context_parts
from dagpack_hf.render.chunks import ChunkTrie
from dagpack_hf.render.control import ControlTokens, unused_character
from dagpack_hf.render.encoder import ChunkEncoder
from dagpack_hf.render.options import RenderOptions, parse_date, template_source
from dagpack_hf.render.probe import TemplateFacts, probe_template
from dagpack_hf.render.template import (
    ChatTemplate,
    Message,
    RenderError,
    Tools,
    prepare_messages,
    text_of,
    without_surrogates,
)
from dagpack_hf.render.tree import ConversationTokens
from dagpack_hf.render.turn import ConversationText, TurnText, WindowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class RenderCounts:
    """What happened to the turns of some conversations. All are counts, by name where there are several.

    Args:
        turns: turns that were rendered.
        skipped: turns that were not, by reason.
        examples: for each reason the first turn it happened to.
        variables: turns by the template's variables that were chosen for them.
        context_losses: turns by what the template leaves out of their context.
        control_tokens: control tokens in plain text.
        windowed: contexts that were rendered in windows.
        checked: of those the ones that were compared with the full rendering.
        fallbacks: conversations that were rendered in full because a comparison failed.
    """

    turns: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    variables: Counter[str] = field(default_factory=Counter)
    context_losses: Counter[str] = field(default_factory=Counter)
    control_tokens: int = 0
    windowed: int = 0
    checked: int = 0
    fallbacks: int = 0


@dataclass(frozen=True)
class _Template:
    """A template with what is known about it."""

    template: ChatTemplate
    facts: TemplateFacts
    control: ControlTokens
    cuts: re.Pattern[str] | None


class ConversationRenderer:
    """Renders conversations with one tokenizer and one set of options.

    Args:
        tokenizer: a tokenizer with a chat template.
        options: what to render.

    Attributes:
        encoder: the tokenizer with its memory of chunks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: RenderOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._sources: dict[bool, str] = {}
        self._templates: dict[str, _Template] = {}
        self._windows = options.windows

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def encoder(self) -> ChunkEncoder:
        """The tokenizer with its memory of chunks."""
        return ChunkEncoder(self.tokenizer)

    def facts(self, has_tools: bool = True) -> TemplateFacts:
        """What the probe found out about the template for conversations with or without tools."""
        return self._template(has_tools).facts

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        trained: Sequence[bool] | None = None,
        *,
        variables: dict[str, Any] | None = None,
        timestamp: str | None = None,
        place: str = "",
        progress: Callable[[], None] | None = None,
    ) -> tuple[ConversationTokens, RenderCounts]:
        """Render the turns of a conversation.

        Args:
            messages: the conversation.
            tools: JSON schemas of the tools that were offered.
            trained: for each message whether it is a target if its role is; all are if not given.
            variables: further variables of the template, for this conversation only.
            timestamp: ISO 8601 time that the template's clock shows if the options name no date.
            place: names the conversation in errors.
            progress: called after every turn.

        Returns:
            The turns' tokens and what happened to them.

        Raises:
            ValueError: `trained` is not aligned with the messages, or the timestamp is no time.
            RenderError: a turn cannot be rendered and `on_error` is `"raise"`.
        """
        known = self._template(bool(tools))
        counts = RenderCounts()
        prepared = prepare_messages(messages, thinking=self.options.thinking == "keep")
        if not known.facts.parts:
            prepared = [_joined(message) for message in prepared]
        tools = without_surrogates(tools)
        counts.control_tokens = known.control.count(list(map(_own_texts, prepared))) + known.control.count(tools)
        if self.options.control_tokens == "neutralize":
            mark = unused_character([prepared, tools])
            prepared, tools = known.control.neutralize(prepared, mark), known.control.neutralize(tools, mark)
            self.encoder.set_mark(mark)
        template = known.template
        if variables:
            template = ChatTemplate(template.source, {**template.variables, **variables})
        date = self.options.date or timestamp

        def text(windows: bool) -> ConversationText:
            return ConversationText(
                template,
                known.facts,
                prepared,
                tools,
                ChunkTrie(known.cuts),
                date=parse_date(date) if date else None,
                windows=windows,
            )

        targets = self._targets(prepared, trained, place)
        rendering = text(self._windows)
        try:
            turns = self._turns(rendering, targets, counts, place, progress)
        except WindowError:
            self._windows = False
            counts = RenderCounts(control_tokens=counts.control_tokens, fallbacks=1)
            rendering = text(False)
            turns = self._turns(rendering, targets, counts, place, None)
        self._refuse_escaped_marks(rendering.trie)
        lost = context_parts(prepared, tools, known.facts)
        counts.context_losses.update(part for turn in turns for part in lost[turn.index])
        counts.windowed, counts.checked = rendering.windowed, rendering.checked
        tokens = ConversationTokens(
            rendering.trie, turns, self.encoder, loss_on_thinking=self.options.loss_on_thinking
        )
        return tokens, counts

    def _turns(
        self,
        rendering: ConversationText,
        targets: Sequence[int],
        counts: RenderCounts,
        place: str,
        progress: Callable[[], None] | None,
    ) -> list[TurnText]:
        turns = []
        for index in targets:
            try:
                turn = rendering.turn(index, check=index == targets[-1])
            except RenderError as error:
                self._skip(error, counts, f"{place}message {index}")
            else:
                turns.append(turn)
                counts.variables.update(f"{name}={value}" for name, value in turn.variables.items())
            if progress is not None:
                progress()
        rendering.finish()
        counts.turns = len(turns)
        return turns

    def _skip(self, error: RenderError, counts: RenderCounts, place: str) -> None:
        if self.options.on_error == "raise":
            raise RenderError(
                error.reason, f'{error.detail} ({place}; on_error="skip" leaves such turns out and counts them)'
            ) from error
        counts.skipped[error.reason] += 1
        counts.examples.setdefault(error.reason, f"{place}: {error.detail}")

    def _refuse_escaped_marks(self, trie: ChunkTrie) -> None:
        """Refuse a template that writes the mark of control tokens in another way.

        Raises:
            ValueError: it does.
        """
        if self.encoder.mark is None:
            return
        escaped = json.dumps(self.encoder.mark)[1:-1]
        if any(escaped in chunk for chunk in trie.chunks):
            raise ValueError(
                'control_tokens="neutralize" cannot be used with this chat template: it escapes characters beyond '
                'ASCII, the marks of control tokens among them. Use control_tokens="keep".'
            )

    def _targets(self, messages: Sequence[Message], trained: Sequence[bool] | None, place: str) -> list[int]:
        if trained is not None and len(trained) != len(messages):
            raise ValueError(
                f"{place or 'messages: '}{len(messages)} messages but {len(trained)} values in `trained`; they must "
                "be aligned."
            )
        return [
            index
            for index, message in enumerate(messages)
            if message.get("role") in self.options.loss_roles
            and (trained is None or trained[index] or message["role"] != "assistant")
        ]

    def _template(self, has_tools: bool) -> _Template:
        if has_tools not in self._sources:
            self._sources[has_tools] = template_source(self.tokenizer, self.options.template, has_tools)
        source = self._sources[has_tools]
        if source not in self._templates:
            variables = {**self.tokenizer.special_tokens_map, **self.options.chat_template_kwargs}
            template = ChatTemplate(source, variables)
            facts = probe_template(template, list(self.tokenizer.added_tokens_encoder))
            control = ControlTokens(self.tokenizer, facts.texts)
            self._templates[source] = _Template(template, facts, control, self.encoder.pattern(facts.texts))
        return self._templates[source]


def _own_texts(message: Message) -> Message:
    """A prepared message without the second name of its thinking."""
    if "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key != "thinking"}


def _joined(message: Message) -> Message:
    """A message whose content is text, for templates that cannot read a list of parts."""
    return {**message, "content": text_of(message)} if isinstance(message.get("content"), list) else message

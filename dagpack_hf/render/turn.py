"""One trained turn as tokens: what the model is fed, and what it has to write.

With G the rendered context including the generation prompt and F the rendered context including the turn, the turn is
C = F[len(G):]. Its targets are the tokens of C up to and including the stop token: not the scaffold before them, which
the server writes, nor the newline after it, which nobody samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jinja2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


class RenderError(ValueError):
    """A turn that cannot be rendered as at inference. `reason` is short and the same for turns that fail alike."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class TurnTokens:
    """Token ids of one turn.

    Args:
        context_ids: what the model is fed, generation prompt included.
        target_ids: what it has to write, the stop token last.
    """

    context_ids: list[int]
    target_ids: list[int]


def render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    turn: int,
    *,
    tools: list[dict[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> TurnTokens:
    """Tokens of the assistant message `messages[turn]` in the context that comes before it.

    The context is tokenised on its own, as a server does, and the turn in its place after it; where the two would melt
    into one token at the border, the turn is tokenised on its own too.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: the conversation; what comes after `turn` is not looked at.
        turn: index of the assistant message to train.
        tools: JSON schemas of the tools that were offered.
        chat_template: a template to use instead of the tokenizer's own.
        chat_template_kwargs: further variables of the template.

    Raises:
        RenderError: the template fails, does not continue its own generation prompt, or ends the turn without a stop
            token.
    """
    variables = {"tools": tools, "chat_template": chat_template, **(chat_template_kwargs or {})}
    try:
        context = _render(tokenizer, messages[:turn], add_generation_prompt=True, **variables)
        whole = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # A template is a program: on values that it does not expect, arguments that are null say, it fails as one.
        raise RenderError("the chat template raised an error", str(error)) from error
    if not whole.startswith(context):
        same = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(whole))
        raise RenderError(
            "the chat template does not continue its own generation prompt",
            f"the context ends in {context[-60:]!r}, the turn has {whole[same : same + 60]!r} from character {same} "
            "on",
        )
    context_ids = _encode(tokenizer, context)
    whole_ids = _encode(tokenizer, whole)
    if whole_ids[: len(context_ids)] == context_ids:
        turn_ids = whole_ids[len(context_ids) :]
    else:
        turn_ids = _encode(tokenizer, whole[len(context) :])
    return TurnTokens(context_ids, turn_ids[: _stop_position(tokenizer, turn_ids) + 1])


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **variables: Any) -> str:
    return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, **variables))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _stop_position(tokenizer: PreTrainedTokenizerBase, turn_ids: list[int]) -> int:
    """Position of the last special token, after which only white space may come."""
    special = set(tokenizer.all_special_ids)
    last = next((i for i in range(len(turn_ids) - 1, -1, -1) if turn_ids[i] in special), -1)
    rest = str(tokenizer.decode(turn_ids[last + 1 :]))
    if last < 0 or rest.strip():
        raise RenderError(
            "the turn does not end on a stop token",
            f"it ends in {tokenizer.decode(turn_ids[-20:])!r}. The template must close an assistant message with a "
            "special token of the tokenizer",
        )
    return last

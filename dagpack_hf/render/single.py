"""One turn, or one template, looked at by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.options import RenderOptions
from dagpack_hf.render.probe import TemplateFacts
from dagpack_hf.render.template import Message
from dagpack_hf.render.tree import TurnTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    turn: int,
    *,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> TurnTokens:
    """Tokens of the message `messages[turn]` in the context that comes before it.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the conversation; what comes after `turn` is not looked at.
        turn: index of the message to train.
        tools: JSON schemas of the tools that were offered.
        **options: the fields of `RenderOptions`.

    Raises:
        RenderError: the turn cannot be rendered as at inference.
    """
    renderer = ConversationRenderer(tokenizer, RenderOptions(**options))
    trained = [index == turn for index in range(turn + 1)]
    tokens, _ = renderer.render(messages[: turn + 1], tools, trained)
    return tokens.turn(0)


def probe_chat_template(tokenizer: PreTrainedTokenizerBase, *, tools: bool = True, **options: Any) -> TemplateFacts:
    """Find out what a tokenizer's chat template does with turns and contexts.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: whether to take the template for conversations with tools, if the tokenizer has two.
        **options: the fields of `RenderOptions`.

    Returns:
        The facts; as text, the verdict on the template.
    """
    return ConversationRenderer(tokenizer, RenderOptions(**options)).facts(tools)

"""Rendering: chat template and tokenizer turn conversations into token trees.

A template may render a message differently once others follow (many strip earlier thinking), so a conversation is not
one token sequence but one for each trained turn: the context as the template renders it at inference, with the
generation prompt, and then the turn. The sequences of a conversation become one token tree, which `TokenForest` merges
with the others.

Cost: each turn renders and tokenises its whole context, which is quadratic in the length of a conversation.
"""

from dagpack_hf.render.tokenize import RenderReport, tokenize_conversations
from dagpack_hf.render.turn import RenderError, TurnTokens, render_turn

__all__ = ["RenderError", "RenderReport", "TurnTokens", "render_turn", "tokenize_conversations"]

"""Rendering: chat template and tokenizer turn conversations into token trees.

A template may render a message differently once others follow (many strip earlier thinking), so a conversation is not
one token sequence but one for each trained turn: the context as the template renders it at inference, with the
generation prompt, and then the turn. The sequences of a conversation become one token tree, which `TokenForest` merges
with the others.

It goes in two steps, text first: `template` renders, `probe` finds out what the template does, `context` renders
contexts from turn to turn and `turn` what comes behind them; then `chunks` and `tree` make tokens of the distinct
text. `conversation` puts them together, `tokenize` applies them to data sets.

Cost: linear in the distinct text, at the speed of the tokenizer.
"""

from dagpack_hf.render.options import RenderOptions
from dagpack_hf.render.report import RenderReport
from dagpack_hf.render.rows import conversation_columns
from dagpack_hf.render.single import probe_chat_template, render_turn
from dagpack_hf.render.template import RenderError
from dagpack_hf.render.tokenize import ConversationTokenizer, tokenize_conversations
from dagpack_hf.render.tree import TurnTokens

__all__ = [
    "ConversationTokenizer",
    "RenderError",
    "RenderOptions",
    "RenderReport",
    "TurnTokens",
    "conversation_columns",
    "probe_chat_template",
    "render_turn",
    "tokenize_conversations",
]

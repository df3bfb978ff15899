"""Control tokens in plain text: a tool result that holds `<|im_end|>`, say.

A server that renders such a text makes a control token of it, and the model then sees a turn end where none ended.
They are always counted. By default the text stays as it is, as the server had it; neutralised, the same characters
become ordinary tokens.

Cost. One search of a pattern in all texts of a conversation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagpack_hf.render.chunks import BREAK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """The control tokens of a tokenizer with a template.

    Those are the special tokens, and the other added tokens that the template writes, white space not among them.

    Args:
        tokenizer: the tokenizer.
        template_texts: texts in which the template's own tokens occur.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_texts: str) -> None:
        added = tokenizer.added_tokens_decoder.values()
        texts = {
            token.content
            for token in added
            if token.content.strip() and (token.special or token.content in template_texts)
        }
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def count(self, value: Any) -> int:
        """Number of control tokens in all strings of a JSON value."""
        if isinstance(value, str):
            return len(self._pattern.findall(value))
        if isinstance(value, dict):
            return sum(map(self.count, value)) + sum(map(self.count, value.values()))
        return sum(map(self.count, value)) if isinstance(value, list) else 0

    def neutralize(self, value: Any) -> Any:
        """Mark each control token in the strings of a JSON value, so that it is tokenised as text.

        The mark stands behind the first character. Marks that were there before are removed. Keys stay as they are.
        """
        if isinstance(value, str):
            clean = value.replace(BREAK, "") if BREAK in value else value
            return self._pattern.sub(lambda match: f"{match[0][0]}{BREAK}{match[0][1:]}", clean)
        if isinstance(value, dict):
            return {key: self.neutralize(item) for key, item in value.items()}
        return [self.neutralize(item) for item in value] if isinstance(value, list) else value

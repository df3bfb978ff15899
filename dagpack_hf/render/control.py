"""Control tokens in plain text: a tool result that holds `<|im_end|>`, say.

A server that renders such a text makes a control token of it, and the model then sees a turn end where none ended.
They are always counted. By default the text stays as it is, as the server had it; neutralised, the same characters
become ordinary tokens.

Cost. One search of a pattern in all texts of a conversation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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

    def neutralize(self, value: Any, mark: str) -> Any:
        """Mark each control token in the strings of a JSON value, so that it is tokenised as text.

        Args:
            value: the JSON value. Keys stay as they are.
            mark: a character that does not occur in it. It comes behind the first character of each control token, and
                the tokenizer's texts are divided there (see `ChunkEncoder.set_mark`).
        """
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{match[0][0]}{mark}{match[0][1:]}", value)
        if isinstance(value, dict):
            return {key: self.neutralize(item, mark) for key, item in value.items()}
        return [self.neutralize(item, mark) for item in value] if isinstance(value, list) else value


def unused_character(value: Any) -> str:
    """A character that occurs in no string of a JSON value: the last of the last private plane that is free."""
    return next(mark for mark in map(chr, range(0x10FFFD, 0xF0000, -1)) if not _contains(value, mark))


def _contains(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(_contains(key, text) or _contains(item, text) for key, item in value.items())
    return isinstance(value, list) and any(_contains(item, text) for item in value)

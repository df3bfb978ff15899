"""A tokenizer that is asked for every chunk once.

Design. Chunks that are new go to the tokenizer in batches; a bounded number of bytes is remembered from one
conversation to the next, the most recently used. A text that goes on after another without joining it is tokenised
behind a text that it does not join either, since tokenizers treat the start of a text in their own way.

Cost. The tokenizer's, once for each distinct chunk, and 64 MB.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from datasets.fingerprint import Hasher

from dagpack_hf.render.safe import safe_tokens
from dagpack_hf.trie import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 1 << 20
"""Characters that are given to the tokenizer at once."""

_BEFORE = ("\n", ";")
"""Texts that hardly any text joins."""

CACHE_BYTES = 64 << 20
"""Memory of the chunks that a `ChunkEncoder` remembers from one conversation to the next."""


class ChunkEncoder:
    """A tokenizer that is asked for every chunk once, with bounded memory of earlier ones.

    Args:
        tokenizer: a tokenizer of the host. One without the fast backend works, without cuts.
        cache_bytes: memory of the chunks that are remembered.

    Attributes:
        safe: texts of the safe tokens.
        tokenized: characters that went through the tokenizer.
    """

    mark: str | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cache_bytes: int = CACHE_BYTES) -> None:
        self.tokenizer = tokenizer
        self.cache_bytes = cache_bytes
        self.tokenized = 0
        self.safe: list[str] = []
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._split_special = bool(getattr(tokenizer, "split_special_tokens", False))
        self._before: tuple[str, ...] = _BEFORE
        if self.backend is not None:
            self._prepare_backend()
            self.safe = safe_tokens(self.backend)
            self._before = self._find_before()
        self._cache: OrderedDict[str, IntArray] = OrderedDict()
        self._held = 0

    def fingerprint(self) -> str:
        """Hash of the tokenizer, without what its earlier calls have left in it."""
        if self.backend is None:
            return Hasher.hash(self.tokenizer)
        self._prepare_backend()
        return xxhash.xxh3_128_hexdigest(self.backend.to_str().encode())

    def set_mark(self, mark: str | None) -> None:
        """Choose the character at which tokens end, and which takes no token itself (see `control`)."""
        if mark != self.mark:
            self._cache.clear()
            self._held = 0
        self.mark = mark

    def pattern(self, text: str) -> re.Pattern[str] | None:
        """Pattern of the safe tokens that occur in `text`; `None` if there are none, so that nothing is cut.

        Fewer places to cut are fewer look-ups: a template uses a handful of the thousands of tokens some vocabularies
        have. Any choice gives the same ids.
        """
        used = sorted((token for token in self.safe if token in text), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, used))) if used else None

    def encode(self, chunks: Sequence[str]) -> list[IntArray]:
        """Token ids of each chunk, as at the place where it stands."""
        found: dict[str, IntArray] = {}
        batch: list[str] = []
        size = 0
        for chunk in chunks:
            if chunk in found:
                continue
            ids = self._cache.get(chunk)
            if ids is not None:
                self._cache.move_to_end(chunk)
                found[chunk] = ids
                continue
            found[chunk] = _NO_IDS
            batch.append(chunk)
            size += len(chunk)
            if size >= _BATCH_CHARACTERS:
                self._encode_batch(batch, found)
                batch, size = [], 0
        self._encode_batch(batch, found)
        return [found[chunk] for chunk in chunks]

    def encode_alone(self, text: str) -> IntArray:
        """Token ids of a text that goes on after another without joining it, and is not the start of a text."""
        return np.concatenate([self._alone(piece)[0] for piece in self._pieces(text)])

    def starts(self, text: str, *, alone: bool = False) -> IntArray:
        """For each token of a text its first character; `alone` as in `encode_alone`.

        Raises:
            ValueError: the tokenizer has no fast backend, which alone knows.
        """
        if self.backend is None:
            raise ValueError("Where tokens begin is known to fast tokenizers only; load the fast version.")
        found, at = [], 0
        for number, piece in enumerate(self._pieces(text)):
            if alone or number:
                found.append(self._alone(piece)[1] + at)
            else:
                found.append(_starts(self._encodings([piece])[0]))
            at += len(piece) + 1
        return np.concatenate(found)

    def _alone(self, text: str) -> tuple[IntArray, IntArray]:
        """Ids and first characters of the tokens of a text that does not begin a text."""
        if self.backend is None:
            return self._tokenize([text])[0], _NO_IDS
        for before in self._before:
            head, joined = self._encodings([before, before + text])
            if joined.ids[: len(head.ids)] == head.ids:
                break
        else:
            before, (head, joined) = "", self._encodings(["", text])
        ids = np.array(joined.ids[len(head.ids) :], np.int32)
        return ids, _starts(joined)[len(head.ids) :] - len(before)

    def _find_before(self) -> tuple[str, ...]:
        """What `_alone` puts before a text: a safe token, if the text behind it begins as behind other text."""
        strips = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.rstrip}
        token = next((text for text in self.safe if text not in strips), None)
        if token is None:
            return _BEFORE
        behind_text, _ = self._alone("a")
        behind_token = self._encodings([token + "a"])[0].ids[1:]
        return (token,) if behind_text.tolist() == behind_token else _BEFORE

    def _encode_batch(self, batch: list[str], found: dict[str, IntArray]) -> None:
        for chunk, ids in zip(batch, self._tokenize(batch), strict=True):
            found[chunk] = ids
            self._remember(chunk, ids)

    def _remember(self, chunk: str, ids: IntArray) -> None:
        size = _weight(chunk, ids)
        if size > self.cache_bytes // 4:
            return
        self._cache[chunk] = ids
        self._held += size
        while self._held > self.cache_bytes:
            self._held -= _weight(*self._cache.popitem(last=False))

    def _tokenize(self, texts: list[str]) -> list[IntArray]:
        self.tokenized += sum(map(len, texts))
        if not texts:
            return []
        if self.backend is None:
            return [np.array(ids, np.int32) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        pieces = [self._pieces(text) for text in texts]
        self._prepare_backend()
        encodings = self.backend.encode_batch_fast([first for first, *_ in pieces], add_special_tokens=False)
        found = [np.array(item.ids, np.int32) for item in encodings]
        for index, (_, *rest) in enumerate(pieces):
            if rest:
                found[index] = np.concatenate([found[index], *(self._alone(piece)[0] for piece in rest)])
        return found

    def _pieces(self, text: str) -> list[str]:
        return [text] if self.mark is None else text.split(self.mark)

    def _encodings(self, texts: list[str]) -> list[Any]:
        self._prepare_backend()
        return self.backend.encode_batch(texts, add_special_tokens=False)

    def _prepare_backend(self) -> None:
        """What the host sets before each of its own calls."""
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = self._split_special


def _starts(encoding: Any) -> IntArray:
    return np.array([start for start, _ in encoding.offsets], np.int32).reshape(-1)


_NO_IDS: IntArray = np.zeros(0, np.int32)


def _weight(chunk: str, ids: IntArray) -> int:
    """Bytes of a remembered chunk, the objects around it included."""
    return len(chunk) * (1 if chunk.isascii() else 4) + ids.nbytes + 300

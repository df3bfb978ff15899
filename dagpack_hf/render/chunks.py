"""Chunks: text cut where a tokenizer never joins, so that equal text is tokenised once and gives the same ids.

Design. An added token that the tokenizer finds wherever its text occurs, a *safe* token, ends whatever stands before
it: `encode(x + b + y) == encode(x) + encode(b + y)` for every x and y. The text is cut before safe tokens and never
behind them, since what comes first in a text can be encoded in its own way (a prefix space, say). Which tokens are
safe follows from the tokenizer's own rules (`safe_tokens`), not from a list of names.

`ChunkTrie` holds all contexts of a conversation by their shared chunks; `ChunkPath` is the context at hand, of which
only the end is exchanged when the conversation goes on; `ChunkEncoder` tokenises chunks and remembers some of them.

Cost. A chunk is stored and tokenised once; a turn costs its new text and a dictionary look-up for each new chunk.
"""

from __future__ import annotations

import re
import unicodedata
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import normalizers

from dagpack_hf.trie import IntArray

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 1 << 20
"""Characters that are given to the tokenizer at once."""

_BEFORE = ("\n", ";")
"""Texts that hardly any text joins."""

CACHE_BYTES = 64 << 20
"""Memory of the chunks that a `ChunkEncoder` remembers from one conversation to the next."""


def safe_tokens(backend: Tokenizer) -> list[str]:
    """Find the added tokens before which a text can be cut without changing its ids.

    Added tokens are looked for twice, each time the leftmost and there the longest: first those that are not
    `normalized`, in the raw text; then the others, in what is left between the first, normalised. A safe token b is
    found wherever it stands, whatever surrounds it:

    * it takes no white space to its left and does not ask for the borders of words; it does not begin or end with
      white space, which a token beside it could take;
    * no other added token contains it, and none (nor b itself) ends in a proper beginning of it: one of these could be
      found in its place;
    * it is looked for in the raw text; or the text is not normalised at all, and no token that is looked for in the
      raw text lies in it or begins with a proper ending of it;
    * if some token asks for the borders of words, b begins with a character that is surely none of a word, as the end
      of a text is none.

    Args:
        backend: the fast tokenizer.

    Returns:
        The texts of the safe tokens, in the order of the vocabulary. There are none if the model draws its tokens at
        random, or if special tokens are split as other text is.
    """
    model = backend.model
    random = getattr(model, "dropout", None) or getattr(model, "alpha", None) is not None
    if random or backend.encode_special_tokens:
        return []
    normalizer = backend.normalizer
    plain = normalizer is None or (isinstance(normalizer, normalizers.Sequence) and not len(normalizer))
    added = {token.content: token for _, token in sorted(backend.get_added_tokens_decoder().items())}
    first = {text for text, token in added.items() if not token.normalized}
    words = any(token.single_word for token in added.values())
    sizes = {len(text) for text in added}
    inner = {text: _inner(text, sizes) & added.keys() for text in added}
    contained = {part for parts in inner.values() for part in parts}
    ends = {text[-size:] for text in added for size in range(1, len(text))}
    starts = {text[:size] for text in first for size in range(1, len(text) + 1)}

    def safe(text: str, token: AddedToken) -> bool:
        if token.lstrip or token.single_word or text.strip() != text:
            return False
        if text in contained or any(text[:size] in ends for size in range(1, len(text))):
            return False
        if words and not _never_in_word(text[0]):
            return False
        if not token.normalized:
            return True
        return plain and first.isdisjoint(inner[text]) and not any(text[at:] in starts for at in range(1, len(text)))

    return [text for text, token in added.items() if safe(text, token)]


def _inner(text: str, sizes: Collection[int]) -> set[str]:
    """Parts of a text that have one of the sizes; the whole is none."""
    return {text[at : at + size] for size in sizes if size < len(text) for at in range(len(text) - size + 1)}


def _never_in_word(character: str) -> bool:
    r"""Whether a character is punctuation or a sign that `\w` matches in no engine; of some signs this is not sure."""
    category = unicodedata.category(character)
    return category[0] in "PS" and category not in ("Pc", "So")


class ChunkTrie:
    """Texts by their shared beginnings, chunk by chunk.

    Attributes:
        chunks: each distinct chunk.
        parent: for each node the node before it, -1 for none; parents come before children.
        chunk: for each node the index of its chunk.
    """

    def __init__(self, cuts: re.Pattern[str] | None) -> None:
        self.cuts = cuts
        self.chunks: list[str] = []
        self.parent: list[int] = []
        self.chunk: list[int] = []
        self._index: dict[str, int] = {}
        self._children: dict[tuple[int, int], int] = {}

    def split(self, text: str) -> list[str]:
        """Cut a text into chunks; an empty text has none."""
        if self.cuts is None or not text:
            return [text] if text else []
        at = [match.start() for match in self.cuts.finditer(text)]
        if not at or at[0]:
            at.insert(0, 0)
        return [text[start:stop] for start, stop in zip(at, [*at[1:], len(text)], strict=True)]

    def intern(self, chunk: str) -> int:
        """Index of a chunk."""
        index = self._index.get(chunk)
        if index is None:
            index = self._index[chunk] = len(self.chunks)
            self.chunks.append(chunk)
        return index

    def child(self, node: int, chunk: str) -> int:
        """Node of a text that is one chunk longer."""
        edge = node, self.intern(chunk)
        child = self._children.get(edge)
        if child is None:
            child = self._children[edge] = len(self.parent)
            self.parent.append(node)
            self.chunk.append(edge[1])
        return child


class ChunkPath:
    """A text as a path in a `ChunkTrie`, of which the end can be exchanged.

    Example:
    >>> trie = ChunkTrie(re.compile("<a>|<b>"))
    >>> path = ChunkPath(trie)
    >>> path.replace(0, "<a>one<b>two<b>")
    >>> path.replace(9, "three<b>")
    >>> path.text(), len(trie.parent), path.last
    ('<a>one<b>three<b>', 5, '<b>')
    """

    def __init__(self, trie: ChunkTrie) -> None:
        self.trie = trie
        self.starts: list[int] = []
        self.nodes: list[int] = []
        self.length = 0

    @property
    def node(self) -> int:
        """Node of the whole text."""
        return self.nodes[-1] if self.nodes else -1

    @property
    def last(self) -> str:
        """The last chunk."""
        return self._chunk(-1) if self.nodes else ""

    def shortened(self, characters: int) -> ChunkPath:
        """The same text without its last characters, as another path."""
        path = ChunkPath(self.trie)
        path.starts, path.nodes, path.length = self.starts.copy(), self.nodes.copy(), self.length
        path.replace(self.length - characters, "")
        return path

    def text(self) -> str:
        """The whole text."""
        return "".join(self._chunk(index) for index in range(len(self.nodes)))

    def replace(self, keep: int, text: str) -> None:
        """Keep the first `keep` characters and go on with `text`.

        Raises:
            ValueError: `keep` is beyond the text.
        """
        if not 0 <= keep <= self.length:
            raise ValueError(f"cannot keep {keep} characters of a text of {self.length}")
        while self.nodes and self.starts[-1] > keep:
            self._drop()
        at = 0
        while self.nodes:
            # The chunk that `keep` falls into, or ends, may go on in `text`, and no token may be left where it begins.
            start, chunk = self.starts[-1], self._chunk(-1)
            text = chunk[: keep - start] + text
            keep = start
            self._drop()
            if self.trie.cuts is None or self.trie.cuts.match(text):
                break
        for chunk in self.trie.split(text):
            self.starts.append(keep + at)
            self.nodes.append(self.trie.child(self.node, chunk))
            at += len(chunk)
        self.length = keep + at

    def _chunk(self, index: int) -> str:
        return self.trie.chunks[self.trie.chunk[self.nodes[index]]]

    def _drop(self) -> None:
        self.starts.pop()
        self.nodes.pop()


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

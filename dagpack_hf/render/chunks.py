"""Chunks: the contexts of a conversation as a tree of texts that are cut before safe tokens (see `safe`).

Design. `ChunkTrie` holds all contexts of a conversation by their shared chunks; `ChunkPath` is the context at hand, of
which only the end is exchanged when the conversation goes on.

Cost. A chunk is stored once; a turn costs its new text and a dictionary look-up for each new chunk.
"""

from __future__ import annotations

import re


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

    def endswith(self, text: str) -> bool:
        """Whether the whole text ends in `text`."""
        end = len(text)
        for index in range(len(self.nodes) - 1, -1, -1):
            chunk = self._chunk(index)
            if len(chunk) >= end:
                return chunk.endswith(text[:end])
            if not text.endswith(chunk, 0, end):
                return False
            end -= len(chunk)
        return not end

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

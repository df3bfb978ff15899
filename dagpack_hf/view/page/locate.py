"""Where in the token tree the messages of rendered conversations lie.

The turns that are trained are known exactly. Their contexts are known as chunks, each of which several turns share, so
each chunk is placed once: where it begins is where the chunk before it ends. `MessageFinder` says which message a
chunk belongs to.

Cost: one step for each distinct chunk and turn; a few numbers for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dagpack_hf.render.turn import TurnText
from dagpack_hf.trie import TokenForest
from dagpack_hf.view.page.messages import MessageFinder, Piece
from dagpack_hf.view.page.render import Conversation
from dagpack_hf.view.page.walk import START, ForestWalk, Place, Range, take

Key = tuple[str, str]
"""Path of a session file, and the id of an entry in it."""


@dataclass(frozen=True)
class Located:
    """Tokens by where they come from, as ranges in node order that may overlap.

    Args:
        entries: For each entry its tokens.
        files: For each session file the tokens of its paths.
    """

    entries: dict[Key, list[Range]] = field(default_factory=dict)
    files: dict[str, list[Range]] = field(default_factory=dict)


def locate(forest: TokenForest, conversations: Iterable[Conversation]) -> Located:
    """Find the tokens of each entry and each file.

    Args:
        forest: The token tree, whose paths may have been cut.
        conversations: What it was made from.
    """
    walk = ForestWalk(forest)
    located = Located()
    for conversation in conversations:
        _ConversationPlaces(walk, conversation, located).add_turns()
    return located


class _ConversationPlaces:
    """The chunks of one conversation on their way into the tree.

    Args:
        walk: Through the tree.
        conversation: The conversation.
        located: Takes what is found.
    """

    def __init__(self, walk: ForestWalk, conversation: Conversation, located: Located) -> None:
        self._walk = walk
        self._conversation = conversation
        self._located = located
        self._trie = conversation.tokens.trie
        prompts = {turn.last for turn in conversation.tokens.turns}
        self._finder = MessageFinder(conversation.messages, prompts)
        self._places: dict[int, Place | None] = {-1: START}
        self._message = {-1: -1}  # of each chunk the message that is open behind it

    def add_turns(self) -> None:
        tokens = self._conversation.tokens
        for number, turn in enumerate(tokens.turns):
            self._add_context(turn)
            target, _ = tokens.turn_ids(number)
            ranges, _ = self._walk.go(self._places[turn.context], target.tolist())
            self._credit(turn.index, ranges)

    def _add_context(self, turn: TurnText) -> None:
        trie, encoder, new = self._trie, self._conversation.encoder, []
        node = turn.context
        while node not in self._places:
            new.append(node)
            node = trie.parent[node]
        new.reverse()
        chunks = [trie.chunks[trie.chunk[each]] for each in new]
        for node, chunk, ids in zip(new, chunks, encoder.encode(chunks), strict=True):
            parent = trie.parent[node]
            current = self._message[parent]
            pieces = self._finder.pieces(chunk, current, turn.index)
            if node == turn.context and pieces == [Piece(0, current)]:
                pieces = [Piece(0, turn.index)]  # what comes last before a turn is its prompt
            ranges, self._places[node] = self._walk.go(self._places[parent], ids.tolist())
            self._message[node] = pieces[-1].message
            starts = encoder.starts(chunk) if len(pieces) > 1 else np.zeros(1, np.int32)
            cuts = [int(np.searchsorted(starts, piece.start)) for piece in pieces[1:]]
            for piece, low, high in zip(pieces, [0, *cuts], [*cuts, len(ids)], strict=True):
                self._credit(piece.message, take(ranges, low, high))

    def _credit(self, message: int, ranges: list[Range]) -> None:
        session = self._conversation.session
        self._located.files.setdefault(session, []).extend(ranges)
        entry = self._conversation.entries[message]
        if entry is not None:
            self._located.entries.setdefault((session, entry), []).extend(ranges)

"""Turns in their contexts, as text, to one token tree.

Design. Every chunk of a context is one stretch of the tree, however many turns see it, and every turn a stretch behind
its context. A turn is tokenised together with the last chunk of its context; where the two would melt into one token
at the border, the context keeps the tokens that a server feeds and the turn is tokenised on its own. At the end the
trie's own builder brings the stretches into one form, in which no two begin with the same token.

Cost. Distinct chunks are tokenised once, in batches; memory is that of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dagpack_hf.render.chunks import ChunkTrie
from dagpack_hf.render.encoder import ChunkEncoder
from dagpack_hf.render.turn import TurnText
from dagpack_hf.trie import IntArray, TokenForest, TokenTree


@dataclass(frozen=True)
class TurnTokens:
    """Token ids of one turn.

    Args:
        context_ids: what the model is fed, generation prompt included.
        target_ids: what it has to write, the stop token last.
        first_target: how many of `target_ids` at the beginning are not trained.
    """

    context_ids: list[int]
    target_ids: list[int]
    first_target: int = 0


class ConversationTokens:
    """Token ids of the contexts and turns of one conversation.

    Args:
        trie: the contexts as chunks.
        turns: the turns, each behind a node of `trie`.
        encoder: the tokenizer.
        loss_on_thinking: whether thinking is trained; if not, tokens that reach into it are context.
    """

    def __init__(
        self, trie: ChunkTrie, turns: Sequence[TurnText], encoder: ChunkEncoder, *, loss_on_thinking: bool = True
    ) -> None:
        self.trie = trie
        self.turns = turns
        self._encoder = encoder
        self._loss_on_thinking = loss_on_thinking
        self._pieces = [trie.split(turn.last + turn.text) for turn in turns]
        for pieces in self._pieces:
            for piece in pieces:
                trie.intern(piece)
        self._used = self._used_nodes()
        chunks = {trie.chunk[node] for node in self._used}
        wanted = [trie.chunks[chunk] for chunk in sorted(chunks)]
        wanted += [piece for pieces in self._pieces for piece in pieces]
        self._ids = dict(zip(wanted, encoder.encode(wanted), strict=True))

    def turn(self, number: int) -> TurnTokens:
        """Ids of one turn, its context written out."""
        path = []
        node = self.turns[number].context
        while node >= 0:
            path.append(self._node_ids(node))
            node = self.trie.parent[node]
        target, first = self.turn_ids(number)
        return TurnTokens([token for ids in reversed(path) for token in ids.tolist()], target.tolist(), first)

    def tree(self, weights: Sequence[float] | None = None) -> TokenTree:
        """All turns in their contexts, merged.

        Args:
            weights: weight of each turn; without them each counts once.

        Raises:
            ValueError: more than 65,535 of the turns share a target.
        """
        ids: list[IntArray] = []
        counts: list[IntArray] = []
        weighed: list[np.ndarray] = []
        hangs_from: list[int] = []
        end, depth = {-1: -1}, {-1: 0}
        size = logical = 0
        for node in self._used:
            tokens = self._node_ids(node)
            parent = self.trie.parent[node]
            depth[node] = depth[parent] + len(tokens)
            end[node] = end[parent]
            if len(tokens):
                ids.append(tokens)
                counts.append(np.zeros(len(tokens), np.int32))
                hangs_from.append(end[parent])
                size += len(tokens)
                end[node] = size - 1
        for number, turn in enumerate(self.turns):
            target, first = self.turn_ids(number)
            count = np.ones(len(target), np.int32)
            count[:first] = 0
            ids.append(target)
            counts.append(count)
            hangs_from.append(end[turn.context])
            logical += depth[turn.context] + len(target)
            if weights is not None:
                weighed.append(count * np.float32(weights[number]))
        tree = TokenTree(
            input_ids=_joined(ids, np.int32),
            target_count=_joined(counts, np.int32),
            node_length=np.array([len(tokens) for tokens in ids], np.int32),
            node_parent=np.array(hangs_from, np.int32),
            logical_tokens=logical,
            target_weight=None if weights is None else _joined([np.zeros(size), *weighed], np.float32),
        )
        return forest_tree(TokenForest.from_trees([tree]))

    def _used_nodes(self) -> list[int]:
        """Nodes on the way to a turn, parents before children."""
        used: set[int] = set()
        for turn in self.turns:
            node = turn.context
            while node >= 0 and node not in used:
                used.add(node)
                node = self.trie.parent[node]
        return sorted(used)

    def _node_ids(self, node: int) -> IntArray:
        return self._ids[self.trie.chunks[self.trie.chunk[node]]]

    def turn_ids(self, number: int) -> tuple[IntArray, int]:
        """Token ids of a turn that are new after its context, and how many of them stand before the first target."""
        turn, pieces = self.turns[number], self._pieces[number]
        before = self._ids[turn.last] if turn.last else np.zeros(0, np.int32)
        first = self._ids[pieces[0]]
        if len(pieces[0]) >= len(turn.last) and np.array_equal(first[: len(before)], before):
            ids = np.concatenate([first[len(before) :], *(self._ids[piece] for piece in pieces[1:])])
            apart = False
        else:
            ids, apart = self._encoder.encode_alone(turn.text), True
        if self._loss_on_thinking or not turn.thought:
            return ids, 0
        text, border = (turn.text, 0) if apart else (turn.last + turn.text, len(turn.last))
        starts = self._encoder.starts(text, alone=apart)[-len(ids) :]
        return ids, int(np.searchsorted(starts, border + turn.thought))


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def forest_tree(forest: TokenForest) -> TokenTree:
    """Write a forest as one token tree.

    Raises:
        ValueError: more than 65,535 sequences share a target.
    """
    most = int(forest.tally.count.max(initial=0))
    if most > np.iinfo(np.uint16).max:
        raise ValueError(
            f"{most} sequences of one conversation share a target; a token tree counts up to "
            f"{np.iinfo(np.uint16).max}. Split the conversation."
        )
    last = forest.start + forest.length - 1
    return TokenTree(
        input_ids=forest.tokens,
        target_count=forest.target_count.astype(np.uint16),
        node_length=forest.length,
        node_parent=np.where(forest.parent < 0, -1, last[forest.parent] if forest.num_nodes else -1).astype(np.int32),
        logical_tokens=forest.logical_tokens,
        target_weight=None if forest.target_weight is None else forest.target_weight.astype(np.float32),
    )

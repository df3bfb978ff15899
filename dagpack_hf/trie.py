"""The trie: all token sequences of a corpus, merged by their common prefixes.

Design. A radix tree (one node per stretch of tokens without a branch) is grown by insertion: what is new of a sequence
becomes a branch, a position in the arrays the tokens came in, and branches are found through one hash table keyed by
(branch, offset, next token), see `kernels/radix.py`. Trees are inserted node by node from the place where their parent
landed, so the tokens of a context are never written out again for each turn that shares it. At the end the forest is
put into canonical form (`kernels/canonical.py`): branches are cut where others leave them, chains are merged, children
ordered by their first token and nodes numbered in preorder, so the result depends neither on the order of the input
nor on how it was cut into trees. Then the sequences that train each token are added up (`kernels/tally.py`).

Nothing is kept per token: a node is a stretch of the tokens that came in (those of token trees are copied once, where
a node is made of several), and tallies are kept as runs.

Weights. How many sequences train a token, and what these sequences weigh together, are the *tally* of a token: its
count, and where a sequence has a weight, its weight. Weights are read as float32 and added as float64. Such sums are
exact, and do not depend on the order of the input, as long as the number of sequences times the ratio of the largest
to the smallest weight stays below 2**28.

Cost: 2 to 5 G tokens/s, 0.4 to 1 with labels. A label is read once (twice with weights), a token once or, if it is
new, twice. 40 to 110 bytes per sequence while the forest grows, 20 per node and 12 per run of equal tallies (20 with
weights) afterwards. Nothing recurses. The loops are compiled on first use (4 s) and cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dagpack_hf.growth import Shape, before, merge_sequences, merge_trees
from dagpack_hf.kernels.canonical import copy_pieces
from dagpack_hf.spans import IGNORE_INDEX as IGNORE_INDEX
from dagpack_hf.spans import (
    Chunks,
    FloatArray,
    IntArray,
    LongArray,
    TokenSequence,
    read_arrays,
    read_only,
    read_sequences,
)
from dagpack_hf.tally import Tally
from dagpack_hf.token_trees import TokenTree as TokenTree
from dagpack_hf.token_trees import read_trees


@dataclass(frozen=True)
class TokenForest:
    """Path-compressed trie of a corpus in flat arrays. Nodes are in preorder, tokens in node order.

    The tokens are those that the forest was made from, which therefore have to stay as they are.

    Args:
        values: `int32[...]`, an array with the tokens of all nodes, and others.
        source: `int64[N]`; node `v` owns `values[source[v] : source[v] + length[v]]`.
        parent: `int32[N]`, parent node, -1 for a root. `parent[v] < v`.
        length: `int32[N]`, tokens of the node, at least 1.
        depth: `int32[N]`, tokens above the node, 0 for a root.
        tally: how many source sequences train each token, and what they weigh together. A token without a predecessor
            is never a target.
        logical_tokens: tokens of all source sequences, each written out on its own.
    """

    values: IntArray
    source: LongArray
    parent: IntArray
    length: IntArray
    depth: IntArray
    tally: Tally
    logical_tokens: int

    @classmethod
    def _of(cls, shape: Shape, tally: Tally, logical_tokens: int) -> TokenForest:
        return cls(shape.values, shape.source, shape.parent, shape.length, shape.depth, tally, logical_tokens)

    @classmethod
    def _of_own(
        cls, tokens: IntArray, parent: IntArray, length: IntArray, depth: IntArray, tally: Tally, logical_tokens: int
    ) -> TokenForest:
        return cls(read_only(tokens), before(length), parent, length, depth, tally, logical_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """How a forest is pickled and copied: its own tokens only, as `values` may reach over other memory."""
        return TokenForest._of_own, (
            self.tokens,
            self.parent,
            self.length,
            self.depth,
            self.tally,
            self.logical_tokens,
        )

    @classmethod
    def from_tokens(
        cls,
        tokens: IntArray,
        target_count: IntArray,
        parent: IntArray,
        length: IntArray,
        depth: IntArray,
        logical_tokens: int,
        target_weight: FloatArray | None = None,
    ) -> TokenForest:
        """A forest from its distinct tokens and their tallies, `[U]` each, in node order."""
        tally = Tally.of_tokens(target_count, target_weight)
        return cls._of_own(tokens, parent, length, depth, tally, logical_tokens)

    @classmethod
    def from_trees(cls, trees: Iterable[TokenTree]) -> TokenForest:
        """Merge token trees.

        Args:
            trees: the trees of the corpus, in any order, with weights or without. The forest has weights if one of
                them has; the sequences of the others then weigh 1.

        Raises:
            ValueError: a tree whose columns contradict each other, or a weight that is negative or not finite; the
                message names the tree by its position.
        """
        return cls._of(*merge_trees(read_trees(trees)))

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[TokenSequence],
        labels: Iterable[TokenSequence] | None = None,
        weights: Iterable[float] | None = None,
    ) -> TokenForest:
        """Merge plain token sequences.

        Args:
            sequences: token ids of each sequence.
            labels: for each sequence, its labels: the token itself where the token is a target, -100 where it is not
                (not shifted, as in `transformers`). Without labels every token is a target. The label of the first
                token is not used, since nothing precedes it.
            weights: for each sequence, how much each of its targets counts. Without weights each counts 1.

        Raises:
            ValueError: ids or labels that cannot be represented, or a weight that is negative or not finite; the
                message names sequence and position.

        Example:
            >>> forest = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4]])
            >>> forest.num_nodes, forest.num_tokens, forest.logical_tokens
            (3, 4, 6)
        """
        return cls._of(*merge_sequences(read_sequences(sequences, labels, weights)))

    @classmethod
    def from_arrays(
        cls,
        tokens: Chunks,
        offsets: Chunks,
        labels: Chunks | None = None,
        weights: npt.ArrayLike | None = None,
        *,
        label_offsets: Chunks | None = None,
    ) -> TokenForest:
        """Merge plain token sequences that lie one behind the other, as in an Arrow column of lists.

        Nothing is copied of contiguous int32 arrays, memory-mapped ones included: the forest refers to them, so they
        must not be written to. Of others (an Arrow `list<int64>`) each chunk is copied as int32.

        Args:
            tokens: `int32[total]`, token ids; or a list of such arrays, the chunks of a column.
            offsets: `int64[n + 1]`; sequence `i` is `tokens[offsets[i] : offsets[i + 1]]`. For a list of chunks a list
                with the offsets in each chunk.
            labels: `int32[total]`, as in `from_sequences`; or a list of chunks.
            weights: `float[n]`, as in `from_sequences`.
            label_offsets: like `offsets`, if those of the labels differ.

        Raises:
            ValueError: as in `from_sequences`, or offsets that do not fit the tokens.

        Example:
            >>> tokens, offsets = np.array([1, 2, 3, 1, 2, 4], np.int32), np.array([0, 3, 6])
            >>> TokenForest.from_arrays(tokens, offsets).tokens
            array([1, 2, 3, 4], dtype=int32)
        """
        return cls._of(*merge_sequences(read_arrays(tokens, offsets, labels, weights, label_offsets)))

    def with_tally(self, count: IntArray, weight: FloatArray | None = None) -> TokenForest:
        """The same forest with other tallies, `[U]` each."""
        return replace(self, tally=Tally.of_tokens(count, weight))

    @property
    def num_nodes(self) -> int:
        """Nodes of the path-compressed trie."""
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Unique tokens: each shared prefix counted once."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def num_targets(self) -> int:
        """Distinct tokens that are trained."""
        return int(self.tally.length[self.tally.path_weight > 0].sum())

    @property
    def num_source_targets(self) -> int:
        """Labelled tokens of all source sequences."""
        return int((self.tally.length * self.tally.count).sum())

    @property
    def num_source_tokens(self) -> int | None:
        """Tokens of all source sequences, as far as they are in the forest; `None` if the sequences were not counted.

        Unlike `logical_tokens` without what was cut off, or is in no sequence with a target.
        """
        passes = self.tally.sequences
        return None if passes is None else int((self.tally.length * passes).sum())

    @cached_property
    def start(self) -> LongArray:
        """`int64[N]`, first token of each node among the unique tokens in node order."""
        return before(self.length)

    @property
    def tokens(self) -> IntArray:
        """`int32[U]`, a copy of the unique tokens; node `v` owns `tokens[start[v] : start[v] + length[v]]`."""
        return copy_pieces(self.values, self.source, self.length)

    @property
    def target_count(self) -> IntArray:
        """`int32[U]`, written out: how many source sequences train each token; 0 for context."""
        return np.repeat(self.tally.count, self.tally.length)

    @property
    def target_weight(self) -> FloatArray | None:
        """`float64[U]`, written out: what the sequences that train each token weigh together; 0 for context.

        `None`: every sequence weighs 1, so the weight is the count.
        """
        return None if self.tally.weight is None else np.repeat(self.tally.weight, self.tally.length)

    @property
    def path_weight(self) -> IntArray | FloatArray:
        """`[U]`, written out: weight of each token under `"paths"`, that is `target_weight`, or if `None` the count.

        Trained is a token with a weight above 0. One that only sequences of weight 0 have as a target is context.
        """
        return self.target_count if self.tally.weight is None else np.repeat(self.tally.weight, self.tally.length)

    @cached_property
    def leaves(self) -> npt.NDArray[np.int64]:
        """`int64[L]`, the nodes without children, in preorder."""
        has_child = np.zeros(self.num_nodes, bool)
        has_child[self.parent[self.parent >= 0]] = True
        return np.flatnonzero(~has_child)

    @property
    def longest_path(self) -> int:
        """Tokens from a root to the deepest leaf; 0 for an empty forest."""
        return int((self.depth + self.length).max(initial=0))

    def path(self, node: int) -> IntArray:
        """Token ids from the root to the end of `node`."""
        pieces = []
        while node >= 0:
            pieces.append(self.values[self.source[node] : self.source[node] + self.length[node]])
            node = int(self.parent[node])
        return np.concatenate(pieces[::-1])

"""The trie: all token sequences of a corpus, merged by their common prefixes.

Design. A radix tree (one node per stretch of tokens without a branch) is grown by insertion: what is new of a sequence
becomes a branch, a position in the arrays the tokens came in, and branches are found through one hash table keyed by
(branch, offset, next token), see `kernels/radix.py`. Trees are inserted node by node from the place where their parent
landed, so the tokens of a context are never written out again for each turn that shares it. At the end the forest is
put into canonical form (`kernels/canonical.py`): branches are cut where others leave them, chains are merged, children
ordered by their first token and nodes numbered in preorder, so the result depends neither on the order of the input
nor on how it was cut into trees. Then the sequences that train each token are added up (`kernels/tally.py`).

Weights. How many sequences train a token, and what these sequences weigh together, are the *tally* of a token: its
count, and where a sequence has a weight, its weight. Weights are read as float32 and added as float64. Such sums are
exact, and do not depend on the order of the input, as long as the number of sequences times the ratio of the largest
to the smallest weight stays below 2**28.

Cost: 3 to 5 G tokens/s of agent sessions as written out, 0.3 where nothing is shared; 1 to 2 with labels. A label is
read once, a token once or, if it is new, twice. Nothing is kept per token but the result, the distinct token and its
tally (8 bytes, 16 with weights); 40 to 80 bytes per sequence while the forest grows. Nothing recurses. The loops are
compiled on first use (4 s) and cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.canonical import find_nodes, group_children, sort_keys, write_nodes
from dagpack_hf.kernels.radix import HOPPY, NEGATIVE, grow
from dagpack_hf.kernels.tally import add_counts, add_labels, add_subtrees, count_ends
from dagpack_hf.spans import IGNORE_INDEX as IGNORE_INDEX
from dagpack_hf.spans import (
    Chunks,
    FloatArray,
    IntArray,
    LongArray,
    SequenceSpans,
    Spans,
    TokenSequence,
    read_arrays,
    read_only,
    read_sequences,
)
from dagpack_hf.token_trees import TokenTree as TokenTree
from dagpack_hf.token_trees import TreeSpans, read_trees

PATIENCE = 4096
"""Steps from branch to branch after which the sequences are inserted anew, the longest first, if there is more than
one step for each 16 tokens."""

NEVER = 2**62
NONE = read_only(np.zeros(0, np.int64))
NO_WEIGHTS = read_only(np.zeros(0, np.float64))


@dataclass(frozen=True)
class TokenForest:
    """Path-compressed trie of a corpus in flat arrays. Nodes are in preorder, tokens in node order.

    Args:
        tokens: `int32[U]`, the distinct (unique) tokens; node `v` owns `tokens[start[v] : start[v] + length[v]]`.
        target_count: `int32[U]`, how many source sequences train this token; 0 for context. A token without a
            predecessor is never a target.
        parent: `int32[N]`, parent node, -1 for a root. `parent[v] < v`.
        start: `int64[N]`, first token of the node.
        length: `int32[N]`, tokens of the node, at least 1.
        depth: `int32[N]`, tokens above the node, 0 for a root.
        logical_tokens: tokens of all source sequences, each written out on its own.
        target_weight: `float64[U]`, what the sequences that train this token weigh together; 0 for context. `None`:
            every sequence weighs 1, so the weight is the count.
    """

    tokens: IntArray
    target_count: IntArray
    parent: IntArray
    start: npt.NDArray[np.int64]
    length: IntArray
    depth: IntArray
    logical_tokens: int
    target_weight: FloatArray | None = None

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
        return _merge_trees(read_trees(trees))

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
        return _merge_sequences(read_sequences(sequences, labels, weights))

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

        Nothing is copied of contiguous int32 arrays, memory-mapped ones included. Of others (an Arrow `list<int64>`)
        each chunk is copied as int32.

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
        return _merge_sequences(read_arrays(tokens, offsets, labels, weights, label_offsets))

    @property
    def num_nodes(self) -> int:
        """Nodes of the path-compressed trie."""
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Unique tokens: each shared prefix counted once."""
        return len(self.tokens)

    @property
    def path_weight(self) -> IntArray | FloatArray:
        """`[U]`, weight of each token under `"paths"`: `target_weight`, or where that is `None` the count.

        Trained is a token with a weight above 0. One that only sequences of weight 0 have as a target is context.
        """
        return self.target_count if self.target_weight is None else self.target_weight

    @property
    def num_targets(self) -> int:
        """Distinct tokens that are trained."""
        return int(np.count_nonzero(self.path_weight))

    @property
    def num_source_targets(self) -> int:
        """Labelled tokens of all source sequences."""
        return int(self.target_count.sum(dtype=np.int64))

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
            pieces.append(self.tokens[self.start[node] : self.start[node] + self.length[node]])
            node = int(self.parent[node])
        return np.concatenate(pieces[::-1])


def join_tally(count: npt.NDArray[np.integer], weight: npt.NDArray[np.number] | None) -> IntArray | FloatArray:
    """Counts (`int32[1, n]`), or counts and weights (`float64[2, n]`), as the rows of one array."""
    if weight is None:
        return np.asarray(count, np.int32)[None]
    return np.array([count, weight], np.float64)


def split_tally(tally: IntArray | FloatArray) -> tuple[IntArray, FloatArray | None]:
    """The inverse of `join_tally`: `target_count`, and `target_weight` if there are weights."""
    return tally[0].astype(np.int32), tally[1].astype(np.float64) if len(tally) > 1 else None


@dataclass(frozen=True)
class _Form:
    """The nodes of a forest, as in `TokenForest`."""

    tokens: IntArray
    parent: IntArray
    start: LongArray
    length: IntArray
    depth: IntArray

    def no_tally(self, weighted: bool) -> tuple[IntArray, FloatArray]:
        """Counts and weights of 0; if not `weighted`, an empty array of weights."""
        return np.zeros(len(self.tokens), np.int32), np.zeros(len(self.tokens) if weighted else 0)

    def forest(self, count: IntArray, weight: FloatArray | None, logical_tokens: int) -> TokenForest:
        """The forest with these tallies, but that a token without a predecessor is no target."""
        without_predecessor = self.start[self.parent < 0]
        count[without_predecessor] = 0
        if weight is not None:
            weight[without_predecessor] = 0
        return TokenForest(
            tokens=self.tokens,
            target_count=count,
            parent=self.parent,
            start=self.start,
            length=self.length,
            depth=self.depth,
            logical_tokens=logical_tokens,
            target_weight=weight,
        )


def _merge_sequences(sequences: SequenceSpans) -> TokenForest:
    ids, labels = sequences.ids, sequences.labels
    try:
        form, last_node, _ = _grow(ids, NONE, NONE, PATIENCE)
    except ValueError:
        sequences.check()
        raise
    weighted = sequences.weights is not None
    count, weight = form.no_tally(weighted)
    weights = read_only(np.zeros(0, np.float32) if sequences.weights is None else sequences.weights.astype(np.float32))
    if labels is None:
        count_ends(last_node, ids.begin, ids.end, weights, form.start, form.depth, count, weight)
        add_subtrees(count, form.parent, form.start, form.length)
        if weighted:
            add_subtrees(weight, form.parent, form.start, form.length)
    else:
        fit = add_labels(
            labels.values,
            labels.begin,
            labels.end,
            weights,
            last_node,
            form.tokens,
            form.parent,
            form.start,
            form.depth,
            count,
            weight,
        )
        if not fit:
            sequences.check()
            raise ValueError("A label differs from its token.")
    return form.forest(count, weight if weighted else None, int((ids.end - ids.begin).sum()))


def _merge_trees(trees: TreeSpans) -> TokenForest:
    form, last_node, above = _grow(trees.ids, trees.owner, trees.hangs_from, NEVER)
    weighted = any(part.weights is not None for part in trees.parts)
    count, weight = form.no_tally(weighted)
    first = 0
    for part in trees.parts:
        nodes = slice(first, first + len(part.begin))
        weights = NO_WEIGHTS
        if weighted:
            weights = read_only(part.counts.astype(np.float64)) if part.weights is None else part.weights
        add_counts(
            part.counts,
            weights,
            part.begin,
            part.end,
            above[nodes],
            last_node[nodes],
            form.parent,
            form.start,
            form.depth,
            count,
            weight,
        )
        first = nodes.stop
    return form.forest(count, weight if weighted else None, sum(part.logical_tokens for part in trees.parts))


def _grow(ids: Spans, owner: LongArray, hangs_from: LongArray, patience: int) -> tuple[_Form, IntArray, IntArray]:
    """The nodes of a forest; for each span the node it ends in (-1 if it is empty), and the tokens above it."""
    status, *grown = grow(ids.values, ids.begin, ids.end, owner, hangs_from, NONE, patience)
    if status == HOPPY:
        longest_first = read_only(np.argsort(ids.begin - ids.end, kind="stable"))
        status, *grown = grow(ids.values, ids.begin, ids.end, owner, hangs_from, longest_first, NEVER)
    if status == NEGATIVE:
        raise ValueError("Token ids must not be below 0.")
    source, length, parent, at, depth, last_branch, above = grown
    first, child = group_children(parent, np.argsort(sort_keys(ids.values, source, at)))
    *nodes, head, following = write_nodes(ids.values, source, length, at, first, child)
    find_nodes(last_branch, ids.begin, ids.end, above, depth, first, child, at, head, following)
    return _Form(*nodes), last_branch, above

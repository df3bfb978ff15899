"""Random corpora for property tests, and an independent dictionary trie to compare with."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from dagpack_hf import TokenForest, TokenTree


@st.composite
def labelled_sequences(draw, max_sequences: int = 7, max_tokens: int = 9, vocabulary: int = 3):
    """Sequences over a tiny vocabulary (so that they share prefixes often), each with a random label mask."""
    token = st.integers(0, vocabulary - 1)
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=max_tokens), min_size=1, max_size=max_sequences))
    if draw(st.booleans()):
        trunk = draw(st.lists(token, min_size=1, max_size=max_tokens))
        sequences = [(trunk + sequence)[:max_tokens] for sequence in sequences]
    masks = [draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))) for s in sequences]
    labels = [
        [t if m else -100 for t, m in zip(s, mask, strict=True)] for s, mask in zip(sequences, masks, strict=True)
    ]
    return sequences, labels


def prefix_counts(sequences, labels=None) -> dict[tuple[int, ...], int]:
    """For each distinct prefix, how many sequences train its last token. One dictionary entry per token."""
    counts: Counter[tuple[int, ...]] = Counter()
    for index, sequence in enumerate(sequences):
        for end in range(1, len(sequence) + 1):
            trained = end > 1 and (labels is None or labels[index][end - 1] != -100)
            counts[tuple(sequence[:end])] += int(trained)
    return dict(counts)


def forest_prefixes(forest: TokenForest) -> dict[tuple[int, ...], int]:
    """The same of a forest, from its arrays."""
    found = {}
    for node in range(forest.num_nodes):
        path = forest.path(node)
        for at in range(forest.length[node]):
            found[tuple(path[: forest.depth[node] + at + 1].tolist())] = int(
                forest.target_count[forest.start[node] + at]
            )
    return found


def random_tree(rng: np.random.Generator, sequences, labels) -> TokenTree:
    """The sequences as one token tree, cut into nodes at random places."""
    ids, count, length, parent = [], [], [], []
    place: dict[tuple[int, ...], int] = {}
    for sequence, label in zip(sequences, labels, strict=True):
        known = 0
        while known < len(sequence) and tuple(sequence[: known + 1]) in place:
            known += 1
        for end in range(1, known + 1):
            count[place[tuple(sequence[:end])]] += int(label[end - 1] != -100)
        for at in range(known, len(sequence)):
            if at == known or rng.random() < 0.3:
                length.append(0)
                parent.append(place[tuple(sequence[:at])] if at else -1)
            place[tuple(sequence[: at + 1])] = len(ids)
            ids.append(sequence[at])
            count.append(int(label[at] != -100))
            length[-1] += 1
    return TokenTree(
        np.array(ids, np.int32),
        np.array(count, np.uint16),
        np.array(length, np.int32),
        np.array(parent, np.int32),
        sum(map(len, sequences)),
    )


def row_parents(row) -> list[int]:
    """Parent position of each position of a row, from `subtree_end` alone."""
    parents, open_positions = [], []
    for position, end in enumerate(row["subtree_end"]):
        while open_positions and row["subtree_end"][open_positions[-1]] <= position:
            open_positions.pop()
        parents.append(open_positions[-1] if open_positions else -1)
        assert (
            position < end <= (row["subtree_end"][open_positions[-1]] if open_positions else len(row["subtree_end"]))
        )
        open_positions.append(position)
    return parents


def row_prefixes(row) -> list[tuple[int, ...]]:
    """The tokens that each position of a row sees, itself included."""
    prefixes: list[tuple[int, ...]] = []
    for position, parent in enumerate(row_parents(row)):
        prefixes.append((*(prefixes[parent] if parent >= 0 else ()), int(row["input_ids"][position])))
    return prefixes

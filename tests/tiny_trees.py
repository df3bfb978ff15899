"""Rows for tests, laid out from parent pointers and nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TreeRow:
    """A row, how it came about, and where each sequence lies in it."""

    input_ids: np.ndarray
    parent: np.ndarray
    """Index of the parent position, -1 for a root and for padding."""
    position_ids: np.ndarray
    subtree_end: np.ndarray
    sequences: list[list[int]]
    paths: list[list[int]]
    """For each sequence the positions of its tokens."""


def parents_of(depths: list[int]) -> np.ndarray:
    """Parent of each node of a preorder walk, from the depths."""
    parent, path = [], []
    for index, depth in enumerate(depths):
        del path[depth:]
        parent.append(path[-1] if path else -1)
        path.append(index)
    return np.array(parent)


def depths_from(steps: list[int]) -> list[int]:
    """Turn any non-negative integers into the depths of a preorder walk: go one down, or up by the step."""
    depths: list[int] = []
    for step in steps:
        depths.append(max(0, depths[-1] + 1 - step) if depths else 0)
    return depths


def ancestors(parent: np.ndarray) -> np.ndarray:
    """`[i, j]`: is `j` met on the way from `i` to its root? Each position meets itself."""
    met = np.eye(len(parent), dtype=bool)
    for i in range(len(parent)):
        j = parent[i]
        while j >= 0:
            met[i, j] = True
            j = parent[j]
    return met


def subtree_end_of(parent: np.ndarray) -> np.ndarray:
    """One past the last descendant of each position, by looking at all pairs."""
    met = ancestors(parent)
    return np.array([np.flatnonzero(met[:, j]).max() + 1 for j in range(len(parent))])


def lay_out(sequences: list[list[int]], padding: int = 0) -> TreeRow:
    """Merge the sequences by common prefixes and walk the trie depth first."""
    children: list[dict[int, int]] = [{}]
    token, walks = [-1], []
    for sequence in sequences:
        node, walk = 0, []
        for each in sequence:
            if each not in children[node]:
                children[node][each] = len(children)
                children.append({})
                token.append(each)
            node = children[node][each]
            walk.append(node)
        walks.append(walk)
    position_of, input_ids, parent, depths = {0: -1}, [], [], []
    stack = [(child, 0, 0) for child in reversed(children[0].values())]
    while stack:
        node, above, depth = stack.pop()
        position_of[node] = len(input_ids)
        input_ids.append(token[node])
        parent.append(position_of[above])
        depths.append(depth)
        stack.extend((child, node, depth + 1) for child in reversed(children[node].values()))
    parent += [-1] * padding
    return TreeRow(
        input_ids=np.array(input_ids + [0] * padding),
        parent=np.array(parent),
        position_ids=np.array(depths + [0] * padding),
        subtree_end=subtree_end_of(np.array(parent)),
        sequences=sequences,
        paths=[[position_of[node] for node in walk] for walk in walks],
    )


def random_sequences(seed: int, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Sequences of up to `longest` tokens; most start like an earlier one, some are wholly new."""
    random = np.random.default_rng(seed)
    sequences: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if sequences and random.random() < 0.8:
            start = sequences[random.integers(len(sequences))]
            start = start[: random.integers(1, len(start) + 1)]
        new = random.integers(vocabulary, size=random.integers(1, longest - len(start) + 2)).tolist()
        sequences.append((start + new)[:longest])
    return sequences

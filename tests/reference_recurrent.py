"""What a plan of states should be, written down from parent pointers and nothing of the package; and rows to try."""

from __future__ import annotations

import numpy as np

from tests.shrunk_models import VOCABULARY
from tests.tiny_trees import TreeRow, depths_from, lay_out, parents_of, random_sequences, subtree_end_of


def path_to(parent: np.ndarray, position: int) -> list[int]:
    """The positions from the root down to a position."""
    path = [position]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return path[::-1]


def expected_cells(parent: np.ndarray, length: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each cell, as the positions it has, the cell above it; `()` at a root."""
    leaves = [i for i in range(len(parent)) if i not in set(parent.tolist())]
    cells: dict[tuple[int, ...], tuple[int, ...]] = {}
    for leaf in leaves:
        path = path_to(parent, leaf)
        above: tuple[int, ...] = ()
        for start in range(0, len(path), length):
            cell = tuple(path[start : start + length])
            cells[cell] = above
            above = cell
    return cells


def row_of(steps: list[int], stretch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Parent and `subtree_end` of a row; the depths follow `steps`, each step down is `stretch` positions."""
    depths: list[int] = []
    for depth in depths_from(steps):
        depths += range(depth * stretch, (depth + 1) * stretch)
    parent = parents_of(depths)
    return parent, subtree_end_of(parent)


def batch_of(rows: list[tuple[np.ndarray, np.ndarray]], padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents in the batch (padding is -2), `subtree_end` and lengths of rows padded to one width."""
    width = max(len(end) for _, end in rows) + padding
    ends = np.tile(np.arange(1, width + 1), (len(rows), 1))
    parents = np.full((len(rows), width), -2)
    for b, (parent, end) in enumerate(rows):
        ends[b, : len(end)] = end
        parents[b, : len(end)] = np.where(parent >= 0, parent + b * width, -1)
    return parents.ravel(), ends, np.array([len(end) for _, end in rows])


def recurrent_rows() -> list[TreeRow]:
    """Two rows of one batch for models with recurrent layers, with paths of up to three cells of 64.

    Branches in branches, nodes of one token, several roots, padding. Sequences are dealt out in turn, so the second
    row repeats ancestors that the first one trains.
    """
    sequences = [[token + 3 for token in each] for each in random_sequences(3, 8, 150, VOCABULARY - 3)]
    longest = max(sequences, key=len)
    sequences += [[*longest, 4], [*longest[:130], 5], [3, 7], [*longest[:64], 6], [*longest[:70], 8], [4, 9]]
    forests = [sequences[::2], sequences[1::2]]
    lengths = [len(lay_out(forest).input_ids) for forest in forests]
    rows = [lay_out(forest, max(lengths) + 3 - length) for forest, length in zip(forests, lengths, strict=True)]
    assert len(longest) > 128 and min(map(len, sequences)) > 1
    assert all((row.parent[:-3] == -1).sum() > 1 for row in rows)
    return rows

"""How many sequences pass through each position of packed rows.

Design: the path to a position is known by the sum of a hash for each of its tokens and depths. In a row that is one
running sum, to which a position adds its hash and from which it takes it away where its subtree ends.

Cost: 24 bytes for each token of the sequences and the rows, and a sort of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagpack_hf.layout import Rows


def sequence_counts(sequences: Sequence[npt.NDArray[np.integer]], rows: Rows) -> list[npt.NDArray[np.float32]]:
    """Number of sequences that pass through each position of rows.

    Positions and sequences are matched by a hash of 64 bits of the tokens up to them. Of positions that are equal, the
    copies at branch points and what windows repeat, the first has the number and the others 0.

    Args:
        sequences: what was packed, as far as it is in the rows.
        rows: the rows.

    Returns:
        `float32` for each row. They sum to the tokens of the sequences.

    Example:
        >>> from dagpack_hf import TokenForest, pack_forest
        >>> sequences = [np.array([1, 2, 3]), np.array([1, 2, 4])]
        >>> rows, _ = pack_forest(TokenForest.from_sequences(sequences), max_length=8)
        >>> rows[0]["input_ids"].tolist(), sequence_counts(sequences, rows)[0].tolist()
        ([1, 2, 3, 2, 4], [2.0, 2.0, 1.0, 0.0, 1.0])
    """
    hashes = [np.cumsum(_token_hashes(sequence, np.arange(len(sequence)))) for sequence in sequences]
    paths, count = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]), return_counts=True)
    lengths = [len(row["input_ids"]) for row in rows]
    positions = np.concatenate([np.zeros(0, np.uint64), *map(_path_hashes, rows)])
    counts = np.zeros(len(positions), np.float32)
    known, first = np.unique(positions, return_index=True)
    at = np.minimum(np.searchsorted(paths, known), max(len(paths) - 1, 0))
    if len(paths):
        counts[first] = np.where(paths[at] == known, count[at], 0)
    return np.split(counts, np.cumsum(lengths)[:-1]) if lengths else []


def _token_hashes(tokens: npt.NDArray[np.integer], depths: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """A hash of each token and its depth (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    mixed = (np.asarray(tokens).astype(np.uint64) << np.uint64(32)) + np.asarray(depths).astype(np.uint64)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _path_hashes(row: dict[str, np.ndarray]) -> npt.NDArray[np.uint64]:
    """Sum of the hashes of each position and its ancestors: what is added at a position is taken away at its end."""
    own = _token_hashes(row["input_ids"], row["position_ids"])
    change = np.concatenate([own, np.zeros(1, np.uint64)])
    np.subtract.at(change, row["subtree_end"], own)
    return np.cumsum(change)[:-1]

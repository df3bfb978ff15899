"""Random trees of sequences with a given reuse, and the same sequences as rows, merged or side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from trl import pack_dataset

from dagpack_hf import TokenForest, pack_forest

PATH = 4
"""Distinct tokens over the tokens of a sequence."""


def random_tree(length: int, reuse: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Sequences that fill one window of `length` when merged, and `reuse` windows when not.

    Each has a quarter of the window. It goes with a random one before it for a while and then its own way.
    """
    rng = np.random.default_rng(seed)
    count = PATH * reuse
    own_length = (length - count) // PATH  # a window also holds copies of branch points, at most one for each sequence
    share = rng.uniform(0.5, 1.5, count - 1)
    own = np.maximum(share / share.sum() * (PATH - 1) * own_length, 1).astype(int)
    sequences = [rng.integers(vocabulary, size=own_length)]
    for new in own:
        start = sequences[rng.integers(len(sequences))][: own_length - min(new, own_length - 1)]
        sequences.append(np.concatenate([start, rng.integers(vocabulary, size=own_length - len(start))]))
    return [sequence.tolist() for sequence in sequences]


def tree_rows(sequences: list[list[int]], length: int) -> list[dict[str, Any]]:
    """The sequences merged; each target counts as often as sequences have it."""
    rows, _ = pack_forest(TokenForest.from_sequences(sequences), length, loss_weighting="paths")
    return list(rows)


def document_rows(sequences: list[list[int]], length: int) -> list[dict[str, Any]]:
    """The sequences packed by best fit, each a tree without branches."""
    packed = pack_dataset(Dataset.from_dict({"input_ids": sequences}), length, "bfd")
    return [_document_row(np.array(row["input_ids"]), np.array(row["seq_lengths"])) for row in packed]


def _document_row(input_ids: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    ends = np.cumsum(lengths)
    last = np.zeros(len(input_ids), bool)
    last[ends - 1] = True
    return {
        "input_ids": input_ids,
        "shift_labels": np.where(last, -100, np.roll(input_ids, -1)),
        "position_ids": np.arange(len(input_ids)) - np.repeat(ends - lengths, lengths),
        "subtree_end": np.repeat(ends, lengths),
        "loss_weight": (~last).astype(np.float32),
    }

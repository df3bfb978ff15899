"""Baseline layouts written out position by position in plain Python, and dense masks: the reference of the tests."""

from __future__ import annotations

import numpy as np

Position = tuple[int, int]
"""Document, and place in it."""


def reference_rows(lengths: list[int], max_length: int, layout: str) -> list[list[Position]]:
    """The positions of each row, without padding."""
    documents = [[(document, at) for at in range(length)] for document, length in enumerate(lengths)]
    if layout == "concatenated":
        stream = [position for document in documents for position in document]
        return [stream[low : low + max_length] for low in range(0, len(stream), max_length)]
    kept = [document[:max_length] for document in documents if document]
    if layout == "padded":
        return kept
    rows: list[list[Position]] = []
    for document in sorted(kept, key=len, reverse=True):
        fitting = [row for row in rows if len(row) + len(document) <= max_length]
        fullest = max(fitting, key=len, default=None)
        if fullest is None:
            rows.append(list(document))
        else:
            fullest.extend(document)
    return rows


def dense_mask(row: list[Position], width: int, within_documents: bool) -> np.ndarray:
    """Which pairs (query, key) are visible; rows of padding see nothing unless the mask is plainly causal."""
    mask = np.tril(np.ones((width, width), bool))
    if within_documents:
        document = np.array([document for document, _ in row] + [-1] * (width - len(row)))
        mask &= (document[:, None] == document) & (document >= 0)
    return mask


def count_blocks(mask: np.ndarray, block: int) -> int:
    """Blocks of a dense mask with a visible pair."""
    width = len(mask)
    return sum(
        bool(mask[low : low + block, left : left + block].any())
        for low in range(0, width, block)
        for left in range(0, width, block)
    )

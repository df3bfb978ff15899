"""Attention of rows in numbers: pairs of a query and a key, and 128x128 blocks, without a dense mask.

In every layout what a key is seen by is one stretch: from its own position to the end of its row (causal), of its
document (document mask), or of its subtree (tree mask). So pairs are a sum over stretches, and the blocks of a column
of keys run without a gap from the diagonal to the block in which the longest stretch ends.

Pairs are those between tokens; padding has none. Blocks are what a kernel visits that skips the blocks in which
nothing is visible: under a document or tree mask those with a visible pair of tokens; a causal mask knows nothing of
padding, so there they are all on and below the diagonal of the row, padding included.

Cost: O(n) for n positions, and O(parts) where the layout is given by parts of documents.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.baselines.placement import LongArray, Placement
from dagpack_hf.layout import Rows

BLOCK = 128
"""Positions of a block, as in FlexAttention."""


def triangle(length: LongArray) -> int:
    """Pairs of stretches in which each position sees those before it and itself."""
    return int((length * (length + 1) // 2).sum())


def causal_pairs(placement: Placement) -> int:
    """Pairs of tokens of the same row."""
    return triangle(np.diff(placement.row_offsets))


def document_pairs(placement: Placement) -> int:
    """Pairs of tokens of the same part of a document."""
    return triangle(placement.length)


def causal_blocks(rows: int, width: int) -> int:
    """Blocks of rows of this width under a causal mask."""
    return rows * triangle(np.array([-(-width // BLOCK)]))


def document_blocks(placement: Placement) -> int:
    """Blocks with a pair of tokens of the same part of a document.

    Stretches end later the later they begin, so the longest one of a block of keys is that of its last key.
    """
    begin = placement.row_offsets[:-1]
    block, row = _blocks_of_rows(placement.row_offsets)
    last = np.minimum(begin[row] + (block + 1) * BLOCK, placement.row_offsets[row + 1]) - 1
    part = np.searchsorted(placement.part_offsets, last, side="right") - 1
    last_query = placement.part_offsets[part + 1] - begin[row] - 1
    return int((last_query // BLOCK - block + 1).sum())


def tree_pairs(rows: Rows) -> int:
    """Pairs of a position and its ancestors, itself included."""
    return int(rows.position_ids.sum(dtype=np.int64)) + len(rows.position_ids)


def tree_blocks(rows: Rows) -> int:
    """Blocks with a position and one of its ancestors."""
    block, row = _blocks_of_rows(rows.offsets)
    if not len(block):
        return 0
    last_query = np.maximum.reduceat(rows.subtree_end, rows.offsets[row] + block * BLOCK).astype(np.int64) - 1
    return int((last_query // BLOCK - block + 1).sum())


def _blocks_of_rows(offsets: LongArray) -> tuple[LongArray, LongArray]:
    """The blocks that rows without padding consist of: number within its row, and row, of each."""
    blocks = -(-np.diff(offsets) // BLOCK)
    row = np.repeat(np.arange(len(blocks)), blocks)
    return np.arange(len(row)) - (np.cumsum(blocks) - blocks)[row], row

"""Which part of which document goes where in the layouts that know nothing of shared prefixes.

*Padded*: a row for each document, the rest of it padding. *Concatenated*: all documents one behind the other, cut into
rows of the window's length; a document that lies across a border is in two rows. *Best fit*: documents whole, longest
first, each into the row with the least room that takes it (best fit decreasing; for training data Ding et al.: Fewer
Truncations Improve Language Modeling, 2024, as TRL's `packing_strategy="bfd"` does it). What is longer than a window
is truncated where documents stay whole.

Cost: vectorised, O(n); best fit sorts the documents and takes a few word operations for each. 32 bytes for each part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.best_fit import best_fit_windows
from dagpack_hf.pack_options import check_choice

LongArray = npt.NDArray[np.int64]

PLACEMENTS = ("padded", "concatenated", "best_fit")


@dataclass(frozen=True)
class Placement:
    """Parts of documents in rows; one behind the other, row by row.

    Args:
        document: `int64[P]`, the document that each part is of.
        start: `int64[P]`, where in its document a part begins.
        length: `int64[P]`, tokens of each part, at least 1.
        row: `int64[P]`, its row; ascending, and every row up to the last one has a part.
    """

    document: LongArray
    start: LongArray
    length: LongArray
    row: LongArray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.row[-1]) + 1 if len(self.row) else 0

    @cached_property
    def part_offsets(self) -> LongArray:
        """`int64[P + 1]`, where each part begins if all rows are written one behind the other, without padding."""
        return np.concatenate([[0], np.cumsum(self.length)])

    @cached_property
    def row_offsets(self) -> LongArray:
        """`int64[R + 1]`, where each row begins in the same count."""
        return self.part_offsets[np.searchsorted(self.row, np.arange(self.rows + 1))]


def place(lengths: npt.ArrayLike, max_length: int, layout: str) -> Placement:
    """Place documents in rows.

    Args:
        lengths: tokens of each document. Documents of 0 tokens are left out.
        max_length: window length in tokens.
        layout: `"padded"`, `"concatenated"` or `"best_fit"`.

    Returns:
        The parts. Of documents that stay whole, what lies beyond `max_length` is in none.

    Raises:
        ValueError: `max_length` is below 1, the layout is unknown, or a length is negative or no integer.

    Example:
        >>> place([3, 5, 2], 4, "concatenated").length.tolist(), place([3, 5, 2], 4, "best_fit").length.tolist()
        ([3, 1, 4, 2], [4, 3, 2])
    """
    check_max_length(max_length)
    check_choice("layout", layout, PLACEMENTS)
    tokens = document_lengths(lengths)
    if layout == "concatenated":
        return _concatenated(tokens, max_length)
    document = np.flatnonzero(tokens)
    length = np.minimum(tokens[document], max_length)
    row = np.arange(len(document))
    if layout == "best_fit":
        longest_first = np.argsort(-length, kind="stable")
        row, _ = best_fit_windows(length[longest_first], max_length)
        order = np.argsort(row, kind="stable")
        row, chosen = row[order], longest_first[order]
        document, length = document[chosen], length[chosen]
    return Placement(document, np.zeros(len(document), np.int64), length, row)


def check_max_length(max_length: int) -> None:
    """Refuse windows that hold nothing."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")


def document_lengths(lengths: npt.ArrayLike) -> LongArray:
    """Lengths of documents as `int64[n]`.

    Raises:
        ValueError: one is negative, or they are no flat list of integers.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be a flat list of integers, got {array.dtype} of shape {array.shape}.")
    if array.size and array.min() < 0:
        at = int((array < 0).argmax())
        raise ValueError(f"Document {at} has a length of {array[at]}; lengths are at least 0.")
    return array.astype(np.int64)


def _concatenated(lengths: LongArray, max_length: int) -> Placement:
    """All documents one behind the other, cut at every multiple of the window's length."""
    end = np.cumsum(lengths)
    total = int(end[-1]) if len(end) else 0
    bounds = np.unique(np.concatenate([[0], end, np.arange(0, total, max_length)]))
    begin = bounds[:-1]
    document = np.searchsorted(end, begin, side="right")
    return Placement(document, begin - (end - lengths)[document], np.diff(bounds), begin // max_length)

"""Baseline layouts as rows: the five vectors of `dagpack_hf.layout`, made of documents that share nothing.

Under a document mask a document is a chain of its own: `subtree_end` is where it ends, positions count from 0, and no
target lies in another document. Concatenated without a document mask the row is one chain: positions count through,
each position sees all before it, and the last token of a document has the first of the next one as its target, as in
ordinary training on concatenated text. Every target weighs 1. So the trainer, its attention and its loss are the same
for all layouts, and what differs between two runs is the layout.

Rows hold no padding; the collator pads them, to the longest row of the batch or to the window.

Cost: vectorised, a portion of rows at a time; 20 bytes in memory for each position, and each token is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, DatasetDict, DatasetInfo, IterableDataset, IterableDatasetDict

from dagpack_hf.baselines.placement import LongArray, Placement, check_max_length, place
from dagpack_hf.columns import (
    PORTION,
    ROW_FEATURES,
    SequenceColumns,
    arrow_table,
    is_tree_dataset,
    packing_columns,
    rows_to_table,
)
from dagpack_hf.layout import Rows
from dagpack_hf.overflow import OVERFLOW_CHOICES
from dagpack_hf.pack_options import check_choice
from dagpack_hf.spans import IGNORE_INDEX, SequenceSpans, TokenSequence, read_arrays, read_sequences

BASELINES = {
    "padded": "padded",
    "concatenated": "concatenated",
    "concatenated_masked": "concatenated",
    "best_fit": "best_fit",
}
"""The layouts that can be trained, and how each places documents."""


@dataclass(frozen=True)
class BaselineReport:
    """What a baseline layout made of the documents.

    Args:
        layout: one of `BASELINES`.
        max_length: window length in tokens.
        documents: documents in the rows.
        rows: number of rows.
        tokens: tokens of documents in the rows, appended end-of-text tokens included.
        padding_tokens: positions that padding every row to `max_length` adds.
        targets: positions with a target, each of weight 1.
        crossing_targets: those of them whose target begins another document.
        source_targets: labelled tokens of all documents, the first token of each not counted.
        lost_targets: those of them that are not trained: truncated, dropped, or the first token of a row that goes on
            with a document.
        cut_documents: documents that are truncated or divided among rows.
        dropped_documents: documents longer than a window that are left out.
        empty_documents: documents without a token, which are left out.
        lost_tokens: tokens of documents that are in no row.
    """

    layout: str
    max_length: int
    documents: int
    rows: int
    tokens: int
    padding_tokens: int
    targets: int
    crossing_targets: int
    source_targets: int
    lost_targets: int
    cut_documents: int
    dropped_documents: int
    empty_documents: int
    lost_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        figures = self.to_dict()
        names = [name for name in figures if name not in ("layout", "max_length")]
        width = max(map(len, names))
        lines = [f"{name.replace('_', ' '):<{width}}  {figures[name]:>14,}" for name in names]
        return "\n".join([f"{self.layout}, windows of {self.max_length:,}", *lines])


def baseline_rows(
    documents: Dataset | Sequence[TokenSequence],
    max_length: int,
    *,
    layout: str = "padded",
    labels: Sequence[TokenSequence] | None = None,
    eos_token_id: int | None = None,
    overflow: str = "error",
) -> tuple[Dataset, BaselineReport]:
    """Lay documents out as they are without shared prefixes, in rows that `DagSFTTrainer` trains.

    Args:
        documents: a data set of plain sequences (`input_ids`, and `labels` with -100 where there is no loss), or token
            sequences.
        max_length: window length in tokens.
        layout: `"padded"` (one document in a row), `"concatenated"` (documents one behind the other, cut into rows, a
            row being one causal document), `"concatenated_masked"` (the same with a document mask) or `"best_fit"`
            (whole documents, longest first, each into the fullest row that takes it, with a document mask).
        labels: labels of `documents`, if these are sequences.
        eos_token_id: a token that is appended to every document that does not end with it, whatever the layout. It is
            a target unless the token before it is none.
        overflow: what happens to documents that are longer than a window where they stay whole, as in `pack_dataset`:
            `"error"`, `"truncate"` or `"drop"`. Concatenated documents are cut.

    Returns:
        The rows, in the order of the documents (of the windows under `"best_fit"`), and what was done.

    Raises:
        TypeError: a stream, or a dictionary of splits.
        ValueError: an option is wrong, a document is too long, or ids or labels are not what they should be.

    Example:
        >>> rows, report = baseline_rows([[5, 6, 7], [8, 9]], 4, layout="concatenated_masked")
        >>> rows[0]["input_ids"], rows[0]["position_ids"], rows[0]["subtree_end"]
        ([5, 6, 7, 8], [0, 1, 2, 0], [3, 3, 3, 4])
        >>> rows[0]["shift_labels"], report.rows, report.lost_targets
        ([6, 7, -100, -100], 2, 1)
    """
    check_choice("layout", layout, tuple(BASELINES))
    check_choice("overflow", overflow, OVERFLOW_CHOICES)
    check_max_length(max_length)
    source = _Documents.of(documents, labels, eos_token_id)
    lengths, dropped = _fitting(source.lengths, max_length, layout, overflow)
    placement = place(lengths, max_length, BASELINES[layout])
    masked = layout != "concatenated"
    targets = crossing = 0
    tables = [ROW_FEATURES.arrow_schema.empty_table()]
    for low, high in _portions(placement, PORTION):
        rows, begins = _write(source, placement, low, high, masked)
        targets += int(np.count_nonzero(rows.loss_weight))
        crossing += int(np.count_nonzero(rows.loss_weight[:-1][begins[1:]]))
        tables.append(rows_to_table(rows))
    dataset = Dataset(pa.concat_tables(tables), info=DatasetInfo(features=ROW_FEATURES.copy()))
    counts = {"targets": targets, "crossing_targets": crossing, "dropped_documents": dropped}
    return dataset, _report(source, lengths, placement, layout=layout, max_length=max_length, **counts)


def _report(
    source: _Documents, lengths: LongArray, placement: Placement, *, max_length: int, **known: Any
) -> BaselineReport:
    """The report, with what only the rows tell as `known`; `lengths` are 0 for documents that are dropped."""
    parts = np.bincount(placement.document, minlength=len(lengths))
    tokens, source_targets = int(placement.length.sum()), source.count_targets()
    return BaselineReport(
        max_length=max_length,
        documents=int(np.count_nonzero(parts)),
        rows=placement.rows,
        tokens=tokens,
        padding_tokens=placement.rows * max_length - tokens,
        source_targets=source_targets,
        lost_targets=source_targets - (known["targets"] - known["crossing_targets"]),
        cut_documents=int(((parts > 1) | ((parts > 0) & (lengths > max_length))).sum()),
        empty_documents=int(np.count_nonzero(source.lengths == 0)),
        lost_tokens=int(source.lengths.sum()) - tokens,
        **known,
    )


@dataclass(frozen=True)
class _Documents:
    """Documents, and the end-of-text token that some of them get.

    Args:
        spans: their tokens and labels.
        appended: `bool[n]`, whether the token is appended.
        eos_token_id: the token.
    """

    spans: SequenceSpans
    appended: npt.NDArray[np.bool_]
    eos_token_id: int

    @classmethod
    def of(
        cls,
        documents: Dataset | Sequence[TokenSequence],
        labels: Sequence[TokenSequence] | None,
        eos_token_id: int | None,
    ) -> _Documents:
        spans = _read(documents, labels)
        spans.check()
        ids = spans.ids
        appended = np.zeros(len(ids), bool)
        if eos_token_id is not None:
            if not 0 <= eos_token_id <= np.iinfo(np.int32).max:
                raise ValueError(f"eos_token_id must be a token id, got {eos_token_id}.")
            held = np.flatnonzero(ids.end > ids.begin)
            appended[held] = ids.values[ids.end[held] - 1] != eos_token_id
        return cls(spans, appended, -1 if eos_token_id is None else eos_token_id)

    @property
    def lengths(self) -> LongArray:
        """`int64[n]`, tokens of each, the appended one included."""
        return self.spans.ids.end - self.spans.ids.begin + self.appended

    def tokens(self, document: LongArray, at: LongArray) -> npt.NDArray[np.int32]:
        """Tokens by document and place in it."""
        ids = self.spans.ids
        own = at < (ids.end - ids.begin)[document]
        tokens = np.full(len(at), self.eos_token_id, np.int32)
        tokens[own] = ids.values[ids.begin[document[own]] + at[own]]
        return tokens

    def is_labelled(self, document: LongArray, at: LongArray) -> npt.NDArray[np.bool_]:
        """Whether the tokens at these places are labelled; an appended one is if the token before it is."""
        labels = self.spans.labels
        if labels is None:
            return np.ones(len(at), bool)
        last = (labels.end - labels.begin)[document] - 1
        return labels.values[labels.begin[document] + np.minimum(at, last)] != IGNORE_INDEX

    def count_targets(self) -> int:
        """Labelled tokens, the first one of each document not counted."""
        labels = self.spans.labels
        if labels is None:
            return int(np.maximum(self.lengths - 1, 0).sum())
        count = sum(int(np.count_nonzero(labels[index][1:] != IGNORE_INDEX)) for index in range(len(labels)))
        got = np.flatnonzero(self.appended)
        return count + int(self.is_labelled(got, labels.end[got] - labels.begin[got]).sum())


def _read(documents: Dataset | Sequence[TokenSequence], labels: Sequence[TokenSequence] | None) -> SequenceSpans:
    if isinstance(documents, DatasetDict | IterableDataset | IterableDatasetDict):
        raise TypeError(
            f"baseline_rows needs a data set in memory or on disk, got {type(documents).__name__}. Give it one split, "
            "not a stream."
        )
    if not isinstance(documents, Dataset):
        return read_sequences(documents, labels, None)
    if labels is not None:
        raise ValueError("labels go with sequences; those of a data set are its column `labels`.")
    names = packing_columns(documents.column_names)
    if is_tree_dataset(documents.column_names):
        raise ValueError(
            "The data set has token trees, whose sequences are not written out. Baseline layouts need plain sequences "
            "(input_ids, and labels)."
        )
    columns = SequenceColumns.of(arrow_table(documents, names))
    if columns.labels is None:
        return read_arrays(columns.ids.values, columns.ids.offsets)
    return read_arrays(
        columns.ids.values, columns.ids.offsets, columns.labels.values, label_offsets=columns.labels.offsets
    )


def _fitting(lengths: LongArray, max_length: int, layout: str, overflow: str) -> tuple[LongArray, int]:
    """Lengths of what is placed, 0 for documents that are dropped, and how many these are."""
    too_long = lengths > max_length
    if BASELINES[layout] == "concatenated" or not too_long.any():
        return lengths, 0
    if overflow == "error":
        raise ValueError(
            f"{int(too_long.sum())} of {len(lengths)} documents are longer than max_length={max_length} tokens (the "
            f"longest has {lengths.max()}). Choose a larger max_length, or overflow='truncate' or 'drop'."
        )
    return (np.where(too_long, 0, lengths), int(too_long.sum())) if overflow == "drop" else (lengths, 0)


def _portions(placement: Placement, positions: int) -> list[tuple[int, int]]:
    """First row and end of portions of at most so many positions, or of one row if that is longer."""
    bounds = [0]
    while bounds[-1] < placement.rows:
        reach = placement.row_offsets[bounds[-1]] + positions
        bounds.append(max(int(np.searchsorted(placement.row_offsets, reach, side="right")) - 1, bounds[-1] + 1))
    return list(pairwise(bounds))


def _write(
    source: _Documents, placement: Placement, low: int, high: int, masked: bool
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Rows `low` to `high`, the latter not included, and which positions begin a document."""
    first, end = np.searchsorted(placement.row, [low, high])
    length = placement.length[first:end]
    offsets = placement.row_offsets[low : high + 1] - placement.row_offsets[low]
    part_begin = np.cumsum(length) - length
    row_begin = np.repeat(offsets[:-1], np.diff(offsets))
    chain = np.repeat(part_begin, length) if masked else row_begin
    chain_end = np.repeat(part_begin + length, length) if masked else np.repeat(offsets[1:], np.diff(offsets))
    position = np.arange(offsets[-1])
    document = np.repeat(placement.document[first:end], length)
    at = np.repeat(placement.start[first:end] - part_begin, length) + position
    tokens = source.tokens(document, at)
    labels = np.where(source.is_labelled(document, at), tokens, IGNORE_INDEX)
    shift_labels = np.append(labels[1:], IGNORE_INDEX)
    shift_labels[position + 1 == chain_end] = IGNORE_INDEX
    rows = Rows(
        offsets,
        tokens,
        shift_labels.astype(np.int32),
        (position - chain).astype(np.int32),
        (chain_end - row_begin).astype(np.int32),
        (shift_labels != IGNORE_INDEX).astype(np.float32),
    )
    return rows, at == 0

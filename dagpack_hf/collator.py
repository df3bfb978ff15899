"""Examples of a batch as the tensors of one forward pass.

Two scopes. `"dataset"`: the examples are rows that were packed beforehand over the whole corpus, which shares most;
they are padded and stacked. `"batch"`: the examples are token sequences or token trees, and those of one batch are
merged and packed on the fly, so that each optimizer step sees exactly the examples it would see without packing. Rows
are recognised by their columns, so one collator serves both (evaluation data are packed beforehand in either scope).

Cost: one copy of each row; packing on the fly costs some 0.1 ms for each example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from dagpack_hf.layout import COUNT_COLUMN, ROW_COLUMNS
from dagpack_hf.packing import BatchPacker, is_row_dataset
from dagpack_hf.trie import IGNORE_INDEX

PACKING_SCOPES = ("dataset", "batch")


@dataclass(frozen=True)
class DagCollator:
    """Data collator for packed rows.

    Args:
        max_length: window length in tokens.
        pad_token_id: token of padding positions. They see only themselves and have no target.
        packing_scope: `"dataset"`: every example must be a row that was packed beforehand. `"batch"`: the examples of
            a batch (columns `input_ids` and optional `labels`, or those of token trees) are merged and packed here.
        loss_weighting: `"once"` or `"paths"`, used when packing here.
        overflow: `"error"`, `"truncate"` or `"drop"`, used when packing here.
        padding: `"longest"` (to the longest row of the batch) or `"max_length"` (every batch has the same width, so
            that a compiled kernel is compiled once).
        pad_to_multiple_of: rounds the width up.
        count_sequences: whether batches say how many sequences pass through each position, for the load-balancing loss
            of mixtures of experts: they are counted here, or rows have a column that does.

    Returns:
        A dictionary of tensors. `input_ids`, `shift_labels`, `position_ids`, `subtree_end` (`int64`) and `loss_weight`
        (`float32`) have shape `(rows, width)`; `num_tokens` (`int64`, shape `(rows,)`) is the length of each row
        without padding. With `count_sequences` also `sequence_count` (`float32`, shape `(rows, width)`, 0 at padding),
        unless rows come without it, such as those for evaluation.
        Of examples that were packed here also `logical_tokens` and `unique_tokens` (`int64`, shape `(rows,)`, those of
        the batch in the first row).

    Example:
        >>> collator = DagCollator(max_length=8, packing_scope="batch")
        >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}])
        >>> batch["input_ids"].tolist(), batch["subtree_end"].tolist()
        ([[1, 2, 3, 2, 4]], [[5, 3, 3, 5, 5]])
    """

    max_length: int
    pad_token_id: int = 0
    packing_scope: str = "dataset"
    loss_weighting: str = "once"
    overflow: str = "error"
    padding: str = "longest"
    pad_to_multiple_of: int | None = None
    count_sequences: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("packing_scope", PACKING_SCOPES), ("padding", ("longest", "max_length"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}.")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Stack rows, or pack examples into rows and stack them."""
        if is_row_dataset(examples[0]):
            return self._stack(examples)
        if self.packing_scope == "dataset":
            raise ValueError(
                f"The examples have the columns {', '.join(examples[0])}, which are not rows. Pack the data set with "
                '`pack_dataset` first, or use packing_scope="batch".'
            )
        names = dict.fromkeys(chain.from_iterable(examples))
        batch = {name: [example.get(name) for example in examples] for name in names}
        packer = BatchPacker(self.max_length, self.loss_weighting, self.overflow, count_sequences=self.count_sequences)
        rows, report = packer.pack(batch)
        tensors = self._stack(list(rows) or [EMPTY_ROW])
        for name in ("logical_tokens", "unique_tokens"):
            tensors[name] = torch.zeros_like(tensors["num_tokens"])
            tensors[name][0] = getattr(report, name)
        return tensors

    def _stack(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        if max(lengths) > self.max_length:
            raise ValueError(
                f"A row of {max(lengths)} tokens does not fit max_length={self.max_length}; pack the data set with "
                "the same max_length that the trainer gets."
            )
        width = self.max_length if self.padding == "max_length" else max(*lengths, 1)
        if self.pad_to_multiple_of:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (len(rows), width)
        batch = {
            "input_ids": np.full(shape, self.pad_token_id, np.int64),
            "shift_labels": np.full(shape, IGNORE_INDEX, np.int64),
            "position_ids": np.zeros(shape, np.int64),
            "subtree_end": np.broadcast_to(np.arange(1, width + 1), shape).copy(),
            "loss_weight": np.zeros(shape, np.float32),
        }
        if self.count_sequences and COUNT_COLUMN in rows[0]:
            batch[COUNT_COLUMN] = np.zeros(shape, np.float32)
        for name in batch:
            for index, row in enumerate(rows):
                batch[name][index, : lengths[index]] = row[name]
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        tensors["num_tokens"] = torch.tensor(lengths)
        return tensors


EMPTY_ROW: dict[str, list[int]] = {name: [] for name in (*ROW_COLUMNS, COUNT_COLUMN)}
"""A row of padding only, for ranks that would otherwise get a repeated row."""

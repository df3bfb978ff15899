"""Examples into a forest: of a data set, of an Arrow table, or of a batch of lists of any kind.

Under `overflow="drop"` sequences that are longer than a window are left out here, where they are still sequences; in
token trees only the forest knows which turns reach too far.

Cost: the token ids are not copied on the way in if they are int32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from dagpack_hf.buckets import Examples
from dagpack_hf.columns import (
    SequenceColumns,
    arrow_table,
    batch_trees,
    is_tree_dataset,
    iter_trees,
    packing_columns,
    table_trees,
)
from dagpack_hf.overflow import Overflow
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.sequence_counts import count_plain_sequences, count_tree_sequences
from dagpack_hf.spans import read_arrays
from dagpack_hf.token_trees import TokenTree, read_trees
from dagpack_hf.trie import IGNORE_INDEX, TokenForest


@dataclass(frozen=True)
class MergedDataset:
    """A data set, merged.

    Args:
        forest: the merged examples.
        dropped: what was left out before.
        examples: where each example is, if that is needed.
    """

    forest: TokenForest
    dropped: Overflow
    examples: Examples | None


def merge_dataset(dataset: Dataset, options: PackOptions) -> MergedDataset:
    """Merge a data set; `bucket_size` needs to know where each example is."""
    in_buckets = options.bucket_size is not None
    if is_tree_dataset(dataset.column_names):
        examples = _tree_examples(dataset) if in_buckets else None
        return MergedDataset(_merged_trees(iter_trees(dataset), options), Overflow(), examples)
    sequences, dropped = _fitting(
        SequenceColumns.of(arrow_table(dataset, packing_columns(dataset.column_names))), options
    )
    ids = sequences.ids
    examples = Examples.of_sequences(read_arrays(ids.values, ids.offsets)) if in_buckets else None
    return MergedDataset(sequences.forest(options.count_sequences), dropped, examples)


def merge_batch(batch: pa.Table | Mapping[str, Any], options: PackOptions) -> tuple[TokenForest, Overflow]:
    """Merge a batch of examples, as a table or as lists of any kind; with it, what was left out before."""
    if isinstance(batch, pa.Table):
        if is_tree_dataset(batch.column_names):
            return _merged_trees(table_trees(batch), options), Overflow()
        sequences, dropped = _fitting(SequenceColumns.of(batch), options)
        return sequences.forest(options.count_sequences), dropped
    names = packing_columns(list(batch))
    if is_tree_dataset(names):
        return _merged_trees(batch_trees(batch), options), Overflow()
    ids, labels = list(batch["input_ids"]), batch.get("labels")
    keep, dropped = _fitting_lists(ids, labels, options)
    ids = [ids[index] for index in keep]
    forest = TokenForest.from_sequences(ids, None if labels is None else [labels[index] for index in keep])
    if options.count_sequences:
        forest = count_plain_sequences(forest, forest if labels is None else TokenForest.from_sequences(ids))
    return forest, dropped


def _merged_trees(trees: Iterable[TokenTree], options: PackOptions) -> TokenForest:
    forest = TokenForest.from_trees(trees)
    return count_tree_sequences(forest) if options.count_sequences else forest


def _tree_examples(dataset: Dataset) -> Examples:
    nodes = np.fromiter((len(tree.node_length) for tree in iter_trees(dataset)), np.int64, len(dataset))
    return Examples.of_trees(read_trees(iter_trees(dataset)), nodes)


def _fitting(sequences: SequenceColumns, options: PackOptions) -> tuple[SequenceColumns, Overflow]:
    """The sequences that are packed: all, but under `"drop"` those that fit the window."""
    return sequences.up_to(options.max_length) if options.overflow == "drop" else (sequences, Overflow())


def _fitting_lists(ids: Sequence[Any], labels: Any, options: PackOptions) -> tuple[Sequence[int], Overflow]:
    """The same of lists of any kind, as indices."""
    if options.overflow != "drop":
        return range(len(ids)), Overflow()
    gone = [index for index, sequence in enumerate(ids) if len(sequence) > options.max_length]
    lost = Overflow(
        cut_sequences=len(gone),
        lost_tokens=sum(len(ids[index]) for index in gone),
        lost_targets=sum(
            len(ids[index]) - 1
            if labels is None
            else int(np.count_nonzero(np.asarray(labels[index])[1:] != IGNORE_INDEX))
            for index in gone
        ),
    )
    return sorted(set(range(len(ids))).difference(gone)), lost

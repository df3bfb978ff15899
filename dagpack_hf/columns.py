"""Arrow columns of token trees, plain sequences and rows, as numpy arrays and back.

Lists are read where they lie: of each chunk of a column the flat values and the offsets of its lists, without an
object for each list. Of trees there is one for each tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat
from datasets import Dataset, Features, List, Value

from dagpack_hf.layout import COUNT_COLUMN, ROW_COLUMNS, Rows
from dagpack_hf.overflow import Overflow
from dagpack_hf.sequence_counts import count_plain_sequences
from dagpack_hf.trie import IGNORE_INDEX, TokenForest, TokenTree

TREE_COLUMNS = ("input_ids", "target_count", "node_length", "node_parent", "logical_tokens")
"""Columns of a data set of token trees."""

OPTIONAL_TREE_COLUMNS = ("target_weight",)
"""Columns that a data set of token trees may have besides. A tree without a value there has no weights."""

SEQUENCE_COLUMNS = ("input_ids", "labels")
"""Columns of a data set of plain sequences; the second one is optional."""

ROW_FEATURES = Features({name: List(Value("float32" if name == "loss_weight" else "int32")) for name in ROW_COLUMNS})
"""Features of a data set of rows."""

COUNTED_ROW_FEATURES = Features({**ROW_FEATURES, COUNT_COLUMN: List(Value("float32"))})
"""Features of a data set of rows that say how many sequences pass through each position."""

PORTION = 1024 * 1024
"""Positions of the rows that are in memory at a time while they are written."""

IntegerArray = npt.NDArray[np.integer]


def is_tree_dataset(columns: Any) -> bool:
    """Whether these are the columns of a data set of token trees."""
    return "node_parent" in columns and "target_count" in columns


def is_row_dataset(columns: Any) -> bool:
    """Whether these are the columns of a data set of rows."""
    return all(name in columns for name in ROW_COLUMNS)


def row_features(counted: bool) -> Features:
    """Features of a data set of rows, with the number of sequences through each position or without."""
    return (COUNTED_ROW_FEATURES if counted else ROW_FEATURES).copy()


def packing_columns(columns: Sequence[str]) -> list[str]:
    """The columns that packing reads.

    Raises:
        ValueError: there are no token ids, or masks that would be ignored.
    """
    if is_tree_dataset(columns):
        return [*TREE_COLUMNS, *(name for name in OPTIONAL_TREE_COLUMNS if name in columns)]
    if "input_ids" in columns:
        masks = [name for name in ("assistant_masks", "completion_mask") if name in columns]
        if masks and "labels" not in columns:
            raise ValueError(
                f"The data set has {' and '.join(masks)} but no labels column, so every token would be trained. Add a "
                "labels column (-100 where there is no loss) or remove the masks."
            )
        return [name for name in SEQUENCE_COLUMNS if name in columns]
    remedy = (
        "Turn conversations into token trees with `tokenize_conversations(dataset, tokenizer)` first."
        if "messages" in columns
        else "Tokenise the data set first."
    )
    raise ValueError(f"Packing needs an input_ids column; the data set has {', '.join(columns) or 'none'}. {remedy}")


def arrow_table(dataset: Dataset, columns: Sequence[str]) -> pa.Table:
    """Some columns of a data set as an Arrow table; nothing is copied unless rows were selected."""
    if dataset._indices is not None:
        return dataset.select_columns(list(columns)).with_format("arrow")[:]
    return dataset.data.table.select(list(columns))


# Trees


def iter_trees(dataset: Dataset) -> Iterator[TokenTree]:
    """Token trees of a data set, as views of its Arrow buffers."""
    names = packing_columns(dataset.column_names)
    for batch in dataset.select_columns(names).with_format("arrow").iter(batch_size=256):
        yield from table_trees(batch)


def table_trees(table: pa.Table) -> Iterator[TokenTree]:
    """Token trees of an Arrow table."""
    names = packing_columns(table.column_names)
    columns: dict[str, Iterable[Any]] = {
        name: table[name].to_pylist() if name == "logical_tokens" else _list_views(table[name]) for name in names
    }
    for values in zip(*columns.values(), strict=True):
        yield TokenTree(**dict(zip(names, values, strict=True)))


def batch_trees(batch: Mapping[str, Any]) -> Iterator[TokenTree]:
    """Token trees of a batch of examples, whose lists are of any kind."""
    names = packing_columns(list(batch))
    for values in zip(*(batch[name] for name in names), strict=True):
        arrays: list[Any] = [None if value is None else np.asarray(value) for value in values]
        yield TokenTree(**dict(zip(names, arrays, strict=True)))


def _list_views(column: pa.ChunkedArray) -> Iterator[Any]:
    """The lists of a column as numpy arrays, `None` for a null."""
    for chunk in column.chunks:
        if chunk.null_count == len(chunk):
            yield from [None] * len(chunk)
            continue
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=True)
        is_null = chunk.is_null().to_pylist() if chunk.null_count else repeat(False)
        for (low, high), null in zip(pairwise(offsets.tolist()), is_null, strict=False):
            yield None if null else values[low:high]


# Sequences


@dataclass(frozen=True)
class ListColumn:
    """A column of lists of integers, in chunks.

    Args:
        values: flat values of each chunk.
        offsets: `int64[n + 1]` for each chunk; its list `i` is `values[offsets[i] : offsets[i + 1]]`.
    """

    values: list[IntegerArray]
    offsets: list[npt.NDArray[np.int64]]

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray) -> ListColumn:
        """Read a column of lists of any kind.

        Raises:
            ValueError: it is not a column of lists of integers, or has nulls.
        """
        kind = column.type
        if pat.is_null(kind) and not len(column):
            return cls([], [])
        if any(is_other(kind) for is_other in (pat.is_list_view, pat.is_large_list_view, pat.is_fixed_size_list)):
            column = column.cast(pa.large_list(kind.value_type))
        is_list = pat.is_list(column.type) or pat.is_large_list(column.type)
        if not is_list or not (pat.is_integer(kind.value_type) or pat.is_null(kind.value_type)):
            raise ValueError(f"The column {name} has the type {kind}; packing needs lists of integers.")
        values, offsets, before = [], [], 0
        for chunk in column.chunks:
            bounds = np.asarray(chunk.offsets.to_numpy(), np.int64)
            flat = chunk.values
            if chunk.null_count or (flat.null_count and chunk.flatten().null_count):
                raise ValueError(f"The column {name} has {_first_null(chunk, before)}. Leave such examples out.")
            if pat.is_null(flat.type) or flat.null_count:
                flat, bounds = chunk.flatten().cast(pa.int32()), bounds - bounds[0]
            values.append(flat.to_numpy(zero_copy_only=True))
            offsets.append(bounds)
            before += len(chunk)
        return cls(values, offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`int64[n]`, length of each list."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(bounds) for bounds in self.offsets)])

    def lists(self, which: npt.NDArray[np.bool_]) -> Iterator[IntegerArray]:
        """Some of the lists."""
        at = 0
        for flat, bounds in zip(self.values, self.offsets, strict=True):
            for index in np.flatnonzero(which[at : at + len(bounds) - 1]):
                yield flat[bounds[index] : bounds[index + 1]]
            at += len(bounds) - 1

    def only(self, which: npt.NDArray[np.bool_]) -> ListColumn:
        """The same column with some of its lists, without a copy: a chunk for each stretch of them."""
        values, offsets, at = [], [], 0
        for flat, bounds in zip(self.values, self.offsets, strict=True):
            mask = np.concatenate([[False], which[at : at + len(bounds) - 1], [False]])
            edges = np.flatnonzero(mask[1:] != mask[:-1]).reshape(-1, 2)
            for low, high in edges.tolist():
                values.append(flat)
                offsets.append(bounds[low : high + 1])
            at += len(bounds) - 1
        return ListColumn(values, offsets)


@dataclass(frozen=True)
class SequenceColumns:
    """Plain sequences.

    Args:
        ids: their token ids.
        labels: their labels, `None` if every token is a target.
    """

    ids: ListColumn
    labels: ListColumn | None = None

    @classmethod
    def of(cls, table: pa.Table) -> SequenceColumns:
        """Read `input_ids`, and `labels` if there are any."""
        names = [name for name in SEQUENCE_COLUMNS if name in table.column_names]
        return cls(*(ListColumn.of(name, table[name]) for name in names))

    def up_to(self, max_length: int) -> tuple[SequenceColumns, Overflow]:
        """Leave out the sequences that are longer, and say what that costs."""
        lengths = self.ids.lengths
        gone = lengths > max_length
        if not gone.any():
            return self, Overflow()
        if self.labels is None:
            targets = int((lengths[gone] - 1).sum())
        else:
            targets = sum(int(np.count_nonzero(each[1:] != IGNORE_INDEX)) for each in self.labels.lists(gone))
        lost = Overflow(cut_sequences=int(gone.sum()), lost_tokens=int(lengths[gone].sum()), lost_targets=targets)
        labels = None if self.labels is None else self.labels.only(~gone)
        return SequenceColumns(self.ids.only(~gone), labels), lost

    def forest(self, count_sequences: bool = False) -> TokenForest:
        """Merge them, and count how many pass through each token if that is wanted."""
        labels = self.labels
        if labels is None:
            forest = without_labels = TokenForest.from_arrays(self.ids.values, self.ids.offsets)
        else:
            forest = TokenForest.from_arrays(
                self.ids.values, self.ids.offsets, labels.values, label_offsets=labels.offsets
            )
            if count_sequences:
                without_labels = TokenForest.from_arrays(self.ids.values, self.ids.offsets)
        return count_plain_sequences(forest, without_labels) if count_sequences else forest


def _first_null(chunk: pa.Array, before: int) -> str:
    """Where a chunk has a null; `before` is the number of examples before it."""
    if chunk.null_count:
        return f"no value in example {before + chunk.is_null().to_pylist().index(True)}"
    index = next(index for index, each in enumerate(chunk) if each.values.null_count)
    return f"a null among the values of example {before + index}"


# Rows


def rows_to_table(rows: Rows) -> pa.Table:
    """Rows as an Arrow table with the features of `row_features`."""
    offsets = pa.array(rows.offsets, pa.int64())
    if len(rows.input_ids) > np.iinfo(np.int32).max:
        return pa.table(
            {name: pa.LargeListArray.from_arrays(offsets, pa.array(getattr(rows, name))) for name in rows.columns}
        )
    offsets = offsets.cast(pa.int32())
    columns = {name: pa.ListArray.from_arrays(offsets, pa.array(getattr(rows, name))) for name in rows.columns}
    return pa.table(columns, schema=row_features(rows.sequence_count is not None).arrow_schema)


def written(portions: Iterable[Rows], write: Callable[[pa.Table], None]) -> Iterator[Rows]:
    """Write rows, portion by portion, as they pass."""
    for rows in portions:
        write(rows_to_table(rows))
        yield rows

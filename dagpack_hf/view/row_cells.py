"""What a figure shows of a packed row: its positions, or stretches of them, and what each of them is.

All is read from the vectors of the row. A position is a *copy* if a sibling has the same token: that is how a branch
point is written. It is *replayed* if another row trains the step into it, or, where no row trains that, an earlier row
has it: the window repeats it as context.

A stretch is a run of positions without a branch that are alike in this; so a window of thousands of tokens can be
shown in a few cells.

Cost: linear in the positions of the rows, in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagpack_hf.trie import IGNORE_INDEX

_LOOK = 40
"""Tokens of a stretch whose text is looked at: more than any label shows."""

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Row = dict[str, Any]
"""The vectors of a row by name, as `Rows` and data sets of rows give them."""

Namer = Callable[[list[int]], str]
"""Gives the label of some token ids in a row."""


class RowSource(Protocol):
    """Rows by number: `Rows`, a data set of rows, or a list of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class RowCells:
    """The cells of a row, each a position or a stretch of positions.

    Args:
        first: `int64[n]`, the first position of each.
        length: `int64[n]`, how many positions it stands for.
        end: `int64[n]`, one past the last cell of its subtree: cell `i` sees cell `j` exactly when
            `j <= i < end[j]`.
        depth: `int64[n]`, the position id of its first position.
        inputs: the label of its input ids.
        targets: the label of its targets, empty without any.
        is_copy: `bool[n]`, whether it is one of the copies of a branch point.
        is_replayed: `bool[n]`, whether it is there as context only and trained elsewhere.
    """

    first: LongArray
    length: LongArray
    end: LongArray
    depth: LongArray
    inputs: list[str]
    targets: list[str]
    is_copy: BoolArray
    is_replayed: BoolArray

    def __len__(self) -> int:
        return len(self.first)


def row_cells(rows: RowSource, index: int = 0, *, name: Namer | None = None, stretches: bool = False) -> RowCells:
    """The cells of one row among several.

    Args:
        rows: rows that belong together: what is replayed is found out by looking at all of them.
        index: which one is shown.
        name: gives the label of token ids; by default the first id, and how many there are.
        stretches: one cell for each stretch, not for each position.

    Raises:
        IndexError: there is no such row.
        ValueError: the row is none: a vector is missing, or they do not fit each other.
    """
    if not 0 <= index < len(rows):
        raise IndexError(f"There is no row {index}; there are {len(rows):,}, counted from 0.")
    row = rows[index]
    vectors = [_vector(row, each, index) for each in ("input_ids", "shift_labels", "position_ids", "subtree_end")]
    ids, labels, depth, end = vectors
    above = parents(end)
    copied = copies(ids, end)
    replayed = replayed_positions(rows, index)
    begins = np.ones(len(ids), bool)
    if stretches and len(ids):
        is_only_child = (above[1:] == np.arange(len(ids) - 1)) & (end[1:] == end[:-1])
        is_alike = replayed[1:] == replayed[:-1]
        for vector in (labels != IGNORE_INDEX, copied):
            is_alike &= vector[1:] == vector[:-1]
        begins[1:] = ~(is_only_child & is_alike)
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, len(ids)))
    number = np.cumsum(begins) - 1
    say = _ids if name is None else name
    spans = [slice(at, at + count) for at, count in zip(first.tolist(), length.tolist(), strict=True)]
    return RowCells(
        first,
        length,
        np.append(number, len(first))[end[first]],
        depth[first],
        [say(ids[span].tolist()) for span in spans],
        [say(labels[span].tolist()) if labels[span.start] != IGNORE_INDEX else "" for span in spans],
        copied[first],
        replayed[first],
    )


def parents(end: LongArray) -> LongArray:
    """`int64[n]`, the position above each, -1 for a root.

    Args:
        end: `int64[n]`, one past the last position of each one's subtree.
    """
    above = np.full(len(end), -1, np.int64)
    open_positions: list[int] = []
    for position, last in enumerate(end.tolist()):
        while open_positions and end[open_positions[-1]] <= position:
            open_positions.pop()
        if open_positions:
            above[position] = open_positions[-1]
        if last > position + 1:
            open_positions.append(position)
    return above


def copies(ids: LongArray, end: LongArray) -> BoolArray:
    """`bool[n]`, which positions have a sibling with the same token.

    Args:
        ids: `int64[n]`, the token at each position.
        end: `int64[n]`, one past the last position of each one's subtree.
    """
    pairs = np.stack([parents(end), ids])
    _, of_position, count = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    return count[of_position.reshape(-1)] > 1


def replayed_positions(rows: RowSource, index: int) -> BoolArray:
    """`bool[n]`, which positions of a row only repeat, as context, what belongs to another row."""
    numbers: dict[tuple[int, int], int] = {}
    owner: dict[int, int] = {}
    paths: list[int] = []
    for number in range(len(rows)):
        row = rows[number]
        ids, labels, end = (_vector(row, name, number) for name in ("input_ids", "shift_labels", "subtree_end"))
        own: list[int] = []
        for position, (token, above) in enumerate(zip(ids.tolist(), parents(end).tolist(), strict=True)):
            path = numbers.setdefault((own[above] if above >= 0 else -1, token), len(numbers))
            own.append(path)
            is_trained = position > 0 and above == position - 1 and labels[above] == token
            if is_trained or path not in owner:
                owner[path] = number
        if number == index:
            paths = own
    return np.array([owner[path] != index for path in paths], bool)


def _vector(row: Row, name: str, index: int) -> LongArray:
    """One vector of a row, checked."""
    if name not in row:
        raise ValueError(f"Row {index} has no {name}; rows are those of pack_forest or pack_dataset.")
    vector = np.asarray(row[name], np.int64)
    count = len(row["input_ids"])
    if vector.shape != (count,):
        raise ValueError(f"Row {index}: {name} has shape {vector.shape}, and there are {count} input_ids.")
    if name == "subtree_end" and count and not ((vector > np.arange(count)) & (vector <= count)).all():
        raise ValueError(f"Row {index}: subtree_end must lie behind each position and within the row.")
    return vector


def _ids(ids: Sequence[int]) -> str:
    return str(ids[0]) if len(ids) == 1 else f"{ids[0]} … {len(ids)} ids"


def token_namer(decode: Callable[[list[int]], str]) -> Namer:
    """Labels of token ids as text; white space of single tokens is made visible.

    Args:
        decode: gives the text of ids, such as `tokenizer.decode`.
    """
    marks = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})

    def name(ids: list[int]) -> str:
        text = decode(ids[:_LOOK])
        return text.translate(marks) if len(ids) == 1 else text.replace("\n", " ")

    return name

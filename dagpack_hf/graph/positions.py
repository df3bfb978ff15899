"""Positions other than depth, and the pairs of ids that a row trains.

Depth is what makes a row equal to its paths as ordinary sequences. With other positions it equals those paths under
the same `position_ids`, as long as the model looks at positions through `position_ids` alone. A sliding window, which
is measured in positions, then reaches by the new ones.

Cost: one pass over each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from dagpack_hf.columns import is_row_dataset
from dagpack_hf.layout import Rows
from dagpack_hf.trie import IGNORE_INDEX

IntArray = npt.NDArray[np.integer]
PositionFunction = Callable[[IntArray, IntArray], IntArray]
"""Takes token ids and depths, `int32[n]` of one row each, and gives a position for each."""

R = TypeVar("R", Rows, Dataset)


def with_positions(rows: R, position: PositionFunction) -> R:
    """The same rows with other positions.

    Args:
        rows: rows of `pack_forest` or `pack_dataset`.
        position: called with the token ids and depths of each row; gives the positions, integers from 0 up.

    Raises:
        ValueError: what it gives is no position for each token.
        TypeError: not rows.

    Example:
        >>> from dagpack_hf import pack_forest
        >>> from dagpack_hf.graph import TransitionGraph
        >>> graph = TransitionGraph.from_episodes([("abcd", [1, 1, 1]), ("acd", [2, 1])])
        >>> rows, _ = pack_forest(graph.to_forest(), max_length=8)
        >>> distances = graph.distances()
        >>> with_positions(rows, lambda ids, depth: distances[ids]).position_ids.tolist()
        [0, 1, 2, 2, 0, 1]
    """
    if isinstance(rows, Rows):
        moved: list[npt.NDArray[np.int32]] = [
            _positions(position, row["input_ids"], row["position_ids"], index) for index, row in enumerate(rows)
        ]
        return replace(rows, position_ids=np.concatenate([np.zeros(0, np.int32), *moved]))
    if not isinstance(rows, Dataset) or not is_row_dataset(rows.column_names):
        raise TypeError("with_positions needs rows: those of pack_forest, or the data set that pack_dataset returns.")

    def move(row: dict[str, Any], index: int) -> dict[str, Any]:
        ids, depth = (np.asarray(row[name], np.int32) for name in ("input_ids", "position_ids"))
        return {"position_ids": _positions(position, ids, depth, index)}

    return cast(R, rows.map(move, with_indices=True, features=rows.features, desc="Moving positions"))


def _positions(position: PositionFunction, ids: IntArray, depth: IntArray, index: int) -> npt.NDArray[np.int32]:
    """Positions of one row, checked."""
    given = np.asarray(position(ids, depth))
    if given.shape != ids.shape or (given.size and (given.dtype.kind not in "iu" or given.min() < 0)):
        raise ValueError(
            f"Row {index}: the position function must give an integer from 0 up for each of {len(ids)} tokens, got "
            f"{given.dtype} of shape {given.shape}{f', the least {given.min()}' if given.size else ''}."
        )
    return given.astype(np.int32)


def trained_pairs(rows: Rows) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What rows train, as ids X and their targets Y, in order.

    With nodes of one id, each pair is a transition: the node it leaves, and the node it leads to.

    Returns:
        X and Y, `int32[t]` each.

    Example:
        >>> from dagpack_hf import pack_forest
        >>> from dagpack_hf.graph import TransitionGraph
        >>> graph = TransitionGraph.from_episodes([("abcd", [1, 1, 1]), ("acd", [2, 1])])
        >>> rows, _ = pack_forest(graph.to_forest(), max_length=8)
        >>> x, y = trained_pairs(rows)
        >>> x.tolist(), y.tolist()
        ([0, 1, 2, 0], [1, 2, 3, 4])
    """
    is_trained = rows.shift_labels != IGNORE_INDEX
    return rows.input_ids[is_trained], rows.shift_labels[is_trained]

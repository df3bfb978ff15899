"""Windows as rows: five aligned vectors, and the way back.

A row is one window in depth-first preorder, heavy child first (fewest attention blocks). Query `i` sees key `j`
exactly when `j <= i < subtree_end[j]`, so one vector is the whole attention mask. A window repeats the ancestors that
its leaves need; a segment that is in several windows is trained in the first one only. Cost: a few vectorised passes
over the positions of each window, and Python per segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.pack import Windows
from dagpack_hf.segments import Segments, subtree_lengths
from dagpack_hf.trie import IGNORE_INDEX, TokenForest, preorder

ROW_DTYPES = {
    "input_ids": np.dtype(np.int32),
    "shift_labels": np.dtype(np.int32),
    "position_ids": np.dtype(np.int32),
    "subtree_end": np.dtype(np.int32),
    "loss_weight": np.dtype(np.float32),
}
"""The five vectors of a row."""

ROW_COLUMNS = tuple(ROW_DTYPES)

LOSS_WEIGHTINGS = ("once", "paths")


@dataclass(frozen=True)
class Rows:
    """Windows, laid out one after the other.

    Args:
        offsets: `int64[W + 1]`; row `w` is `[offsets[w], offsets[w + 1])` of each vector.
        input_ids: `int32`, the token at each position.
        shift_labels: `int32`, the target of each position, -100 for none.
        position_ids: `int32`, depth in the trie.
        subtree_end: `int32`, one past the last position of this position's subtree, counted within its row.
        loss_weight: `float32`, weight of the target, 0 where there is none.
    """

    offsets: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    shift_labels: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    subtree_end: npt.NDArray[np.int32]
    loss_weight: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: getattr(self, name)[self.offsets[index] : self.offsets[index + 1]] for name in ROW_COLUMNS}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))


def layout_rows(
    forest: TokenForest, segments: Segments, windows: Windows, *, loss_weighting: str = "once", seed: int | None = None
) -> Rows:
    """Write windows as rows.

    Args:
        forest: the merged corpus.
        segments: its segments.
        windows: the leaf segments of each window.
        loss_weighting: `"once"` (each distinct target counts once, with the mean weight of the source sequences that
            have it as a target) or `"paths"` (each target counts as often as source sequences train it, with the sum
            of their weights, which equals ordinary training on the unpacked data). Without weights each weighs 1.
        seed: shuffles the order of the rows; `None` keeps the order of the windows.

    Returns:
        One row for each window.

    Raises:
        ValueError: unknown `loss_weighting`.
    """
    if loss_weighting not in LOSS_WEIGHTINGS:
        choices = " or ".join(map(repr, LOSS_WEIGHTINGS))
        raise ValueError(f"loss_weighting must be {choices}, got {loss_weighting!r}.")
    trained = np.zeros(len(segments), bool)
    pieces = [_layout_window(forest, segments, leaves, trained, loss_weighting) for leaves in windows]
    order = np.arange(len(pieces)) if seed is None else np.random.default_rng(seed).permutation(len(pieces))
    pieces = [pieces[index] for index in order]
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece["input_ids"]) for piece in pieces], out=offsets[1:])
    columns = [
        np.concatenate([np.zeros(0, dtype), *(piece[name] for piece in pieces)]) for name, dtype in ROW_DTYPES.items()
    ]
    return Rows(offsets, *columns)


def _layout_window(
    forest: TokenForest, segments: Segments, leaves: Sequence[int], trained: npt.NDArray[np.bool_], loss_weighting: str
) -> dict[str, np.ndarray]:
    """The five vectors of one window; marks the segments it trains."""
    own, parent = _window_segments(segments, leaves)
    length = segments.length[own]
    weight = subtree_lengths(parent, length)
    order, _ = preorder(parent, -weight)
    own, length, weight = own[order], length[order], weight[order]

    begin = np.cumsum(length) - length
    within = np.arange(length.sum()) - np.repeat(begin, length)
    token = np.repeat(segments.start[own], length) + within
    target = np.append(token[1:], 0)
    last = (begin + length - 1)[length > 0]
    target[last] = segments.target[own][length > 0]
    target_weight = forest.path_weight[target]
    if loss_weighting == "once":
        target_weight = target_weight / np.maximum(forest.target_count[target], 1)
    target_weight[(target < 0) | np.repeat(trained[own], length)] = 0
    trained[own] = True

    row = {
        "input_ids": forest.tokens[token],
        "shift_labels": np.where(target_weight > 0, forest.tokens[target], IGNORE_INDEX),
        "position_ids": np.repeat(segments.depth[own], length) + within,
        "subtree_end": np.repeat(begin + weight, length),
        "loss_weight": target_weight,
    }
    return {name: values.astype(ROW_DTYPES[name], copy=False) for name, values in row.items()}


def _window_segments(segments: Segments, leaves: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Segments of the leaves' root paths in preorder, and the parent of each as an index among them."""
    found: set[int] = set()
    for leaf in leaves:
        node = leaf
        while node >= 0 and node not in found:
            found.add(node)
            node = int(segments.parent[node])
    own = np.array(sorted(found), np.int64)
    above = segments.parent[own]
    return own, np.where(above < 0, -1, np.searchsorted(own, above))


def unpack(rows: Rows) -> list[npt.NDArray[np.int32]]:
    """The distinct maximal sequences in a set of rows: the token ids of every path from a root to a leaf.

    The inverse of packing. Equal sequences, and a sequence that is a prefix of another one, are one path.

    Returns:
        Token ids, `int32`, sorted.

    Example:
        >>> from dagpack_hf import TokenForest, pack_forest
        >>> rows, _ = pack_forest(TokenForest.from_sequences([[1, 2, 3], [1, 2, 4]]), max_length=8)
        >>> [path.tolist() for path in unpack(rows)]
        [[1, 2, 3], [1, 2, 4]]
    """
    paths = []
    for row in rows:
        end = row["subtree_end"]
        for leaf in np.flatnonzero(end == np.arange(len(end)) + 1):
            ancestors = np.flatnonzero(end[: leaf + 1] > leaf)
            paths.append(row["input_ids"][ancestors])
    return sorted(paths, key=lambda path: path.tolist())

"""Windows as rows: five aligned vectors, a sixth if wanted, and the way back.

A row is one window in depth-first preorder, heavy child first (fewest attention blocks). Query `i` sees key `j`
exactly when `j <= i < subtree_end[j]`, so one vector is the whole attention mask. A window repeats the ancestors that
its leaves need; a segment that is in several windows is trained in the first one only. Which one that is, is found out
first, so that rows can be written in any order and portion.

Cost: one pass over the segments of each window to measure it and one to write it, at the speed of memory. In memory
the rows of a portion, and 64 bytes for each segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.rows import count_paths, measure_windows, write_paths, write_windows
from dagpack_hf.pack import Windows
from dagpack_hf.segments import Segments
from dagpack_hf.trie import TokenForest

ROW_DTYPES = {
    "input_ids": np.dtype(np.int32),
    "shift_labels": np.dtype(np.int32),
    "position_ids": np.dtype(np.int32),
    "subtree_end": np.dtype(np.int32),
    "loss_weight": np.dtype(np.float32),
}
"""The five vectors of a row."""

ROW_COLUMNS = tuple(ROW_DTYPES)

COUNT_COLUMN = "sequence_count"
"""The sixth vector, `float32`, that a row may have: how many source sequences pass through each position."""

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
        sequence_count: `float32`, how many source sequences pass through each position, as a target or as context; 0
            where another position stands for them: at all but one of the copies of a branch point, and in what a
            window repeats. `None`: not counted.
    """

    offsets: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    shift_labels: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    subtree_end: npt.NDArray[np.int32]
    loss_weight: npt.NDArray[np.float32]
    sequence_count: npt.NDArray[np.float32] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The vectors that these rows have."""
        return ROW_COLUMNS if self.sequence_count is None else (*ROW_COLUMNS, COUNT_COLUMN)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: getattr(self, name)[self.offsets[index] : self.offsets[index + 1]] for name in self.columns}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))


class Source(NamedTuple):
    """Where the tokens and weights of segments come from. Tokens are counted in node order.

    Args:
        values: `int32[...]`, an array with all tokens.
        at: `int64[M]`, where in it each segment begins.
        start: `int64[M]`, the first token of each.
        run: `int64[M]`, the run of equal weights that this token is in.
        target: `int32[M]`, the target of each one's last position, -1 for none.
        target_weight: `float32[M]`, its weight, 0 for none.
        run_end: `int64[R]`, one past the last token of each run of equal weights.
        run_weight: `float32[R]`, weight of each token of a run as a target.
        run_trained: `bool[R]`, whether they are targets.
        run_sequences: `float32[R]`, how often each of them counts as a position of sequences; empty: not counted.
        stands: `bool[M]`, whether the segment is the one that counts, of those with the same tokens.
    """

    values: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    run: npt.NDArray[np.int64]
    target: npt.NDArray[np.int32]
    target_weight: npt.NDArray[np.float32]
    run_end: npt.NDArray[np.int64]
    run_weight: npt.NDArray[np.float32]
    run_trained: npt.NDArray[np.bool_]
    run_sequences: npt.NDArray[np.float32]
    stands: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, forest: TokenForest, segments: Segments, loss_weighting: str) -> Source:
        """The source of the segments of a forest."""
        tally = forest.tally
        weight = tally.path_weight if loss_weighting == "paths" else tally.mean_weight
        run_weight = weight.astype(np.float32)
        ends = np.flatnonzero(segments.target >= 0)
        token = segments.target[ends]
        target = np.full(len(segments), -1, np.int32)
        target[ends] = forest.values[_positions(forest, token)]
        target_weight = np.zeros(len(segments), np.float32)
        target_weight[ends] = run_weight[tally.run_of(token)]
        return cls(
            forest.values,
            _positions(forest, segments.start),
            segments.start,
            tally.run_of(segments.start),
            target,
            target_weight,
            tally.end,
            run_weight,
            tally.path_weight > 0,
            _sequences(forest, loss_weighting),
            _stand_for_copies(segments),
        )


def _sequences(forest: TokenForest, loss_weighting: str) -> npt.NDArray[np.float32]:
    """How often each run counts as a position of sequences, under `"once"` once at most."""
    sequences = forest.tally.sequences
    if sequences is None:
        return np.zeros(0, np.float32)
    return (sequences if loss_weighting == "paths" else np.minimum(sequences, 1)).astype(np.float32)


def _stand_for_copies(segments: Segments) -> npt.NDArray[np.bool_]:
    """Whether each segment is the first with its tokens: the copies of a branch point have the same ones."""
    filled = np.flatnonzero(segments.length > 0)
    stands = np.zeros(len(segments), bool)
    stands[filled[np.unique(segments.start[filled], return_index=True)[1]]] = True
    return stands


def _positions(forest: TokenForest, token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where in the forest's `values` some tokens are, which are counted in node order."""
    node = np.searchsorted(forest.start, token, side="right") - 1
    return forest.source[node] + token - forest.start[node]


class RowWriter:
    """The windows of a plan, to be written as rows in any portions.

    Args:
        forest: the merged corpus.
        segments: its segments.
        windows: the leaf segments of each window.
        loss_weighting: as in `layout_rows`.
        seed: as in `layout_rows`.

    Attributes:
        offsets: `int64[W + 1]`, where each row begins if all are written one after the other.
        counted: whether rows say how many sequences pass through each position, as the forest does.

    Raises:
        ValueError: unknown `loss_weighting`.
    """

    def __init__(
        self,
        forest: TokenForest,
        segments: Segments,
        windows: Windows,
        *,
        loss_weighting: str = "once",
        seed: int | None = None,
    ) -> None:
        if loss_weighting not in LOSS_WEIGHTINGS:
            choices = " or ".join(map(repr, LOSS_WEIGHTINGS))
            raise ValueError(f"loss_weighting must be {choices}, got {loss_weighting!r}.")
        self._windows = windows
        self.counted = forest.tally.sequences is not None
        self._segments = (segments.parent, segments.length, segments.depth)
        self._source = Source.of(forest, segments, loss_weighting)
        sizes, self._trainer, self._most = measure_windows(
            segments.parent, segments.length, windows.leaf, windows.offset
        )
        count = len(windows)
        self._order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self._slot = np.full(len(segments), -1, np.int64)
        self.offsets = np.zeros(count + 1, np.int64)
        np.cumsum(sizes[self._order], out=self.offsets[1:])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def write(self, low: int, high: int) -> Rows:
        """Rows `low` to `high`, the latter not included."""
        offsets = self.offsets[low : high + 1] - self.offsets[low]
        columns = {name: np.empty(offsets[-1], dtype) for name, dtype in ROW_DTYPES.items()}
        counts = np.empty(offsets[-1] if self.counted else 0, np.float32)
        write_windows(
            self._order[low:high],
            offsets,
            self._windows.leaf,
            self._windows.offset,
            self._segments,
            self._trainer,
            self._most,
            self._slot,
            self._source,
            (*columns.values(), counts),
        )
        return Rows(offsets, **columns, sequence_count=counts if self.counted else None)

    def portions(self, positions: int) -> Iterator[Rows]:
        """All rows in portions of at most so many positions, or of one row if that is longer."""
        low = 0
        while low < len(self):
            high = int(np.searchsorted(self.offsets, self.offsets[low] + positions, side="right")) - 1
            high = max(high, low + 1)
            yield self.write(low, high)
            low = high


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
    writer = RowWriter(forest, segments, windows, loss_weighting=loss_weighting, seed=seed)
    return writer.write(0, len(writer))


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
    ids, begin = write_paths(
        rows.offsets, rows.subtree_end, rows.input_ids, *count_paths(rows.offsets, rows.subtree_end)
    )
    big_endian = ids.astype(">i4")  # whose bytes are ordered as the token ids are, which are not negative
    bounds = list(pairwise(begin.tolist()))
    bounds.sort(key=lambda path: big_endian[path[0] : path[1]].tobytes())
    return [ids[low:high] for low, high in bounds]

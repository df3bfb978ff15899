"""The tally of a forest: how many sequences train each token and what these weigh together, as runs of equal tallies.

Neighbouring tokens mostly have the same tally: what changes it is a branch point, the end of a sequence or a border
of its labels. So tallies are kept as runs over the distinct tokens in node order, which cost nothing per token.

Cost: 12 bytes for each run, 20 with weights, 4 more with the number of sequences that pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """Runs of tokens with equal tallies. They are as long as they can be, so equal tallies have equal runs.

    Args:
        end: `int64[R]`, one past the last token of each run, ascending; the first run begins at token 0.
        count: `int32[R]`, how many sequences train each token of the run; 0 for context.
        weight: `float64[R]`, what these sequences weigh together. `None`: every sequence weighs 1.
        sequences: `int32[R]`, how many sequences pass through each token, as a target or as context. `None`: that was
            not counted.
    """

    end: LongArray
    count: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float64] | None = None
    sequences: npt.NDArray[np.int32] | None = None

    @classmethod
    def of_tokens(cls, count: npt.NDArray[np.integer], weight: npt.NDArray[np.number] | None = None) -> Tally:
        """Runs of tallies that are given token by token, `[U]` each."""
        end = np.arange(1, len(count) + 1, dtype=np.int64)
        whole = cls(end, np.asarray(count, np.int32), None if weight is None else np.asarray(weight, np.float64))
        return whole.merged()

    def merged(self) -> Tally:
        """The same tally in the fewest runs."""
        last = np.ones(len(self.end), bool)
        last[:-1] = False
        for values in (self.count, self.weight, self.sequences):
            if values is not None:
                last[:-1] |= values[1:] != values[:-1]
        return self if last.all() else self.some(last)

    def some(self, runs: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Tally:
        """Some of the runs; each goes on from the one before it that is left."""
        weight = None if self.weight is None else self.weight[runs]
        sequences = None if self.sequences is None else self.sequences[runs]
        return Tally(self.end[runs], self.count[runs], weight, sequences)

    def with_sequences(self, end: LongArray, sequences: npt.NDArray[np.int32]) -> Tally:
        """The same tally with the number of sequences that pass, which is given as runs of its own."""
        ends = np.union1d(self.end, end)
        fine = replace(self.some(self.run_of(ends - 1)), end=ends)
        return replace(fine, sequences=sequences[np.searchsorted(end, ends - 1, side="right")]).merged()

    @property
    def length(self) -> LongArray:
        """`int64[R]`, tokens of each run."""
        return np.diff(self.end, prepend=0)

    @property
    def path_weight(self) -> npt.NDArray[np.int32] | npt.NDArray[np.float64]:
        """`[R]`, weight of each token of a run under `"paths"`: the weight, or where that is `None` the count."""
        return self.count if self.weight is None else self.weight

    @property
    def mean_weight(self) -> npt.NDArray[np.float64]:
        """`float64[R]`, mean weight of the sequences that train a token, 0 where there are none."""
        return self.path_weight / np.maximum(self.count, 1)

    def run_of(self, token: npt.NDArray[np.integer]) -> LongArray:
        """The run that each of some tokens is in."""
        return np.searchsorted(self.end, token, side="right")

    def is_target(self, token: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Whether each of some tokens is trained."""
        return (self.path_weight > 0)[self.run_of(token)]

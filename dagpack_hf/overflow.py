"""What happens to paths that are longer than a window.

A window holds whole paths, so a path of more than `max_length` tokens cannot be written. Either that is an error, or
the tokens beyond the window are cut off (`"truncate"`), or the sequences that reach beyond it are taken out
(`"drop"`). In a token tree the sequences are its turns: a turn is a run of targets, so dropping one takes its targets
out, also those before the border, and leaves the context that other turns need. What crosses the border is known as a
tally only, a count and a weight. Going up it is the smallest tally so far: where fewer sequences have a target, those
are all that are left. A turn that was dropped does not pass through its context any more; one that was cut short does,
as far as the window goes.

Cost: linear in nodes and in runs of equal tallies; no token is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dagpack_hf.kernels.overflow import count_beyond, cut_runs, kept_lengths
from dagpack_hf.sequence_counts import count_from_targets
from dagpack_hf.spans import LongArray
from dagpack_hf.stretches import Stretches
from dagpack_hf.tally import Tally
from dagpack_hf.trie import TokenForest

OVERFLOW_CHOICES = ("error", "truncate", "drop")


@dataclass(frozen=True)
class Overflow:
    """What a limit on the path length cost.

    Args:
        cut_sequences: turns or sequences whose targets reach across the limit (cut short, or dropped).
        lost_sequences: turns whose targets all lie beyond the limit, so that nothing of them is trained.
        lost_tokens: unique tokens that were cut off.
        lost_targets: labelled source tokens that are not trained.
    """

    cut_sequences: int = 0
    lost_sequences: int = 0
    lost_tokens: int = 0
    lost_targets: int = 0

    def __bool__(self) -> bool:
        return self != Overflow()

    def __add__(self, other: Overflow) -> Overflow:
        return Overflow(
            self.cut_sequences + other.cut_sequences,
            self.lost_sequences + other.lost_sequences,
            self.lost_tokens + other.lost_tokens,
            self.lost_targets + other.lost_targets,
        )


def limit_paths(forest: TokenForest, max_length: int, overflow: str = "error") -> tuple[TokenForest, Overflow]:
    """Make every path of a forest fit a window.

    Args:
        forest: the merged corpus.
        max_length: window length in tokens.
        overflow: `"error"`, `"truncate"` (tokens beyond the limit are cut) or `"drop"` (turns that reach beyond the
            limit are no targets any more). Of a path that was cut, context after its last target is cut too.

    Returns:
        The forest, all of whose paths have at most `max_length` tokens, and what was lost.

    Raises:
        ValueError: a path is too long and `overflow` is `"error"`, or an option is unknown.
    """
    if overflow not in OVERFLOW_CHOICES:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOW_CHOICES))}, got {overflow!r}.")
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    if forest.longest_path <= max_length:
        return forest, Overflow()
    if overflow == "error":
        too_long = (forest.depth + forest.length)[forest.leaves] > max_length
        raise ValueError(
            f"{int(too_long.sum())} of {len(too_long)} paths are longer than max_length={max_length} tokens (the "
            f"longest has {forest.longest_path}). Choose a larger max_length (two to four times the longest path "
            'keeps most of the sharing), or set overflow="truncate" to cut what lies beyond, or overflow="drop" to '
            "leave out the sequences that reach beyond."
        )

    stretches = Stretches.of(forest, max_length)
    shape = (forest.parent, forest.depth, stretches.first, stretches.length)
    count = stretches.count.copy()
    weight = np.zeros(0) if stretches.weight is None else stretches.weight.copy()
    lost, lost_targets = count_beyond(*shape, stretches.count, max_length)
    crossing, taken = cut_runs(*shape, stretches.count, max_length, overflow == "drop", count, weight)
    length = kept_lengths(*shape, count, max_length)
    tally = Tally(np.cumsum(length), count, None if stretches.weight is None else weight, stretches.sequences)
    clipped = _clip(forest, np.add.reduceat(length, stretches.first[:-1]), tally.some(length > 0).merged())
    if overflow == "drop" and stretches.sequences is not None:
        clipped = count_from_targets(clipped)
    return clipped, Overflow(crossing, lost, forest.num_tokens - clipped.num_tokens, lost_targets + taken)


def _clip(forest: TokenForest, length: LongArray, tally: Tally) -> TokenForest:
    """The first `length` tokens of each node, with these tallies."""
    keep = np.flatnonzero(length > 0)
    new_id = np.full(forest.num_nodes + 1, -1, np.int32)
    new_id[keep] = np.arange(len(keep), dtype=np.int32)
    return replace(
        forest,
        source=forest.source[keep],
        parent=new_id[forest.parent[keep]],
        length=length[keep].astype(np.int32),
        depth=forest.depth[keep],
        tally=tally,
    )

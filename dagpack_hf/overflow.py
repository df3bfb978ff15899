"""What happens to paths that are longer than a window.

A window holds whole paths, so a path of more than `max_length` tokens cannot be written. Either that is an error, or
the tokens beyond the window are cut off (`"truncate"`), or the sequences that reach beyond it are taken out
(`"drop"`). In a token tree the sequences are its turns: a turn is a run of targets, so dropping one takes its targets
out, also those before the border, and leaves the context that other turns need. What crosses the border is known as a
tally only, a count and a weight. Going up it is the smallest tally so far: where fewer sequences have a target, those
are all that are left. Cost: linear in nodes, one pass over the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dagpack_hf.trie import FloatArray, IntArray, TokenForest, join_tally, split_tally

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

    depth = np.repeat(forest.depth - forest.start, forest.length) + np.arange(forest.num_tokens)
    beyond = depth >= max_length
    run_start = (forest.target_count > 0) & (_count_before(forest) == 0)
    lost = int(forest.target_count[beyond & run_start].sum(dtype=np.int64))
    lost_targets = int(forest.target_count[beyond].sum(dtype=np.int64))
    tally = join_tally(forest.target_count, forest.target_weight).copy()
    cut = 0
    for node in np.flatnonzero((forest.depth <= max_length) & (forest.depth + forest.length > max_length)):
        crossing = _crossing(forest, int(node), max_length)
        cut += crossing
        if crossing and overflow == "drop":
            lost_targets += _take_out_run(forest, tally, int(node), max_length)
    count, weight = split_tally(tally)
    forest = replace(forest, target_count=count, target_weight=weight)
    clipped = _clip(forest, _kept_lengths(forest, max_length))
    return clipped, Overflow(cut, lost, forest.num_tokens - clipped.num_tokens, lost_targets)


def _count_before(forest: TokenForest) -> np.ndarray:
    """Target count of the token before each token, 0 at a root."""
    before = np.zeros(forest.num_tokens, np.int32)
    before[1:] = forest.target_count[:-1]
    above = forest.parent
    last = forest.target_count[forest.start[above] + forest.length[above] - 1]
    before[forest.start] = np.where(above < 0, 0, last)
    return before


def _crossing(forest: TokenForest, node: int, limit: int) -> int:
    """Sequences whose run of targets in this node reaches across the limit."""
    at = int(forest.start[node]) + limit - int(forest.depth[node])
    if limit > forest.depth[node]:
        before = forest.target_count[at - 1]
    else:
        above = int(forest.parent[node])
        before = forest.target_count[forest.start[above] + forest.length[above] - 1]
    return int(min(before, forest.target_count[at]))


def _take_out_run(forest: TokenForest, tally: IntArray | FloatArray, node: int, limit: int) -> int:
    """Take the sequences that reach across the limit out of the run of targets before it; return the targets lost."""
    at = int(forest.start[node]) + limit - int(forest.depth[node])
    crossing, taken, depth = tally[:, at : at + 1], 0, limit
    while node >= 0:
        start = int(forest.start[node])
        stop = start + depth - int(forest.depth[node])
        context = np.flatnonzero(forest.target_count[start:stop] == 0)
        first = start + int(context[-1]) + 1 if len(context) else start
        run = tally[:, first:stop]
        share = _smallest_below(np.concatenate([run, crossing], axis=1))
        np.maximum(run - share[:, :-1], 0, out=run)
        taken += int(share[0, :-1].sum())
        if first > start:
            break
        crossing, depth, node = share[:, :1], int(forest.depth[node]), int(forest.parent[node])
    return taken


def _smallest_below(tally: IntArray | FloatArray) -> IntArray | FloatArray:
    """For each token the tally, of those from it to the last, with the smallest count; the nearest of equal ones."""
    upward = tally[:, ::-1]
    smallest = np.minimum.accumulate(upward[0])
    nearest = np.maximum.accumulate(np.where(upward[0] == smallest, np.arange(upward.shape[1]), 0))
    return upward[:, nearest][:, ::-1]


def _kept_lengths(forest: TokenForest, limit: int) -> np.ndarray:
    """Tokens of each node that stay: those within the limit; of a path that was cut, none after its last target."""
    within = np.arange(forest.num_tokens) - np.repeat(forest.start, forest.length)
    trained = (forest.target_count > 0) & (within < np.repeat(limit - forest.depth, forest.length))
    up_to_target = np.maximum.reduceat(np.where(trained, within + 1, 0), forest.start)
    kept = np.clip(limit - forest.depth, 0, forest.length)
    is_cut = forest.depth + forest.length > limit
    needed = np.zeros(forest.num_nodes, bool)
    for node in range(forest.num_nodes - 1, -1, -1):
        if is_cut[node] and not needed[node]:
            kept[node] = up_to_target[node]
        above = forest.parent[node]
        if above >= 0:
            is_cut[above] |= is_cut[node]
            needed[above] |= kept[node] > 0
    return kept


def _clip(forest: TokenForest, length: np.ndarray) -> TokenForest:
    keep_token = np.arange(forest.num_tokens) < np.repeat(forest.start + length, forest.length)
    keep = np.flatnonzero(length > 0)
    new_id = np.full(forest.num_nodes + 1, -1, np.int32)
    new_id[keep] = np.arange(len(keep), dtype=np.int32)
    length = length[keep]
    return TokenForest(
        tokens=forest.tokens[keep_token],
        target_count=forest.target_count[keep_token],
        parent=new_id[forest.parent[keep]],
        start=np.cumsum(length, dtype=np.int64) - length,
        length=length.astype(np.int32),
        depth=forest.depth[keep],
        logical_tokens=forest.logical_tokens,
        target_weight=None if forest.target_weight is None else forest.target_weight[keep_token],
    )

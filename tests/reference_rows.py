"""Segments, rows and the limit on path lengths in plain Python and numpy: what the compiled loops are compared with.

Nothing here is fast. It takes and gives the same arrays as `segments`, `layout` and `overflow`, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagpack_hf.layout import ROW_DTYPES, Rows
from dagpack_hf.overflow import Overflow
from dagpack_hf.pack import Windows
from dagpack_hf.segments import Segments
from dagpack_hf.trie import IGNORE_INDEX, FloatArray, IntArray, TokenForest
from tests.reference_trie import join_tally, preorder, split_tally

# Segments


def build_segments(forest: TokenForest) -> Segments:
    """Split the branch points of a forest, so that each position has at most one target."""
    trained, untrained = _children(forest)
    start, length, depth = forest.start.tolist(), forest.length.tolist(), forest.depth.tolist()
    hangs_from = [-1] * forest.num_nodes
    rows: list[tuple[int, int, int, int, int]] = []  # parent, start, length, depth, target
    for node in range(forest.num_nodes):
        last = start[node] + length[node] - 1
        targets = trained.get(node, [])
        if len(targets) <= 1:
            rows.append(
                (hangs_from[node], start[node], length[node], depth[node], start[targets[0]] if targets else -1)
            )
        else:
            trunk_target = last if length[node] > 1 and forest.path_weight[last] > 0 else -1
            rows.append((hangs_from[node], start[node], length[node] - 1, depth[node], trunk_target))
            trunk = len(rows) - 1
            for child in targets:
                hangs_from[child] = len(rows)
                rows.append((trunk, last, 1, depth[node] + length[node] - 1, start[child]))
        first = hangs_from[targets[0]] if len(targets) > 1 else len(rows) - 1
        if len(targets) == 1:
            hangs_from[targets[0]] = first
        for child in untrained.get(node, []):
            hangs_from[child] = first

    parent, *columns = np.array(rows, np.int64).reshape(-1, 5).T
    order, _ = preorder(parent, -subtree_lengths(parent, columns[1]))
    new_id = np.empty(len(order) + 1, np.int64)
    new_id[order] = np.arange(len(order))
    new_id[-1] = -1
    return Segments(new_id[parent[order]], *(column[order] for column in columns))


def subtree_lengths(parent: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens in each node's subtree, the node included. Parents come before children."""
    total = length.tolist()
    above = parent.tolist()
    for node in range(len(total) - 1, -1, -1):
        if above[node] >= 0:
            total[above[node]] += total[node]
    return np.array(total, np.int64)


def _children(forest: TokenForest) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Children of each node that begin with a target, heavy child first, and those that begin with context."""
    weight = subtree_lengths(forest.parent.astype(np.int64), forest.length.astype(np.int64))
    is_target = forest.path_weight[forest.start] > 0
    groups: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for node in np.lexsort((-weight, forest.parent)).tolist():
        if forest.parent[node] >= 0:
            groups[0 if is_target[node] else 1].setdefault(int(forest.parent[node]), []).append(node)
    return groups


# Rows


def layout_rows(
    forest: TokenForest, segments: Segments, windows: Windows, *, loss_weighting: str = "once", seed: int | None = None
) -> Rows:
    """Write windows as rows."""
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
    """The token ids of every path from a root to a leaf, sorted."""
    paths = []
    for row in rows:
        end = row["subtree_end"]
        for leaf in np.flatnonzero(end == np.arange(len(end)) + 1):
            ancestors = np.flatnonzero(end[: leaf + 1] > leaf)
            paths.append(row["input_ids"][ancestors])
    return sorted(paths, key=lambda path: path.tolist())


# Paths that are too long


def limit_paths(forest: TokenForest, max_length: int, overflow: str = "error") -> tuple[TokenForest, Overflow]:
    """Make every path of a forest fit a window, by truncation or by dropping turns."""
    if forest.longest_path <= max_length:
        return forest, Overflow()
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
    forest = forest.with_tally(count, weight)
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
    return TokenForest.from_tokens(
        tokens=forest.tokens[keep_token],
        target_count=forest.target_count[keep_token],
        parent=new_id[forest.parent[keep]],
        length=length.astype(np.int32),
        depth=forest.depth[keep],
        logical_tokens=forest.logical_tokens,
        target_weight=None if forest.target_weight is None else forest.target_weight[keep_token],
    )

"""Token trees cut into pieces, one for each partition, and the tallies along the splitters.

Cost: linear in stretches and in the tokens that are written.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel

TARGETS, COUNTS, LABELS = 0, 1, 2
"""What says which tokens are targets: nothing (all are), counts, or labels."""

BELOW, ABOVE = 0, 1
"""The partitions next to a splitter: that which ends there, and that which begins there."""


@inlined
def count_of(marks, kind, at):
    """How many sequences train a token."""
    if kind == TARGETS:
        return np.int64(1)
    if kind == COUNTS:
        return np.int64(marks[at])
    return np.int64(marks[at] != -100)


@inlined
def agreement(one, other, least, shared):
    """Tokens that two splitters have in common, or some number up to `least` if they are not more.

    `shared[i]` is what splitter `i` has in common with the one before.
    """
    found = np.iinfo(np.int64).max
    for splitter in range(min(one, other) + 1, max(one, other) + 1):
        found = min(found, shared[splitter])
        if found <= least:
            break
    return found


@kernel
def reach_along(partition, common, near, shared, reach):
    """Most tokens that the paths of a partition have in common with the splitters at its ends.

    Args:
        partition: `int64[n]`, the partition of each leaf, -1 for what is none.
        common: `int64[n]`, tokens that each path has in common with a splitter.
        near: `int64[n]`, that splitter.
        shared: `int64[S]`, tokens that each splitter has in common with the one before.
        reach: `int64[2, S]`, raised: for each splitter, of the partitions `BELOW` and `ABOVE` it.
    """
    splitters = len(shared)
    for stretch in range(len(partition)):
        own = partition[stretch]
        if own < 0 or splitters == 0:
            continue
        for side in range(2):
            splitter = own if side == BELOW else own - 1
            if 0 <= splitter < splitters:
                along = min(common[stretch], agreement(near[stretch], splitter, 0, shared))
                reach[side, splitter] = max(reach[side, splitter], along)


@kernel
def tally_along(
    marks, mark_begin, kind, weights, begin, end, reach, common, near, first, shared, offset, count, weight
):
    """Add the tallies of tokens on splitters, each in the first partition that it belongs to.

    Args:
        marks: `int32[...]`, counts or labels, or empty.
        mark_begin: `int64[n]`, the first of each stretch.
        kind: which of these.
        weights: `float64[...]`, weights, placed like the counts; empty if they are the counts.
        begin: `int64[n]`, first token of each stretch.
        end: `int64[n]`, one past its last one.
        reach: `int64[n]`, tokens of the path up to its end.
        common: as in `reach_along`, like the next.
        near: the splitter.
        first: `int64[n]`, the first partition below each stretch.
        shared: as in `reach_along`.
        offset: `int64[S + 1]`, where each splitter begins in the next arrays.
        count: `int64[2, ...]`, added to, `BELOW` and `ABOVE` each splitter.
        weight: `float64[2, ...]`, added to.
    """
    splitters = len(shared)
    for stretch in range(len(begin)):
        depth = reach[stretch] - (end[stretch] - begin[stretch])
        top = min(common[stretch], reach[stretch])
        if depth >= top:
            continue
        for side in range(2):
            splitter = first[stretch] if side == BELOW else first[stretch] - 1
            if not 0 <= splitter < splitters:
                continue
            stop = min(top, agreement(near[stretch], splitter, depth, shared))
            for at in range(max(depth, 1), stop):
                mark = mark_begin[stretch] + at - depth
                trained = count_of(marks, kind, mark)
                count[side, offset[splitter] + at] += trained
                weight[side, offset[splitter] + at] += weights[mark] if len(weights) else trained


@kernel
def climb(leaves, group_offset, parent, mark, nodes):
    """Stretches of each group of leaves with all that is above them, in ascending order.

    Args:
        leaves: `int64[L]`, leaves, group by group.
        group_offset: `int64[G + 1]`, where each group begins.
        parent: `int64[n]`, parent stretch.
        mark: `int64[n]`, -1 at first.
        nodes: `int64[...]`, written if it is not empty.

    Returns:
        `int64[G + 1]`, where the stretches of each group begin.
    """
    groups = len(group_offset) - 1
    offset = np.zeros(groups + 1, np.int64)
    used = 0
    for group in range(groups):
        for index in range(group_offset[group], group_offset[group + 1]):
            stretch = leaves[index]
            while stretch >= 0 and mark[stretch] != group:
                mark[stretch] = group
                if len(nodes):
                    nodes[used] = stretch
                used += 1
                stretch = parent[stretch]
        offset[group + 1] = used
        if len(nodes):
            nodes[offset[group] : used].sort()
    return offset


@kernel
def write_pieces(
    nodes, node_offset, own, first, values, marks, mark_begin, kind, weights, begin, end, parent, ids, out, out_weights
):
    """Write the tokens of pieces; what is trained in an earlier piece is context.

    Args:
        nodes: `int64[K]`, the stretches of all pieces, piece by piece.
        node_offset: `int64[G + 1]`, where those of each begin.
        own: `int64[G]`, the partition of each piece.
        first: as in `tally_along`.
        values: `int32[...]`, the tokens.
        marks: as in `tally_along`, like the next five.
        mark_begin: where they begin.
        kind: which.
        weights: weights.
        begin: first token of each stretch.
        end: one past its last one.
        parent: `int64[n]`, parent stretch.
        ids: `int32[total]`, written.
        out: `int32[total]`, marks, written unless empty.
        out_weights: `float32[total]`, written unless empty.

    Returns:
        `int64[G + 1]`, where each piece begins; `int32[K]`, the token in its piece that each stretch hangs from, -1
        for none; and whether all tokens are at least 0, and all labels -100 or their token.
    """
    pieces = len(own)
    offset = np.zeros(pieces + 1, np.int64)
    hangs_from = np.empty(len(nodes), np.int32)
    last = np.empty(len(begin), np.int32)
    at = np.uint64(0)
    wrong = np.int32(0)
    for piece in range(pieces):
        start = np.int64(at)
        for index in range(node_offset[piece], node_offset[piece + 1]):
            stretch = nodes[index]
            hangs_from[index] = last[parent[stretch]] if parent[stretch] >= 0 else -1
            source = np.uint64(begin[stretch])
            mark = np.uint64(mark_begin[stretch])
            length = np.uint64(end[stretch] - begin[stretch])
            for j in range(length):
                ids[at + j] = values[source + j]
                wrong |= values[source + j] >> np.int32(31)
            if kind == LABELS:
                for j in range(length):
                    label = marks[mark + j]
                    out[at + j] = label
                    wrong |= -np.int32(label != -100) & (label ^ values[source + j])
            elif kind == COUNTS:
                is_own = np.int32(first[stretch] == own[piece])
                for j in range(length):
                    out[at + j] = marks[mark + j] * is_own
                if len(out_weights):
                    for j in range(length):
                        out_weights[at + j] = weights[mark + j] * is_own
            at += length
            last[stretch] = np.int64(at) - start - 1
        offset[piece + 1] = at
    return offset, hangs_from, wrong == 0

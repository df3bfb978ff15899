"""How many sequences train each token, and what these weigh together, as runs of equal tallies.

Where a sequence goes from a target to a token that is none, or ends with a target, one sequence more trains that
target than what is below it; where it goes to a target, one less trains the token before. So the count of a token is
the sum of such *changes* at it and below. They are added up in a hash table by place, `(node, offset)`, and the runs
of equal counts are read off them node by node from the end: nothing is written for each token.

Weights could be added up like that too, but would then be differences, which are not exact. They are added to the runs
in a second pass. So that a run is wholly inside or outside of each stretch of targets, places where changes cancel out
are kept until then.

Cost: each label or count is read once, twice with weights, in blocks that the compiler vectorises; each change costs a
look-up. Memory: 24 to 48 bytes for each place where the tally changes.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel

BLOCK = 64
"""Labels or counts that are compared at once."""

IGNORE_INDEX = -100

CONTEXT, TARGETS, MIXED, WRONG = range(4)
"""What some labels are."""

FREE = -1
"""A slot of the table without a place."""


@inlined
def place(node, offset):
    """A place as one number; places are ordered by node, then offset."""
    return (np.int64(node) << 32) | np.int64(offset)


@kernel
def new_changes(slots):
    """An empty table: places, and the sum of changes at each. `slots` is a power of two."""
    return np.full(slots, FREE, np.int64), np.zeros(slots, np.int64)


@kernel
def slot_of(places, key):
    """The slot of a place, or the free one where it goes. Probing is linear (Fibonacci hashing)."""
    mask = np.uint64(len(places) - 1)
    high = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    slot = (high * np.uint64(len(places))) >> np.uint64(32)  # the uppermost bits: the lower ones of nodes may be 0
    while places[slot] != FREE and places[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def add_change(places, changes, key, change):
    """Add a change; return whether its place is new."""
    slot = slot_of(places, key)
    is_new = places[slot] == FREE
    places[slot] = key
    changes[slot] += change
    return is_new


@kernel
def with_room(places, changes, used):
    """The same table, of twice the slots if half of them are taken."""
    if 2 * used < len(places):
        return places, changes
    more_places, more_changes = new_changes(2 * len(places))
    for old in range(len(places)):
        if places[old] != FREE:
            slot = slot_of(more_places, places[old])
            more_places[slot] = places[old]
            more_changes[slot] = changes[old]
    return more_places, more_changes


@kernel
def places_of_ends(last_node, begin, end, depth):
    """The place of the last token of each sequence that is not empty; arguments as in `change_at_labels`."""
    ends = np.empty(len(last_node), np.int64)
    size = 0
    for sequence in range(len(last_node)):
        node = last_node[sequence]
        if node >= 0:
            ends[size] = place(node, end[sequence] - begin[sequence] - 1 - depth[node])
            size += 1
    return ends[:size]


@kernel
def change_at_labels(labels, label_begin, label_end, last_node, tokens, source, parent, depth):
    """Changes of sequences with labels.

    Args:
        labels: `int32[...]`, the token where it is a target, else -100.
        label_begin: `int64[n]`, first label of each sequence.
        label_end: `int64[n]`, one past its last label.
        last_node: `int32[n]`, the node each sequence ends in, -1 if it is empty.
        tokens: `int32[...]`, where the tokens of the nodes are.
        source: `int64[N]`, the first of each node.
        parent: `int32[N]`, parent node.
        depth: `int32[N]`, tokens above it.

    Returns:
        The table, and whether every label is its token or -100.
    """
    places, changes = new_changes(64)
    used = 0
    for sequence in range(len(last_node)):
        node = last_node[sequence]
        label = label_begin[sequence]
        stop = label_end[sequence] - label
        next_is_target = False
        while node >= 0:
            top = np.int64(depth[node])
            token = source[node] - top
            while stop > top:
                low = max(stop - BLOCK, top)
                kind = kind_of_labels(labels, label + low, tokens, token + low, stop - low)
                if kind == WRONG:
                    return places, changes, False
                if kind == MIXED or (kind == TARGETS) != next_is_target:
                    for at in range(stop - 1, low - 1, -1):
                        is_target = labels[label + at] != IGNORE_INDEX
                        if is_target != next_is_target:
                            change = np.int64(1) if is_target else np.int64(-1)
                            used += add_change(places, changes, place(node, at - top), change)
                            places, changes = with_room(places, changes, used)
                            next_is_target = is_target
                            if kind != MIXED:
                                break
                stop = low
            node = parent[node]
    return places, changes, True


@kernel
def kind_of_labels(labels, label, tokens, token, size):
    """What some labels are: `CONTEXT` or `TARGETS`, all of them, or `MIXED`; or one is `WRONG`."""
    a = np.uint64(label)
    b = np.uint64(token)
    full = size == BLOCK  # a number of steps that the compiler knows leaves nothing over
    differing = np.int32(0)
    if full:
        for j in range(np.uint64(BLOCK)):
            differing |= labels[a + j] ^ np.int32(IGNORE_INDEX)
    else:
        for j in range(np.uint64(size)):
            differing |= labels[a + j] ^ np.int32(IGNORE_INDEX)
    if differing == 0:
        return CONTEXT
    differing = np.int32(0)
    if full:
        for j in range(np.uint64(BLOCK)):
            differing |= labels[a + j] ^ tokens[b + j]
    else:
        for j in range(np.uint64(size)):
            differing |= labels[a + j] ^ tokens[b + j]
    if differing == 0:
        return TARGETS
    for j in range(np.uint64(size)):
        if labels[a + j] != IGNORE_INDEX and labels[a + j] != tokens[b + j]:
            return WRONG
    return MIXED


@kernel
def change_at_counts(places, changes, used, counts, weights, begin, end, above, last_node, parent, depth):
    """Add the changes of token trees to a table.

    Args:
        places: of the table.
        changes: of the table.
        used: slots of the table that are taken.
        counts: `int32[total]`, count of each token of the spans.
        weights: `float64[total]`, its weight. Empty: there are none.
        begin: `int64[n]`, first token of each span.
        end: `int64[n]`, one past its last token.
        above: `int32[n]`, tokens above it.
        last_node: `int32[n]`, the node each span ends in, -1 if it is empty.
        parent: `int32[N]`, parent node.
        depth: `int32[N]`, tokens above it.

    Returns:
        The table, and how many slots are taken.
    """
    weighted = len(weights) > 0
    for span in range(len(last_node)):
        node = last_node[span]
        first = begin[span]
        shift = np.int64(above[span]) - first  # depth of a token less its position
        stop = end[span]
        next_count = np.int32(0)
        next_weight = 0.0
        while stop > first:
            top = np.int64(depth[node]) - shift
            while stop > max(top, first):
                low = max(stop - BLOCK, top, first)
                uniform = all_equal(counts, low, stop - low, next_count)
                if weighted and uniform:
                    uniform = all_equal(weights, low, stop - low, next_weight)
                for at in range(stop - 1, stop - 1 if uniform else low - 1, -1):
                    weight = weights[at] if weighted else 0.0
                    if counts[at] != next_count or weight != next_weight:
                        change = np.int64(counts[at]) - np.int64(next_count)
                        used += add_change(places, changes, place(node, at - top), change)
                        places, changes = with_room(places, changes, used)
                        next_count = counts[at]
                        next_weight = weight
                stop = low
            if top > first:
                node = parent[node]
        if above[span] > 0 and (next_count != 0 or next_weight != 0.0):
            if depth[node] == above[span]:
                node = parent[node]
            key = place(node, above[span] - 1 - depth[node])
            used += add_change(places, changes, key, -np.int64(next_count))
            places, changes = with_room(places, changes, used)
    return places, changes, used


@kernel
def all_equal(values, first, size, value):
    """Whether some values are all the same one."""
    a = np.uint64(first)
    differing = False
    for j in range(np.uint64(size)):
        differing |= values[a + j] != value
    return not differing


@kernel
def write_runs(places, changes, parent, start, length, keep_all):
    """Runs of equal counts.

    A token without a predecessor is no target.

    Args:
        places: `int64[K]`, ascending.
        changes: `int64[K]`, the change at each. Empty: 1 at each, and a place may come several times.
        parent: `int32[N]`, parent node, before its children.
        start: `int64[N]`, first token of each node.
        length: `int32[N]`, its tokens.
        keep_all: whether a run ends at each node and place, even if the next one has the same count.

    Returns:
        `int64[R]`, one past the last token of each run; `int32[R]`, its count; and `int64[N + 1]`, the run in which
        each node begins, which is empty but with `keep_all`.
    """
    nodes = len(parent)
    roots = 0
    for node in range(nodes):
        roots += parent[node] < 0
    size = len(places) + nodes + roots
    end = np.empty(size, np.int64)
    count = np.empty(size, np.int32)
    first = np.full(nodes + 1 if keep_all else 0, size, np.int64)
    below = np.zeros(nodes, np.int64)
    free = size
    at = len(places) - 1
    for back in range(nodes):
        node = nodes - 1 - back
        total = below[node]
        upper = np.int64(length[node])
        while at >= 0 and places[at] >> 32 == node:
            lower = (places[at] & 0xFFFFFFFF) + 1
            change = changes[at] if len(changes) else np.int64(1)
            if lower < upper:
                free = put_run(end, count, free, start[node] + upper, total, keep_all)
                upper = lower
            total += change
            at -= 1
        if parent[node] >= 0:
            free = put_run(end, count, free, start[node] + upper, total, keep_all)
            below[parent[node]] += total
        else:
            if upper > 1:
                free = put_run(end, count, free, start[node] + upper, total, keep_all)
            free = put_run(end, count, free, start[node] + 1, 0, keep_all)
        if keep_all:
            first[node] = free
    return end[free:], count[free:], first - free


@inlined
def put_run(end, count, free, last, total, keep_all):
    """Put a run before those that are there, unless it has the count of the next one."""
    if free < len(end) and count[free] == total and not keep_all:
        return free
    end[free - 1] = last
    count[free - 1] = total
    return free - 1


@kernel
def weigh_sequences(weights, size, labels, label_begin, last_node, parent, depth, start, first, end, weight):
    """Add each sequence's weight to the runs that it has as targets.

    Args:
        weights: `float32[n]`, weight of each sequence.
        size: `int64[n]`, its tokens.
        labels: as in `change_at_labels`. Empty: every token is a target.
        label_begin: as in `change_at_labels`; may be empty with `labels`.
        last_node: as in `change_at_labels`.
        parent: as in `write_runs`, like `start` and `depth`.
        depth: `int32[N]`.
        start: `int64[N]`.
        first: `int64[N + 1]`, the run in which each node begins.
        end: `int64[R]`, one past the last token of each run.
        weight: `float64[R]`, added to.
    """
    for sequence in range(len(last_node)):
        node = last_node[sequence]
        stop = size[sequence]
        while node >= 0:
            shift = np.int64(depth[node]) - start[node]
            at = np.int64(depth[node])
            run = first[node]
            while at < stop:
                if len(labels) == 0 or labels[label_begin[sequence] + at] != IGNORE_INDEX:
                    weight[run] += weights[sequence]
                at = end[run] + shift
                run += 1
            stop = np.int64(depth[node])
            node = parent[node]


@kernel
def weigh_spans(weights, begin, stop, above, last_node, parent, depth, start, first, end, weight):
    """Add the weights of token trees to the runs.

    Args:
        weights: `float64[total]`, weight of each token of the spans.
        begin: `int64[n]`, first token of each span.
        stop: `int64[n]`, one past its last token.
        above: `int32[n]`, tokens above it.
        last_node: as in `weigh_sequences`, like the rest.
        parent: `int32[N]`.
        depth: `int32[N]`.
        start: `int64[N]`.
        first: `int64[N + 1]`.
        end: `int64[R]`.
        weight: `float64[R]`, added to.
    """
    for span in range(len(last_node)):
        node = last_node[span]
        path = np.int64(above[span]) + stop[span] - begin[span]
        while path > above[span]:
            shift = np.int64(depth[node]) - start[node]
            for run in range(first[node], first[node + 1]):
                at = (end[run - 1] if run > first[node] else start[node]) + shift
                if at >= path:
                    break
                if at >= above[span]:
                    weight[run] += weights[begin[span] + at - above[span]]
            path = np.int64(depth[node])
            node = parent[node]

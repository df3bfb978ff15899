"""Windows as rows: which window trains which segment, the positions of each window, and the way back.

Cost: a walk over the segments of each window, and 20 or 24 bytes written for each position in loops that the compiler
vectorises (hence the unsigned numbers). Scratch memory: 16 bytes per segment of the forest, 96 per segment of the
window that has the most.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel
from dagpack_hf.kernels.preorder import link_children, next_in_preorder

IGNORE_INDEX = np.int32(-100)


@kernel
def measure_windows(parent, length, leaf, offset):
    """Size of each window, and which window trains each segment.

    Args:
        parent: `int64[M]`, parent segment, -1 for a root.
        length: `int64[M]`, tokens of each segment.
        leaf: `int64[L]`, leaf segments, window by window.
        offset: `int64[W + 1]`, first leaf of each window.

    Returns:
        `int64[W]`, positions of each window; `int64[M]`, the first window that holds each segment, -1 for none; and
        how many segments the window with the most of them has.
    """
    size = np.zeros(len(offset) - 1, np.int64)
    trainer = np.full(len(parent), -1, np.int64)
    seen_in = np.full(len(parent), -1, np.int64)
    most = 0
    for window in range(len(size)):
        held = 0
        for at in range(offset[window], offset[window + 1]):
            segment = leaf[at]
            while segment >= 0 and seen_in[segment] != window:
                seen_in[segment] = window
                if trainer[segment] < 0:
                    trainer[segment] = window
                size[window] += length[segment]
                held += 1
                segment = parent[segment]
        most = max(most, held)
    return size, trainer, most


@inlined
def reverse(values, begin, end):
    """Reverse `values[begin:end]` in place."""
    end -= 1
    while begin < end:
        values[begin], values[end] = values[end], values[begin]
        begin += 1
        end -= 1


@kernel
def collect_segments(leaves, parent, slot, own, above):
    """Segments of the root paths of leaves in preorder, and the parent of each as an index among them.

    What a leaf adds to the paths before it comes after them in preorder, so each path is appended, top down.

    Args:
        leaves: `int64[l]`, in preorder.
        parent: `int64[M]`, parent segment.
        slot: `int64[M]`, all -1; on return the index of each segment that was found.
        own: on return the segments.
        above: on return the index of each one's parent, -1 for a root.

    Returns:
        Number of segments.
    """
    count = 0
    for leaf in leaves:
        begin = count
        segment = leaf
        while segment >= 0 and slot[segment] < 0:
            slot[segment] = 0
            own[count] = segment
            count += 1
            segment = parent[segment]
        reverse(own, begin, count)
        hangs_from = slot[segment] if segment >= 0 else -1
        for index in range(begin, count):
            slot[own[index]] = index
            above[index] = hangs_from
            hangs_from = index
    return count


@kernel
def order_segments(window, own, above, child, sibling, weight, segments, trainer, at_value, spans, ends, laid, trains):
    """Lay out the segments of a window, heavy child first; those without tokens are left out.

    Args:
        window: the window.
        own: its segments in preorder.
        above: index of each one's parent, -1 for a root.
        child: as in `link_children`.
        sibling: as in `link_children`.
        weight: tokens of each one's subtree in this window.
        segments: as in `write_windows`.
        trainer: as in `write_windows`.
        at_value: `int64[M]`, where the tokens of each segment are.
        spans: `uint64[4, n]`; on return first position, length, where the tokens are, and depth of each segment.
        ends: `int64[n]`; on return one past the last position of each segment's subtree.
        laid: `int64[n]`; on return the segments in the order in which they are laid out.
        trains: `bool[n]`; on return whether this window trains each; another one does if not.

    Returns:
        Number of segments.
    """
    _, length, depth = segments
    at = count = 0
    index = child[len(child) - 1]
    while index >= 0:
        segment = own[index]
        if length[segment] > 0:
            spans[0, count] = at
            spans[1, count] = length[segment]
            spans[2, count] = at_value[segment]
            spans[3, count] = depth[segment]
            ends[count] = at + weight[index]
            laid[count] = segment
            trains[count] = trainer[segment] == window
            at += length[segment]
            count += 1
        index = next_in_preorder(index, above, child, sibling)
    return count


@inlined
def copy(values, first, goal, at, length):
    """Copy `values[first : first + length]` to `goal[at:]`."""
    a = np.uint64(first)
    b = np.uint64(at)
    for i in range(np.uint64(length)):
        goal[b + i] = values[a + i]


@kernel
def write_tokens(spans, values, input_ids):
    """Copy the tokens of each segment."""
    for index in range(spans.shape[1]):
        copy(values, spans[2, index], input_ids, spans[0, index], spans[1, index])


@kernel
def write_depths(spans, position_ids):
    """Number the positions of each segment by depth."""
    for index in range(spans.shape[1]):
        at, depth = spans[0, index], spans[3, index]
        for i in range(spans[1, index]):
            position_ids[at + i] = np.int32(depth + i)


@kernel
def write_ends(spans, ends, subtree_end):
    """Write the end of each segment's subtree at all of its positions."""
    for index in range(spans.shape[1]):
        at, end = spans[0, index], np.int32(ends[index])
        for i in range(spans[1, index]):
            subtree_end[at + i] = end


@inlined
def fill(values, begin, end, value):
    """Write one value to `values[begin:end]`."""
    for i in range(np.uint64(begin), np.uint64(end)):
        values[i] = value


@kernel
def write_targets(spans, own, trained_here, source, shift_labels, loss_weight):
    """Write the target of each position and its weight: the next token, and at the end of a segment its own target.

    Args:
        spans: as in `order_segments`.
        own: `int64[n]`, the segments.
        trained_here: `bool[n]`, whether this window trains each; the others are context.
        source: as in `write_windows`.
        shift_labels: of the window, written to.
        loss_weight: of the window, written to.
    """
    values, start, first_run, target, target_weight = source[0], source[2], source[3], source[4], source[5]
    run_end, run_weight, run_trained = source[6], source[7], source[8]
    for index in range(spans.shape[1]):
        segment = own[index]
        at = np.int64(spans[0, index])
        last = at + np.int64(spans[1, index]) - 1
        if not trained_here[index]:
            fill(shift_labels, at, last + 1, IGNORE_INDEX)
            fill(loss_weight, at, last + 1, np.float32(0))
            continue
        run = first_run[segment]
        shift = at - start[segment] - 1  # the position whose target is a token, less the token
        token = np.int64(spans[2, index]) + 1
        while at < last:
            stop = min(run_end[run] + shift, last)
            if run_trained[run]:
                copy(values, token, shift_labels, at, stop - at)
            else:
                fill(shift_labels, at, stop, IGNORE_INDEX)
            fill(loss_weight, at, stop, run_weight[run])
            token += stop - at
            at = stop
            run += 1
        shift_labels[last] = target[segment] if target[segment] >= 0 else IGNORE_INDEX
        loss_weight[last] = target_weight[segment]


@kernel
def write_counts(spans, own, trained_here, source, sequence_count):
    """Write how many sequences pass through each position, 0 where another stands for them.

    Args:
        spans: as in `write_targets`, like the next three.
        own: `int64[n]`.
        trained_here: `bool[n]`.
        source: as in `write_windows`.
        sequence_count: of the window, written to.
    """
    start, first_run, run_end, run_sequences, stands = source[2], source[3], source[6], source[9], source[10]
    for index in range(spans.shape[1]):
        segment = own[index]
        at = np.int64(spans[0, index])
        stop = at + np.int64(spans[1, index])
        if not (trained_here[index] and stands[segment]):
            fill(sequence_count, at, stop, np.float32(0))
            continue
        run = first_run[segment]
        shift = at - start[segment]
        while at < stop:
            end = min(run_end[run] + shift, stop)
            fill(sequence_count, at, end, run_sequences[run])
            at = end
            run += 1


@kernel
def write_windows(which, begin, leaf, offset, segments, trainer, most, slot, source, columns):
    """Write some windows as rows.

    Args:
        which: `int64[w]`, the windows to write.
        begin: `int64[w + 1]`, where each begins and the last ends.
        leaf: `int64[L]`, leaf segments, window by window.
        offset: `int64[W + 1]`, first leaf of each window.
        segments: `(parent, length, depth)`, `int64[M]` each.
        trainer: `int64[M]`, the window that trains each segment.
        most: segments of the window with the most of them.
        slot: `int64[M]`, all -1, and left so.
        source: a `Source` of `layout`.
        columns: the five vectors of the rows, in the order of `ROW_COLUMNS`, and that of `COUNT_COLUMN`, which is
            empty if it is not to be written.
    """
    parent, length = segments[0], segments[1]
    values, at_value = source[0], source[1]
    input_ids, shift_labels, position_ids, subtree_end, loss_weight, sequence_count = columns
    scratch = np.empty((8, most + 1), np.int64)
    own, above, child, sibling = scratch[0], scratch[1], scratch[2], scratch[3]
    tokens_of, weight, ends, laid = scratch[4], scratch[5], scratch[6], scratch[7]
    trains = np.empty(most, np.bool_)
    spans = np.empty((4, most), np.uint64)
    for row in range(len(which)):
        window = which[row]
        size = collect_segments(leaf[offset[window] : offset[window + 1]], parent, slot, own, above)
        for index in range(size):
            slot[own[index]] = -1
            tokens_of[index] = length[own[index]]
        link_children(size, above, tokens_of, weight, child, sibling)
        count = order_segments(
            window,
            own,
            above,
            child[: size + 1],
            sibling,
            weight,
            segments,
            trainer,
            at_value,
            spans,
            ends,
            laid,
            trains,
        )
        low, high = begin[row], begin[row + 1]
        held = spans[:, :count]
        write_tokens(held, values, input_ids[low:high])
        write_depths(held, position_ids[low:high])
        write_ends(held, ends, subtree_end[low:high])
        write_targets(held, laid, trains, source, shift_labels[low:high], loss_weight[low:high])
        if len(sequence_count):
            write_counts(held, laid, trains, source, sequence_count[low:high])


@kernel
def count_paths(offsets, subtree_end):
    """Number of paths of all rows, and of their tokens. A position whose subtree is itself ends a path."""
    longest = 0
    for row in range(len(offsets) - 1):
        longest = max(longest, offsets[row + 1] - offsets[row])
    open_until = np.empty(longest, np.int64)
    paths = total = 0
    for row in range(len(offsets) - 1):
        depth = 0
        for position in range(offsets[row + 1] - offsets[row]):
            end = subtree_end[offsets[row] + position]
            while depth and open_until[depth - 1] <= position:
                depth -= 1
            open_until[depth] = end
            depth += 1
            if end == position + 1:
                paths += 1
                total += depth
    return paths, total


@kernel
def write_paths(offsets, subtree_end, input_ids, paths, total):
    """Token ids of every path of all rows, one after the other, and where each begins; arguments of `count_paths`."""
    longest = 0
    for row in range(len(offsets) - 1):
        longest = max(longest, offsets[row + 1] - offsets[row])
    open_until = np.empty(longest, np.int64)
    open_token = np.empty(longest, np.int32)
    begin = np.zeros(paths + 1, np.int64)
    ids = np.empty(total, np.int32)
    path = 0
    for row in range(len(offsets) - 1):
        depth = 0
        for position in range(offsets[row + 1] - offsets[row]):
            end = subtree_end[offsets[row] + position]
            while depth and open_until[depth - 1] <= position:
                depth -= 1
            open_until[depth] = end
            open_token[depth] = input_ids[offsets[row] + position]
            depth += 1
            if end == position + 1:
                for above in range(depth):
                    ids[begin[path] + above] = open_token[above]
                begin[path + 1] = begin[path] + depth
                path += 1
    return ids, begin

"""How many sequences train each token, and what these weigh together.

Where every token of a sequence is a target, the tokens it trains are its whole path: it is enough to count the
sequences that end at a token and to add up what is below. Labels and the counts of token trees are added token by
token along the path, node by node from its end.

Weights are summed in float64; see `dagpack_hf.trie` for when these sums are exact. A forest without weights has an
empty array of them.

Cost: `count_ends` and `add_subtrees` are linear in sequences and unique tokens, the others read each label or count
once. No memory besides the result.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel


@kernel
def count_ends(last_node, begin, end, weights, start, depth, count, weight):
    """Add each sequence to the token it ends with.

    Args:
        last_node: `int32[n]`, the node each sequence ends in, -1 if it is empty.
        begin: `int64[n]`, first token of each sequence.
        end: `int64[n]`, one past its last token.
        weights: `float32[n]`, its weight. Empty: there are none.
        start: `int64[N]`, first token of each node.
        depth: `int32[N]`, tokens above it.
        count: `int32[U]`, added to.
        weight: `float64[U]`, added to. Empty: there are no weights.
    """
    for sequence in range(len(last_node)):
        node = last_node[sequence]
        if node >= 0:
            token = start[node] + end[sequence] - begin[sequence] - 1 - depth[node]
            count[token] += 1
            if len(weights):
                weight[token] += weights[sequence]


@kernel
def add_subtrees(tally, parent, start, length):
    """Turn what ends at each token into what ends at it or below: sums over the tokens of a node, then its children.

    Args:
        tally: `int32[U]` or `float64[U]`, overwritten.
        parent: `int32[N]`, parent node, before its children.
        start: `int64[N]`, first token of each node.
        length: `int32[N]`, its tokens.
    """
    for node in range(len(parent) - 1, -1, -1):
        first = np.uint64(start[node])
        at = np.uint64(start[node] + length[node] - 1)
        total = tally[at]
        while at > first:
            at -= np.uint64(1)
            total += tally[at]
            tally[at] = total
        if parent[node] >= 0:
            tally[start[parent[node]] + length[parent[node]] - 1] += total


@kernel
def add_labels(labels, label_begin, label_end, weights, last_node, tokens, parent, start, depth, count, weight):
    """Add each sequence to the tokens that it has as targets.

    Args:
        labels: `int32[total]`, the token where it is a target, else -100.
        label_begin: `int64[n]`, first label of each sequence.
        label_end: `int64[n]`, one past its last label.
        weights: `float32[n]`, weight of each sequence. Empty: there are none.
        last_node: `int32[n]`, the node each sequence ends in, -1 if it is empty.
        tokens: `int32[U]`, tokens of the forest.
        parent: `int32[N]`, parent node.
        start: `int64[N]`, first token of each node.
        depth: `int32[N]`, tokens above it.
        count: `int32[U]`, added to.
        weight: `float64[U]`, added to. Empty: there are no weights.

    Returns:
        Whether every label is its token or -100.
    """
    for sequence in range(len(last_node)):
        node = last_node[sequence]
        stop = label_end[sequence] - label_begin[sequence]
        while node >= 0:
            label = label_begin[sequence] + depth[node]
            if not count_labels(labels, label, tokens, count, start[node], stop - depth[node]):
                return False
            if len(weights):
                weigh_labels(labels, label, weights[sequence], weight, start[node], stop - depth[node])
            stop = np.int64(depth[node])
            node = parent[node]
    return True


@kernel
def count_labels(labels, label, tokens, count, token, length):
    """Count the targets of one node; return whether each label is its token or -100."""
    a = np.uint64(label)
    b = np.uint64(token)
    differing = np.int32(0)
    for j in range(np.uint64(length)):
        is_target = np.int32(labels[a + j] != -100)
        differing |= -is_target & (labels[a + j] ^ tokens[b + j])
        count[b + j] += is_target
    return differing == 0


@kernel
def weigh_labels(labels, label, sequence_weight, weight, token, length):
    """Add a sequence's weight to its targets in one node."""
    a = np.uint64(label)
    b = np.uint64(token)
    for j in range(np.uint64(length)):
        weight[b + j] += sequence_weight if labels[a + j] != -100 else np.float32(0)


@kernel
def add_counts(counts, weights, begin, end, above, last_node, parent, start, depth, count, weight):
    """Add the counts and weights of token trees.

    Args:
        counts: `int32[total]`, count of each token of the spans.
        weights: `float64[total]`, its weight. Empty: there are none.
        begin: `int64[n]`, first token of each span.
        end: `int64[n]`, one past its last token.
        above: `int32[n]`, tokens above it.
        last_node: `int32[n]`, the node each span ends in, -1 if it is empty.
        parent: `int32[N]`, parent node.
        start: `int64[N]`, first token of each node.
        depth: `int32[N]`, tokens above it.
        count: `int32[U]`, added to.
        weight: `float64[U]`, added to. Empty: there are no weights.
    """
    for span in range(len(last_node)):
        node = last_node[span]
        stop = end[span] - begin[span] + above[span]
        while stop > above[span]:
            low = np.int64(max(depth[node], above[span]))
            first = begin[span] + low - above[span]
            token = start[node] + low - depth[node]
            add_span(counts, first, count, token, stop - low)
            if len(weights):
                add_span(weights, first, weight, token, stop - low)
            stop = low
            node = parent[node]


@kernel
def add_span(values, first, sums, token, length):
    """Add consecutive values to consecutive sums."""
    a = np.uint64(first)
    b = np.uint64(token)
    for j in range(np.uint64(length)):
        sums[b + j] += values[a + j]

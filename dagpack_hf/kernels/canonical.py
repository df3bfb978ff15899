"""From branches to nodes: the one form of a trie, whatever it grew from.

A branch is cut where others hang from it; the pieces are the nodes. Where a branch ends and one only hangs from its
end, they are one node of several pieces. That happens to the nodes of token trees only: a sequence that goes on beyond
the end of a branch takes its place. Children are ordered by their first token and nodes numbered in preorder, so
neither the order of insertion nor which span came to be the branch shows in the result.

Cost: linear in branches, once they are sorted by offset and first token; no token is read but the first of each piece.
Memory besides the result: 24 bytes for each branch while the nodes are written, 16 afterwards.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel


@kernel
def sort_keys(tokens, source, at):
    """`int64[B - 1]`: offset and first token of each branch but the root, as one number."""
    keys = np.empty(len(source) - 1, np.int64)
    for branch in range(1, len(source)):
        keys[branch - 1] = (np.int64(at[branch]) << 31) | np.int64(tokens[source[branch]])
    return keys


@kernel
def group_children(parent, order):
    """Children of each branch, in a given order.

    Args:
        parent: `int32[B]`; branch 0 is the root.
        order: `int64[B - 1]`, the branches but the root, counted without it.

    Returns:
        `first: int32[B + 1]` and `child: int32[B - 1]`: the children of `b` are `child[first[b] : first[b + 1]]`.
    """
    size = len(parent)
    first = np.zeros(size + 1, np.int32)
    for branch in range(1, size):
        first[parent[branch] + 1] += 1
    for branch in range(size):
        first[branch + 1] += first[branch]
    free = first[:size].copy()
    child = np.empty(len(order), np.int32)
    for place in order:
        branch = place + 1
        child[free[parent[branch]]] = branch
        free[parent[branch]] += 1
    return first, child


@kernel
def count_pieces(length, at, first, child):
    """Pieces that the branches are cut into; the arguments are as in `write_nodes`."""
    pieces = 0
    for branch in range(len(length)):
        before = np.int64(0)
        for index in range(first[branch], first[branch + 1]):
            if at[child[index]] > before:
                before = np.int64(at[child[index]])
                pieces += 1
        pieces += length[branch] > before
    return pieces


@inlined
def written(branch, ahead, first, child, at):
    """Tokens of a branch that are in pieces already: those before the children that it goes on from."""
    index = ahead[branch]
    return np.int64(at[child[index - 1]]) if index > first[branch] else np.int64(0)


@kernel
def write_nodes(tokens, source, length, at, depth, first, child, pieces, chains):
    """Write the nodes in preorder.

    Args:
        tokens: `int32[total]`.
        source: `int64[B]`, position of each branch in `tokens`.
        length: `int32[B]`, its tokens.
        at: `int32[B]`, behind how many tokens of its parent it hangs.
        depth: `int32[B]`, tokens above it.
        first: `int32[B + 1]`, from `group_children`.
        child: `int32[B - 1]`, from `group_children`, siblings in the order of their offset and then first token.
        pieces: from `count_pieces`.
        chains: whether there may be nodes of several pieces.

    Returns:
        `parent` and `depth` of the nodes as in `TokenForest`, and with `chains` the first piece of each (`int32`);
        position and length of the pieces in `tokens`, `int64[P]` and `int32[P]`, in the order of the nodes; and where
        the pieces of the branches are: `head: int32[B]`, the node of the first piece of each, and
        `following: int32[B - 1]`, the node of the piece behind the last of the children that hang from one offset.
    """
    size = len(source)
    parent = np.empty(pieces, np.int32)
    node_depth = np.empty(pieces, np.int32)
    first_piece = np.empty(pieces if chains else 0, np.int32)
    piece_source = np.empty(pieces, np.int64)
    piece_length = np.empty(pieces, np.int32)
    head = np.empty(size, np.int32)
    following = np.empty(len(child), np.int32)
    ahead = first[:size].copy()  # the next child on each branch
    stack = np.empty(size, np.int32)
    stack_parent = np.empty(size, np.int32)
    top = push_children(stack, stack_parent, 0, -1, child, 0, first[1], 0, np.int32(-1), tokens, source)
    node = -1
    piece = 0
    while top:
        top -= 1
        branch = np.int64(stack[top])
        node += 1
        parent[node] = stack_parent[top]
        node_depth[node] = depth[branch] + written(branch, ahead, first, child, at)
        if chains:
            first_piece[node] = piece
        while True:
            begin = written(branch, ahead, first, child, at)
            low = ahead[branch]
            last = first[branch + 1]
            end = np.int64(at[child[low]]) if low < last else np.int64(length[branch])
            piece_source[piece] = source[branch] + begin
            piece_length[piece] = end - begin
            piece += 1
            if begin:
                following[low - 1] = node
            else:
                head[branch] = node
            high = low
            while high < last and at[child[high]] == end:
                high += 1
            ahead[branch] = high
            goes_on = end < length[branch]
            if goes_on or high - low != 1:
                break
            branch = np.int64(child[low])
        first_token = tokens[source[branch] + end] if goes_on else np.int32(-1)
        top = push_children(stack, stack_parent, top, node, child, low, high, branch, first_token, tokens, source)
    count = node + 1
    return parent[:count], node_depth[:count], first_piece, piece_source, piece_length, head, following


@kernel
def push_children(stack, stack_parent, top, node, child, low, high, branch, first_token, tokens, source):
    """Put the branches that hang from the end of a node on the stack, the one with the smallest first token on top.

    They are `child[low:high]`, and `branch` itself if it goes on, with `first_token`; else this is -1.
    """
    waiting = first_token >= 0
    i = high - 1
    while i >= low or waiting:
        if waiting and (i < low or tokens[source[child[i]]] < first_token):
            stack[top] = branch
            waiting = False
        else:
            stack[top] = child[i]
            i -= 1
        stack_parent[top] = node
        top += 1
    return top


@kernel
def copy_pieces(values, source, length):
    """Copies of stretches of `values`, one after the other."""
    total = np.int64(0)
    for piece in range(len(source)):
        total += length[piece]
    copied = np.empty(total, values.dtype)
    at = np.uint64(0)
    for piece in range(len(source)):
        first = np.uint64(source[piece])
        for i in range(np.uint64(length[piece])):
            copied[at + i] = values[first + i]
        at += np.uint64(length[piece])
    return copied


@kernel
def find_nodes(last_branch, begin, end, above, depth, first, child, at, head, following):
    """The node that each span ends in, written in place of its branch; -1 where the path is empty.

    Args:
        last_branch: `int32[n]`, the branch each span ends in; overwritten.
        begin: `int64[n]`, first token of each span.
        end: `int64[n]`, one past its last token.
        above: `int32[n]`, tokens above it; empty: none.
        depth: `int32[B]`, tokens above each branch.
        first: `int32[B + 1]`, as in `write_nodes`, like the others.
        child: `int32[B - 1]`.
        at: `int32[B]`.
        head: `int32[B]`.
        following: `int32[B - 1]`.
    """
    for span in range(len(last_branch)):
        branch = np.int64(last_branch[span])
        path = end[span] - begin[span] + (np.int64(above[span]) if len(above) else np.int64(0))
        offset = path - 1 - np.int64(depth[branch])
        low = first[branch]
        high = first[branch + 1]
        while low < high:
            middle = (low + high) >> 1
            if at[child[middle]] <= offset:
                low = middle + 1
            else:
                high = middle
        if path == 0:
            last_branch[span] = -1
        elif low == first[branch]:
            last_branch[span] = head[branch]
        else:
            last_branch[span] = following[low - 1]

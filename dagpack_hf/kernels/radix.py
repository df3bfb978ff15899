"""Growing the trie: spans of a flat token array, linked to each other through a hash table.

What is inserted is a *span* `tokens[begin : end]`: a sequence, which starts at the root, or a node of a token tree,
which starts below a token of an earlier span. What grows are *branches*: runs of tokens, each hanging from a token of
another one. A branch is not split where others hang from it; the table finds them by `(branch, offset, next token)`.
So a span is compared with a whole branch at once, however many leave it on the way, and a walk takes one step for each
branch that it *leaves*. A span that ends inside a branch changes nothing, and one that goes on beyond the end of a
branch takes its place. Prefixes of each other are therefore one branch, in any order.

Branch 0 is empty: the root. No token is stored: a branch is a position in `tokens` and a length.

Cost: each token is compared once, in blocks of 64, and each step costs a look-up. Where spans leave branch after
branch, inserting the longest first lets each branch go on as far as any span can, and no path has more than
`sqrt(2 * unique tokens)` steps (long-path decomposition; Bender and Farach-Colton, The level ancestor problem
simplified, 2004). Memory: 24 bytes for each branch, 11 to 21 for its slot in the table, 4 for each span;
there are at most as many branches as spans.
"""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import kernel

BLOCK = 64
"""Tokens that are compared at once: long enough for vector instructions, short enough to stop early."""

GROWN, HOPPY, NEGATIVE = 0, 1, 2
"""How `grow` ended: with all spans, with too many steps for the tokens, or with a token below 0."""


@kernel
def common_prefix(first, at, second, begin, limit):
    """Tokens that agree from `first[at]` and `second[begin]` on, at most `limit`; unsigned, it vectorises."""
    a = np.uint64(at)
    b = np.uint64(begin)
    end = np.uint64(limit)
    block = np.uint64(BLOCK)
    shared = np.uint64(0)
    while shared + block <= end:
        differing = np.int32(0)
        for j in range(block):
            differing |= first[a + shared + j] ^ second[b + shared + j]
        if differing != 0:
            break
        shared += block
    while shared < end and first[a + shared] == second[b + shared]:
        shared += np.uint64(1)
    return np.int64(shared)


@kernel
def any_negative(tokens, begin, end):
    """Whether a token of the span is below 0."""
    sign = np.int32(0)
    for at in range(np.uint64(begin), np.uint64(end)):
        sign |= tokens[at]
    return sign < 0


@kernel
def fingerprint(branch, offset, token):
    """32 well-mixed bits of a key (the finaliser of MurmurHash3)."""
    x = (np.uint64(branch) << np.uint64(32)) | np.uint64(offset)
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x >> np.uint64(32)


@kernel
def find_child(table, mark, branch, offset, token, tokens, source, parent, at):
    """The branch that hangs from `offset` of `branch` and begins with `token`, 0 for none; and its slot.

    A slot is empty (0), or holds a fingerprint and below it 32 bits of a branch. Probing is linear.
    """
    mask = np.uint64(len(table) - 1)
    slot = mark & mask
    while table[slot] != 0:
        if table[slot] >> np.uint64(32) == mark:
            child = np.int64(table[slot] & np.uint64(0xFFFFFFFF))
            if parent[child] == branch and at[child] == offset and tokens[source[child]] == token:
                return child, slot
        slot = (slot + np.uint64(1)) & mask
    return 0, slot


@kernel
def doubled(table):
    """The same table with twice the slots; a fingerprint says where an entry goes."""
    larger = np.zeros(2 * len(table), np.uint64)
    mask = np.uint64(len(larger) - 1)
    for entry in table:
        if entry != 0:
            slot = (entry >> np.uint64(32)) & mask
            while larger[slot] != 0:
                slot = (slot + np.uint64(1)) & mask
            larger[slot] = entry
    return larger


@kernel
def grow(tokens, begin, end, owner, hangs_from, order, patience):
    """Insert spans.

    Args:
        tokens: `int32[total]`.
        begin: `int64[n]`, first token of each span.
        end: `int64[n]`, one past its last token.
        owner: `int64[n]`, the span it hangs from, -1 for the root; it must come before. Empty: all are at the root.
        hangs_from: `int64[n]`, the token of that span it hangs from. Empty like `owner`.
        order: `int64[n]`, the order to insert in. Empty: as they are, as `owner` demands.
        patience: give up with `HOPPY` after this many steps, if there are more than one for each 16 tokens.

    Returns:
        How it ended (nothing else is of use then, unless `GROWN`); `source`, `length`, `parent`, `at` and `depth` of
        the branches (position in `tokens`, tokens, the branch it hangs from, behind how many tokens of that, tokens
        above); for each span the branch it ends in, and the tokens above the span (empty like `owner`).
    """
    n = len(begin)
    source = np.empty(n + 1, np.int64)
    length = np.empty(n + 1, np.int32)
    parent = np.empty(n + 1, np.int32)
    at = np.empty(n + 1, np.int32)
    depth = np.empty(n + 1, np.int32)
    source[0] = length[0] = parent[0] = at[0] = depth[0] = 0
    last_branch = np.empty(n, np.int32)
    above = np.empty(len(owner), np.int32)
    table = np.zeros(64, np.uint64)
    size = 1
    steps = 0
    compared = 0
    status = GROWN
    for turn in range(n):
        span = order[turn] if len(order) else turn
        here = begin[span]
        stop = end[span]
        compared += stop - here
        branch = np.int64(0)
        offset = np.int64(0)
        entered = np.int64(-1)  # where this span came upon the first token of the branch
        if len(owner):
            above[span] = 0
            if owner[span] >= 0:
                above[span] = above[owner[span]] + hangs_from[span] - begin[owner[span]] + 1
                branch = np.int64(last_branch[owner[span]])
                while depth[branch] >= above[span]:
                    branch = np.int64(parent[branch])
                offset = np.int64(above[span] - depth[branch])
        while here < stop:
            limit = min(length[branch] - offset, stop - here)
            shared = common_prefix(tokens, source[branch] + offset, tokens, here, limit)
            here += shared
            offset += shared
            if here == stop:
                break
            token = tokens[here]
            mark = fingerprint(branch, offset, token)
            child, slot = find_child(table, mark, branch, offset, token, tokens, source, parent, at)
            if child:
                steps += 1
                branch = child
                entered = here
                offset = np.int64(1)
                here += 1
                continue
            if any_negative(tokens, here, stop):
                status = NEGATIVE
                break
            if offset == length[branch] and entered >= 0:
                source[branch] = entered
                length[branch] = stop - entered
                break
            source[size] = here
            length[size] = stop - here
            parent[size] = branch
            at[size] = offset
            depth[size] = depth[branch] + offset
            table[slot] = (mark << np.uint64(32)) | np.uint64(size)
            branch = np.int64(size)
            size += 1
            if 4 * size > 3 * len(table):
                table = doubled(table)
            break
        last_branch[span] = branch
        if steps > patience and steps > compared // 16:
            status = HOPPY
        if status != GROWN:
            break
    return status, source[:size], length[:size], parent[:size], at[:size], depth[:size], last_branch, above

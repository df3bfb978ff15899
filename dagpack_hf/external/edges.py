"""The two outer paths of a forest: their tallies, and the end of the last one.

Cost: linear in runs and in the tokens of these paths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dagpack_hf.external.border import SharedPath
from dagpack_hf.spans import LongArray
from dagpack_hf.tally import Tally
from dagpack_hf.trie import TokenForest


def path_tokens(forest: TokenForest, node: int, length: int) -> LongArray:
    """`int64[length]`, the first tokens of the path to a node, counted in node order."""
    pieces = [np.zeros(0, np.int64)]
    while node >= 0:
        size = min(int(forest.length[node]), length - int(forest.depth[node]))
        pieces.append(forest.start[node] + np.arange(max(size, 0)))
        node = int(forest.parent[node])
    return np.concatenate(pieces[::-1])


def with_tallies(forest: TokenForest, token: LongArray, path: SharedPath) -> TokenForest:
    """Give some tokens, all different, other tallies; the forest has weights afterwards if these have."""
    if not len(token):
        return forest
    old = forest.tally
    bounds = np.concatenate([[0], old.end, token, token + 1])
    end = np.unique(bounds)[1:]
    begin = np.append(0, end[:-1])
    run = old.run_of(begin)
    order = np.argsort(token)
    place = np.minimum(np.searchsorted(token[order], begin), len(token) - 1)
    is_new = token[order][place] == begin
    given = order[place]
    count = np.where(is_new, path.count[given], old.count[run]).astype(np.int32)
    weight = None
    if path.weight is not None:
        weight = np.where(is_new, path.weight[given], old.path_weight[run]).astype(np.float64)
    return replace(forest, tally=Tally(end, count, weight).merged())


def tallies_of(forest: TokenForest, token: LongArray) -> SharedPath:
    """Tallies of some tokens."""
    run = forest.tally.run_of(token)
    weight = None if forest.tally.weight is None else forest.tally.weight[run]
    return SharedPath(forest.tally.count[run].astype(np.int64), weight)


def without_last_leaf(forest: TokenForest) -> TokenForest:
    """Take out the last node, which is a leaf."""
    tokens = int(forest.start[-1])
    tally = forest.tally
    runs = int(np.searchsorted(tally.end, tokens)) + 1 if tokens else 0
    weight = None if tally.weight is None else tally.weight[:runs]
    return replace(
        forest,
        source=forest.source[:-1],
        parent=forest.parent[:-1],
        length=forest.length[:-1],
        depth=forest.depth[:-1],
        tally=Tally(np.minimum(tally.end[:runs], tokens), tally.count[:runs], weight),
    )

"""The walk as token trees.

The walk is depth first and crosses every edge once; a path that arrives where the walk has been ends there. So it is a
tree with one entry for each edge, whose paths are the contexts that transitions are trained in. Its entries become
tokens here, and the tree of each root a `TokenTree`, which is where a graph becomes what text is.

Cost: 0.2 µs for each edge, and one copy of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dagpack_hf.graph.edges import Edges
from dagpack_hf.graph.loops import cross_edges
from dagpack_hf.graph.node_tokens import NodeTokens
from dagpack_hf.kernels.canonical import copy_pieces
from dagpack_hf.token_trees import TokenTree

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """The entries of a walk, in preorder.

    Args:
        parent: `int64[W]`, the entry above each, -1 for a root.
        node: `int32[W]`, the node that is emitted.
        edge: `int64[W]`, the edge that was crossed, -1 for a root.
    """

    parent: LongArray
    node: npt.NDArray[np.int32]
    edge: LongArray

    @classmethod
    def over(
        cls,
        edges: Edges,
        start: LongArray,
        start_node: npt.NDArray[np.int32],
        tokens: NodeTokens,
        above: int,
        max_path: int | None,
        seed: int | None,
    ) -> Walk:
        """Walk over all edges.

        Args:
            edges: the edges.
            start: `int64[R]`, the vertices where paths begin.
            start_node: `int32[R]`, their nodes.
            tokens: of the nodes.
            above: tokens above each root.
            max_path: tokens that a path may have, those above the root included; `None`: any number.
            seed: shuffles in which order the edges out of a vertex, and the starts, are taken; `None`: in that of
                their first appearance.

        Raises:
            ValueError: `max_path` has no room for a root and one transition.
        """
        vertices = len(edges.first) - 1
        root_tokens, node_tokens = above + tokens.state_length, tokens.length
        most_below = np.zeros(vertices, np.int64)
        np.maximum.at(most_below, edges.source, node_tokens[edges.node])
        if max_path is not None:
            state_length = np.zeros(vertices, np.int64)
            state_length[start] = root_tokens[start_node]
            state_length[edges.target] = root_tokens[edges.node]
            least = int(np.where(most_below, state_length + most_below, 0).max(initial=0))
            if max_path < least:
                raise ValueError(
                    f"max_path={max_path} has no room for a state and the transition that follows: that takes "
                    f"{least} tokens. Choose a larger max_path."
                )
        limit = np.iinfo(np.int64).max if max_path is None else max_path
        order = np.arange(len(edges))
        if seed is not None:
            random = np.random.default_rng(seed)
            order = np.lexsort((random.random(len(edges)), edges.source))
            shuffled = random.permutation(len(start))
            start, start_node = start[shuffled], start_node[shuffled]
        parent, walked, crossed = cross_edges(
            edges.first,
            edges.node[order],
            edges.target[order],
            start,
            start_node,
            root_tokens,
            node_tokens,
            most_below,
            limit,
        )
        return cls(parent, walked, np.where(crossed < 0, -1, np.append(order, -1)[crossed]))

    @property
    def roots(self) -> LongArray:
        """`int64[R]`, the entries of the roots."""
        return np.flatnonzero(self.parent < 0)


def token_trees(
    walk: Walk,
    count: LongArray,
    tokens: NodeTokens,
    above: Sequence[int],
    trained: tuple[bool, bool],
    logical_tokens: int,
) -> Iterator[TokenTree]:
    """The tree of each root of a walk.

    Args:
        walk: the walk.
        count: `int64[E]`, how often each edge is trained.
        tokens: of the nodes.
        above: token ids above each root.
        trained: whether the tokens of actions, and of states, are targets.
        logical_tokens: of all trees; the first one has them.
    """
    is_root = walk.parent < 0
    pieces = np.stack(
        [
            np.where(is_root, len(above), tokens.action_length[walk.node]),
            tokens.state_length[walk.node],
        ],
        axis=1,
    )
    source = np.stack(
        [
            np.where(is_root, len(tokens.values), tokens.action_start[walk.node]),
            tokens.state_start[walk.node],
        ],
        axis=1,
    )
    trains = np.where(is_root, 0, count[walk.edge])[:, None] * np.array(trained)
    values = np.concatenate([tokens.values, np.asarray(above, np.int32)])
    length = pieces.sum(axis=1)
    end = np.cumsum(length)
    bounds = np.append(walk.roots, len(walk.parent)).tolist()
    for low, high in pairwise(bounds):
        begin = int(end[low] - length[low])
        yield TokenTree(
            input_ids=copy_pieces(values, source[low:high].ravel(), pieces[low:high].ravel()),
            target_count=np.repeat(trains[low:high].ravel(), pieces[low:high].ravel()),
            node_length=length[low:high],
            node_parent=np.where(is_root[low:high], -1, end[walk.parent[low:high]] - 1 - begin),
            logical_tokens=logical_tokens if low == 0 else 0,
        )

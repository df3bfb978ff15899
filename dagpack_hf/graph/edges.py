"""The edges of a graph: what leads from a vertex to the next, each of them once.

A vertex is what merging makes of a position in an episode: the state, or the whole path. An edge is a vertex and the
node that follows there. Edges are ordered by the vertex they leave, and there by their first appearance.

Cost: two sorts of the steps, vectorised; 8 bytes for each step and 32 for each edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.graph.episodes import START, History, number

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Edges:
    """The distinct edges of a graph.

    Args:
        first: `int64[V + 1]`; the edges out of vertex `v` are `first[v]` to `first[v + 1]`, the latter not included.
        source: `int64[E]`, the vertex that each leaves.
        node: `int32[E]`, the node that it leads to: a state, and the action that produced it.
        target: `int64[E]`, the vertex that it leads to.
        count: `int64[E]`, steps that took it.
        of_step: `int64[T]`, the edge of each step.
    """

    first: LongArray
    source: LongArray
    node: npt.NDArray[np.int32]
    target: LongArray
    count: LongArray
    of_step: LongArray

    def __len__(self) -> int:
        return len(self.node)

    @classmethod
    def of(cls, history: History, vertex: LongArray, node: npt.NDArray[np.int32]) -> Edges:
        """The edges that episodes take.

        Args:
            history: the episodes.
            vertex: `int64[P]`, the vertex at each position.
            node: `int32[P]`, the node at each position.
        """
        steps = history.steps
        source, target = vertex[steps - 1], vertex[steps]
        appears, of_step = number(source * (int(node.max(initial=0)) + 1) + node[steps])
        order = np.argsort(source[appears], kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        appears, of_step = appears[order], rank[of_step]
        vertices = int(vertex.max(initial=-1)) + 1
        return cls(
            first=np.concatenate([[0], np.cumsum(np.bincount(source[appears], minlength=vertices))]).astype(np.int64),
            source=source[appears],
            node=node[steps[appears]],
            target=target[appears],
            count=np.bincount(of_step, minlength=len(order)),
            of_step=of_step,
        )


def starts(history: History, vertex: LongArray) -> tuple[LongArray, LongArray, LongArray]:
    """Where paths begin.

    Returns:
        The distinct vertices at which a path begins in order of their first appearance, the position where each
        appears first, and how many paths begin there.
    """
    begins = np.flatnonzero(history.action == START)
    appears, of_path = number(vertex[begins])
    return vertex[begins[appears]], begins[appears], np.bincount(of_path, minlength=len(appears))

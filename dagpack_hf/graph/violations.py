"""Where the next state does not depend on the state and the action alone, and which episodes show it.

Cost: vectorised; an object for each violation and each of its outcomes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.graph.edges import Edges
from dagpack_hf.graph.episodes import History

SHOWN = 5
"""Violations that an error names."""

_short = reprlib.Repr()
_short.maxstring, _short.maxtuple = 24, 3


@dataclass(frozen=True, eq=False)
class Outcome:
    """One of several states that followed from the same state and action.

    Args:
        state: the next state.
        episodes: `int64[n]`, the episodes in which it followed, one for each time, counted from 0.
        steps: `int64[n]`, which of the episode's actions led there, counted from 0.
    """

    state: Hashable
    episodes: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    def __str__(self) -> str:
        times = "once" if len(self.steps) == 1 else f"{len(self.steps)} times"
        return f"{_short.repr(self.state)} ({times}, in episode {self.episodes[0]} by action {self.steps[0]})"


@dataclass(frozen=True, eq=False)
class Violation:
    """A state and an action from which several states followed.

    Args:
        state: the state.
        action: the action.
        outcomes: the states that followed, in order of their first appearance.
    """

    state: Hashable
    action: Hashable
    outcomes: tuple[Outcome, ...]

    def __str__(self) -> str:
        outcomes = " and ".join(map(str, self.outcomes))
        return f"from {_short.repr(self.state)} action {_short.repr(self.action)} leads to {outcomes}"


class ViolationError(ValueError):
    """Paths cannot be merged by state. `violations` says where."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = violations
        shown = "".join(f"\n  {violation};" for violation in violations[:SHOWN])
        more = f"\n  and {len(violations) - SHOWN} more." if len(violations) > SHOWN else ""
        super().__init__(
            f"The next state does not depend on state and action alone for {len(violations)} pairs of them:{shown}"
            f"{more}\nPut what is missing into the states, drop noise with `drop=`, or keep histories apart: "
            '`on_violation="prefix"` below these states, `merge="prefix"` everywhere.'
        )


def ambiguous_edges(edges: Edges, action: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The edges that share vertex and action with another one, those that share them side by side.

    Args:
        edges: the edges.
        action: `int32[N]`, the action of each node.
    """
    pair = edges.source * (int(action.max(initial=0)) + 1) + action[edges.node]
    _, of_edge, count = np.unique(pair, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(count[of_edge] > 1)
    return shared[np.argsort(of_edge[shared], kind="stable")]


def find_violations(history: History, edges: Edges, node_action: npt.NDArray[np.int32]) -> list[Violation]:
    """The violations of a graph, in order of the vertices.

    Args:
        history: the episodes.
        edges: the edges.
        node_action: `int32[N]`, the action of each node.
    """
    found: list[Violation] = []
    shared = ambiguous_edges(edges, node_action)
    if not len(shared):
        return found
    steps = history.steps
    position = steps[np.isin(edges.of_step, shared)]
    of_step = edges.of_step[np.isin(edges.of_step, shared)]
    order = np.argsort(of_step, kind="stable")
    position, of_step = position[order], of_step[order]
    groups: dict[tuple[int, int], list[Outcome]] = {}
    for edge in shared.tolist():
        low, high = np.searchsorted(of_step, [edge, edge + 1])
        at = position[low:high]
        outcome = Outcome(history.states[history.state[at[0]]], *history.place(at))
        groups.setdefault((int(edges.source[edge]), int(node_action[edges.node[edge]])), []).append(outcome)
        if len(groups) > len(found):
            state = history.states[history.state[at[0] - 1]]
            found.append(Violation(state, history.actions[history.action[at[0]]], ()))
    return [
        Violation(each.state, each.action, tuple(outcomes))
        for each, outcomes in zip(found, groups.values(), strict=True)
    ]

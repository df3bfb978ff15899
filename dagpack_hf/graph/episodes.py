"""Episodes as numbers: each distinct state and action once, and flat arrays of their numbers.

States and actions may be anything that can be hashed, and are looked at here only: what comes later is numpy. The
episodes lie one after the other, one *position* for each state, beside the action that led there.

Cost: one dictionary look-up for each state and action, 0.1 µs and its hash; 9 bytes for each position, 26 if
transitions are dropped, and the distinct states themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

START = -1
"""Number of the action at a position where a path begins."""

DropPredicate = Callable[[Any, Any, Any], bool]
"""Takes a state, an action and the next state, and says whether such transitions are noise."""


class Episode(NamedTuple):
    """What was played from one start.

    Args:
        states: the states in order, hashable; one more than actions.
        actions: the actions between them, hashable.
    """

    states: Sequence[Hashable]
    actions: Sequence[Hashable]


class _Numbers(dict[Hashable, int]):
    """Numbers of things, in order of their first appearance."""

    def __missing__(self, thing: Hashable) -> int:
        number = self[thing] = len(self)
        return number


@dataclass(frozen=True)
class History:
    """All episodes, in numbers.

    Args:
        states: the distinct states, in order of their first appearance.
        actions: the distinct actions, likewise.
        state: `int32[P]`, the state at each position.
        action: `int32[P]`, the action that led there from the position before, `START` where a path begins.
        offset: `int64[n + 1]`, where each episode begins as it was given.
        position: `int64[P]`, which of the given positions these are; `None` if they are all.
        num_dropped: steps that were dropped.
    """

    states: list[Hashable]
    actions: list[Hashable]
    state: npt.NDArray[np.int32]
    action: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64] | None = None
    num_dropped: int = 0

    @classmethod
    def read(cls, episodes: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]], progress: bool) -> History:
        """Number the states and actions of episodes.

        Raises:
            ValueError: an episode is no pair, or has not one state more than actions.
            TypeError: a state or an action cannot be hashed.
        """
        states, actions = _Numbers(), _Numbers()
        state, action, offset = array("i"), array("i"), array("q", [0])
        for index, episode in enumerate(tqdm(episodes, "Reading episodes", disable=not progress, delay=1)):
            own_states, own_actions = _checked(episode, index)
            try:
                state.extend(map(states.__getitem__, own_states))
                action.append(START)
                action.extend(map(actions.__getitem__, own_actions))
            except TypeError as error:
                raise _unhashable(own_states, own_actions, index) or error from error
            offset.append(len(state))
        return cls(
            list(states),
            list(actions),
            np.frombuffer(state, np.int32) if state else np.zeros(0, np.int32),
            np.frombuffer(action, np.int32) if action else np.zeros(0, np.int32),
            np.frombuffer(offset, np.int64),
        )

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """`int64[T]`, the positions that an action led to."""
        return np.flatnonzero(self.action != START)

    def number_nodes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number the nodes, a node being a state paired with the action that produced it.

        Returns:
            Where each node appears first, and the node at each position.
        """
        return number(self.state.astype(np.int64) * (len(self.actions) + 1) + self.action + 1)

    def place(self, position: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Episode, and number of the action in it, for positions that an action led to. Both count from 0."""
        given = position if self.position is None else self.position[position]
        episode = np.searchsorted(self.offset, given, side="right") - 1
        return episode, given - self.offset[episode] - 1

    def without(self, drop: DropPredicate) -> History:
        """Leave out the transitions that a predicate names.

        One that leads back to its own state is cut out, and the episode goes on as if it had not been. At any other
        the episode is parted: what follows begins anew in the next state. The predicate is asked once for each
        distinct transition.
        """
        steps = self.steps
        if not len(steps):
            return self
        _, node = self.number_nodes()
        first, of_step = number(self.state[steps - 1].astype(np.int64) * len(self.state) + node[steps])
        is_noise = np.fromiter(
            (
                bool(drop(self.states[self.state[at - 1]], self.actions[self.action[at]], self.states[self.state[at]]))
                for at in steps[first].tolist()
            ),
            bool,
            len(first),
        )
        noise = steps[is_noise[of_step]]
        action = self.action.copy()
        action[noise] = START
        kept = np.ones(len(self.state), bool)
        kept[noise[self.state[noise] == self.state[noise - 1]]] = False
        position = np.flatnonzero(kept)
        return History(
            self.states, self.actions, self.state[position], action[position], self.offset, position, len(noise)
        )


def number(keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number distinct keys in order of their first appearance.

    Returns:
        Where each key appears first, and for each of `keys` its number.
    """
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse]


def _checked(episode: Any, index: int) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    try:
        states, actions = episode
        count = (len(states), len(actions))
    except (TypeError, ValueError):
        raise ValueError(f"Episode {index} is no pair of two sequences, (states, actions).") from None
    if count[0] != count[1] + 1:
        raise ValueError(
            f"Episode {index} has {count[0]} states and {count[1]} actions; there must be one state more than actions."
        )
    return states, actions


def _unhashable(states: Sequence[Any], actions: Sequence[Any], index: int) -> TypeError | None:
    """Say which state or action cannot be hashed."""
    for what, things in (("state", states), ("action", actions)):
        for at, thing in enumerate(things):
            try:
                hash(thing)
            except TypeError:
                return TypeError(
                    f"Episode {index}, {what} {at} is a {type(thing).__name__}, which cannot be hashed. Give each "
                    "state and action as a number, a text, bytes or a tuple of these."
                )
    return None

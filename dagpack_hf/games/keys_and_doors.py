"""A deterministic game: a player in a maze, keys, the doors they open, and a step counter.

Everything that decides what comes next is in the state, so paths that reach the same state may be merged. Leave the
counter out (`State.left`) and that is no longer so: when it runs out the level starts over, which then comes as a
surprise. Walking into a wall changes nothing but the counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dagpack_hf.graph.episodes import Episode

ACTIONS = ("up", "down", "left", "right")

_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

CELLAR = (
    "#######",
    "#a.@.b#",
    "#.#.#.#",
    "#.#A#.#",
    "#.B.c.#",
    "##C####",
    "#..*###",
    "#######",
)
"""A maze of three keys and three doors. Two doors are short cuts, the third leads to the exit, 11 steps away."""


class State(NamedTuple):
    """Where the game stands.

    Args:
        row: row of the player, from 0.
        column: column of the player, from 0.
        keys: the keys the player holds, bit 0 for `a`, bit 1 for `b` and so on.
        taken: the keys that have left their places, likewise.
        opened: the doors that are open, bit 0 for `A` and so on.
        left: steps that are left until the level starts over.
    """

    row: int
    column: int
    keys: int
    taken: int
    opened: int
    left: int


@dataclass(frozen=True)
class KeysAndDoors:
    r"""The rules, for one maze.

    Args:
        rows: the maze, one text for each row: `#` wall, `@` where the player starts, `a` to `z` keys, `A` to `Z` the
            doors that they open, `*` the exit, `.` floor. There are walls all around.
        steps: steps until the level starts over.

    Raises:
        ValueError: the maze is not rectangular, is open, has no start, or has characters without a meaning.

    Example:
        >>> game = KeysAndDoors(("######", "#@aA*#", "######"), steps=9)
        >>> episode = play(game, ["right", "right", "right"])
        >>> [tuple(state) for state in episode.states][1:3]
        [(1, 2, 1, 1, 0, 8), (1, 3, 0, 1, 1, 7)]
        >>> print("\n".join(game.draw(episode.states[2])))
        ######
        #..@*#
        ######
        keys - left 7
    """

    rows: tuple[str, ...] = CELLAR
    steps: int = 24

    def __post_init__(self) -> None:
        flat = "".join(self.rows)
        if len({len(row) for row in self.rows}) != 1:
            raise ValueError("The rows of a maze must be equally long, and there must be one at least.")
        edge = self.rows[0] + self.rows[-1] + "".join(row[0] + row[-1] for row in self.rows)
        if set(edge) != {"#"}:
            raise ValueError("A maze needs walls (#) all around.")
        wrong = sorted({each for each in flat if each not in "#@*." and not (each.isascii() and each.isalpha())})
        if wrong:
            raise ValueError(f"A maze has no {wrong[0]!r}; it is made of # @ * . and letters.")
        if flat.count("@") != 1:
            raise ValueError(f"A maze needs one start (@), not {flat.count('@')}.")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")

    @cached_property
    def start(self) -> State:
        """The state in which the level starts."""
        row = next(index for index, each in enumerate(self.rows) if "@" in each)
        return State(row, self.rows[row].index("@"), 0, 0, 0, self.steps)

    def step(self, state: State, action: str) -> State:
        """The next state.

        A closed door opens for the player who walks into it with its key, which is used up. When no step is left, the
        level starts over. At the exit nothing happens any more.

        Raises:
            ValueError: no such action.
        """
        if action not in _MOVES:
            raise ValueError(f"There is no action {action!r}; there are {', '.join(ACTIONS)}.")
        if self.is_won(state):
            return state
        if state.left == 1:
            return self.start
        row, column = state.row + _MOVES[action][0], state.column + _MOVES[action][1]
        _, _, keys, taken, opened, left = state
        cell = self.rows[row][column]
        bit = 1 << (ord(cell.lower()) - ord("a")) if cell.isalpha() else 0
        if cell == "#" or (cell.isupper() and not (keys | opened) & bit):
            return state._replace(left=left - 1)
        if cell.islower() and not taken & bit:
            keys, taken = keys | bit, taken | bit
        elif cell.isupper() and not opened & bit:
            keys, opened = keys & ~bit, opened | bit
        return State(row, column, keys, taken, opened, left - 1)

    def is_won(self, state: State) -> bool:
        """Whether the player is at the exit."""
        return self.rows[state.row][state.column] == "*"

    def draw(self, state: State) -> tuple[str, ...]:
        """The state as rows of text: the maze as it is now, and a row with keys and counter."""
        gone = {"@"}
        gone |= {chr(ord("a") + bit) for bit in range(26) if state.taken >> bit & 1}
        gone |= {chr(ord("A") + bit) for bit in range(26) if state.opened >> bit & 1}
        rows = ["".join("." if cell in gone else cell for cell in row) for row in self.rows]
        rows[state.row] = rows[state.row][: state.column] + "@" + rows[state.row][state.column + 1 :]
        keys = "".join(chr(ord("a") + bit) for bit in range(26) if state.keys >> bit & 1)
        return (*rows, f"keys {keys or '-'} left {state.left}")


def play(game: KeysAndDoors, actions: Sequence[str]) -> Episode:
    """Play from the start; nothing is played after the exit."""
    states = [game.start]
    for action in actions:
        if game.is_won(states[-1]):
            break
        states.append(game.step(states[-1], action))
    return Episode(states, list(actions[: len(states) - 1]))


def random_episodes(game: KeysAndDoors, count: int, length: int, seed: int = 0) -> list[Episode]:
    """Episodes of random actions.

    Args:
        game: the rules.
        count: how many.
        length: actions of each; fewer if the exit is reached.
        seed: the same seed gives the same episodes.
    """
    draws = np.random.default_rng(seed).integers(len(ACTIONS), size=(count, length))
    return [play(game, [ACTIONS[draw] for draw in each]) for each in draws.tolist()]

"""A small world for figures: four ways through a pantry, which part and meet again."""

from __future__ import annotations

from dagpack_hf.games import KeysAndDoors, State, play
from dagpack_hf.graph.episodes import Episode

PANTRY = KeysAndDoors(
    (
        "######",
        "#@.A*#",
        "#.a.##",
        "######",
    ),
    steps=8,
)
"""A room with a key and the door to the exit."""

_PLAYED = (
    "right down up right right",
    "down right up right right",
    "right down left up right",
    "down right left up",
)

_ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}


def example_episodes() -> list[Episode]:
    """Four episodes. All get the key, two by each way; two of them open the door."""
    return [play(PANTRY, actions.split()) for actions in _PLAYED]


def state_name(state: State) -> str:
    """Row and column of the player, and on a second line the key that is held or the door that is open."""
    held = "key" if state.keys else "open" if state.opened else ""
    return f"{state.row},{state.column}\n{held}".strip()


def action_name(action: str) -> str:
    """An arrow."""
    return _ARROWS[action]

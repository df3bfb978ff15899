"""Small worlds for examples and tests."""

from dagpack_hf.games.keys_and_doors import ACTIONS, CELLAR, KeysAndDoors, State, play, random_episodes

__all__ = ["ACTIONS", "CELLAR", "KeysAndDoors", "State", "play", "random_episodes"]

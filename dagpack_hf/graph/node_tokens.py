"""The tokens of nodes: one id for each, or those that a user's functions make of state and action.

Each distinct state and action is encoded once. Paths are told apart by their tokens from there on, so different states
must not have equal tokens, nor actions, nor an action and the state behind it together: that is checked here.

Cost: one call for each distinct state and action; 4 bytes for each of their tokens.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

LongArray = npt.NDArray[np.int64]
Encoder = Callable[[Any], Sequence[int] | npt.NDArray[np.integer]]

TARGETS = ("states", "actions", "both")


@dataclass(frozen=True)
class NodeTokens:
    """Where the tokens of nodes are in a flat array. A node is the tokens of its action, then those of its state.

    Args:
        values: `int32[...]`, the tokens.
        action_start: `int64[N]`, where those of each node's action begin; a node without an action has none.
        action_length: `int64[N]`, how many they are.
        state_start: `int64[N]`, likewise for its state.
        state_length: `int64[N]`, how many they are.
    """

    values: npt.NDArray[np.int32]
    action_start: LongArray
    action_length: LongArray
    state_start: LongArray
    state_length: LongArray

    @property
    def length(self) -> LongArray:
        """`int64[N]`, tokens of each node."""
        return self.action_length + self.state_length

    @classmethod
    def one_id(cls, num_nodes: int) -> NodeTokens:
        """The node's number is its only token."""
        ids, none = np.arange(num_nodes, dtype=np.int64), np.zeros(num_nodes, np.int64)
        return cls(ids.astype(np.int32), none, none, ids, np.ones(num_nodes, np.int64))

    @classmethod
    def encoded(
        cls,
        states: Sequence[Any],
        actions: Sequence[Any],
        node_state: npt.NDArray[np.int32],
        node_action: npt.NDArray[np.int32],
        encode_state: Encoder,
        encode_action: Encoder,
    ) -> NodeTokens:
        """Encode states and actions.

        Raises:
            ValueError: what a function returns is no list of token ids, a state has none, or tokens are equal that
                must differ.
        """
        state_values, state_offset = _encode("state", states, encode_state)
        action_values, action_offset = _encode("action", actions, encode_action)
        state_length, action_length = np.diff(state_offset), np.diff(action_offset)
        action = np.where(node_action < 0, len(actions), node_action)  # one more, which is empty
        tokens = cls(
            np.concatenate([state_values, action_values]),
            (len(state_values) + action_offset)[action],
            np.append(action_length, 0)[action],
            state_offset[node_state],
            state_length[node_state],
        )
        if len(set(action_length.tolist())) > 1 and len(set(state_length.tolist())) > 1:
            produced = np.flatnonzero(node_action >= 0)
            _refuse_equal_nodes(tokens, produced, lambda node: (states[node_state[node]], actions[node_action[node]]))
        return tokens


def _encode(what: str, things: Sequence[Any], encode: Encoder) -> tuple[npt.NDArray[np.int32], LongArray]:
    """Tokens of all things one after the other, and where those of each begin."""
    pieces, offset = [np.zeros(0, np.int32)], np.zeros(len(things) + 1, np.int64)
    seen: dict[bytes, int] = {}
    limit = np.iinfo(np.int32).max
    for index, thing in enumerate(things):
        ids = np.asarray(encode(thing))
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > limit)):
            raise ValueError(
                f"encode_{what} must give a flat list of token ids from 0 to {limit}; for {reprlib.repr(thing)} it "
                f"gives {reprlib.repr(ids.tolist())}."
            )
        if what == "state" and not ids.size:
            raise ValueError(f"encode_state gives no token for {reprlib.repr(thing)}; each state needs one at least.")
        pieces.append(ids.astype(np.int32))
        offset[index + 1] = ids.size
        first = seen.setdefault(_digest([pieces[-1]]), index)
        if first != index:
            raise ValueError(
                f"encode_{what} gives the same tokens for {reprlib.repr(things[first])} and {reprlib.repr(thing)}, so "
                f"their transitions could not be told apart. Merge these {what}s before the graph is built, or give "
                "them different tokens."
            )
    return np.concatenate(pieces), np.cumsum(offset)


def _refuse_equal_nodes(tokens: NodeTokens, nodes: LongArray, name: Callable[[int], tuple[Any, Any]]) -> None:
    """Raise if the tokens of an action and a state together are those of another action and state."""
    seen: dict[bytes, int] = {}
    spans = ((tokens.action_start, tokens.action_length), (tokens.state_start, tokens.state_length))
    for node in nodes.tolist():
        digest = _digest(tokens.values[start[node] : start[node] + length[node]] for start, length in spans)
        first = seen.setdefault(digest, node)
        if first != node:
            pairs = " and ".join(
                f"action {reprlib.repr(action)} with state {reprlib.repr(state)}"
                for state, action in (name(first), name(node))
            )
            raise ValueError(
                f"The tokens of {pairs} are the same, so their transitions could not be told apart. Let encode_action "
                "or encode_state end with a token that occurs nowhere else, or always give as many tokens."
            )


def _digest(arrays: Iterable[npt.NDArray[np.int32]]) -> bytes:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.digest()

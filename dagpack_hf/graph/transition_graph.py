"""The transition graph: episodes of states and actions, merged where they meet.

A *node* is a state paired with the action that produced it; it is what a position of a row holds. A *transition* is an
edge: a state, an action, and the next state. Where paths are merged by state, what follows is the same whichever way
a state was reached, so each transition is in the graph once, and the walk trains it once, in the context of one path
that leads there. Where they are merged by prefix, a transition is once in the graph for each history before it.

Design. Episodes become numbers (`episodes`), positions become vertices (states, or paths where these are kept apart),
steps become edges (`edges`), edges a walk, and the walk token trees (`walk`), which `TokenForest` takes as it takes
those of text. All but the numbering is vectorised or compiled.

Cost: see `docs/games.md`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, List, Value

from dagpack_hf.columns import TREE_COLUMNS
from dagpack_hf.graph.edges import Edges, starts
from dagpack_hf.graph.episodes import START, DropPredicate, History
from dagpack_hf.graph.loops import number_vertices
from dagpack_hf.graph.node_tokens import TARGETS, Encoder, NodeTokens
from dagpack_hf.graph.violations import Violation, ViolationError, ambiguous_edges, find_violations
from dagpack_hf.graph.walk import Walk, token_trees
from dagpack_hf.pack_options import check_choice
from dagpack_hf.trie import TokenForest, TokenTree

MERGES = ("state", "prefix")

ON_VIOLATION = ("error", "prefix")

TREE_FEATURES = Features(
    {name: Value("int64") if name == "logical_tokens" else List(Value("int32")) for name in TREE_COLUMNS}
)
"""Features of a data set of token trees, with counts beyond those of `uint16`."""

LongArray = npt.NDArray[np.int64]


class Node(NamedTuple):
    """What a position holds.

    Args:
        state: the state.
        action: the action that produced it; `None` where a path begins.
    """

    state: Hashable
    action: Hashable | None


@dataclass(frozen=True, eq=False)
class TransitionGraph:
    """Episodes, merged. Made by `from_episodes`.

    Args:
        merge: how paths are merged.
        history: the episodes in numbers.
        vertex: `int64[P]`, the vertex at each position: below `num_states` a state, else a path.
        node: `int32[P]`, the node at each position.
        appears: `int64[N]`, the position where each node appears first.
        edges: the transitions.
        violations: states and actions from which several states followed. Under `merge="prefix"` those that followed
            from the same path.

    Example:
        >>> episodes = [(["hall", "door", "garden"], ["north", "open"]), (["hall", "door", "door"], ["north", "wait"])]
        >>> graph = TransitionGraph.from_episodes(episodes)
        >>> graph.num_states, graph.num_transitions, graph.num_prefixes
        (3, 3, 3)
    """

    merge: str
    history: History = field(repr=False)
    vertex: LongArray = field(repr=False)
    node: npt.NDArray[np.int32] = field(repr=False)
    appears: LongArray = field(repr=False)
    edges: Edges = field(repr=False)
    violations: list[Violation] = field(repr=False)

    @classmethod
    def from_episodes(
        cls,
        episodes: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]],
        merge: str = "state",
        *,
        on_violation: str = "error",
        drop: DropPredicate | None = None,
        progress: bool = True,
    ) -> TransitionGraph:
        """Merge episodes.

        Args:
            episodes: pairs `(states, actions)` with one state more than actions. States and actions are what can be
                hashed; equal ones are the same. They are read once.
            merge: `"state"` merges paths that reach the same state, which is valid where the next state depends on
                state and action alone. `"prefix"` merges common beginnings only, which is always valid.
            on_violation: what to do if merging by state turns out not to be valid: `"error"`, or `"prefix"`: a path
                that reaches a state from which an action led to different states is merged by prefix from there on.
            drop: called with a state, an action and the next state of each distinct transition; those for which it
                is true are left out. One that leads back to its own state is cut out of the episode. At any other the
                episode is parted, and what follows begins anew in the next state.
            progress: show a progress bar, if it takes longer than a second.

        Raises:
            ValueError: an episode is malformed, or an option is unknown.
            TypeError: a state or an action cannot be hashed.
            ViolationError: `on_violation="error"` and the next state does not depend on state and action alone.
        """
        check_choice("merge", merge, MERGES)
        check_choice("on_violation", on_violation, ON_VIOLATION)
        history = History.read(episodes, progress)
        if drop is not None:
            history = history.without(drop)
        appears, of_position = history.number_nodes()
        node, node_action = of_position.astype(np.int32), history.action[appears]
        if merge == "prefix":
            vertex = _vertices(history, node, np.zeros(len(history.states), bool))
        else:
            vertex = history.state.astype(np.int64)
        edges = Edges.of(history, vertex, node)
        violations = find_violations(history, edges, node_action)
        if violations and merge == "state":
            if on_violation == "error":
                raise ViolationError(violations)
            is_merged = np.ones(len(history.states), bool)
            is_merged[edges.source[ambiguous_edges(edges, node_action)]] = False
            vertex = _vertices(history, node, is_merged)
            edges = Edges.of(history, vertex, node)
        return cls(merge, history, vertex, node, appears, edges, violations)

    # What is in it

    @property
    def num_states(self) -> int:
        """Distinct states."""
        return int(np.count_nonzero(np.bincount(self.history.state)))

    @property
    def num_pairs(self) -> int:
        """Distinct pairs of a state and an action that was taken there."""
        steps = self.history.steps
        pairs = self.history.state[steps - 1].astype(np.int64) * len(self.history.actions) + self.history.action[steps]
        return len(np.unique(pairs))

    @property
    def num_transitions(self) -> int:
        """Edges: what is trained once each."""
        return len(self.edges)

    @property
    def num_steps(self) -> int:
        """Steps of all episodes, without those that were dropped."""
        return len(self.history.steps)

    @property
    def num_dropped(self) -> int:
        """Steps that `drop` has left out."""
        return self.history.num_dropped

    @cached_property
    def num_prefixes(self) -> int:
        """Edges that the graph has under `merge="prefix"`: distinct paths with at least one action."""
        if self.merge == "prefix":
            return self.num_transitions
        vertex = _vertices(self.history, self.node, np.zeros(len(self.history.states), bool))
        return len(np.unique(vertex[self.history.steps]))

    @property
    def num_joins(self) -> int:
        """States with several distinct incoming transitions, counted by state, action and next state."""
        steps = self.history.steps
        state = self.history.state
        _, first = np.unique(state[steps - 1].astype(np.int64) * self.num_nodes + self.node[steps], return_index=True)
        return int(np.count_nonzero(np.bincount(state[steps[first]]) > 1))

    @property
    def num_ambiguous(self) -> int:
        """Places in the graph where an action leads to several states, though paths are merged no further."""
        shared = ambiguous_edges(self.edges, self._node_action)
        actions = self._node_action[self.edges.node[shared]]
        return len(np.unique(self.edges.source[shared] * (len(self.history.actions) + 1) + actions))

    # Nodes

    @property
    def _node_state(self) -> npt.NDArray[np.int32]:
        return self.history.state[self.appears]

    @property
    def _node_action(self) -> npt.NDArray[np.int32]:
        return self.history.action[self.appears]

    @property
    def num_nodes(self) -> int:
        """Distinct nodes."""
        return len(self.appears)

    def nodes(self, ids: Iterable[int]) -> list[Node]:
        """The nodes with these numbers, which are their tokens if nodes are one id each.

        They are numbered from 0 up, in order of their first appearance.
        """
        found = []
        for position in self.appears[np.asarray(list(ids), np.int64)].tolist():
            action = self.history.action[position]
            state = self.history.states[self.history.state[position]]
            found.append(Node(state, None if action == START else self.history.actions[action]))
        return found

    def distances(self) -> LongArray:
        """`int64[N]`, the fewest transitions in which each node is reached from where paths begin."""
        vertex, _, _ = starts(self.history, self.vertex)
        of_vertex = np.full(len(self.edges.first) - 1, -1, np.int64)
        of_node = np.full(self.num_nodes, -1, np.int64)
        of_node[self.node[self.history.action == START]] = 0
        front, distance = vertex, 0
        while len(front):
            of_vertex[front] = distance
            distance += 1
            begin, count = self.edges.first[front], np.diff(self.edges.first)[front]
            edge = np.repeat(begin - np.cumsum(count) + count, count) + np.arange(count.sum())
            node = self.edges.node[edge]
            of_node[node[of_node[node] < 0]] = distance
            front = np.unique(self.edges.target[edge])
            front = front[of_vertex[front] < 0]
        return of_node

    # What it becomes

    def to_trees(
        self,
        encode_state: Encoder | None = None,
        encode_action: Encoder | None = None,
        *,
        targets: str = "states",
        max_path: int | None = None,
        virtual_root: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Iterator[TokenTree]:
        """The walk as token trees, one for each root; arguments and errors as of `to_forest`."""
        check_choice("targets", targets, TARGETS)
        if (encode_state is None) != (encode_action is None):
            raise ValueError("Give both encode_state and encode_action, or neither for nodes of one id each.")
        if encode_state is None or encode_action is None:
            tokens = NodeTokens.one_id(self.num_nodes)
            trained = (False, True)
        else:
            tokens = NodeTokens.encoded(
                self.history.states,
                self.history.actions,
                self._node_state,
                self._node_action,
                encode_state,
                encode_action,
            )
            trained = (targets != "states", targets != "actions")
        above = np.atleast_1d(np.asarray([] if virtual_root is None else virtual_root, np.int64)).tolist()
        start, position, paths = starts(self.history, self.vertex)
        start_node = self.node[position]
        walk = Walk.over(self.edges, start, start_node, tokens, len(above), max_path, seed)
        logical = (self.edges.count * tokens.length[self.edges.node]).sum()
        logical += (paths * (len(above) + tokens.state_length[start_node])).sum()
        yield from token_trees(walk, self.edges.count, tokens, above, trained, int(logical))

    def to_forest(
        self,
        encode_state: Encoder | None = None,
        encode_action: Encoder | None = None,
        *,
        targets: str = "states",
        max_path: int | None = None,
        virtual_root: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> TokenForest:
        """The walk as a forest, which is packed and trained as that of text.

        The walk goes depth first from each state where an episode begins, crosses every transition once, and ends a
        path that arrives at a state it has gone on from already. Under `loss_weighting="once"` each transition counts
        once, under `"paths"` as often as episodes take it.

        Args:
            encode_state: gives the token ids of a state, at least one.
            encode_action: gives those of an action. A path is a state, an action, a state and so on. Without the two
                functions a node is one id, see `nodes`.
            targets: what is trained of a transition: the tokens of its next `"states"`, of its `"actions"`, or
                `"both"`. Where a path begins nothing is trained. Has no effect on nodes of one id.
            max_path: tokens that a path may have; choose a half or less of the window. A path that would be longer
                ends, and what follows is walked from a root of its own, the state that was reached. Where paths are
                merged by state nothing is lost; where they are not, histories begin there, and transitions that are
                alike from there on are trained as one. By default paths are as long as they get, which in a large
                graph is far longer than any episode.
            virtual_root: token ids that all roots hang from, so that they are one tree. They, and the states at the
                roots, are context. By default each root is a tree of its own.
            seed: shuffles the order in which transitions are crossed. Where paths are merged by state, another order
                means other contexts: walks of several seeds, put together, train each transition in several. By
                default the order is that of the episodes.

        Raises:
            ValueError: different states, actions or transitions have equal tokens, a state has none, or `max_path` has
                no room for a transition.
        """
        return TokenForest.from_trees(
            self.to_trees(
                encode_state,
                encode_action,
                targets=targets,
                max_path=max_path,
                virtual_root=virtual_root,
                seed=seed,
            )
        )

    def to_dataset(
        self,
        encode_state: Encoder | None = None,
        encode_action: Encoder | None = None,
        *,
        targets: str = "states",
        max_path: int | None = None,
        virtual_root: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Dataset:
        """The walk as a data set of token trees, for `pack_dataset` and the trainer; arguments as of `to_forest`."""
        trees = self.to_trees(
            encode_state, encode_action, targets=targets, max_path=max_path, virtual_root=virtual_root, seed=seed
        )
        columns: dict[str, list[Any]] = {name: [] for name in TREE_FEATURES}
        for tree in trees:
            for name, values in columns.items():
                values.append(getattr(tree, name))
        return Dataset.from_dict(columns, features=TREE_FEATURES)


def _vertices(history: History, node: npt.NDArray[np.int32], is_merged: npt.NDArray[np.bool_]) -> LongArray:
    """The vertex at each position, where paths are merged at some states only."""
    return number_vertices(history.state, node, history.action == START, is_merged, int(node.max(initial=0)) + 1)

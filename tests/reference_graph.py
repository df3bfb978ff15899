"""Transition graph, walk and rows in plain dictionaries: what the package is compared with.

A vertex is a state, or a tuple of nodes where a path is kept apart; a node is a pair (state, action), with the action
`None` where a path begins. Nothing here is fast, and nothing comes from the package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Node = tuple[Hashable, Hashable]
Path = tuple[Node, ...]


class ReferenceGraph:
    """Episodes, merged.

    Args:
        episodes: pairs (states, actions).
        is_merged: whether paths that reach a state are merged there.
    """

    def __init__(self, episodes: Iterable[tuple[Sequence, Sequence]], is_merged: Callable[[Any], bool]) -> None:
        self.starts: dict[Hashable, Node] = {}
        self.out: dict[Hashable, dict[Node, Hashable]] = {}
        self.places: dict[tuple[Hashable, Node], list[tuple[int, int]]] = {}
        for number, (states, actions) in enumerate(episodes):
            nodes = list(zip(states, [None, *actions], strict=True))
            apart = not is_merged(states[0])
            vertex: Hashable = ("path", nodes[0]) if apart else ("state", states[0])
            self.starts.setdefault(vertex, nodes[0])
            for step, node in enumerate(nodes[1:]):
                apart = apart or not is_merged(node[0])
                below = (vertex, node) if apart else ("state", node[0])
                self.out.setdefault(vertex, {})[node] = below
                self.places.setdefault((vertex, node), []).append((number, step))
                vertex = below

    def violations(self) -> dict[tuple[Hashable, Hashable], dict[Hashable, list[tuple[int, int]]]]:
        """For each vertex and action that led to several states: these states, and the episodes and steps."""
        outcomes: dict[tuple, dict] = {}
        for (vertex, (state, action)), places in self.places.items():
            outcomes.setdefault((vertex, action), {})[state] = places
        return {key: value for key, value in outcomes.items() if len(value) > 1}

    def walk(self) -> list[Path]:
        """The path to each node of the walk, roots and the node itself included, depth first."""
        paths: list[Path] = []
        been = set()
        for start, node in self.starts.items():
            if start in been or start not in self.out:
                continue
            been.add(start)
            paths.append((node,))
            stack = [(paths[-1], iter(self.out[start].items()))]
            while stack:
                path, edges = stack[-1]
                node, below = next(edges, (None, None))
                if node is None:
                    stack.pop()
                    continue
                paths.append((*path, node))
                if below not in been and below in self.out:
                    been.add(below)
                    stack.append((paths[-1], iter(self.out[below].items())))
        return paths


def check_rows(rows: Sequence[dict[str, Any]], paths: Sequence[Path], node_of: Callable[[int], Node]) -> None:
    """Assert that rows of one-id nodes are a walk: every transition once; mask, positions and copies as they must be.

    Args:
        rows: the five vectors of each.
        paths: of all nodes of the walk.
        node_of: the node that an id stands for.
    """
    trained: Counter[Path] = Counter()
    known = set(paths)
    for row in rows:
        ids = [node_of(each) for each in row["input_ids"]]
        ends = row["subtree_end"].tolist()
        seen = [[key for key in range(query + 1) if query < ends[key]] for query in range(len(ids))]
        path = [tuple(ids[key] for key in keys) for keys in seen]
        assert all(each in known for each in path)
        assert list(row["position_ids"]) == [len(each) - 1 for each in path]
        below: dict[Path, set[Path]] = {}
        children: dict[int, set[Path]] = {}
        for keys, each in zip(seen, path, strict=True):
            below.setdefault(each[:-1], set()).add(each)
            children.setdefault(keys[-2] if len(keys) > 1 else -1, set()).add(each)
        for each, count in Counter(path).items():
            assert count == max(1, len(below.get(each, ()))), "a branching node is copied once per child"
        for position, label in enumerate(row["shift_labels"].tolist()):
            own = children.get(position, set())
            assert len(own) <= 1 and seen[position][-1] == position
            if label == -100:
                assert row["loss_weight"][position] == 0
                continue
            assert own == {(*path[position], node_of(label))}
            trained.update(own)
    assert trained == Counter(each for each in paths if len(each) > 1), "every transition is trained exactly once"

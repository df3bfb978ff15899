"""Where the vertices of a small graph are drawn: columns by distance from the start, rows with few crossings.

A layered layout in the manner of Sugiyama, Tagawa and Toda (1981): vertices are put into layers, ordered within each
by the mean place of their neighbours (the barycenter heuristic), and moved towards that mean as far as the others in
the layer allow. Layers are distances, so an edge leads at most one to the right; those that close a loop lead back.

Cost: some sweeps over the edges, in plain Python: for figures, not for large graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_SWEEPS = 25
"""An odd number, so that the last one goes with the edges and what follows a vertex alone is level with it."""


@dataclass(frozen=True)
class Drawn:
    """A graph as it is drawn.

    Args:
        labels: of the vertices.
        starts: the vertices where paths begin.
        edges: source, target and label of each edge.
    """

    labels: Sequence[str]
    starts: Sequence[int]
    edges: Sequence[tuple[int, int, str]]

    @cached_property
    def column(self) -> list[int]:
        """The distance of each vertex from the nearest start; 0 for what no start leads to."""
        return [max(each, 0) for each in self._distance]

    @cached_property
    def _distance(self) -> list[int]:
        """The same, with -1 for what no start leads to."""
        after: list[list[int]] = [[] for _ in self.labels]
        for source, target, _ in self.edges:
            after[source].append(target)
        distance = [-1] * len(self.labels)
        front = list(dict.fromkeys(self.starts))
        reached = 0
        while front:
            for vertex in front:
                distance[vertex] = reached
            reached += 1
            ahead = dict.fromkeys(target for vertex in front for target in after[vertex])
            front = [vertex for vertex in ahead if distance[vertex] < 0]
        return distance

    @cached_property
    def row(self) -> list[float]:
        """The height of each vertex, counted in rows from 0; those of a column are at least 1 apart."""
        near = self._neighbours()
        layers: list[list[int]] = [[] for _ in range(max(self.column, default=-1) + 1)]
        for vertex in self._depth_first():
            layers[self.column[vertex]].append(vertex)
        row = [0.0] * len(self.labels)
        for layer in layers:
            for at, vertex in enumerate(layer):
                row[vertex] = at - (len(layer) - 1) / 2
        for sweep in range(_SWEEPS):
            for layer in layers if sweep % 2 == 0 else reversed(layers):
                wanted = {vertex: _mean([row[other] for other in near[vertex]], row[vertex]) for vertex in layer}
                if sweep < _SWEEPS // 2:
                    layer.sort(key=lambda vertex: wanted[vertex])
                for vertex, height in zip(layer, spread([wanted[vertex] for vertex in layer]), strict=True):
                    row[vertex] = height
        least = min(row, default=0.0)
        return [height - least for height in row]

    def incoming(self) -> list[int]:
        """Edges that lead to each vertex, those from itself not counted."""
        count = Counter(target for source, target, _ in self.edges if source != target)
        return [count[vertex] for vertex in range(len(self.labels))]

    def outgoing(self) -> list[int]:
        """Edges that leave each vertex."""
        count = Counter(source for source, _, _ in self.edges)
        return [count[vertex] for vertex in range(len(self.labels))]

    def condensed(self) -> Drawn:
        """The same graph with stretches without a branch as one vertex each, which says how many it stands for."""
        incoming, outgoing = self.incoming(), self.outgoing()
        loops = {source for source, target, _ in self.edges if source == target}
        after = {source: target for source, target, _ in self.edges if outgoing[source] == 1}
        follows = {
            target
            for source, target in after.items()
            if incoming[target] == 1 and self._distance[target] > 0 and not {target, source} & loops
        }
        kept = [vertex for vertex in range(len(self.labels)) if vertex not in follows]
        number = {vertex: at for at, vertex in enumerate(kept)}
        labels, last = [], {}
        for vertex in kept:
            end, more = vertex, 0
            while after.get(end) in follows:
                end, more = after[end], more + 1
            labels.append(with_more(self.labels[vertex], more))
            last[end] = number[vertex]
        edges = [(last[source], number[target], label) for source, target, label in self.edges if target in number]
        return Drawn(labels, [number[start] for start in self.starts], edges)

    def _neighbours(self) -> list[list[int]]:
        """What is connected with each vertex and lies in another column."""
        near: list[list[int]] = [[] for _ in self.labels]
        for source, target, _ in self.edges:
            if self.column[source] != self.column[target]:
                near[source].append(target)
                near[target].append(source)
        return near

    def _depth_first(self) -> list[int]:
        """The vertices in the order of a walk, so that what belongs together is together from the first."""
        after: list[list[int]] = [[] for _ in self.labels]
        for source, target, _ in self.edges:
            after[source].append(target)
        order: dict[int, None] = {}
        for start in (*self.starts, *range(len(self.labels))):
            stack = [start]
            while stack:
                vertex = stack.pop()
                if vertex not in order:
                    order[vertex] = None
                    stack += reversed(after[vertex])
        return list(order)


def with_more(label: str, more: int) -> str:
    """The label of a box that stands for others too."""
    head, *rest = label.split("\n")
    return "\n".join([f"{head} +{more:,}", *rest]) if more else label


def spread(heights: Sequence[float]) -> list[float]:
    """Heights in their order, moved apart to at least 1, as little as that takes.

    Neighbours that would touch form a group, which is centred where its members would be.
    """
    groups: list[tuple[float, int]] = []  # the mean of what the members want, less their places in the group; members
    for height in heights:
        wanted, count = height, 1
        while groups and groups[-1][0] + groups[-1][1] > wanted:
            before, others = groups.pop()
            wanted = (before * others + (wanted - others) * count) / (others + count)
            count += others
        groups.append((wanted, count))
    return [first + at for first, count in groups for at in range(count)]


def _mean(heights: Sequence[float], otherwise: float) -> float:
    return sum(heights) / len(heights) if heights else otherwise

"""The figure of a transition graph: states as boxes, actions on the edges, paths that part and meet again.

Columns are distances from the start. States with several incoming edges, which merging makes, and states with several
outgoing ones, which a window copies, are marked. Edges that close a loop lead back in an arc.

Cost: see `graph_layout`; at most `STATES` states are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import hypot
from typing import TYPE_CHECKING, Any

import numpy as np

from dagpack_hf.graph.edges import starts
from dagpack_hf.graph.transition_graph import TransitionGraph
from dagpack_hf.view.boxes import (
    HEAD,
    MARGIN,
    WIDTH,
    draw_arrow,
    draw_box,
    draw_head,
    draw_text,
    fitted,
    new_canvas,
    tint,
)
from dagpack_hf.view.graph_layout import Drawn
from dagpack_hf.view.theme import Theme, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATES = 80
"""Boxes that fit into a figure."""

COLUMNS = 14
"""Columns that fit, so that boxes and actions can be read."""

_BOX = 42
_GAP = 22


def graph_figure(
    graph: TransitionGraph,
    *,
    name: Callable[[Any], str] = str,
    action_name: Callable[[Any], str] = str,
    stretches: bool = False,
    theme: str = "light",
    title: str | None = None,
) -> Figure:
    """Draw a transition graph.

    Args:
        graph: the graph, merged by state or by prefix.
        name: gives the label of a state, of one line or two.
        action_name: gives the label of an action.
        stretches: draw one box for each stretch of states without a branch, not for each state.
        theme: `"light"` or `"dark"`.
        title: by default how many states and transitions there are.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: the graph is empty, or too large to be read.
        ImportError: matplotlib is not installed.
    """
    drawn = drawn_graph(graph, name, action_name)
    if stretches:
        drawn = drawn.condensed()
    columns = max(drawn.column, default=-1) + 1
    if not drawn.labels:
        raise ValueError("There is nothing to draw: the graph has no state.")
    if len(drawn.labels) > STATES or columns > COLUMNS:
        raise ValueError(
            f"A figure has room for {STATES} boxes in {COLUMNS} columns, and this graph merged by {graph.merge} has "
            f"{len(drawn.labels):,} in {columns:,}. Draw {'' if stretches else 'stretches (stretches=True), '}fewer "
            "or shorter episodes."
        )
    rows = max(drawn.row) + 1
    gap = 44 if columns < 10 else 30
    pitch = min((WIDTH - 2 * MARGIN + gap) / columns, gap + (150 if stretches else 92))
    with themed(theme) as colors:
        step = [drawn.column[target] - drawn.column[source] for source, target, _ in drawn.edges]
        above = 26 if any(source == target for source, target, _ in drawn.edges) or min(step, default=0) < -1 else 0
        level = _BOX + _GAP + above // 2
        top = HEAD + 8 + above
        figure, axes = new_canvas(top + level * (rows - 1) + _BOX + MARGIN)
        draw_head(axes, title or _summary(graph), _legend(drawn, stretches, colors), colors)
        size = (pitch - gap, _BOX)
        corners = [
            (MARGIN + column * pitch, top + row * level) for column, row in zip(drawn.column, drawn.row, strict=True)
        ]
        _edges(axes, drawn, corners, size, colors)
        for label, corner, entering, leaving in zip(
            drawn.labels, corners, drawn.incoming(), drawn.outgoing(), strict=True
        ):
            look = _look(colors, meets=entering > 1, parts=leaving > 1)
            draw_box(axes, (*corner, *size), label, **look)
    return figure


def drawn_graph(graph: TransitionGraph, name: Callable[[Any], str], action_name: Callable[[Any], str]) -> Drawn:
    """The states, or under `merge="prefix"` the paths, and the transitions of a graph, as they are drawn."""
    vertices, first = np.unique(graph.vertex, return_index=True)
    states = [node.state for node in graph.nodes(graph.node[first])]
    begins, _, _ = starts(graph.history, graph.vertex)
    actions = [node.action for node in graph.nodes(graph.edges.node)]
    ends = zip(
        np.searchsorted(vertices, graph.edges.source).tolist(),
        np.searchsorted(vertices, graph.edges.target).tolist(),
        actions,
        strict=True,
    )
    return Drawn(
        [name(state) for state in states],
        np.searchsorted(vertices, begins).tolist(),
        [(source, target, action_name(action)) for source, target, action in ends],
    )


def _look(colors: Theme, *, meets: bool, parts: bool) -> dict[str, Any]:
    """Fill, border and label of a state."""
    return {
        "fill": tint(colors.green, colors.paper) if meets else colors.shade,
        "edge": colors.orange if parts else colors.green if meets else colors.line,
        "weight": 2.5 if parts else 1.2,
        "ink": colors.ink,
    }


def _edges(
    axes: Axes, drawn: Drawn, corners: list[tuple[float, float]], size: tuple[float, float], colors: Theme
) -> None:
    """All edges, those between the same states side by side."""
    entering = drawn.incoming()
    alike = Counter((source, target) for source, target, _ in drawn.edges)
    seen: Counter[tuple[int, int]] = Counter()
    for source, target, label in drawn.edges:
        at, seen[source, target] = seen[source, target], seen[source, target] + 1
        aside = at - (alike[source, target] - 1) / 2
        color = colors.green if entering[target] > 1 and source != target else colors.quiet
        if source == target:
            _loop(axes, corners[source], size, (label, at), colors)
            continue
        if (target, source) in alike:
            aside += 0.7 * alike[source, target]
        begin, end, bend = _ends(drawn, (source, target), corners, size, aside)
        draw_arrow(axes, begin, end, color, bend=bend, weight=1.8)
        text, font = fitted(label, 46, 14)
        draw_text(axes, *_beside(begin, end, bend), text, colors.ink, font, behind=colors.paper)


def _ends(
    drawn: Drawn, edge: tuple[int, int], corners: list[tuple[float, float]], size: tuple[float, float], aside: float
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Where an edge begins and ends, and how it is bent; `aside` is how far it lies to the right of the direct way."""
    (left, top), (other_left, other_top) = corners[edge[0]], corners[edge[1]]
    width, height = size
    columns = drawn.column[edge[1]] - drawn.column[edge[0]]
    if columns == 1:
        begin = (left + width + 2, top + height / 2 + 9 * aside)
        return begin, (other_left - 2, other_top + height / 2 + 9 * aside), 0.22 * aside
    if columns == -1:
        begin = (left - 2, top + height / 2 - 9 * aside)
        return begin, (other_left + width + 2, other_top + height / 2 - 9 * aside), 0.22 * aside
    if columns == 0:
        down = other_top > top
        across = width / 2 - (9 if down else -9) * aside
        begin = (left + across, top + (height + 2 if down else -2))
        return begin, (other_left + across, other_top + (-2 if down else height + 2)), 0.2 * aside
    begin = (left + width * 0.35, top - 2)
    return begin, (other_left + width * 0.65, other_top - 2), 0.16 + 0.08 * aside


def _beside(begin: tuple[float, float], end: tuple[float, float], bend: float) -> tuple[float, float]:
    """Where the label of an arc is: beside its middle, on the outer side, above it if it is straight.

    matplotlib draws a quadratic curve, whose middle is half as far out as its control point.
    """
    (x, y), (other_x, other_y) = begin, end
    across, down = other_x - x, other_y - y
    length = max(hypot(across, down), 1.0)
    outward = 1.0 if bend > 0 or (bend == 0 and across < 0) else -1.0
    out = bend * length / 2 + 10 * outward
    return (x + other_x) / 2 - out * down / length, (y + other_y) / 2 + out * across / length


def _loop(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], edge: tuple[str, int], colors: Theme
) -> None:
    """An edge that leads back to where it begins, above its box."""
    label, at = edge
    x, y = corner[0] + size[0] - 14 - 24 * at, corner[1] - 1
    draw_arrow(axes, (x + 6, y), (x - 6, y), colors.quiet, bend=1.5)
    text, font = fitted(label, 24, 12)
    draw_text(axes, x, y - 17, text, colors.ink, font)


def _legend(drawn: Drawn, stretches: bool, colors: Theme) -> list[tuple[str, str, str]]:
    """What the colours mean, of those that are there."""
    legend = []
    if max(drawn.outgoing(), default=0) > 1:
        legend.append((colors.paper, colors.orange, "paths part: copied in a window"))
    if max(drawn.incoming(), default=0) > 1:
        legend.append((tint(colors.green, colors.paper), colors.green, "paths meet: several edges lead here"))
    if stretches:
        legend.append(("", "", "+ n: and n more without a branch"))
    return legend or [("", "", "a single path")]


def _summary(graph: TransitionGraph) -> str:
    count = f"{graph.num_states:,} states, {graph.num_transitions:,} transitions"
    return f"Merged by {graph.merge}: {count}"

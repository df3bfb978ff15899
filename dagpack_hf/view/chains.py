"""The figure of sequences as chains: a row of boxes for each, what they share in one colour.

Three things are marked: what begins several sequences (computed once when merged by prefix), where sequences part,
and, for episodes, states that are reached with another history (computed once when merged by state).

Cost: linear in the boxes that are drawn, at most `ROWS` rows of as many as the width takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from dagpack_hf.view.graph_layout import with_more
from dagpack_hf.view.theme import Theme, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 16
"""Sequences that are drawn; the figure says how many more there are."""

GUTTER = 26
"""Pixels at the left for the numbers of the sequences."""

_BOX = 42
_PITCH = 59


@dataclass(frozen=True)
class Chains:
    """Sequences, and what each place in them shares with the others.

    Args:
        prefix: for each sequence, the number of the prefix that ends at each place; equal prefixes have equal numbers.
        shared: for each prefix, whether several sequences begin with it.
        parts: for each prefix, whether sequences go on from it in different ways.
        met: for each prefix, whether its last state is also reached with another history.
        num_transitions: distinct triples of a state, an action and the next state.
    """

    prefix: list[list[int]]
    shared: list[bool]
    parts: list[bool]
    met: list[bool]
    num_transitions: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[Hashable]], actions: Sequence[Sequence[Hashable]] | None) -> Chains:
        """Compare sequences; with actions, the elements are states between them.

        Raises:
            ValueError: there are not as many lists of actions as sequences, or not one state more than actions.
        """
        _check(sequences, actions)
        numbers: dict[tuple[int, Hashable, Hashable], int] = {}
        prefix: list[list[int]] = []
        for index, sequence in enumerate(sequences):
            taken = [None] * len(sequence) if actions is None else [None, *actions[index]]
            above, path = -1, []
            for action, element in zip(taken, sequence, strict=True):
                above = numbers.setdefault((above, action, element), len(numbers))
                path.append(above)
            prefix.append(path)
        users = Counter(number for path in prefix for number in path)
        children = Counter(above for above, _, _ in numbers)
        last = [element for _, _, element in numbers]
        reached = Counter(last)
        return cls(
            prefix,
            [users[number] > 1 for number in range(len(last))],
            [children[number] > 1 for number in range(len(last))],
            [actions is not None and reached[element] > 1 for element in last],
            len({(last[above], action, element) for above, action, element in numbers if above >= 0}),
        )

    def condensed(self, labels: list[list[str]]) -> tuple[list[list[str]], Chains, Callable[[Any], str]]:
        """Labels with stretches as one each, what they share, and the label of a label.

        A stretch ends where sequences part and where others end.
        """
        ends = {path[-1] for path in self.prefix}
        kept: list[list[int]] = [[] for _ in self.prefix]
        texts: list[list[str]] = [[] for _ in self.prefix]
        for index, path in enumerate(self.prefix):
            begin = 0
            for at, number in enumerate(path):
                if self.parts[number] or number in ends:
                    texts[index].append(with_more(labels[index][begin], at - begin))
                    kept[index].append(number)
                    begin = at + 1
        return texts, replace(self, prefix=kept), str


def chains_figure(
    sequences: Sequence[Sequence[Hashable]],
    actions: Sequence[Sequence[Hashable]] | None = None,
    *,
    name: Callable[[Any], str] = str,
    action_name: Callable[[Any], str] = str,
    stretches: bool = False,
    theme: str = "light",
    title: str | None = None,
) -> Figure:
    """Draw sequences as chains of boxes.

    Args:
        sequences: token ids, texts or the states of episodes; elements are compared, so they must be hashable. What is
            beyond the width, and sequences beyond `ROWS`, are counted in the figure.
        actions: for episodes, the actions between their states, one fewer than states.
        name: gives the label of an element, of one line or two.
        action_name: gives the label of an action.
        stretches: draw one box for each stretch without a branch, not for each element. Not for episodes.
        theme: `"light"` or `"dark"`.
        title: by default what is shared, in numbers.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: no sequence, an empty one, actions that do not fit, or stretches of episodes.
        ImportError: matplotlib is not installed.
    """
    if not sequences or not all(map(len, sequences)):
        raise ValueError("There is nothing to draw: give at least one sequence, and none that is empty.")
    if stretches and actions is not None:
        raise ValueError("Stretches are drawn of sequences without actions; draw the graph of these episodes.")
    chains = Chains.of(sequences, actions)
    summary = title or _summary(chains, actions is not None)
    if stretches:
        sequences, chains, name = chains.condensed([[name(each) for each in sequence] for sequence in sequences])
    shown = min(len(sequences), ROWS)
    gap = 30 if actions is not None else 4
    left = MARGIN + GUTTER
    room = WIDTH - MARGIN - left
    columns = min(max(map(len, sequences[:shown])), (room - 60 + gap) // (gap + 32) if actions is not None else 22)
    is_cut = any(len(sequence) > columns for sequence in sequences[:shown])
    pitch = min((room - 60 * is_cut + gap) / columns, gap + (150 if stretches else 92))
    with themed(theme) as colors:
        height = HEAD + 6 + _PITCH * shown + (22 if shown < len(sequences) else 0)
        figure, axes = new_canvas(height)
        draw_head(axes, summary, _legend(chains, stretches, colors), colors)
        for row in range(shown):
            top = HEAD + 6 + _PITCH * row
            draw_text(axes, left - 10, top + _BOX / 2, str(row + 1), colors.quiet, 12, align="right")
            steps = None if actions is None else [action_name(action) for action in actions[row][: columns - 1]]
            labels = [name(element) for element in sequences[row][:columns]]
            _chain(axes, (left, top, pitch, gap), labels, steps, chains, chains.prefix[row], colors)
            if (more := len(sequences[row]) - columns) > 0:
                end = left + columns * pitch
                draw_text(axes, end, top + _BOX / 2, f"+ {more:,}", colors.quiet, 12, align="left")
        if more := len(sequences) - shown:
            draw_text(axes, left, height - 16, f"and {more:,} more sequences", colors.quiet, 12, align="left")
    return figure


def box_colors(colors: Theme, *, shared: bool, met: bool, parts: bool) -> dict[str, Any]:
    """Fill, border and label of a box, by what its place in a sequence or graph is."""
    color = colors.blue if shared else colors.green if met else None
    return {
        "fill": colors.shade if color is None else tint(color, colors.paper),
        "edge": colors.orange if parts else color or colors.line,
        "weight": 2.5 if parts else 1.2,
        "ink": colors.ink,
        "bar": colors.green if shared and met else None,
    }


def _chain(
    axes: Axes,
    place: tuple[float, float, float, float],
    labels: list[str],
    steps: list[str] | None,
    chains: Chains,
    prefix: list[int],
    colors: Theme,
) -> None:
    """One row: boxes, and arrows between them if there are actions."""
    left, top, pitch, gap = place
    for column, label in enumerate(labels):
        x, number = left + column * pitch, prefix[column]
        shared, met, parts = chains.shared[number], chains.met[number], chains.parts[number]
        look = box_colors(colors, shared=shared, met=met, parts=parts)
        draw_box(axes, (x, top, pitch - gap, _BOX), label, **look)
        if steps is None or not column:
            continue
        middle = top + _BOX / 2
        draw_arrow(axes, (x - gap + 3, middle), (x - 2, middle), colors.quiet)
        text, size = fitted(steps[column - 1], gap + 6, 13)
        draw_text(axes, x - gap / 2, middle - 11, text, colors.ink, size, behind=colors.paper)


def _legend(chains: Chains, stretches: bool, colors: Theme) -> list[tuple[str, str, str]]:
    """What the colours mean, of those that are there."""
    legend = []
    if any(chains.shared):
        legend.append((tint(colors.blue, colors.paper), colors.blue, "shared beginning"))
    if any(chains.parts):
        legend.append((colors.paper, colors.orange, "paths part"))
    if any(chains.met):
        legend.append((tint(colors.green, colors.paper), colors.green, "state that another path reaches too"))
    if stretches:
        legend.append(("", "", "+ n: and n more"))
    return legend or [("", "", "nothing is shared")]


def _summary(chains: Chains, are_episodes: bool) -> str:
    """How much is written out, and how much of it is distinct."""
    count = sum(map(len, chains.prefix))
    starts = len({path[0] for path in chains.prefix})
    if are_episodes:
        return (
            f"{len(chains.prefix):,} episodes: {count - len(chains.prefix):,} transitions, of which merging by prefix "
            f"leaves {len(chains.shared) - starts:,}, by state {chains.num_transitions:,}"
        )
    return (
        f"{len(chains.prefix):,} sequences: {count:,} elements, of which merging by prefix leaves "
        f"{len(chains.shared):,}"
    )


def _check(sequences: Sequence[Sequence[Hashable]], actions: Sequence[Sequence[Hashable]] | None) -> None:
    if actions is None:
        return
    if len(actions) != len(sequences):
        raise ValueError(f"There are {len(sequences)} sequences of states and {len(actions)} of actions.")
    for index, (states, between) in enumerate(zip(sequences, actions, strict=True)):
        if len(states) != len(between) + 1:
            raise ValueError(
                f"Episode {index} has {len(states)} states and {len(between)} actions; there must be one state more "
                "than actions."
            )

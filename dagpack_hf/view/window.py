"""The figure of a packed window: input ids X, targets Y, positions, and below them the mask.

Columns are positions, as keys of the mask; rows of the mask are the same positions as queries. All is drawn from the
vectors of a row, so it shows what the model is given. A window that is longer than a figure is wide is drawn in
stretches, a cell for each (`row_cells`).

Cost: linear in cells for the rows and the mask: one rectangle for each key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dagpack_hf.view.boxes import (
    HEAD,
    MARGIN,
    SMALLEST_TEXT,
    WIDTH,
    draw_box,
    draw_head,
    draw_text,
    fitted,
    new_canvas,
    printable,
    tint,
)
from dagpack_hf.view.row_cells import Namer, RowCells, RowSource, row_cells
from dagpack_hf.view.text import cells, cut
from dagpack_hf.view.theme import Theme, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

CELLS = 48
"""Cells that fit beside each other and can be read."""

_GUTTER = 92
_ONE_LINE, _TWO_LINES = 28.0, 40.0
_TURNED_COLUMNS = 14
"""Characters of a label that is turned."""


def window_figure(
    rows: RowSource,
    index: int = 0,
    *,
    name: Namer | None = None,
    stretches: bool = False,
    theme: str = "light",
    title: str | None = None,
) -> Figure:
    """Draw one packed window.

    Args:
        rows: `Rows` of `pack_forest`, a data set of rows, or a list of rows (dictionaries of their vectors). What the
            window repeats of others is marked if they are among them.
        index: the row that is drawn.
        name: gives the label of a list of token ids, of one line or two; `token_namer` makes one of a tokenizer. By
            default the ids.
        stretches: draw a cell for each stretch of positions that has no branch and is trained as a whole or not at
            all, in place of one for each position.
        theme: `"light"` or `"dark"`.
        title: by default what the window holds, in numbers.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: the row is empty or has more than `CELLS` cells.
        IndexError: there is no such row.
        ImportError: matplotlib is not installed.
    """
    shown = row_cells(rows, index, name=name, stretches=stretches)
    if not len(shown):
        raise ValueError(f"There is nothing to draw: row {index} is empty.")
    if len(shown) > CELLS:
        remedy = "Pack into shorter windows, or pack fewer sequences."
        if not stretches:
            remedy = "Draw stretches (stretches=True), pack into shorter windows, or pack fewer sequences."
        raise ValueError(
            f"A figure has room for {CELLS} cells, and row {index} has {len(shown):,} "
            f"{'stretches' if stretches else 'positions'}. {remedy}"
        )
    width = min((WIDTH - 2 * MARGIN - _GUTTER) / len(shown), 76)
    deep = _cell_height(shown, width)
    row_height = float(np.clip(460 / len(shown), 13, min(width, 30)))
    with themed(theme) as colors:
        top = HEAD + 4
        mask_top = top + 2 * deep + 22 * (2 if stretches else 1) + 34
        figure, axes = new_canvas(mask_top + row_height * len(shown) + MARGIN)
        draw_head(axes, title or _summary(shown, stretches), _legend(shown, colors), colors)
        _vectors(axes, shown, (top, width, deep), stretches, colors)
        _mask(axes, shown, (mask_top, width, row_height), colors)
    return figure


def visible(shown: RowCells) -> np.ndarray:
    """`bool[n, n]`, which query (first axis) sees which key: the definition of the mask."""
    query, key = np.ogrid[: len(shown), : len(shown)]
    return (key <= query) & (query < shown.end[key])


def _cell_height(shown: RowCells, width: float) -> float:
    """Height of the cells of X and Y: more where labels are turned, since the cells are narrow."""
    labels = (*shown.inputs, *shown.targets)
    longest = max(cells(printable(line)) for label in labels for line in label.split("\n"))
    if longest * SMALLEST_TEXT * 0.602 <= width - 4:
        return _TWO_LINES if any("\n" in label for label in labels) else _ONE_LINE
    return max(12 + 0.602 * 11 * min(longest, _TURNED_COLUMNS), _TWO_LINES + 1)


def _vectors(axes: Axes, shown: RowCells, place: tuple[float, float, float], stretches: bool, colors: Theme) -> None:
    """The rows X, Y and position, and of stretches how many tokens they have."""
    top, width, deep = place
    left = MARGIN + _GUTTER
    names = [("X", "input"), ("Y", "target")]
    for at, (letter, what) in enumerate(names):
        middle = top + at * deep + deep / 2
        draw_text(axes, MARGIN, middle, letter, colors.ink, 15, align="left", bold=True)
        draw_text(axes, MARGIN + 18, middle, what, colors.quiet, 12, align="left")
    below = top + 2 * deep + 12
    draw_text(axes, MARGIN, below, "position", colors.quiet, 12, align="left")
    if stretches:
        draw_text(axes, MARGIN, below + 22, "tokens", colors.quiet, 12, align="left")
    for cell in range(len(shown)):
        x = left + cell * width
        _label(axes, (x, top, width, deep), shown.inputs[cell], _look(shown, cell, colors), colors)
        is_target = bool(shown.targets[cell])
        look = (tint(colors.blue, colors.paper), colors.blue) if is_target else (colors.paper, colors.line)
        _label(axes, (x, top + deep, width, deep), shown.targets[cell] or "–", look, colors, quiet=not is_target)
        numbers = [shown.depth[cell], shown.length[cell]]
        for at, number in enumerate(numbers if stretches else numbers[:1]):
            text, size = fitted(_short(int(number), width - 3), width - 3, 12)
            draw_text(axes, x + width / 2, below + 22 * at, text, colors.quiet, size)


def _short(number: int, width: float) -> str:
    """A number as it fits: in full, or in thousands."""
    full = f"{number:,}"
    if number < 1000 or len(full) * SMALLEST_TEXT * 0.602 <= width:
        return full
    thousands = f"{number / 1000:.1f}k"
    return thousands if len(thousands) * SMALLEST_TEXT * 0.602 <= width else f"{number / 1000:.0f}k"


def _label(
    axes: Axes,
    place: tuple[float, float, float, float],
    label: str,
    look: tuple[str, str],
    colors: Theme,
    *,
    quiet: bool = False,
) -> None:
    """A cell of X or Y; its label is turned where the cell is high."""
    left, top, width, height = place
    fill, edge = look
    box = (left + 1, top + 1, width - 2, height - 2)
    ink = colors.quiet if quiet else colors.ink
    weight = 1.0 if edge == colors.line else 1.8
    if height <= _TWO_LINES or quiet:
        draw_box(axes, box, label, fill=fill, edge=edge, ink=ink, weight=weight, rounding=2)
        return
    draw_box(axes, box, "", fill=fill, edge=edge, ink=ink, weight=weight, rounding=2)
    text = cut(printable(label), _TURNED_COLUMNS)
    draw_text(axes, left + width / 2, top + height - 7, text, ink, min(11, width - 2), turned=True)


def _look(shown: RowCells, cell: int, colors: Theme) -> tuple[str, str]:
    """Fill and border of an input: replayed context is filled, copies have a border of their own."""
    fill = tint(colors.purple, colors.paper) if shown.is_replayed[cell] else colors.shade
    edge = colors.purple if shown.is_replayed[cell] else colors.line
    return fill, colors.orange if shown.is_copy[cell] else edge


def _mask(axes: Axes, shown: RowCells, place: tuple[float, float, float], colors: Theme) -> None:
    """Queries downwards, keys to the right; what a query sees is filled, what it only follows is shaded."""
    from matplotlib.collections import LineCollection

    top, width, height = place
    left, count = MARGIN + _GUTTER, len(shown)
    for key in range(count):
        kind = colors.orange if shown.is_copy[key] else colors.purple if shown.is_replayed[key] else colors.blue
        for begin, end, color in ((key, shown.end[key], kind), (shown.end[key], count, colors.shade)):
            place_of = (left + key * width, top + begin * height)
            if end > begin:
                axes.add_patch(_rectangle(place_of, width, (end - begin) * height, color))
    grid = []
    for at in range(count + 1):
        x, y = left + width * at, top + height * at
        grid.append([(left, y), (left + width * min(at + 1, count), y)])
        grid.append([(x, top + height * max(at - 1, 0)), (x, top + height * count)])
    axes.add_collection(LineCollection(grid, colors=colors.paper, linewidths=0.9, zorder=2))
    for cell in range(count):
        text = cut(printable(shown.inputs[cell]), 11)
        draw_text(
            axes, left - 7, top + (cell + 0.5) * height, text, colors.quiet, min(12, height - 1.5), align="right"
        )
    draw_text(axes, MARGIN, top - 14, "mask", colors.ink, 15, align="left", bold=True)
    draw_text(axes, left + 3, top - 13, "key →", colors.quiet, 11, align="left")
    draw_text(axes, left - 7, top - 13, "query↓", colors.quiet, 11, align="right")
    _key(axes, shown, (left + width * count, top), colors)


def _rectangle(corner: tuple[float, float], width: float, height: float, color: str) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=color, linewidth=0, zorder=1)


def _key(axes: Axes, shown: RowCells, corner: tuple[float, float], colors: Theme) -> None:
    """In the empty half of the mask, what its cells say."""
    right, top = corner
    pairs = int(visible(shown).sum())
    hidden = len(shown) * (len(shown) + 1) // 2 - pairs
    lines = [(colors.blue, f"query sees key: itself or an ancestor ({pairs:,})")]
    if hidden:
        lines.append((colors.shade, f"hidden: on another branch ({hidden:,})"))
    for at, (color, text) in enumerate(lines):
        y = top + 4 + 20 * at
        draw_box(axes, (right - 14, y, 14, 12), "", fill=color, edge=color, ink=color, rounding=2)
        draw_text(axes, right - 22, y + 6, text, colors.quiet, 12, align="right")


def _legend(shown: RowCells, colors: Theme) -> list[tuple[str, str, str]]:
    """What the colours mean, of those that are there."""
    legend = []
    if any(shown.targets):
        legend.append((tint(colors.blue, colors.paper), colors.blue, "trained target"))
    if shown.is_copy.any():
        legend.append((colors.paper, colors.orange, "copy of a branch point"))
    if shown.is_replayed.any():
        legend.append((tint(colors.purple, colors.paper), colors.purple, "context repeated from another window"))
    return legend or [("", "", "context only")]


def _summary(shown: RowCells, stretches: bool) -> str:
    positions = int(shown.length.sum())
    trained = int(shown.length[[bool(target) for target in shown.targets]].sum())
    text = f"A packed window: {positions:,} positions, {trained:,} targets"
    return f"{text}, in {len(shown)} stretches" if stretches else text

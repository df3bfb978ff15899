"""Boxes, arrows and their labels, measured in pixels: what the figures of chains, graphs and windows are made of.

A figure of this kind has one axes, which covers it and counts pixels from the upper left corner. Labels in boxes have
a fixed width for each character, so what fits is known without drawing: a label is made smaller, then cut.

Labels come from users' data. They are cleaned (`text`), never read as mathematics, and characters that the font does
not have are shown as a square.

Cost: a few patches for each box; matplotlib draws a thousand in about a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dagpack_hf.view.text import cells, clean, cut
from dagpack_hf.view.theme import PIXELS_PER_INCH, Theme, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font

WIDTH = 800
"""Width of a figure in pixels, that of a README."""
MARGIN = 18
"""Pixels around what is drawn."""
HEAD = 72
"""Pixels for title and legend."""
TEXT = 13
"""Height of the font in pixels, where there is room."""
SMALLEST_TEXT = 9.5
"""Height of the font in pixels below which a label is cut instead."""

_CELL = 0.602
"""Width of a character of the monospaced font, as a share of its height."""


def new_canvas(height: float) -> tuple[Figure, Axes]:
    """An empty figure of `WIDTH` pixels, with axes that count pixels to the right and down."""
    figure = new_figure(WIDTH, round(height))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(round(height), 0))
    axes.set_axis_off()
    return figure, axes


def points(pixels: float) -> float:
    """Pixels as points, in which matplotlib measures fonts and lines."""
    return pixels * 72 / PIXELS_PER_INCH


def tint(color: str, paper: str, share: float = 0.28) -> str:
    """A colour thinned with that of the paper, so that text on it can be read."""
    mixed = (
        round(share * int(color[at : at + 2], 16) + (1 - share) * int(paper[at : at + 2], 16)) for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def printable(text: str) -> str:
    """Text on one line that the figures' font can show."""
    return "".join(character if _has_glyph(character) else "□" for character in clean(text))


def fitted(text: str, width: float, size: float = TEXT) -> tuple[str, float]:
    """A label for a box, and the height of its font: smaller if need be, then cut.

    Args:
        text: The label.
        width: Pixels.
        size: Largest height of the font, in pixels.
    """
    text = printable(text)
    size = min(size, max(width / (_CELL * max(cells(text), 1)), SMALLEST_TEXT))
    return cut(text, int(width / (_CELL * size) + 1e-9)), size


def draw_text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    color: str,
    size: float = TEXT,
    *,
    align: str = "center",
    bold: bool = False,
    turned: bool = False,
    behind: str | None = None,
) -> None:
    """Draw a label as it is.

    Args:
        axes: Where.
        x: Its middle, or where it begins or ends.
        y: Its middle.
        text: The label.
        color: Its colour.
        size: Height of the font in pixels.
        align: `"left"`, `"center"` or `"right"`.
        bold: Whether it is bold.
        turned: Whether it is read upwards; `y` is then where it begins.
        behind: Colour of the paper, drawn around it where it may lie on lines.
    """
    from matplotlib.patheffects import withStroke

    axes.text(
        x,
        y,
        text,
        color=color,
        fontsize=points(size),
        family="DejaVu Sans Mono",
        fontweight="bold" if bold else "normal",
        ha=align,
        va="bottom" if turned else "center_baseline",
        rotation=90 if turned else 0,
        parse_math=False,
        zorder=4,
        path_effects=None if behind is None else [withStroke(linewidth=points(4), foreground=behind)],
    )


def draw_box(
    axes: Axes,
    place: tuple[float, float, float, float],
    label: str,
    *,
    fill: str,
    edge: str,
    ink: str,
    weight: float = 1.0,
    rounding: float = 4,
    size: float = TEXT,
    bar: str | None = None,
) -> None:
    """Draw a box and its label, whose lines are set one below the other.

    Args:
        axes: Where.
        place: Left, top, width and height in pixels.
        label: The label.
        fill: Colour within.
        edge: Colour of the border.
        ink: Colour of the label.
        weight: Width of the border in pixels.
        rounding: Radius of the corners in pixels.
        size: Largest height of the font in pixels.
        bar: Colour of a bar at the lower edge, if there is one.
    """
    from matplotlib.patches import FancyBboxPatch, Rectangle

    left, top, width, height = place
    style = f"round,pad=0,rounding_size={rounding}"
    border: dict[str, Any] = {"edgecolor": edge, "linewidth": points(weight)}
    axes.add_patch(FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=fill, zorder=3, **border))
    if bar is not None:
        strip = axes.add_patch(Rectangle((left, top + height - 5), width, 5, facecolor=bar, linewidth=0, zorder=3))
        outline = axes.add_patch(
            FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor="none", zorder=3, **border)
        )
        strip.set_clip_path(outline)
    if not label:
        return
    lines = label.split("\n")[:2]
    shown = [fitted(line, width - 6, size) for line in lines]
    font = min(each for _, each in shown)
    middle = top + (height - (5 if bar else 0)) / 2
    for row, (text, _) in enumerate(shown):
        draw_text(axes, left + width / 2, middle + (row - (len(lines) - 1) / 2) * 1.25 * font, text, ink, font)


def draw_arrow(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    color: str,
    *,
    bend: float = 0.0,
    weight: float = 1.5,
) -> None:
    """Draw an arrow between two points.

    Args:
        axes: Where.
        begin: Where it begins, in pixels.
        end: Its tip.
        color: Its colour.
        bend: How far its middle lies to the right of the straight line, as a share of its length.
        weight: Width of the line in pixels.
    """
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle="-|>,head_length=4.5,head_width=2.6",
            connectionstyle=f"arc3,rad={bend:.4f}",
            mutation_scale=1,
            shrinkA=0,
            shrinkB=0,
            color=color,
            linewidth=points(weight),
            zorder=2,
        )
    )


def draw_head(axes: Axes, title: str, legend: Sequence[tuple[str, str, str]], theme: Theme) -> None:
    """Draw the title, and below it a line that says what the colours mean.

    Args:
        axes: Where.
        title: The title.
        legend: For each entry colour within, colour of the border, and text. An entry without a fill is text only.
        theme: Colours.
    """
    axes.text(MARGIN, 24, printable(title), color=theme.ink, fontweight="bold", va="center_baseline", parse_math=False)
    x: float = MARGIN
    for fill, edge, text in legend:
        if fill:
            draw_box(
                axes, (x, 43, 15, 13), "", fill=fill, edge=edge, ink=edge, weight=2 if edge != fill else 1, rounding=2
            )
            x += 22
        axes.text(x, 50, text, color=theme.quiet, fontsize=points(13), va="center_baseline", parse_math=False)
        x += _sans_width(text, 13) + 22


def _sans_width(text: str, size: float) -> float:
    """Pixels that a text takes in the figures' other font."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(width)


@lru_cache(maxsize=4096)
def _has_glyph(character: str) -> bool:
    return _font().get_char_index(ord(character)) > 0


@lru_cache(maxsize=1)
def _font() -> FT2Font:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans Mono"))

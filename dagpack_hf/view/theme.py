"""Colours, fonts and files of the matplotlib figures, for light and dark pages.

Figures are made as objects, without pyplot and its global state, so they can be drawn in any process and thread. The
colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any kind of colour vision can tell
apart; on dark paper the darker ones are lighter. Text is written as paths, so a figure looks the same everywhere, and
neither date nor random names go into a file: the same figure gives the same bytes.

matplotlib is imported when the first figure is made (`pip install "dagpack-hf[plot]"`). Cost: that import, 0.5 s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 100
"""Figures are measured in pixels of this size; PNG files have twice as many."""

FORMATS = (".svg", ".png")


@dataclass(frozen=True)
class Theme:
    """Colours of a figure, as `#rrggbb`.

    Args:
        paper: background.
        ink: text and what matters most.
        quiet: text that explains, axes.
        line: grid, borders of cells.
        shade: fill of cells that are there but do not matter.
        blue: these six for data.
        orange: red-orange (vermilion).
        green: bluish green.
        purple: reddish purple.
        sky: light blue.
        amber: yellow-orange.
    """

    paper: str
    ink: str
    quiet: str
    line: str
    shade: str
    blue: str
    orange: str
    green: str
    purple: str
    sky: str
    amber: str

    @property
    def colors(self) -> tuple[str, ...]:
        """The six colours for data, in the order in which series take them."""
        return (self.blue, self.orange, self.green, self.purple, self.sky, self.amber)


THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#1f2328",
        quiet="#59636e",
        line="#d0d7de",
        shade="#eaeef2",
        blue="#0072b2",
        orange="#d55e00",
        green="#009e73",
        purple="#b8578c",
        sky="#56b4e9",
        amber="#c98500",
    ),
    "dark": Theme(
        paper="#0d1117",
        ink="#f0f6fc",
        quiet="#9198a1",
        line="#3d444d",
        shade="#212830",
        blue="#4da3e0",
        orange="#f0813a",
        green="#2fc49a",
        purple="#df8fbc",
        sky="#8fd0f5",
        amber="#e6b23c",
    ),
}
"""Themes by name."""


def theme_of(name: str) -> Theme:
    """The theme of a name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in THEMES:
        raise ValueError(f"theme must be {' or '.join(map(repr, THEMES))}, got {name!r}.")
    return THEMES[name]


def require_matplotlib() -> Any:
    """Import matplotlib.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            'Figures are drawn with matplotlib, which is not installed. Install it: pip install "dagpack-hf[plot]"'
        ) from error
    return matplotlib


@contextmanager
def themed(name: str) -> Iterator[Theme]:
    """Draw in a theme: text, axes and lines made within have its colours and sizes."""
    theme = theme_of(name)
    with require_matplotlib().rc_context(_settings(theme)):
        yield theme


def new_figure(width: int, height: int) -> Figure:
    """An empty figure of so many pixels, to be called within `themed`."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file; the same figure gives the same bytes.

    Args:
        figure: The figure.
        path: The file, `.svg` or `.png`.

    Raises:
        ValueError: another ending.
        OSError: the file cannot be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise ValueError(
            f"{os.fspath(path)}: figures are written as {' or '.join(FORMATS)}, not as {ending or 'that'}"
        )
    metadata = {"Date": None, "Creator": None} if ending == ".svg" else {"Software": None}
    with require_matplotlib().rc_context({"svg.hashsalt": "dagpack", "svg.fonttype": "path"}):
        figure.savefig(path, metadata=metadata, dpi=2 * PIXELS_PER_INCH)


def _settings(theme: Theme) -> dict[str, Any]:
    return {
        "font.family": ["DejaVu Sans"],
        "font.size": 11,
        "figure.facecolor": theme.paper,
        "figure.dpi": PIXELS_PER_INCH,
        "savefig.facecolor": "auto",
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.line,
        "axes.labelcolor": theme.quiet,
        "axes.titlecolor": theme.ink,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": False,
        "axes.axisbelow": True,
        "grid.color": theme.line,
        "grid.linewidth": 0.8,
        "text.color": theme.ink,
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.quiet,
        "ytick.labelcolor": theme.quiet,
        "lines.linewidth": 2.2,
        "lines.solid_capstyle": "round",
        "patch.linewidth": 0.8,
        "hatch.linewidth": 0.7,
    }

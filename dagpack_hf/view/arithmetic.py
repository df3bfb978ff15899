"""Figures of the arithmetic of packing: waste and crossing pairs against window length, and what a crossing pair is.

They draw plain arrays, so they draw what `dagpack_hf.stats` computed (`cost_series` gives the arrays) and anything of
the same form. Lines are labelled where they end, not in a legend.

Cost: matplotlib's; half a second for each figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dagpack_hf.view.theme import Theme, new_figure, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 800
"""Width of a figure in pixels, that of a README."""

_LAYOUTS = {"padded": "orange", "concatenated": "purple", "best_fit": "blue", "dag": "green"}
"""Colours of the layouts, by the names of `dagpack_hf.stats.LAYOUTS`."""

_LABEL_GAP = 0.075
"""Least distance of two labels, as a share of the height of the axes."""


def waste_figure(
    windows: npt.ArrayLike,
    waste: Mapping[str, npt.ArrayLike],
    *,
    theme: str = "light",
    title: str = "Positions wasted, by window length",
    least: float = 1e-3,
) -> Figure:
    """Draw the share of wasted positions of several layouts against the window length, both on logarithmic axes.

    Args:
        windows: `[n]`, window lengths in tokens.
        waste: For each layout, `[n]` shares from 0 to 1. Keys of `dagpack_hf.stats.LAYOUTS` have their colours.
        theme: `"light"` or `"dark"`.
        title: Title.
        least: Lower end of the axis; shares below are drawn there.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: nothing to draw, or arrays that do not fit the windows.
        ImportError: matplotlib is not installed.
    """
    with themed(theme) as colors:
        figure, axes = _line_axes(windows, title, "of all positions")
        axes.set_yscale("log")
        axes.set_ylim(least, 1.0)
        axes.set_yticks([], minor=True)
        floors = {name: np.maximum(np.asarray(shares, float), least) for name, shares in waste.items()}
        _lines(axes, windows, floors, colors, waste)
        axes.yaxis.set_major_formatter(lambda share, _: _percent(share))
    return figure


def cross_document_figure(
    windows: npt.ArrayLike,
    shares: Mapping[str, npt.ArrayLike],
    *,
    theme: str = "light",
    title: str = "Attention that crosses a document boundary",
) -> Figure:
    """Draw the share of causal attention pairs that cross a document boundary against the window length.

    Args:
        windows: `[n]`, window lengths in tokens.
        shares: For each set of documents, `[n]` shares from 0 to 1.
        theme: `"light"` or `"dark"`.
        title: Title.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: nothing to draw, or arrays that do not fit the windows.
        ImportError: matplotlib is not installed.
    """
    with themed(theme) as colors:
        figure, axes = _line_axes(windows, title, "of the causal pairs of concatenated documents")
        axes.set_ylim(0, 1)
        _lines(axes, windows, {name: np.asarray(each, float) for name, each in shares.items()}, colors, shares)
        axes.yaxis.set_major_formatter(lambda share, _: _percent(share))
    return figure


def crossing_pairs_figure(lengths: Sequence[int] = (9, 8, 7), *, theme: str = "light") -> Figure:
    """Draw a row of a few documents under a causal and under a document mask, with the crossing pairs shaded.

    Args:
        lengths: Tokens of each document, 24 together by default and at most 64.
        theme: `"light"` or `"dark"`.

    Returns:
        The figure, to be written with `save_figure`.

    Raises:
        ValueError: no documents, one that is empty, or too many tokens to be seen.
        ImportError: matplotlib is not installed.
    """
    if not lengths or min(lengths) < 1 or sum(lengths) > 64:
        raise ValueError(f"lengths must be 1 or more for each document, and at most 64 together, got {list(lengths)}.")
    total = sum(lengths)
    pairs = total * (total + 1) // 2
    crossing = pairs - sum(length * (length + 1) // 2 for length in lengths)
    with themed(theme) as colors:
        figure = new_figure(WIDTH, 455)
        panels = figure.subplots(1, 2)
        for axes, masked in zip(panels, (False, True), strict=True):
            _mask(axes, lengths, masked, colors)
        panels[0].set_title(f"causal mask: {pairs} pairs\n{crossing} cross a boundary ({_percent(crossing / pairs)})")
        panels[1].set_title(f"document mask: {pairs - crossing} pairs\nnone crosses a boundary")
    return figure


def _line_axes(windows: npt.ArrayLike, title: str, unit: str) -> tuple[Figure, Axes]:
    """A figure with a logarithmic axis of window lengths."""
    x = np.asarray(windows)
    if x.ndim != 1 or not len(x) or x.min() < 1:
        raise ValueError(f"windows must be a flat list of window lengths of at least 1, got {windows!r}.")
    figure = new_figure(WIDTH, 400)
    axes = figure.subplots()
    axes.set_title(title, pad=26)
    axes.text(0, 1.035, unit, transform=axes.transAxes, color=axes.xaxis.label.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{window:,}" for window in x.tolist()])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("window length in tokens")
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    return figure, axes


def _lines(
    axes: Axes,
    windows: npt.ArrayLike,
    shares: Mapping[str, npt.NDArray[np.float64]],
    theme: Theme,
    given: Mapping[str, npt.ArrayLike],
) -> None:
    """A line for each name, and its name and last share beside its end; `given` has the shares as they are."""
    if not shares:
        raise ValueError("There is nothing to draw: give the shares of one layout or set of documents at least.")
    x = np.asarray(windows)
    heights = []
    for index, (name, values) in enumerate(shares.items()):
        if values.shape != x.shape or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{name}: there must be a share from 0 to 1 for each of the {len(x)} windows.")
        color = _color(name, index, theme)
        hidden_by = sum(_coincide(values, other) for other in list(shares.values())[index + 1 :])
        width = 2.2 + 2.6 * hidden_by  # so that a line beneath others is seen
        axes.plot(x, values, color=color, marker="o", linewidth=width, markersize=width + 3, clip_on=False)
        heights.append(float(axes.transAxes.inverted().transform(axes.transData.transform((x[-1], values[-1])))[1]))
    for index, (name, height) in enumerate(zip(shares, _spread(heights), strict=True)):
        axes.annotate(
            f"{name.replace('_', ' ')}  {_percent(np.asarray(given[name], float)[-1])}",
            (1.0, height),
            xycoords=axes.transAxes,
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=_color(name, index, theme),
            fontweight="bold",
            annotation_clip=False,
        )


def _color(name: str, index: int, theme: Theme) -> str:
    return getattr(theme, _LAYOUTS[name]) if name in _LAYOUTS else theme.colors[index % len(theme.colors)]


def _spread(heights: Sequence[float]) -> list[float]:
    """Heights moved apart so that labels do not lie on each other, in the same order and as little as that takes.

    Labels that would touch form a group, which is centred where its members would be; groups that then touch are one.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    groups: list[tuple[float, list[int]]] = []
    for index in order:
        center, members = heights[index], [index]
        while groups and groups[-1][0] + _LABEL_GAP * (len(groups[-1][1]) + len(members)) / 2 > center:
            members = groups.pop()[1] + members
            center = sum(heights[member] for member in members) / len(members)
        groups.append((center, members))
    placed = [0.0] * len(heights)
    for center, members in groups:
        for place, member in enumerate(members):
            placed[member] = center + (place - (len(members) - 1) / 2) * _LABEL_GAP
    return placed


def _coincide(values: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> bool:
    """Whether two lines lie on each other along at least half of their way."""
    return 2 * np.count_nonzero(np.isclose(values, others, rtol=0.05)) >= len(values)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _mask(axes: Axes, lengths: Sequence[int], masked: bool, theme: Theme) -> None:
    """Queries downwards, keys to the right; a cell for each pair."""
    total = sum(lengths)
    begins = np.cumsum([0, *lengths])
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        for query in range(begin, end):
            axes.broken_barh([(begin, query + 1 - begin)], (query, 1), color=theme.blue, linewidth=0)
            if begin and not masked:
                axes.broken_barh(
                    [(0, begin)],
                    (query, 1),
                    facecolor=theme.orange,
                    edgecolor=theme.paper,
                    hatch="///",
                    linewidth=0,
                )
    for line in range(total + 1):
        axes.plot([0, total], [line, line], color=theme.paper, linewidth=0.8)
        axes.plot([line, line], [0, total], color=theme.paper, linewidth=0.8)
    for begin in begins[1:-1].tolist():
        axes.plot([0, begin, begin], [begin, begin, total], color=theme.quiet, linewidth=1.2)
    if not masked:
        axes.text(total * 0.95, total * 0.18, "crosses a boundary", color=theme.orange, fontweight="bold", ha="right")
    axes.text(total * 0.95, total * 0.10, "same document", color=theme.blue, fontweight="bold", ha="right")
    names = [f"doc {number}" for number in range(1, len(lengths) + 1)]
    middles = (begins[:-1] + begins[1:]) / 2
    axes.set_xticks(middles, names)
    axes.set_yticks(middles, names, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.set(xlim=(0, total), ylim=(total, 0), xlabel="key", ylabel="query", aspect="equal")
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(theme.quiet)

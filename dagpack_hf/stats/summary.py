"""Costs of layouts as a table and as series to draw, of one set of documents or as the mean over several draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dagpack_hf.stats.costs import LayoutCost

COLUMNS = (
    ("layout", "layout"),
    ("rows", "rows"),
    ("waste", "wasted"),
    ("cross_document_share", "cross-document"),
    ("causal_pairs", "causal pairs"),
    ("masked_pairs", "masked pairs"),
    ("causal_blocks", "causal blocks"),
    ("masked_blocks", "masked blocks"),
    ("repeated_tokens", "repeated"),
    ("cut_tokens", "cut off"),
)
"""Figure and heading of each column of a table."""

NAMES = {"padded": "padded", "concatenated": "concatenated", "best_fit": "best fit", "dag": "dag"}
"""What layouts are called in text."""


@dataclass(frozen=True)
class MeanCost:
    """What one layout costs on the mean of several draws of documents.

    Args:
        layout: as in `LayoutCost`.
        max_length: window length in tokens.
        draws: number of draws.
        mean: mean of each figure of `LayoutCost.to_dict()`; shares are the mean of the shares.
        deviation: standard deviation of each between draws, of the sample; 0 for one draw.
    """

    layout: str
    max_length: int
    draws: int
    mean: dict[str, float | None]
    deviation: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "layout": self.layout,
            "max_length": self.max_length,
            "draws": self.draws,
            "mean": self.mean,
            "deviation": self.deviation,
        }


def mean_costs(draws: Sequence[Sequence[LayoutCost]]) -> list[MeanCost]:
    """Mean and standard deviation over draws.

    Args:
        draws: for each draw, the costs of the same layouts and windows in the same order.

    Returns:
        One for each layout and window.

    Raises:
        ValueError: draws that do not agree in layouts and windows.
    """
    kinds = [[(cost.layout, cost.max_length) for cost in draw] for draw in draws]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError("mean_costs needs the same layouts and windows in each draw, in the same order.")
    return [_mean(same) for same in zip(*draws, strict=True)]


def _mean(costs: Sequence[LayoutCost]) -> MeanCost:
    mean: dict[str, float | None] = {}
    deviation: dict[str, float | None] = {}
    figures = [cost.to_dict() for cost in costs]
    for name in figures[0]:
        if name in ("layout", "max_length"):
            continue
        values = [figure[name] for figure in figures]
        known = all(value is not None for value in values)
        mean[name] = float(np.mean(values)) if known else None
        deviation[name] = (float(np.std(values, ddof=1)) if len(values) > 1 else 0.0) if known else None
    return MeanCost(costs[0].layout, costs[0].max_length, len(costs), mean, deviation)


def cost_series(
    costs: Sequence[LayoutCost | MeanCost], figure: str = "waste"
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
    """One figure of each layout against the window length, as arrays to draw.

    Args:
        costs: each layout at each window length, once.
        figure: a key of `LayoutCost.to_dict()`.

    Returns:
        `int64[n]`, the window lengths in ascending order; and for each layout that has the figure, `float64[n]`.

    Raises:
        ValueError: a layout is missing at a window length, or there is no such figure.

    Example:
        >>> from dagpack_hf.stats import layout_costs
        >>> costs = [cost for window in (8, 16) for cost in layout_costs([3, 5], window, layouts=["padded"])]
        >>> cost_series(costs)
        (array([ 8, 16]), {'padded': array([0.5 , 0.75])})
    """
    windows = np.unique(np.array([cost.max_length for cost in costs], np.int64))
    series: dict[str, npt.NDArray[np.float64]] = {}
    for layout in dict.fromkeys(cost.layout for cost in costs):
        same = sorted((cost for cost in costs if cost.layout == layout), key=lambda cost: cost.max_length)
        if [cost.max_length for cost in same] != windows.tolist():
            raise ValueError(f"The layout {layout!r} is not there once for each window length {windows.tolist()}.")
        values = [_figures(cost).get(figure) for cost in same]
        if figure not in _figures(same[0]):
            raise ValueError(f"There is no figure {figure!r}; there are {', '.join(_figures(same[0]))}.")
        if None not in values:
            series[layout] = np.array(values, np.float64)
    return windows, series


def cost_table(costs: Sequence[LayoutCost | MeanCost]) -> str:
    """A table with a line for each layout, under a heading for each window length.

    Columns in which no layout has a figure are left out. *Masked* is the document mask, and for dag the tree mask.
    """
    texts = []
    for max_length in dict.fromkeys(cost.max_length for cost in costs):
        lines = [_cells(cost) for cost in costs if cost.max_length == max_length]
        kept = [column for column, (name, _) in enumerate(COLUMNS) if any(line[column] != "-" for line in lines)]
        table = [[COLUMNS[column][1] for column in kept], *([line[column] for column in kept] for line in lines)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        texts.append(f"window {max_length:,}")
        texts += ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
        texts.append("")
    return "\n".join(texts[:-1])


def _cells(cost: LayoutCost | MeanCost) -> list[str]:
    figures = _figures(cost)
    masked = "tree" if figures["document_pairs"] is None else "document"
    shown = {
        **figures,
        "layout": NAMES[cost.layout],
        "masked_pairs": figures[f"{masked}_pairs"],
        "masked_blocks": figures[f"{masked}_blocks"],
    }
    return [_cell(name, shown[name]) for name, _ in COLUMNS]


def _figures(cost: LayoutCost | MeanCost) -> Mapping[str, Any]:
    return cost.mean if isinstance(cost, MeanCost) else cost.to_dict()


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name in ("waste", "cross_document_share"):
        return f"{value:.2%}"
    return f"{value:,.1f}" if isinstance(value, float) and value < 1000 and value % 1 else f"{value:,.0f}"

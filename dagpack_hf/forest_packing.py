"""A forest into windows, rows and a report: paths limited, branch points split, leaves planned, rows ready to write.

`plan_forest` does all but the writing, so that rows may be written portion by portion; `pack_whole` writes them at
once. Neither knows where the forest comes from.

Cost: the segments, a few numbers for each node, and the plan, a few for each leaf; of rows only what is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from dagpack_hf.advice import advise
from dagpack_hf.buckets import Examples, pack_buckets
from dagpack_hf.layout import Rows, RowWriter
from dagpack_hf.overflow import Overflow, limit_paths
from dagpack_hf.pack import Windows, lower_bound, pack_windows
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport
from dagpack_hf.segments import Segments, build_segments
from dagpack_hf.trie import TokenForest

logger = logging.getLogger(__name__)


def pack_forest(
    forest: TokenForest,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    strategy: str = "best",
    effort: float = 0.0,
    seed: int | None = None,
) -> tuple[Rows, PackReport]:
    """Pack a forest into windows; arguments and errors as in `pack_dataset`."""
    return pack_whole(forest, PackOptions(max_length, loss_weighting, overflow, strategy, effort, None, seed))


def pack_whole(
    forest: TokenForest, options: PackOptions, dropped: Overflow = Overflow(), *, advice: bool = True
) -> tuple[Rows, PackReport]:
    """Plan a forest, write all of its rows, and say what is lost; arguments as of `plan_forest`."""
    plan = plan_forest(forest, options, dropped, advice=advice)
    rows = plan.writer.write(0, len(plan.writer))
    report = plan.report([rows])
    warn_of_losses(report, options.overflow)
    return rows, report


@dataclass(frozen=True)
class ForestPlan:
    """A packed forest before it is written.

    Args:
        writer: its rows.
        figures: the report without what only the rows tell.
    """

    writer: RowWriter
    figures: PackReport

    def report(self, portions: Iterable[Rows]) -> PackReport:
        """The report, when all portions of the rows went through."""
        tokens, weight = 0, 0.0
        for rows in portions:
            tokens += int(np.count_nonzero(rows.loss_weight))
            weight += float(rows.loss_weight.sum(dtype=np.float64))
        return replace(self.figures, loss_tokens=tokens, loss_weight=weight)


def plan_forest(
    forest: TokenForest,
    options: PackOptions,
    dropped: Overflow = Overflow(),
    examples: Examples | None = None,
    *,
    advice: bool = True,
) -> ForestPlan:
    """Plan the windows of a forest.

    Args:
        forest: the merged examples.
        options: how they are packed.
        dropped: what was left out before they were merged; it goes into the report.
        examples: where each example is; `bucket_size` needs them and is without effect if they are not given.
        advice: whether the report says what longer windows would give.

    Raises:
        ValueError: a path is longer than a window, and `overflow="error"`.
    """
    max_length = options.max_length
    fitting, lost = limit_paths(forest, max_length, options.overflow)
    lost = lost + dropped
    segments = build_segments(fitting)
    windows = _windows(fitting, segments, options, examples)
    writer = RowWriter(fitting, segments, windows, loss_weighting=options.loss_weighting, seed=options.seed)
    executed = int(writer.offsets[-1])
    figures = PackReport(
        max_length=max_length,
        loss_weighting=options.loss_weighting,
        logical_tokens=forest.logical_tokens,
        unique_tokens=fitting.num_tokens,
        executed_tokens=executed,
        loss_tokens=0,
        loss_weight=0.0,
        padding_tokens=len(writer) * max_length - executed,
        windows=len(writer),
        lower_bound=lower_bound(fitting, max_length),
        longest_path=fitting.longest_path,
        overflow={reason: count for reason, count in asdict(lost).items() if count},
        strategy=options.strategy,
        effort=options.effort,
        bucket_size=options.bucket_size,
        source_targets=forest.num_source_targets + dropped.lost_targets,
        advice=advise(forest) if advice else (),
    )
    return ForestPlan(writer, figures)


def warn_of_losses(report: PackReport, overflow: str) -> None:
    """Log what the limit on the path length cost, if anything."""
    lost = report.overflow
    if lost:
        logger.warning(
            "max_length=%d: %d sequences or turns were %s, %d lie wholly beyond; %d labelled tokens are not trained "
            "(%.2g%% of them).",
            report.max_length,
            lost.get("cut_sequences", 0),
            "dropped" if overflow == "drop" else "cut short",
            lost.get("lost_sequences", 0),
            lost.get("lost_targets", 0),
            100 * report.lost_share,
        )


def _windows(forest: TokenForest, segments: Segments, options: PackOptions, examples: Examples | None) -> Windows:
    if options.bucket_size is None or examples is None:
        return pack_windows(
            segments, options.max_length, strategy=options.strategy, effort=options.effort, seed=options.seed or 0
        )
    return pack_buckets(
        forest,
        segments,
        examples,
        options.max_length,
        bucket_size=options.bucket_size,
        strategy=options.strategy,
        effort=options.effort,
        seed=options.seed,
    )

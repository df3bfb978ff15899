"""The report of a corpus from what came of its partitions.

Counts that lie in one partition each are added up; what depends on the shape of the whole trie (unique tokens, the
bound, the longest path, advice) comes from its leaf line, and is what packing in memory reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from dagpack_hf.external.border import Summary
from dagpack_hf.external.lines import WholeLine
from dagpack_hf.external.partitions import Outcome
from dagpack_hf.overflow import Overflow
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport, add_reports


def join_outcomes(outcomes: Iterable[Outcome], summary: Summary, options: PackOptions) -> PackReport:
    """The report of the corpus.

    Args:
        outcomes: of all partitions that were packed, in any order.
        summary: of the whole corpus.
        options: those of the corpus.
    """
    ordered = sorted(outcomes, key=lambda each: each.partition)
    line = WholeLine.of(each.line for each in ordered)
    full = line
    if any(each.full is not None for each in ordered):
        full = WholeLine.of(each.line if each.full is None else each.full for each in ordered)
    total = add_reports(each.report for each in ordered) or _nothing(options)
    lost = Overflow(**total.overflow) + Overflow(lost_tokens=full.tokens - line.tokens) + summary.dropped
    return replace(
        total,
        logical_tokens=summary.logical_tokens,
        unique_tokens=line.tokens,
        lower_bound=line.lower_bound(options.max_length),
        longest_path=line.longest,
        overflow={reason: count for reason, count in asdict(lost).items() if count},
        effort=options.effort,
        partitions=len(ordered),
        source_targets=total.source_targets + summary.dropped.lost_targets,
        advice=full.advise(summary.logical_tokens),
    )


def _nothing(options: PackOptions) -> PackReport:
    return PackReport(
        max_length=options.max_length,
        loss_weighting=options.loss_weighting,
        logical_tokens=0,
        unique_tokens=0,
        executed_tokens=0,
        loss_tokens=0,
        loss_weight=0.0,
        padding_tokens=0,
        windows=0,
        lower_bound=0,
        longest_path=0,
        strategy=options.strategy,
    )

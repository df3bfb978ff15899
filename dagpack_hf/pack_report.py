"""What packing did, in tokens, and what another window length would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dagpack_hf.advice import LengthAdvice


@dataclass(frozen=True)
class PackReport:
    """What packing did, in tokens.

    Args:
        max_length: window length.
        loss_weighting: `"once"` or `"paths"`.
        logical_tokens: tokens of all source sequences, one for each trained turn.
        unique_tokens: tokens of the trie.
        executed_tokens: positions of all windows, replay and branch copies included, padding not.
        loss_tokens: targets over all windows; those of weight 0 are context.
        loss_weight: sum of the weights of all targets.
        padding_tokens: positions that padding every window to `max_length` adds.
        windows: number of windows.
        lower_bound: windows that no packing can do without.
        longest_path: tokens of the longest path that was packed.
        overflow: what the limit on the path length cost, by reason (empty if nothing).
        strategy: `"best"` or `"dfs"`.
        effort: seconds that a better packing was searched for.
        bucket_size: examples that were packed together, `None` for all.
        partitions: parts that the corpus was packed in since it is larger than memory, `None` if it is not.
        source_targets: labelled tokens of all source sequences, those that were lost included.
        advice: what windows of 1, 2 and 4 times the longest path can give at best.
    """

    max_length: int
    loss_weighting: str
    logical_tokens: int
    unique_tokens: int
    executed_tokens: int
    loss_tokens: int
    loss_weight: float
    padding_tokens: int
    windows: int
    lower_bound: int
    longest_path: int
    overflow: dict[str, int] = field(default_factory=dict)
    strategy: str = "best"
    effort: float = 0.0
    bucket_size: int | None = None
    partitions: int | None = None
    source_targets: int = 0
    advice: tuple[LengthAdvice, ...] = ()

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> PackReport:
        """The inverse of `to_dict`."""
        given = {name: figures[name] for name in cls.__dataclass_fields__}
        return cls(**{**given, "advice": tuple(LengthAdvice(**each) for each in given["advice"])})

    @property
    def reuse_ratio(self) -> float:
        """Logical tokens over unique tokens: what sharing could save at best."""
        return self.logical_tokens / max(self.unique_tokens, 1)

    @property
    def speedup_bound(self) -> float:
        """Logical tokens over executed tokens: what sharing saves in these windows."""
        return self.logical_tokens / max(self.executed_tokens, 1)

    @property
    def replay_tokens(self) -> int:
        """Executed tokens beyond the unique ones: repeated ancestors and copies at branch points."""
        return self.executed_tokens - self.unique_tokens

    @property
    def gap(self) -> float:
        """Windows over the lower bound, minus one."""
        return self.windows / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def lost_share(self) -> float:
        """Share of the labelled source tokens that are not trained, since they lie beyond a window."""
        return self.overflow.get("lost_targets", 0) / max(self.source_targets, 1)

    def to_dict(self) -> dict[str, Any]:
        """All figures, the derived ones included, for JSON."""
        names = ("reuse_ratio", "speedup_bound", "replay_tokens", "gap", "lost_share")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        rows = [
            ("logical tokens", f"{self.logical_tokens:,}", "each trained sequence written out"),
            ("unique tokens", f"{self.unique_tokens:,}", f"reuse ratio {self.reuse_ratio:.2f}"),
            (
                "executed tokens",
                f"{self.executed_tokens:,}",
                f"replay {self.replay_tokens:,}; speedup bound {self.speedup_bound:.2f}",
            ),
            (
                "loss tokens",
                f"{self.loss_tokens:,}",
                f"total weight {round(self.loss_weight, 2):,.15g} ({self.loss_weighting!r})",
            ),
            ("padding tokens", f"{self.padding_tokens:,}", f"to windows of {self.max_length:,}"),
            (
                "windows",
                f"{self.windows:,}",
                f"lower bound {self.lower_bound:,}, gap {self.gap:.1%}; {self._how()}",
            ),
            (
                "longest path",
                f"{self.longest_path:,}",
                f"window is {self.max_length / max(self.longest_path, 1):.1f}x",
            ),
        ]
        rows += [(reason.replace("_", " "), f"{count:,}", "overflow") for reason, count in self.overflow.items()]
        if self.lost_share:
            rows.append(("lost share", f"{self.lost_share:.2%}", "of the labelled tokens, beyond the window"))
        rows += [
            (
                f"window of {each.factor}x",
                f"{each.max_length:,}",
                f"executes at least {each.executed_tokens:,}; speedup at most {each.speedup_bound:.2f}",
            )
            for each in self.advice
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {note}" for name, figure, note in rows)

    def _how(self) -> str:
        how = f"strategy {self.strategy!r}"
        if self.effort:
            how += f", {self.effort:g} s of search"
        if self.partitions is not None:
            how += f", {self.partitions:,} partitions"
        return how if self.bucket_size is None else f"{how}, buckets of {self.bucket_size:,} examples"


def add_reports(reports: Iterable[PackReport]) -> PackReport | None:
    """The report of several packings with the same options, `None` for none. It has no advice.

    A path may be longer than those of the packing that is asked about, so the longest path is that of all, and the
    lower bound is that of packing each on its own.
    """
    each = list(reports)
    if not each:
        return None
    summed = (
        "logical_tokens",
        "unique_tokens",
        "executed_tokens",
        "loss_tokens",
        "loss_weight",
        "padding_tokens",
        "windows",
        "lower_bound",
        "source_targets",
    )
    reasons = dict.fromkeys(reason for report in each for reason in report.overflow)
    first = each[0]
    return PackReport(
        max_length=first.max_length,
        loss_weighting=first.loss_weighting,
        longest_path=max(report.longest_path for report in each),
        overflow={reason: sum(report.overflow.get(reason, 0) for report in each) for reason in reasons},
        strategy=first.strategy,
        effort=first.effort,
        bucket_size=first.bucket_size,
        **{name: sum(getattr(report, name) for report in each) for name in summed},
    )


class StreamReport:
    """Report of a stream, which fills as the stream is read in this process.

    Attributes:
        buffers: number of buffers that were packed.
        total: their reports added up; `None` as long as nothing was read. Each buffer is a packing of its own, so
            `unique_tokens` counts a prefix once for each buffer that has it. There is no advice.
    """

    def __init__(self) -> None:
        self.buffers = 0
        self.total: PackReport | None = None

    def add(self, report: PackReport) -> None:
        """Add the report of one buffer."""
        self.buffers += 1
        self.total = add_reports([report] if self.total is None else [self.total, report])

    def __str__(self) -> str:
        return "nothing was read yet" if self.total is None else f"{self.total}\nin {self.buffers:,} buffers"

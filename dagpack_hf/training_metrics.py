"""What the trainer logs of its tokens: means over targets, tokens per second, and how much is shared.

Every figure is a ratio of two sums over all processes and batches since it was last logged. Rows carry very unequal
weight, so a mean of the ratios of batches, as TRL logs it, would be wrong.

How many tokens a batch stands for is known exactly where it was packed on the fly. A row that was packed beforehand
does not say it, since what it shares with other rows has no owner; each of its positions then stands for its share in
the data set. Of rows that came without a report it is not known, and those metrics are not logged.

Cost: ten sums for each batch, on its device and without waiting for it; one gather when they are logged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dagpack_hf.pack_report import PackReport
from dagpack_hf.trie import IGNORE_INDEX

SUMS = (
    "weight",
    "loss",
    "entropy",
    "correct",
    "tokens",
    "targets",
    "logical_tokens",
    "unique_tokens",
    "router_loss",
    "batches",
)
"""What is summed: weight of the targets; loss, entropy and correct predictions, each with its weight; positions,
without padding; targets; tokens of the source sequences and of their trie; the router loss of batches, and batches."""


class Stopwatch:
    """Seconds of training: those of evaluation and of saving are left out."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def start(self) -> None:
        """Start it unless it runs."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def stop(self) -> None:
        """Stop it; the next lap begins with the next start."""
        self._begin = None

    def lap(self) -> float | None:
        """Seconds since the last lap, `None` if it does not run."""
        if self._begin is None:
            return None
        now = time.perf_counter()
        seconds, self._begin = now - self._begin, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a `with` block out."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._begin is not None:
                self._begin += time.perf_counter() - begin


@dataclass(frozen=True)
class CorpusShares:
    """What a position of a data set that was packed as a whole stands for, on average.

    Args:
        logical_tokens: tokens of the source sequences.
        unique_tokens: tokens of the trie.
    """

    logical_tokens: float
    unique_tokens: float

    @classmethod
    def of(cls, report: PackReport | None) -> CorpusShares | None:
        """The shares that a report tells."""
        if report is None or not report.executed_tokens:
            return None
        executed = report.executed_tokens
        return cls(report.logical_tokens / executed, report.unique_tokens / executed)


class Metering:
    """Sums over the batches of this process, for training and for evaluation, and what they say.

    Attributes:
        stopwatch: measures the time of training.
    """

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._sums: dict[str, torch.Tensor] = {}
        self._mean_loss: float | None = None

    def add(
        self,
        mode: str,
        loss: torch.Tensor,
        weight: torch.Tensor,
        outputs: Any,
        inputs: Mapping[str, torch.Tensor],
        shares: CorpusShares | None = None,
        router_loss: torch.Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            mode: `"train"` or `"eval"`.
            loss: summed loss of its targets, each with its weight.
            weight: of each target.
            outputs: of TRL's fused LM head.
            inputs: the batch.
            shares: what a position stands for, where the batch does not say it.
            router_loss: of a mixture of experts.
        """
        figures = {
            "weight": weight.sum(),
            "loss": loss,
            "entropy": (outputs.entropy * weight).sum(),
            "correct": (outputs.is_top1 * weight).sum(),
            "tokens": inputs["num_tokens"].sum(),
            "targets": (inputs["shift_labels"] != IGNORE_INDEX).sum(),
            "router_loss": 0.0 if router_loss is None else router_loss,
            "batches": 1.0,
        }
        for name in ("logical_tokens", "unique_tokens"):
            share = 0.0 if shares is None else getattr(shares, name)
            figures[name] = inputs[name].sum() if name in inputs else figures["tokens"].double() * share
        each = [torch.as_tensor(figures[name]).detach() for name in SUMS]
        sums = torch.stack([figure.to(loss.device, torch.float64) for figure in each])
        self._sums[mode] = self._sums[mode] + sums if mode in self._sums else sums

    def drop(self, mode: str) -> None:
        """Begin anew."""
        self._sums.pop(mode, None)

    def take(self, mode: str, accelerator: Any, copies: int = 1) -> dict[str, float]:
        """Sum over all processes and begin anew. All processes must call it.

        Args:
            mode: `"train"` or `"eval"`.
            accelerator: gathers.
            copies: processes that were given the same batch.

        Returns:
            The figures of `SUMS`.
        """
        zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=accelerator.device)
        sums = self._sums.pop(mode, zeros).to(accelerator.device)
        return dict(zip(SUMS, (accelerator.gather(sums[None]).sum(0) / copies).tolist(), strict=True))

    def metrics(self, mode: str, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of these sums; those of training end a lap of the stopwatch."""
        if mode == "eval":
            return mean_metrics(sums)
        self._mean_loss = sums["loss"] / sums["weight"] if sums["weight"] > 0 else None
        return mean_metrics(sums) | sharing_metrics(sums, self.stopwatch.lap())

    def pop_mean_loss(self) -> float | None:
        """Mean loss of the targets trained since the last entry of the log, `None` if there are none."""
        mean_loss, self._mean_loss = self._mean_loss, None
        return mean_loss


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over targets, under the names of TRL."""
    metrics = {}
    if sums["weight"] > 0:
        metrics["entropy"] = sums["entropy"] / sums["weight"]
        metrics["mean_token_accuracy"] = sums["correct"] / sums["weight"]
    if sums["router_loss"]:
        metrics["aux_loss"] = sums["router_loss"] / sums["batches"]
    return metrics


def sharing_metrics(sums: Mapping[str, float], seconds: float | None) -> dict[str, float]:
    """Tokens per second and how much is shared.

    Args:
        sums: over all processes.
        seconds: that this took, if known.

    Returns:
        `loss_tokens_per_second`: targets trained. `logical_tokens_per_second`: tokens of the source sequences, which
        is what ordinary training would have to compute in the same time. `reuse_ratio`: tokens of the source sequences
        over distinct ones. `replay_share`: share of the positions that repeat what another position computes.
    """
    metrics = {}
    if seconds:
        metrics["loss_tokens_per_second"] = sums["targets"] / seconds
    if sums["logical_tokens"] and sums["unique_tokens"]:
        if seconds:
            metrics["logical_tokens_per_second"] = sums["logical_tokens"] / seconds
        metrics["reuse_ratio"] = sums["logical_tokens"] / sums["unique_tokens"]
        metrics["replay_share"] = 1 - sums["unique_tokens"] / sums["tokens"]
    return metrics

"""Time of an epoch: packing by shared prefixes against TRL's `packing=True`, on the same turns.

Both trainers run as they are, with the same model, window length, optimizer and labels, in the same process and taking
turns, so that whatever else the machine does hits both. A round is a whole epoch of the one and a part of an epoch of
the other, a different part in each round; the part's time is scaled by its share of the tokens. Timed is what lies
between the beginning and the end of an epoch: data loading, forward, backward and optimizer.

Cost: with three rounds and eighths, three epochs of packed rows and three eighths of an epoch of TRL's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from dagpack_hf.cli.exactness import Sequences, quiet, trainer_options
from dagpack_hf.config import DagSFTConfig
from dagpack_hf.recipe import tiny_llama
from dagpack_hf.trainer import DagSFTTrainer


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        max_length: Window length in tokens.
        logical_tokens: Tokens of an epoch, one sequence for each turn.
        dagpack_windows: Windows of an epoch, packed by shared prefixes.
        trl_windows: Windows of an epoch, packed by TRL.
        dagpack_seconds: Seconds of an epoch, in each round.
        trl_seconds: Seconds of an epoch, in each round, scaled from the part that was run.
        trl_windows_run: Windows of TRL that were run, all rounds together.
    """

    max_length: int
    logical_tokens: int
    dagpack_windows: int
    trl_windows: int
    dagpack_seconds: list[float]
    trl_seconds: list[float]
    trl_windows_run: int

    @property
    def dagpack_epoch(self) -> float:
        """Median seconds of an epoch, packed by shared prefixes."""
        return statistics.median(self.dagpack_seconds)

    @property
    def trl_epoch(self) -> float:
        """Median seconds of an epoch, packed by TRL."""
        return statistics.median(self.trl_seconds)

    @property
    def ratio(self) -> float:
        """How many times faster an epoch is than with TRL's packing."""
        return self.trl_epoch / self.dagpack_epoch


def measure(
    trees: Dataset,
    sequences: Sequences,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    work_dir: str,
    *,
    rounds: int = 3,
    parts: int = 8,
) -> Speed:
    """Measure both.

    Args:
        trees: Token trees of the turns.
        sequences: The same turns, one sequence each.
        tokenizer: Their tokenizer.
        max_length: Window length in tokens.
        work_dir: Folder for the trainers.
        rounds: Rounds; the medians count.
        parts: Parts that TRL's epoch is divided into, at least as many as rounds; a round runs one of them.
    """
    options = {**trainer_options(work_dir), "max_length": max_length, "num_train_epochs": 1, "learning_rate": 1e-4}
    timer = _EpochTimer()
    ours = DagSFTTrainer(
        model=tiny_llama(tokenizer, seed=0),
        args=DagSFTConfig(loss_weighting="paths", **options),
        train_dataset=trees,
        processing_class=tokenizer,
        callbacks=[timer],
    )
    theirs = SFTTrainer(
        model=tiny_llama(tokenizer, seed=0),
        args=SFTConfig(packing=True, **options),
        train_dataset=Dataset.from_dict({"input_ids": sequences.input_ids, "labels": sequences.labels}),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    for trainer in (ours, theirs):
        quiet(trainer)
    rows, windows = cast(Dataset, ours.train_dataset), cast(Dataset, theirs.train_dataset)
    lengths = np.array([len(ids) for ids in windows["input_ids"]])
    _check_same_work(ours, windows, sequences)
    parts = max(min(parts, len(windows)), 1)

    def ours_seconds() -> float:
        return timer.time(ours, rows)

    def theirs_seconds(part: int) -> float:
        chosen = np.arange(part % parts, len(windows), parts)
        return timer.time(theirs, windows.select(chosen)) * lengths.sum() / lengths[chosen].sum()

    timer.time(ours, rows.select(range(1)))
    timer.time(theirs, windows.select(range(1)))
    seconds: list[tuple[float, float]] = []
    for part in range(rounds):
        if part % 2:
            late = theirs_seconds(part)
            seconds.append((ours_seconds(), late))
        else:
            seconds.append((ours_seconds(), theirs_seconds(part)))
    return Speed(
        max_length=max_length,
        logical_tokens=sequences.logical_tokens,
        dagpack_windows=len(rows),
        trl_windows=len(windows),
        dagpack_seconds=[pair[0] for pair in seconds],
        trl_seconds=[pair[1] for pair in seconds],
        trl_windows_run=sum(len(range(part % parts, len(windows), parts)) for part in range(rounds)),
    )


def _check_same_work(ours: DagSFTTrainer, windows: Dataset, sequences: Sequences) -> None:
    """Make sure that both train the same tokens.

    Raises:
        RuntimeError: If they do not; then the times could not be compared.
    """
    report = ours.pack_reports["train"]
    tokens = sum(map(len, windows["input_ids"]))
    labelled = sum(label != -100 for labels in windows["labels"] for label in labels)
    want = (sequences.logical_tokens, sequences.labelled_tokens)
    if (report.logical_tokens, round(report.loss_weight)) != want or (tokens, labelled) != want:
        raise RuntimeError(
            f"the two sides do not train the same tokens: {want} wanted, "
            f"{report.logical_tokens, report.loss_weight} and {tokens, labelled} found"
        )


class _EpochTimer(TrainerCallback):
    """Takes the time from the beginning of an epoch to its end."""

    def __init__(self) -> None:
        self._start = self._seconds = 0.0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop the clock."""
        self._seconds = time.perf_counter() - self._start

    def time(self, trainer: Trainer, dataset: Dataset) -> float:
        """Train one epoch of a data set and return its seconds."""
        trainer.train_dataset = dataset
        trainer.train()
        return self._seconds

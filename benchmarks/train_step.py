"""Time of an epoch with shared prefixes computed once, beside TRL's packing and TRL's padding.

    python benchmarks/train_step.py [--quick] [--rounds R] [--only shared|sessions] [--max-length T ...]

The same tiny Llama, the same sequences and the same `max_length` in four trainers: `DagSFTTrainer`
(`loss_weighting="paths"`); TRL's `SFTTrainer` with `packing=True` (bfd); plain `SFTTrainer`, which pads, with batches
of four sequences; and with batches of one, where nothing is padded and attention needs no mask, its fastest way on a
CPU. All make the same number of optimizer steps per epoch (gradient accumulation), so each step sees about the same
sequences. An epoch is what `Trainer` does between its begin and its end: collation, forward, backward and optimizer.

*shared*: groups of 16 sequences with 80 % of each common to its group, so long that a merged group fills one window;
every token is a target. *sessions*: turns of the bundled sessions in the order of the files, one sequence for each
with its whole context; only the turn is a target.

The *token ratio* is what sharing could gain if time were proportional to tokens: the tokens of all sequences over
those that `DagSFTTrainer` computes. The ratio of times is to be read beside it.

Runs on CPU, in float32 and without gradient checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import datasets
import numpy as np
import torch
import transformers
from datasets import Dataset
from measure import interleave, medians, peak_memory, print_figures
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer, load_sessions
from dagpack_hf.render import render_turn
from dagpack_hf.sample import sample_sessions, sample_tokenizer

GROUP = 16
"""Sequences that share a prefix."""
SHARED = 0.8
"""Part of each sequence that its group shares."""
PADDING_BATCH = 4
"""Sequences of a padded batch."""
PEERS = ("trl packing", "trl padding", "trl one by one")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    quiet()
    if options.threads:
        torch.set_num_threads(options.threads)
    figures = {}
    for name, length, dataset in cases(options):
        figures[name] = measure(dataset, length, options)
        print_case(name, figures[name])
    print_figures("train_step", {**vars(options), "threads": torch.get_num_threads()}, {"cases": figures})


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, Dataset]]:
    """Name, window length and sequences of each case."""
    if options.only != "sessions":
        for length in options.max_length:
            yield f"shared, T={length}", length, shared_sequences(options.groups, length)
    if options.only != "shared":
        length = options.session_length
        yield f"sessions, T={length}", length, session_sequences(options.turns)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one to warm up (default 5)")
    parser.add_argument("--only", choices=("shared", "sessions"), help="one of the two cases (default both)")
    parser.add_argument(
        "--max-length", type=int, nargs="+", default=[2048], help="window lengths of the case shared (default 2048)"
    )
    parser.add_argument(
        "--session-length",
        type=int,
        default=4096,
        help="window length of the case sessions; the longest sequence has 3,539 tokens (default 4096)",
    )
    parser.add_argument("--groups", type=int, default=1, help="groups of 16 sequences (default 1)")
    parser.add_argument(
        "--turns", type=int, default=10, help="trained turns of the bundled sessions, of 125 (default 10)"
    )
    parser.add_argument("--hidden-size", type=int, default=128, help="hidden size of the model (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="same shape with less of everything")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.groups, options.turns = 2, 1, 3
    return options


def quiet() -> None:
    """Only the figures: no progress bars, no advice about flash attention on a CPU."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets.disable_progress_bars()
    datasets.disable_caching()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


# Data


def shared_sequences(groups: int, max_length: int) -> Dataset:
    """Groups of sequences with a common beginning; the merged group, branch copies included, fills a window."""
    own = int((max_length - GROUP) / (SHARED / (1 - SHARED) + GROUP))
    common = round(own * SHARED / (1 - SHARED))
    rng = np.random.default_rng(0)
    sequences: list[np.ndarray] = []
    for _ in range(groups):
        trunk = rng.integers(5, 2000, common)
        sequences += [np.concatenate([trunk, rng.integers(5, 2000, own)]) for _ in range(GROUP)]
    return Dataset.from_dict({"input_ids": sequences, "labels": sequences})


def session_sequences(turns: int) -> Dataset:
    """The first trained turns of the bundled sessions, each with its whole context."""
    tokenizer = sample_tokenizer()
    sequences: list[list[int]] = []
    labels: list[list[int]] = []
    for row in load_sessions(sample_sessions()):
        for turn in np.flatnonzero(row["trained"])[: turns - len(sequences)].tolist():
            tokens = render_turn(tokenizer, row["messages"], turn, tools=row["tools"])
            sequences.append(tokens.context_ids + tokens.target_ids)
            labels.append([-100] * len(tokens.context_ids) + tokens.target_ids)
    return Dataset.from_dict({"input_ids": sequences, "labels": labels})


# Trainers


class EpochClock(TrainerCallback):
    """Seconds of the last epoch."""

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


def tiny_llama(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=options.hidden_size,
            intermediate_size=3 * options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16_384,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_trainers(dataset: Dataset, length: int, options: argparse.Namespace, folder: str) -> dict[str, SFTTrainer]:
    """One trainer for each way, with as many optimizer steps per epoch as `DagSFTTrainer` has windows."""

    def make(kind: type[SFTTrainer], config: type[SFTConfig], batch_size: int, **own: Any) -> SFTTrainer:
        args = config(
            output_dir=folder,
            max_length=length,
            per_device_train_batch_size=batch_size,
            num_train_epochs=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **own,
        )
        return kind(
            tiny_llama(options),
            args,
            train_dataset=dataset,
            processing_class=sample_tokenizer(),
            callbacks=[EpochClock()],
        )

    trainers = {
        "dagpack": make(DagSFTTrainer, DagSFTConfig, 1, loss_weighting="paths"),
        "trl packing": make(SFTTrainer, SFTConfig, 1, packing=True),
        "trl padding": make(SFTTrainer, SFTConfig, PADDING_BATCH),
        "trl one by one": make(SFTTrainer, SFTConfig, 1),
    }
    steps = len(trainers["dagpack"].get_train_dataloader())
    for trainer in trainers.values():
        trainer.args.gradient_accumulation_steps = -(-len(trainer.get_train_dataloader()) // steps)
    return trainers


def epoch(trainer: SFTTrainer) -> Callable[[], float]:
    """A task that trains one epoch and returns its seconds."""
    clock = next(c for c in trainer.callback_handler.callbacks if isinstance(c, EpochClock))

    def task() -> float:
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            trainer.train()
        return clock.seconds

    return task


# Measurement


def measure(dataset: Dataset, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one case."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainers(dataset, length, options, folder)
        work = {name: count_work(trainer) for name, trainer in trainers.items()}
        memory = {name: peak_memory(epoch(trainer)) for name, trainer in trainers.items()}
        seconds = interleave(
            {name: epoch(trainer) for name, trainer in trainers.items()}, options.rounds, warm_up=False
        )
    median = medians(seconds)
    report = cast(DagSFTTrainer, trainers["dagpack"]).pack_reports["train"]
    return {
        "sequences": len(dataset),
        "max_length": length,
        "reuse_ratio": report.reuse_ratio,
        "token_ratio": report.speedup_bound,
        "work": work,
        "speedup": {name: median[name] / median["dagpack"] for name in PEERS},
        "speedup_over_token_ratio": {name: median[name] / median["dagpack"] / report.speedup_bound for name in PEERS},
        "peak_memory_mib": memory,
        "median_s": median,
        "seconds": seconds,
    }


def count_work(trainer: SFTTrainer) -> dict[str, int]:
    """Batches and optimizer steps of an epoch, positions that are computed (padding included) and targets."""
    batches = positions = targets = 0
    for batch in trainer.get_train_dataloader():
        batches += 1
        positions += batch["input_ids"].numel()
        if "loss_weight" in batch:
            targets += int(batch["loss_weight"].sum())
        else:
            targets += int((batch["labels"][:, 1:] != -100).sum())
    steps = -(-batches // trainer.args.gradient_accumulation_steps)
    return {"batches": batches, "steps": steps, "positions": positions, "targets": targets}


def print_case(name: str, case: dict[str, Any]) -> None:
    print(f"{name}: {case['sequences']} sequences, reuse {case['reuse_ratio']:.2f}, ", end="")
    print(f"token ratio {case['token_ratio']:.2f}")
    print(f"  {'':<15}{'positions':>11}{'batches':>9}{'steps':>7}{'peak MiB':>10}{'median s':>10}  rounds")
    for way, work in case["work"].items():
        memory = case["peak_memory_mib"][way]
        print(
            f"  {way:<15}{work['positions']:>11,}{work['batches']:>9}{work['steps']:>7}"
            f"{'-' if memory is None else f'{memory:,.0f}':>10}{case['median_s'][way]:>10.2f}  "
            + " ".join(f"{spent:.2f}" for spent in case["seconds"][way])
        )
    for way, speedup in case["speedup"].items():
        share = case["speedup_over_token_ratio"][way]
        print(f"  {speedup:.2f}x the speed of {way}: {share:.2f} of the token ratio")
    print(flush=True)


if __name__ == "__main__":
    main()

"""Time of an epoch with shared prefixes computed once, beside TRL's packing and TRL's padding.

    python benchmarks/train_step.py [--quick] [--rounds R] [--only shared|sessions] [--max-length T ...]

The same small Llama, the same sequences and the same `max_length` in four trainers: `DagSFTTrainer`
(`loss_weighting="paths"`); TRL's `SFTTrainer` with `packing=True` (bfd); plain `SFTTrainer`, which pads, with batches
of four sequences; and with batches of one, where nothing is padded and attention needs no mask, its fastest way on a
CPU. All make the same number of optimizer steps per epoch (gradient accumulation), so each step sees about the same
sequences. An epoch is what `Trainer` does between its begin and its end: collation, forward, backward and optimizer.

*shared*: groups of 16 sequences with 80 % of each common to its group, so long that a merged group fills one window;
every token is a target. Where PrefixGrouper is installed (`pip install prefix-grouper`), it is a fifth way of this
case, which is what it is made for: it computes about as many positions as `DagSFTTrainer`. *sessions*: turns of the
bundled sessions in the order of the files, one sequence for each with its whole context; only the turn is a target.

The model is narrow, but not so narrow that it is mostly attention: at sequences of 2,048 tokens attention is a quarter
of its arithmetic, against a sixth for Qwen3-0.6B, and more than half of that of a model with `--hidden-size 128`.

The *token ratio* is what sharing could gain if time were proportional to tokens: the tokens of all sequences over
those that `DagSFTTrainer` computes. The ratio of times is to be read beside it.

Runs on CPU, in float32 and without gradient checkpointing. While time is measured, freed memory stays with the
process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
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
from measure import freed_memory_kept, interleave, medians, peak_memory, print_figures
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer, load_sessions
from dagpack_hf.render import render_turn
from dagpack_hf.sample import sample_sessions, sample_tokenizer

try:
    from prefix_grouper import PrefixGrouper
except ImportError:
    PrefixGrouper = None

GROUP = 16
"""Sequences that share a prefix."""
SHARED = 0.8
"""Part of each sequence that its group shares."""
PADDING_BATCH = 4
"""Sequences of a padded batch."""
PREFIX_GROUPER = "prefix-grouper"
"""Name of the way that is measured only where its package is installed, and only in the case *shared*."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    quiet()
    if options.threads:
        torch.set_num_threads(options.threads)
    figures = {}
    for name, length, dataset in cases(options):
        figures[name] = measure(dataset, length, options, is_shared=name.startswith("shared"))
        print_case(name, figures[name])
    version = importlib.metadata.version("prefix-grouper") if PrefixGrouper else None
    given = {**vars(options), "threads": torch.get_num_threads()}
    print_figures("train_step", given, {"prefix_grouper": version, "cases": figures})


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
    parser.add_argument("--hidden-size", type=int, default=512, help="hidden size of the model (default 512)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="same shape with less of everything")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.groups, options.turns, options.hidden_size = 2, 1, 3, 128
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


def prefix_groups(dataset: Dataset) -> Dataset:
    """The sequences of each group as PrefixGrouper takes them: what all share, once, then the rest of each.

    The last shared token goes with the rests. It has a target in each of them; so every position has one target, and
    the loss is that of the sequences, shared targets included, if these have the weight of the whole group.
    """
    groups: list[dict[str, Any]] = []
    for start in range(0, len(dataset), GROUP):
        sequences = np.array(dataset[start : start + GROUP]["input_ids"])
        shared = int((sequences == sequences[0]).all(axis=0).argmin()) - 1
        rests = sequences[:, shared:]
        trunk, depths = sequences[0, : shared + 1], np.arange(sequences.shape[1])
        targets = np.pad(rests[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        labels = np.concatenate([trunk[1:], targets.ravel()])
        groups.append(
            {
                "input_ids": np.concatenate([trunk[:-1], rests.ravel()]),
                "shift_labels": labels,
                "position_ids": np.concatenate([depths[:shared], np.tile(depths[shared:], GROUP)]),
                "loss_weight": np.where(np.arange(len(labels)) < shared, GROUP, 1) * (labels != -100),
                "lengths": [shared] + GROUP * [rests.shape[1]],
            }
        )
    return Dataset.from_list(groups)


# Trainers


class PrefixGrouperTrainer(SFTTrainer):
    """TRL's trainer on `prefix_groups`, one for each batch, with the model's attention left to PrefixGrouper."""

    def __init__(self, model: LlamaForCausalLM, args: SFTConfig, train_dataset: Dataset, **own: Any) -> None:
        AttentionInterface.register(PREFIX_GROUPER, grouped_attention)
        model.set_attn_implementation(PREFIX_GROUPER)
        super().__init__(model, args, data_collator=stack, train_dataset=prefix_groups(train_dataset), **own)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *_: Any, **__: Any
    ) -> torch.Tensor:
        weight, grouper = inputs.pop("loss_weight"), PrefixGrouper(inputs.pop("lengths").tolist())
        outputs = model(**inputs, prefix_grouper=grouper, use_cache=False, fused_lm_head=True)
        return -(outputs.log_probs * weight).sum() / weight.sum()


def stack(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}


def grouped_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: None,
    *,
    prefix_grouper: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the shared tokens, then that of the rests, as PrefixGrouper splits them; each by SDPA."""
    return prefix_grouper.forward(causal_sdpa, query_BHTD, key_BHTD, value_BHTD, module, scaling), None


def causal_sdpa(
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    is_token_BT: torch.Tensor,
    module: torch.nn.Module,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of the last positions on all. With a group for each batch, no token would see padding."""
    queries, keys = query_BHTD.shape[2], key_BHTD.shape[2]
    mask = None if queries == keys else torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    return sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, mask, scaling=scaling)[0]


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


def make_trainers(
    dataset: Dataset, length: int, options: argparse.Namespace, folder: str, is_shared: bool = False
) -> dict[str, SFTTrainer]:
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
    if is_shared and PrefixGrouper:
        as_they_are = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
        trainers[PREFIX_GROUPER] = make(PrefixGrouperTrainer, SFTConfig, 1, **as_they_are)
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


def measure(dataset: Dataset, length: int, options: argparse.Namespace, is_shared: bool) -> dict[str, Any]:
    """Figures of one case."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainers(dataset, length, options, folder, is_shared)
        work = {name: count_work(trainer) for name, trainer in trainers.items()}
        memory = {name: peak_memory(epoch(trainer)) for name, trainer in trainers.items()}
        with freed_memory_kept():
            seconds = interleave({name: epoch(trainer) for name, trainer in trainers.items()}, options.rounds)
    median = medians(seconds)
    speedup = {name: median[name] / median["dagpack"] for name in trainers if name != "dagpack"}
    report = cast(DagSFTTrainer, trainers["dagpack"]).pack_reports["train"]
    return {
        "sequences": len(dataset),
        "max_length": length,
        "reuse_ratio": report.reuse_ratio,
        "token_ratio": report.speedup_bound,
        "work": work,
        "speedup": speedup,
        "speedup_over_token_ratio": {
            name: factor / report.speedup_bound for name, factor in speedup.items() if name != PREFIX_GROUPER
        },
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
    if name.startswith("shared") and PREFIX_GROUPER not in case["work"]:
        print(f"  {PREFIX_GROUPER:<15}not installed")
    for way, speedup in case["speedup"].items():
        share = case["speedup_over_token_ratio"].get(way)
        print(f"  {speedup:.2f}x the speed of {way}" + (f": {share:.2f} of the token ratio" if share else ""))
    print(flush=True)


if __name__ == "__main__":
    main()

"""Time of a training step on a tree of sequences, of models with recurrent layers.

    python benchmarks/hybrid.py [--quick] [--rounds R] [--tokens T] [--only KIND ...]
    python benchmarks/hybrid.py --device cuda --dtype bfloat16 [--hidden-size 1024] [--tokens 16384]

A small model of each kind of recurrent layer: gated DeltaNet (Qwen3.5), Mamba-2 (Bamba), short convolutions (LFM2),
three such layers and one with attention. A step is forward, backward and optimizer, in float32, on one row. Three
ways:

* *tree*: the merged sequences as one packed row, which is what `DagSFTTrainer` computes;
* *row*: a plain sequence of as many tokens, with the model's own attention and nothing of this package: what a row
  of that length takes if trees cost nothing;
* *alone*: the sequences one after another, gradients added up, and one step of the optimizer.

The shapes are a star (16 sequences that share 80 %), a conversation in which every turn was tried again (8 turns of 3
answers, 9 levels of branching), a comb (one more branch at each of 10 levels) and a binary tree of 6 levels. Losses of
*tree* and *alone* are the same, which is checked.

The *token ratio* is the tokens of all sequences over those of the row. On a CPU times are processor times, so
that other work on the machine counts as little as it can; on a GPU, times until it is done. There the layers are those
of `fla`, `mamba_ssm` and `causal_conv1d` where these are installed, which the figures say, and else PyTorch's.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from measure import interleave, medians, print_figures
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dagpack_hf import DagCollator
from dagpack_hf.attention import DagVisibility, inputs_for, packed_attention
from dagpack_hf.recurrent import StatePlan, plan_of, states_for

Sequences = list[list[int]]

ROW_GOAL = 1.4
"""A step on a tree takes at most so many times that on a plain row of as many tokens."""

ALONE_GOAL = 0.8
"""It is faster than the sequences alone by at least this part of the token ratio."""

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative difference of the losses of *tree* and *alone*."""

KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
"""Packages that transformers takes kernels of recurrent layers from, on a GPU."""

VOCABULARY = 2048

RECURRENT = ["linear_attention"] * 3 + ["full_attention"]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    cases: dict[str, Any] = {}
    for kind in options.only:
        model = make_model(kind, options)
        for shape, sequences in shapes(options.tokens).items():
            name = f"{kind}, {shape}"
            cases[name] = measure(model, sequences, options)
            print_case(name, cases[name])
    goals = {
        "row": {"at most": ROW_GOAL, "worst": max(case["tree_over_row"] for case in cases.values())},
        "alone": {"at least": ALONE_GOAL, "worst": min(case["speedup_over_token_ratio"] for case in cases.values())},
    }
    print(f"at most {ROW_GOAL} x a plain row: {goals['row']['worst']:.2f} at worst")
    print(f"at least {ALONE_GOAL} of the token ratio: {goals['alone']['worst']:.2f} at worst")
    given = {**vars(options), "threads": torch.get_num_threads()}
    kernels = {name: importlib.util.find_spec(name) is not None for name in KERNELS}
    print_figures("hybrid", given, {"kernels": kernels, "cases": cases, "goals": goals})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, after one to warm up (default 3)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row, about (default 4096)")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of layers")
    parser.add_argument("--hidden-size", type=int, default=256, help="hidden size of the models (default 256)")
    parser.add_argument("--device", default="cpu", help="where to compute (default cpu)")
    parser.add_argument("--dtype", default="float32", choices=list(LOSS_TOLERANCE), help="dtype (default float32)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="same shapes with less of everything")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.tokens, options.hidden_size = 1, 640, 64
    return options


# Models and sequences


def make_model(kind: str, options: argparse.Namespace) -> PreTrainedModel:
    model_type, own = KINDS[kind]
    size = options.hidden_size
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=VOCABULARY,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * options.tokens,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **own(size),
    )
    return AutoModelForCausalLM.from_config(config).to(options.device, getattr(torch, options.dtype)).train()


KINDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "gated DeltaNet": (
        "qwen3_5_text",
        lambda size: {
            "layer_types": RECURRENT,
            "head_dim": size // 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": size // 4,
            "linear_value_head_dim": size // 4,
        },
    ),
    "Mamba-2": (
        "bamba",
        lambda size: {
            "attn_layer_indices": [3],
            "mamba_n_heads": 8,
            "mamba_d_head": size // 4,
            "mamba_d_state": size // 4,
        },
    ),
    "convolution": ("lfm2", lambda size: {"layer_types": ["conv"] * 3 + ["full_attention"]}),
}
"""Type of model and own options of each kind of recurrent layer."""


def shapes(tokens: int) -> dict[str, Sequences]:
    """Sequences that make a row of about so many tokens."""
    random = np.random.default_rng(0)

    def new(count: int) -> list[int]:
        return random.integers(3, VOCABULARY, count).tolist()

    trunk = new(tokens // 5)  # 16 sequences of a quarter of the row, 80 % of each common
    star = [trunk + new(tokens // 20 - branch % 5) for branch in range(16)]
    turns: Sequences = []
    path: list[int] = []
    for _ in range(8):
        path = path + new(tokens // 33)
        turns += [path + new(tokens // 34) for _ in range(3)]
    comb: Sequences = []
    path = []
    for _ in range(10):
        path = path + new(tokens // 20)
        comb.append(path + new(tokens // 20 - 7))
    tree: Sequences = [new(tokens // 63)]
    for level in range(5):
        tree = [path + new(tokens // 63 + (-3, 3)[level % 2]) for path in tree for _ in range(2)]
    return {"star 16 x 80 %": star, "8 turns x 3": turns, "comb of 10": comb, "binary tree of 6": tree}


# Measuring


def measure(model: PreTrainedModel, sequences: Sequences, options: argparse.Namespace) -> dict[str, Any]:
    longest = sum(map(len, sequences))
    collator = DagCollator(max_length=longest, packing_scope="batch", loss_weighting="paths", overflow="error")
    batch = collator([{"input_ids": each, "labels": each} for each in sequences])
    assert len(batch["input_ids"]) == 1
    tokens = int(batch["num_tokens"].sum())
    plan = plan_of(batch["subtree_end"], batch["num_tokens"])
    plan_ms = plan_time(batch["subtree_end"].numpy(), batch["num_tokens"].numpy()) * 1e3
    batch = {name: tensor.to(options.device) for name, tensor in batch.items()}
    row = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).to(options.device)
    losses: dict[str, float] = {}
    tasks = {
        "tree": stepper(model, lambda: tree_loss(model, batch), losses, "tree"),
        "row": stepper(model, lambda: plain_loss(model, row), losses, "row"),
        "alone": stepper(model, lambda: alone_loss(model, sequences), losses, "alone"),
    }
    seconds = interleave(tasks, options.rounds)
    if abs(losses["tree"] / losses["alone"] - 1) > LOSS_TOLERANCE[options.dtype]:
        raise AssertionError(f"the row has the loss {losses['tree']}, its sequences {losses['alone']}")
    median = medians(seconds)
    ratio = longest / tokens
    speedup = median["alone"] / median["tree"]
    return {
        "sequences": len(sequences),
        "logical_tokens": longest,
        "tokens": tokens,
        "token_ratio": ratio,
        "levels": len(plan.chains(plan.chain_length()).levels),
        "places_per_token": len(plan.chains(plan.chain_length()).layout.position_M) / tokens,
        "plan_ms": plan_ms,
        "seconds": seconds,
        "median_s": median,
        "tree_over_row": median["tree"] / median["row"],
        "speedup": speedup,
        "speedup_over_token_ratio": speedup / ratio,
    }


def stepper(
    model: PreTrainedModel, loss: Callable[[], float], losses: dict[str, float], name: str
) -> Callable[[], float]:
    """A step as a task of `interleave`, with a rate of 0, so that all steps begin alike."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    on_gpu = model.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time

    def task() -> float:
        gc.collect()
        start = clock()
        losses[name] = loss()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return clock() - start

    return task


def tree_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> float:
    with packed_attention(model):
        visibility = DagVisibility(batch["subtree_end"], batch["position_ids"])
        states = states_for(model, plan_of(batch["subtree_end"], batch["num_tokens"]))
        logits = model(input_ids=batch["input_ids"], use_cache=False, **inputs_for(model, visibility), **states).logits
        losses = F.cross_entropy(logits[0].float(), batch["shift_labels"][0], reduction="none", ignore_index=-100)
        loss = (losses * batch["loss_weight"][0]).sum()
        loss.backward()
    return loss.item()


def plain_loss(model: PreTrainedModel, row: torch.Tensor) -> float:
    logits = model(input_ids=row, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum")
    loss.backward()
    return loss.item()


def alone_loss(model: PreTrainedModel, sequences: Sequences) -> float:
    return sum(plain_loss(model, torch.tensor([each], device=model.device)) for each in sequences)


def plan_time(subtree_end: np.ndarray, lengths: np.ndarray) -> float:
    """Seconds of planning a batch with all that its layers ask for, the best of five."""

    def once() -> float:
        start = time.perf_counter()
        plan = StatePlan(subtree_end, lengths)
        plan.runs(3)
        plan.cells(plan.cell_length(256))
        plan.chains(plan.chain_length())
        return time.perf_counter() - start

    return min(once() for _ in range(5))


def print_case(name: str, case: dict[str, Any]) -> None:
    median = case["median_s"]
    print(
        f"{name}: {case['sequences']} sequences, {case['logical_tokens']:,} tokens in {case['tokens']:,} "
        f"({case['token_ratio']:.2f} x), {case['levels']} levels, planned in {case['plan_ms']:.1f} ms\n"
        f"  tree {median['tree']:.2f} s, row {median['row']:.2f} s, alone {median['alone']:.2f} s: "
        f"{case['tree_over_row']:.2f} x a row, {case['speedup']:.2f} x as fast as alone, "
        f"{case['speedup_over_token_ratio']:.2f} of the token ratio",
        flush=True,
    )


if __name__ == "__main__":
    main()

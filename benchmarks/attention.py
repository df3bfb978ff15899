"""Attention on packed rows: the tile backend beside the dense mask, and beside the sequences unpacked.

One layer's attention, forward and backward, on rows of several shapes: *stars*, a trunk with 16 branches that share
80 % or 64 that share 50 %; a *comb*, a leaf at each position of a trunk; *multi-turn*, a conversation of many turns
with forks; a *chain*, one sequence; and *documents* that share nothing. Three ways: `tile`; `dense`,
PyTorch's scaled dot-product attention under the mask; and *unpacked*, causal attention without a mask for each
sequence, from a root to a leaf, alone. Of more than 16 sequences 16 are computed, spread evenly, and the time is
scaled by the number of pairs.

Time is processor time, so that other programs do not count. Plan and mask are built once for all layers of a forward
pass, so their times stand apart.

The goals: at `T = 4096` `tile` at least twice as fast as `dense` on stars and multi-turn, and nowhere below 0.9 times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import interleave, medians, print_figures
from torch import Tensor

from dagpack_hf.attention import DagVisibility, dense, tile, visible
from dagpack_hf.attention.tile_plan import plan_of

TREES = ("star 16 x 80 %", "star 64 x 50 %", "multi-turn")
"""Shapes that have to be twice as fast."""
GOAL_LENGTH = 4096
GOAL_ON_TREES = 2.0
GOAL_ANYWHERE = 0.9
SEQUENCES = 16
"""Unpacked sequences that are computed."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    cases: dict[str, dict[str, Any]] = {}
    print(
        f"{'':<27}{'visible':>8}{'tile ms':>9}{'dense ms':>10}{'unpacked ms':>13}{'x dense':>9}{'x unpacked':>12}",
        end="",
    )
    print(f"{'plan ms':>9}{'mask ms':>9}")
    for length in options.length:
        for name, walk in shapes(length).items():
            case = cases[f"{name}, T={length}"] = measure(walk, options)
            print_case(f"{name}, T={length}", case)
    goals = check(cases)
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    print_figures("attention", vars(options), {"cases": cases, "goals": goals})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 4096, 8192], help="positions of a row")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one to warm up (default 5)")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default 4)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads (default 2)")
    parser.add_argument("--head-size", type=int, default=64, help="head size (default 64)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--quick", action="store_true", help="same shapes, short rows, two rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.length = 2, [1024]
    return options


# Shapes, each as the depths of a walk in depth-first preorder


def shapes(length: int) -> dict[str, np.ndarray]:
    return {
        "star 16 x 80 %": star(length, 16, 0.8),
        "star 64 x 50 %": star(length, 64, 0.5),
        "comb": comb(length),
        "multi-turn": multi_turn(length),
        "chain": np.arange(length),
        "documents": documents(length),
    }


def star(length: int, branches: int, shared: float) -> np.ndarray:
    """Sequences of one length with a common trunk that is the given part of each."""
    own = int(length / (shared / (1 - shared) + branches))
    trunk = length - branches * own
    return np.concatenate([np.arange(trunk), np.tile(np.arange(trunk, trunk + own), branches)])


def comb(length: int) -> np.ndarray:
    """A trunk, and from each of its positions a leaf, the deepest first."""
    trunk = -(-length // 2)
    return np.concatenate([np.arange(trunk), np.arange(trunk, 0, -1)])[:length]


def multi_turn(length: int, seed: int = 0) -> np.ndarray:
    """Turns of 20 to 200 tokens; two in five follow not the last turn but one that lies one to three before it."""
    rng = np.random.default_rng(seed)
    walk: list[np.ndarray] = []
    open_turns = [0]  # depths at which the turns of the current branch end
    total = 0
    while total < length:
        if rng.random() < 0.4:
            del open_turns[max(1, len(open_turns) - int(rng.integers(1, 4))) :]
        turn = int(rng.integers(20, 201))
        walk.append(np.arange(open_turns[-1], open_turns[-1] + turn))
        open_turns.append(open_turns[-1] + turn)
        total += turn
    return np.concatenate(walk)[:length]


def documents(length: int, seed: int = 0) -> np.ndarray:
    """Sequences of 100 to 1,000 tokens that share nothing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(100, 1001, -(-length // 100))
    return np.concatenate([np.arange(each) for each in lengths])[:length]


def ends(walk: np.ndarray) -> np.ndarray:
    """`subtree_end`: the next position that is not deeper."""
    end = np.full(len(walk), len(walk))
    path: list[int] = []
    for position, depth in enumerate(walk.tolist()):
        end[path[depth:]] = position
        del path[depth:]
        path.append(position)
    return end


def sequence_lengths(walk: np.ndarray) -> np.ndarray:
    """Tokens from the root to each leaf."""
    return walk[ends(walk) == np.arange(1, len(walk) + 1)] + 1


# Measurement


def measure(walk: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one row."""
    subtree_end, position_ids = torch.from_numpy(ends(walk))[None], torch.from_numpy(walk)[None]
    visibility = DagVisibility(subtree_end, position_ids)
    pairs = visible(subtree_end, position_ids).sum().item()
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        x_BTHD = torch.randn(1, length, heads, options.head_size, generator=generator)
        return x_BTHD.transpose(1, 2).requires_grad_()  # as models have them in memory

    def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
        return random(options.heads, length), random(options.kv_heads, length), random(options.kv_heads, length)

    row = inputs(len(walk))
    lengths = sequence_lengths(walk)
    some = lengths[np.linspace(0, len(lengths) - 1, min(SEQUENCES, len(lengths))).astype(int)]
    sequences = [inputs(int(length)) for length in some]
    part = (some * (some + 1)).sum() / (lengths * (lengths + 1)).sum()
    unpacked = processor_time(lambda: [forward_backward(causal, each) for each in sequences])
    seconds = interleave(
        {
            "tile": processor_time(lambda: forward_backward(lambda *x: tile.attend(*x, visibility), row)),
            "dense": processor_time(lambda: forward_backward(lambda *x: dense.attend(*x, visibility), row)),
            "unpacked": lambda: float(unpacked() / part),
            "plan": processor_time(lambda: plan_of(visibility.subtree_end_BT, visibility.position_ids_BT)),
            "mask": processor_time(lambda: visible(visibility.subtree_end_BT, visibility.position_ids_BT)),
        },
        options.rounds,
    )
    median = medians(seconds)
    return {
        "sequences": len(lengths),
        "visible": pairs / len(walk) ** 2,
        "speedup": {name: median[name] / median["tile"] for name in ("dense", "unpacked")},
        "median_s": median,
        "seconds": seconds,
    }


def processor_time(function: Callable[[], Any]) -> Callable[[], float]:
    """The function as a task of `interleave` that returns its processor time."""

    def task() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return task


def forward_backward(attend: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    output = attend(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def check(cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The goals, and whether each is met."""
    speedup = {name: case["speedup"]["dense"] for name, case in cases.items()}
    goals = {
        f"{name}: {speedup[name]:.2f}x dense, at least {GOAL_ON_TREES}x": speedup[name] >= GOAL_ON_TREES
        for name in (f"{shape}, T={GOAL_LENGTH}" for shape in TREES)
        if name in cases
    }
    slowest = min(speedup, key=speedup.__getitem__)
    found = speedup[slowest]
    goals[f"{slowest}, the slowest: {found:.2f}x dense, at least {GOAL_ANYWHERE}x"] = found >= GOAL_ANYWHERE
    return goals


def print_case(name: str, case: dict[str, Any]) -> None:
    ms = {way: 1e3 * seconds for way, seconds in case["median_s"].items()}
    print(f"{name:<27}{case['visible']:>8.1%}{ms['tile']:>9.0f}{ms['dense']:>10.0f}{ms['unpacked']:>13.0f}", end="")
    print(f"{case['speedup']['dense']:>9.2f}{case['speedup']['unpacked']:>12.2f}", end="")
    print(f"{ms['plan']:>9.1f}{ms['mask']:>9.1f}", flush=True)


if __name__ == "__main__":
    main()

"""How fast a training step is with shared prefixes merged, beside the same sequences packed apart."""

from __future__ import annotations

import time
from typing import Any

import torch
from measure import interleave, medians

from .model import PackedSequences, make_model, sequence_way, tree_way, varlen_obstacle
from .rows import document_rows, random_tree, tree_rows
from .run import Run, peak_mib, seconds_of


def time_steps(run: Run) -> None:
    """Every length and reuse; each case gets a part of the time that goes with its length."""
    model = make_model(run.options.model, run.device, checkpointing=not run.options.no_checkpointing)
    # A learning rate of 0 keeps the model as it is and costs the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=run.on_gpu)
    run.figures["parameters"] = sum(p.numel() for p in model.parameters())
    print(f"  {run.options.model}, {run.figures['parameters'] / 1e6:,.1f} million parameters, {model.dtype}")
    if obstacle := varlen_obstacle(run.device):
        run.skip("flash varlen", obstacle)
    cases = [(length, reuse) for length in run.options.length for reuse in run.options.reuse]
    for index, (length, reuse) in enumerate(cases):
        budget = run.left * length / sum(each for each, _ in cases[index:])
        case = f"T={length}, reuse {reuse}"
        if run.enough_for(case, 3 + length / 4000):
            with run.trying(case):
                figures = time_case(run, model, optimizer, length, reuse, budget)
                run.figures.setdefault("steps", {})[case] = figures
                print_case(case, figures)
        model.zero_grad()


def time_case(
    run: Run, model: Any, optimizer: torch.optim.Optimizer, length: int, reuse: int, budget: float
) -> dict[str, Any]:
    """Figures of the ways to train on the same sequences."""
    start = time.monotonic()
    sequences = random_tree(length, reuse, model.config.vocab_size, seed=0)
    documents = document_rows(sequences, length)
    some = documents[: run.options.peer_windows]
    ways = {
        "dagpack": tree_way(model, tree_rows(sequences, length), length, run.device),
        "flex documents": sequence_way(model, some, length, run.device),
    }
    if not varlen_obstacle(run.device):
        ways["flash varlen"] = sequence_way(model, some, length, run.device, varlen=True)
    source_tokens = sum(map(len, sequences))
    scale = {name: 1.0 if name == "dagpack" else source_tokens / way.tokens for name, way in ways.items()}

    def step(way: PackedSequences) -> None:
        way.backward()
        optimizer.step()
        optimizer.zero_grad()

    for way in ways.values():
        step(way)  # compiles
    warm = time.monotonic()
    memory = {name: peak_mib(lambda w=way: step(w), run.device) for name, way in ways.items()}
    one_round = time.monotonic() - warm
    rounds = int((min(budget, run.left) - (time.monotonic() - start)) / one_round)
    rounds = min(max(rounds, 1), run.options.rounds)
    tasks = {name: lambda w=way: seconds_of(lambda: step(w), run.device) for name, way in ways.items()}
    computed = interleave(tasks, rounds, warm_up=False)
    seconds = {name: [scale[name] * each for each in computed[name]] for name in ways}
    median = medians(seconds)
    return {
        "sequences": len(sequences),
        "source_tokens": source_tokens,
        "computed_tokens": {name: way.tokens for name, way in ways.items()},
        "windows": {name: 1 if name == "dagpack" else len(documents) for name in ways},
        "token_ratio": source_tokens / ways["dagpack"].tokens,
        "peak_memory_mib": memory,
        "median_s": median,
        "seconds": seconds,
        "speedup": {name: median[name] / median["dagpack"] for name in ways if name != "dagpack"},
    }


def print_case(case: str, figures: dict[str, Any]) -> None:
    print(f"  {case}: {figures['sequences']} sequences, token ratio {figures['token_ratio']:.2f}")
    for name, median in figures["median_s"].items():
        memory = figures["peak_memory_mib"][name]
        rate = f"{figures['source_tokens'] / median:,.0f} source tokens/s"
        times = f"{median / figures['median_s']['dagpack']:.2f}x"
        peak = "-" if memory is None else f"{memory:,.0f} MiB"
        rounds = " ".join(f"{each:.3f}" for each in figures["seconds"][name])
        print(f"    {name:<16}{median:>9.3f} s{times:>8}{rate:>28}{peak:>14}   rounds {rounds}")

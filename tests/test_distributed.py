"""Several processes over gloo: each window once, the parameters of one process, balanced, resumed exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.toy import shared_dataset
from tests.train_script import make_trainer

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def launch(processes: int, module: str, *arguments: object, expect: int = 0) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (done.returncode == expect) if processes == 1 or not expect else done.returncode, done.stderr[-3000:]


def train(
    tmp_path: Path, name: str, processes: int, output_dir: Path | None = None, expect: int = 0, **settings
) -> dict:
    out = tmp_path / f"{name}.pt"
    launch(processes, "tests.train_script", out, output_dir or tmp_path / name, json.dumps(settings), expect=expect)
    return {} if expect else torch.load(out)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# Loading

LOADING = {
    "plain": {},
    "batches of two": {"per_device_train_batch_size": 2},
    "accumulation": {"gradient_accumulation_steps": 3},
    "not balanced": {"gradient_accumulation_steps": 3, "rank_balance": "none"},
    "epoch": {"rank_balance": "epoch"},
    "drop last": {"dataloader_drop_last": True, "per_device_train_batch_size": 4},
    "uneven batches": {"accelerator_config": {"even_batches": False}},
    "split": {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "dispatched and split": {
        "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        "per_device_train_batch_size": 2,
    },
    "seed of torch": {"accelerator_config": {"use_seedable_sampler": False}},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("loading") / "windows.json"
    launch(2, "tests.distributed_script", out, json.dumps(LOADING))
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", LOADING)
def test_each_window_is_trained_once_in_an_epoch(loaded, name):
    rows, windows, epochs, _ = loaded[name]
    assert windows % 2 == 1 and rows > windows, "the number of windows does not divide"
    shuffles = []
    for processes in epochs:
        assert len(processes) == 2 and len(processes[0]) == len(processes[1])
        seen = [tuple(ids) for batches in processes for batch in batches for ids, _ in batch]
        assert len(seen) == rows and seen.count(()) == rows - windows
        assert max(Counter(ids for ids in seen if ids).values()) == 1, "no window is repeated"
        shuffles.append(seen)
    assert shuffles[0] != shuffles[1], "each epoch has its own order"


@pytest.mark.parametrize("name", LOADING)
def test_the_mean_weight_of_a_step_is_that_of_the_steps_there_are(loaded, name):
    _, _, epochs, (mean, total) = loaded[name]
    steps = -(-len(epochs[0][0]) // LOADING[name].get("gradient_accumulation_steps", 1))
    assert mean == pytest.approx(total / steps, rel=1e-12)


def windows_of_steps(epochs: list, per_process: int) -> list[Counter]:
    """What both processes train in each optimizer step of the first epoch."""
    first, second = ([tuple(map(str, batch)) for batch in batches] for batches in epochs[0])
    return [
        Counter(first[low : low + per_process] + second[low : low + per_process])
        for low in range(0, len(first), per_process)
    ]


def imbalance(epochs: list, per_process: int) -> float:
    pairs = torch.tensor([[sum(cost for _, cost in batch) for batch in b] for b in epochs[0]], dtype=torch.float64)
    steps = torch.stack([part.sum(1) for part in pairs.split(per_process, dim=1)])
    return (steps.max(1).values - steps.mean(1)).sum().item() / steps.mean(1).sum().item()


def test_processes_are_balanced_by_attention_pairs(loaded):
    accumulated, shuffled = loaded["accumulation"][2], loaded["not balanced"][2]
    assert windows_of_steps(accumulated, 3) == windows_of_steps(shuffled, 3), "the windows of a step stay"
    assert imbalance(accumulated, 3) < 0.5 * imbalance(shuffled, 3)
    assert imbalance(loaded["epoch"][2], 1) < 0.5 * imbalance(loaded["plain"][2], 1)


# Training


TRAINING = {"examples": 60, "max_length": 90, "max_steps": 12, "logging_strategy": "steps", "logging_steps": 1}
FIGURES = ("loss", "mean_token_accuracy", "entropy", "reuse_ratio", "replay_share", "num_tokens", "grad_norm")


def train_alone(tmp_path: Path, **settings) -> dict:
    """In this process, with batches of two windows in place of two processes."""
    trainer = make_trainer(str(tmp_path / "one"), **{"per_device_train_batch_size": 2, **TRAINING, **settings})
    assert trainer.pack_reports["train"].windows % 2 == 1, "the number of windows does not divide"
    trainer.train()
    evaluated = trainer.evaluate(shared_dataset(17, seed=3))
    return {"state": trainer.model.state_dict(), "log": trainer.state.log_history, "eval": evaluated}


@pytest.mark.parametrize(("options", "wrapper"), [({}, "DistributedDataParallel"), (FSDP2, "FSDPLlamaForCausalLM")])
def test_two_processes_end_where_one_does(tmp_path, options, wrapper):
    """The same parameters and the same log, for the sums of the metrics are over all processes."""
    two = train(tmp_path, "two", 2, per_device_train_batch_size=1, evaluate=17, **TRAINING, **options)
    one = train_alone(tmp_path)
    assert (two["world"], two["model"]) == (2, wrapper)
    assert largest_difference(two["state"], one["state"]) <= 1e-5
    logs = [[entry for entry in each["log"] if "grad_norm" in entry] for each in (two, one)]
    assert len(logs[0]) == len(logs[1]) == 12
    for ours, theirs in zip(*logs, strict=True):
        assert [ours[name] for name in FIGURES] == pytest.approx([theirs[name] for name in FIGURES], rel=1e-4)
        assert ours["loss_tokens_per_second"] > 0
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert two["eval"][name] == pytest.approx(one["eval"][name], rel=1e-5), name


def test_balanced_accumulation_ends_where_one_process_does(tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 6}
    two = train(tmp_path, "two", 2, per_device_train_batch_size=1, **{**TRAINING, **options})
    assert largest_difference(two["state"], train_alone(tmp_path, **options)["state"]) <= 1e-5


@pytest.mark.parametrize("options", [{}, pytest.param(FSDP2, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"])
def test_killed_in_the_second_epoch_and_resumed_ends_where_one_process_does(tmp_path, options):
    settings = {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 6, **TRAINING, **options}
    settings["max_steps"] = 16
    train(tmp_path, "killed", 2, kill_at=14, expect=-signal.SIGKILL, **settings)
    assert (tmp_path / "killed" / "checkpoint-12").is_dir()
    resumed = train(tmp_path, "resumed", 2, resume=True, output_dir=tmp_path / "killed", **settings)
    assert [entry["step"] for entry in resumed["log"] if "grad_norm" in entry] == list(range(1, 17))
    assert largest_difference(resumed["state"], train_alone(tmp_path, max_steps=16)["state"]) <= 1e-5

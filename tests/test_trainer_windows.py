"""The options of `DagSFTConfig` for windows: what they change, that all processes agree, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from trl import TrlParser

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer

ROOT = Path(__file__).parents[1]
QUIET = {"save_strategy": "no", "report_to": [], "bf16": False, "use_cpu": True, "disable_tqdm": True}
PACKING = {"loss_weighting": "once", "overflow": "truncate", "progress": False}


def config(tmp_path: Path, **options) -> DagSFTConfig:
    return DagSFTConfig(str(tmp_path), **{"max_length": 128, "per_device_train_batch_size": 1, **QUIET, **options})


def trainer_for(tmp_path: Path, dataset: Dataset, eval_dataset: Dataset | None = None, **options) -> DagSFTTrainer:
    return DagSFTTrainer(
        model=tiny_llama(),
        args=config(tmp_path, per_device_eval_batch_size=1, **options),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=toy_tokenizer(),
    )


def labelled(sequences: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"input_ids": sequences, "labels": sequences})


def unshared(lengths=(6, 5, 4, 3, 2)) -> Dataset:
    """Sequences without a common prefix: depth first fills three windows of 10 tokens, two are enough."""
    return labelled([[index] * length for index, length in enumerate(lengths)])


def compile_search() -> None:
    """Compile the loops first, since the time for that counts as search."""
    pack_dataset(unshared(), 10, strategy="dfs", effort=0.01, **PACKING)


FILLED = {2: [(6, 4), (5, 3, 2)], 3: [(6,), (5, 4), (3, 2)]}
"""Lengths of the sequences in each window."""


# What they change


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, 2),
        ({"window_strategy": "dfs"}, 3),
        ({"window_strategy": "dfs", "window_effort": 0.2}, 2),
    ],
    ids=["best", "dfs", "effort"],
)
def test_strategy_and_effort_reach_both_data_sets(tmp_path, options, windows):
    compile_search()
    trainer = trainer_for(tmp_path, unshared(), unshared(), max_length=10, **options)
    strategy, effort = options.get("window_strategy", "best"), options.get("window_effort", 0.0)
    for name, rows in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        report = trainer.pack_reports[name]
        assert (report.windows, report.strategy, report.effort) == (windows, strategy, effort)
        assert len(rows) == windows and sorted(map(len, rows["input_ids"])) == sorted(map(sum, FILLED[windows]))


def test_buckets_part_the_training_data_only(tmp_path):
    # both of a pair share 4 tokens: together they take 9 positions (one is a copy), in different buckets 12
    sequences = [[pair, 100, 101, 102, 150 + half, pair] for pair in range(12) for half in range(2)]
    dataset = labelled(sequences)
    trainer = trainer_for(tmp_path, dataset, dataset, max_length=32, bucket_size=4, seed=7, max_steps=2)
    rows, report = pack_dataset(dataset, 32, bucket_size=4, seed=7, **PACKING)
    assert trainer.train_dataset[:] == rows[:] and trainer.pack_reports["train"] == report
    assert report.bucket_size == 4 and trainer.pack_reports["eval"].bucket_size is None
    assert trainer.pack_reports["eval"].executed_tokens < report.executed_tokens
    assert all(1 <= sum(token >= 150 for token in row["input_ids"]) <= 4 for row in trainer.train_dataset)
    assert trainer._total_weight == sum(map(sum, rows["loss_weight"])) == 12 * 3 + 24 * 2
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("seeds", "used"), [({"seed": 3}, 3), ({"seed": 3, "data_seed": 0}, 0), ({"seed": 3, "data_seed": 5}, 5)]
)
def test_windows_are_shuffled_with_the_seed_of_the_data(tmp_path, seeds, used):
    trainer = trainer_for(tmp_path, shared_dataset(60), max_length=90, **seeds)
    packed = {seed: pack_dataset(shared_dataset(60), 90, seed=seed, **PACKING)[0][:] for seed in (0, 3, 5)}
    assert len(packed[0]["input_ids"]) > 4
    assert [seed for seed, rows in packed.items() if rows == trainer.train_dataset[:]] == [used]


def test_in_batches_they_are_of_the_evaluation_data(tmp_path):
    trainer = trainer_for(
        tmp_path, unshared(), unshared(), max_length=10, packing_scope="batch", window_strategy="dfs"
    )
    assert {name: report.windows for name, report in trainer.pack_reports.items()} == {"eval": 3}


# All processes have the same rows


PROCESS = """
import itertools, json, os, sys
from pathlib import Path
from types import SimpleNamespace

import datasets
from dagpack_hf import pack
from tests.test_trainer_windows import compile_search, trainer_for, unshared
from tests.toy import shared_dataset

out, rank = Path(sys.argv[1]), int(os.environ["RANK"])

compile_search()
# the clock of the second process gives it no time to search
if rank == 1:
    pack.time = SimpleNamespace(monotonic=itertools.count().__next__)

on_disk = datasets.load_from_disk(str(out / "data"))
data = {"memory": unshared(), "disk": on_disk, "uncached": on_disk}
rows = {}
for name, dataset in data.items():
    if name == "uncached":
        datasets.disable_caching()
    trainer = trainer_for(out, dataset, max_length=10, window_strategy="dfs", window_effort=0.3)
    rows[name] = [trainer.pack_reports["train"].to_dict(), trainer.train_dataset[:]]
trainer = trainer_for(out, shared_dataset(60), max_length=90, bucket_size=20)
rows["buckets"] = [trainer.pack_reports["train"].to_dict(), trainer.train_dataset[:]]
(out / f"{rank}.json").write_text(json.dumps({"world": trainer.args.world_size, "rows": rows}))
trainer.accelerator.wait_for_everyone()
sys.stdout.flush(), sys.stderr.flush()
os._exit(0)
"""


def test_two_processes_have_the_same_rows_however_fast_each_searches(tmp_path):
    unshared().save_to_disk(tmp_path / "data")
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["world"] == 2
    assert set(first["rows"]) == {"memory", "disk", "uncached", "buckets"}
    for name in ("memory", "disk", "uncached"):
        report, rows = first["rows"][name]
        assert report["windows"] == len(rows["input_ids"]) == 2, f"{name}: the search has found nothing"


# What is refused, and how they are given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_strategy": "bfd"}, "window_strategy must be 'best' or 'dfs', got 'bfd'"),
        ({"window_effort": -1.0}, "window_effort must be a number of seconds, 0 or more, got -1.0"),
        ({"window_effort": float("inf")}, "window_effort must be a number of seconds"),
        ({"window_effort": "long"}, "window_effort must be a number of seconds, 0 or more, got 'long'"),
        ({"bucket_size": 0}, "bucket_size must be at least 1 example, got 0"),
        ({"bucket_size": 2.5}, "bucket_size must be at least 1 example, got 2.5"),
        (
            {"bucket_size": 8, "packing_scope": "batch"},
            "bucket_size=8 is not supported. With packing_scope='batch' .* leave bucket_size unset, or",
        ),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_on_the_command_line_and_in_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    given = {"output_dir": str(tmp_path), "window_strategy": "dfs", "window_effort": 10, "bucket_size": 500}
    recipe.write_text(yaml.safe_dump({**given, "bf16": False, "use_cpu": True}))
    for argv, expected in (
        ([], ("dfs", 10, 500)),
        (["--window_effort", "0.5", "--bucket_size", "64", "--window_strategy", "best"], ("best", 0.5, 64)),
    ):
        (args,) = TrlParser(DagSFTConfig).parse_args_and_config(["--config", str(recipe), *argv])
        assert (args.window_strategy, args.window_effort, args.bucket_size) == expected
    (args,) = TrlParser(DagSFTConfig).parse_args_and_config(["--output_dir", "x", "--bf16", "false", "--use_cpu"])
    assert (args.window_strategy, args.window_effort, args.bucket_size) == ("best", 0.0, None)

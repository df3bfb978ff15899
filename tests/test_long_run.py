"""A run that is killed at any moment ends where an uninterrupted one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dagpack_hf.checkpoints import is_complete, last_complete_checkpoint
from tests.train_script import make_trainer

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
STEPS, KILLS = 2000, 5


def start(out: Path, output_dir: Path, **settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.train_script", str(out), str(output_dir), json.dumps(settings)]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, expect: int = 0) -> None:
    _, errors = process.communicate(timeout=900)
    assert process.returncode == expect, errors[-3000:]


def same(one: Path, other: Path) -> bool:
    first, second = (torch.load(path)["state"] for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_two_thousand_steps_killed_five_times_end_where_an_uninterrupted_run_does(tmp_path):
    """The moments are random in steps and within a step, so some are while a checkpoint is saved."""
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 40, "save_total_limit": 2}
    settings |= {"max_length": 90, "per_device_train_batch_size": 2}
    settings |= {"lr_scheduler_type": "cosine", "warmup_steps": 50}
    finish(start(tmp_path / "whole.pt", tmp_path / "whole", **settings))

    progress = tmp_path / "progress"
    rng = random.Random(0)
    for kill_at in sorted(rng.sample(range(50, STEPS - 50), KILLS)):
        process = start(
            tmp_path / "no.pt", tmp_path / "killed", progress=str(progress), **settings,
            resume=(tmp_path / "killed").is_dir(),
        )  # fmt: skip
        while not progress.is_file() or int(progress.read_text() or 0) < kill_at:
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        finish(process, -signal.SIGKILL)
        assert not (tmp_path / "no.pt").exists()
    finish(start(tmp_path / "resumed.pt", tmp_path / "killed", resume=True, **settings))
    assert torch.load(tmp_path / "resumed.pt")["log"][-1]["step"] == STEPS
    assert same(tmp_path / "whole.pt", tmp_path / "resumed.pt")


def test_killed_while_it_saves_a_run_resumes_from_the_checkpoint_before(tmp_path):
    settings = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "max_length": 90}
    finish(start(tmp_path / "no.pt", tmp_path / "killed", kill_saving_at=6, **settings), -signal.SIGKILL)
    assert (tmp_path / "killed" / "checkpoint-6" / "model.safetensors").is_file()
    assert last_complete_checkpoint(str(tmp_path / "killed")).endswith("checkpoint-3")
    trainers = [make_trainer(str(tmp_path / name), **settings) for name in ("killed", "whole")]
    trainers[0].train(resume_from_checkpoint=True)
    trainers[1].train()
    states = [trainer.model.state_dict() for trainer in trainers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert is_complete(tmp_path / "killed" / "checkpoint-6"), "saved again"


def test_what_is_incomplete_is_passed_over_and_named(tmp_path, caplog):
    def checkpoint(step: int, state: str | None, archive: bytes | None = None) -> None:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
        torch.save({"a": torch.zeros(1000)}, folder / "optimizer.pt")
        if archive is not None:
            (folder / "rng_state_1.pth").write_bytes(archive)

    (tmp_path / "checkpoint-last").mkdir()
    with pytest.raises(ValueError, match=r"No complete checkpoint found in output_dir=[^;]*\. Name another"):
        last_complete_checkpoint(str(tmp_path))
    checkpoint(100, None)
    checkpoint(90, '{"global_step": 9')
    checkpoint(80, "{}", b"")
    checkpoint(70, "{}", (tmp_path / "checkpoint-100" / "optimizer.pt").read_bytes()[:-60])
    with pytest.raises(ValueError, match="checkpoint-70, checkpoint-80, checkpoint-90, checkpoint-100 are incomplete"):
        last_complete_checkpoint(str(tmp_path))
    checkpoint(9, "{}")
    caplog.clear()
    assert last_complete_checkpoint(str(tmp_path)).endswith("checkpoint-9")
    assert caplog.text.count("is incomplete") == 4 and "checkpoint-100" in caplog.text

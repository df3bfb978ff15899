"""Kills `save_rows` at every step, or at random moments, and looks at what is left. Run by `test_shards.py`.

    python -m tests.killed_while_saving FOLDER over|fresh|random

Each run, and each look, is a fork of this process, which itself starts no thread. It prints how many kills came before
and how many after the new rows were the data set.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset

from dagpack_hf.columns import ROW_FEATURES
from dagpack_hf.pack_report import PackReport
from dagpack_hf.shards import save_rows, saved_report

STEPS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")
KILLS = 15


def some_rows(version: int) -> tuple[Dataset, PackReport]:
    """Rows of any content, more for each version, and a report that names the version."""
    rng = np.random.default_rng(version)
    lengths = rng.integers(50, 150, 60 + version)
    columns = {name: [rng.integers(0, 2**24, length) for length in lengths] for name in ROW_FEATURES}
    report = PackReport(128, "once", 1, 1, 1, version, 1.0, 0, len(lengths), 1, 1)
    return Dataset.from_dict(columns, features=ROW_FEATURES.copy()), report


def save(folder: Path, version: int, overwrite: bool = True) -> None:
    rows, report = some_rows(version)
    save_rows(rows, folder, report, max_shard_size="40KB", overwrite=overwrite, progress=False)


def look(folder: Path, versions: tuple[int, ...]) -> int:
    """Which version the folder holds, as a whole and with its report; 255 for none."""
    cache = folder.parent / f"cache-{os.getpid()}"
    try:
        rows = load_dataset(str(folder), split="train", cache_dir=str(cache))
    except (FileNotFoundError, datasets.exceptions.DatasetNotFoundError):
        return 255
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    (version,) = (each for each in versions if len(rows) == 60 + each)
    assert rows[:] == some_rows(version)[0][:] and rows.features == ROW_FEATURES
    assert saved_report(folder)["packing"]["train"]["loss_tokens"] == version
    return version


def whole(folder: Path) -> None:
    """Check that nothing is left of a run that was killed."""
    names = sorted(os.listdir(folder))
    assert len(names) == 3 and names[0] == ".lock" and names[1] == "README.md" and names[2].startswith("data-"), names
    shards = sorted(os.listdir(folder / names[2]))
    assert shards[0] == "report.json" and len(shards) > 3 and all(name.endswith(".parquet") for name in shards[1:])


def kill_before(step: int) -> None:
    """Kill this process before its n-th step on disk."""
    numbers = count(1)

    def counted(function: Callable) -> Callable:
        def call(*args, **options):
            if next(numbers) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    pq.ParquetWriter.close = counted(pq.ParquetWriter.close)


def fork(run: Callable[[], int | None], kill_after: float | None = None) -> int:
    """Exit status of a function in a process of its own, -9 when it was killed."""
    child = os.fork()
    if not child:
        try:
            status = run() or 0
        except BaseException:
            traceback.print_exc()
            status = 254
        os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != 254
    return status


def main(folder: Path, mode: str) -> None:
    datasets.disable_progress_bars()
    if mode != "fresh":
        assert fork(lambda: save(folder, 0)) == 0
    began = time.perf_counter()
    assert fork(lambda: save(folder.with_name("timed"), 0)) == 0
    seconds = time.perf_counter() - began
    draw = random.Random(0)
    found: Counter[str] = Counter()
    for version in range(1, KILLS + 1) if mode == "random" else count(1):
        old = 255 if mode == "fresh" else version - 1

        def killed(version: int = version) -> None:
            if mode != "random":
                kill_before(version)
            save(folder, version)

        status = fork(killed, draw.uniform(0.0, 1.1 * seconds) if mode == "random" else None)
        left = fork(lambda version=version, old=old: look(folder, (old, version)))
        assert left in (old, version), left
        found["new" if left == version else "old"] += 1
        if status == 0 and mode != "random":
            break
        assert fork(lambda version=version, left=left: save(folder, version, overwrite=left != 255)) == 0
        assert fork(lambda version=version: look(folder, (version,))) == version
        whole(folder)
        if mode == "fresh":
            shutil.rmtree(folder)
    print(found["old"], found["new"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

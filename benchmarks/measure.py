"""What the benchmarks share: interleaved rounds, versions, and the line of figures at the end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "pyarrow", "datasets", "torch", "transformers", "trl")


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    """The function as a task of `interleave`: called once, it returns the seconds it took."""

    def task() -> float:
        gc.collect()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return task


def interleave(tasks: Mapping[str, Callable[[], float]], rounds: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each task in each round.

    A round runs every task once, every other round in reverse, so that a machine that slows down or heats up is not
    held against whatever comes last.

    Args:
        tasks: functions that run once and return the seconds that count.
        rounds: rounds that are kept.
        warm_up: run one round more at first and forget it.
    """
    gc.freeze()  # what is there now, imported modules above all, need not be searched between tasks
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for index in range(-int(warm_up), rounds):
        for name in list(tasks)[:: -1 if index % 2 else 1]:
            spent = tasks[name]()
            if index >= 0:
                seconds[name].append(spent)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_memory(function: Callable[[], Any]) -> float | None:
    """Largest growth of the process's resident memory while the function runs, in MiB; `None` where not Linux."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        function()
        return (_resident("VmHWM") - before) / 1024
    except (AttributeError, OSError, TypeError):
        return None


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within it, memory that is freed stays with the process, as CUDA's allocator keeps it; where glibc allocates.

    Else a fifth of the time goes into pages that are given back and fetched again, and how many these are depends on
    what ran before.
    """
    trim_threshold, mmap_threshold, default = -1, -3, 128 * 1024  # names and default of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):  # not glibc, not even a Unix
        yield
        return
    mallopt(trim_threshold, -1)
    mallopt(mmap_threshold, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(trim_threshold, default)
        mallopt(mmap_threshold, default)


def environment() -> dict[str, Any]:
    """Hardware class and versions."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), **versions}


def print_figures(benchmark: str, options: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Everything that was measured as one line of JSON, the last line of the output."""
    line = {"benchmark": benchmark, "options": options, "environment": environment(), **figures}
    print(json.dumps(_rounded(line)))


def _rounded(value: Any) -> Any:
    """The value with every float at five significant digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")

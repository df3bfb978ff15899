"""A run on a GPU that must end in time: sections and cases, what was left out and why; seconds and memory."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from measure import peak_memory, print_figures


class WrongResultError(Exception):
    """A result is not what it has to be."""


class Tee(io.TextIOBase):
    """Writes to several streams, at once, so that nothing is lost when the run is cut short."""

    def __init__(self, *streams: TextIO):
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
            stream.flush()
        return len(text)


class Run:
    """Device, figures so far, and the time that is left.

    Args:
        options: arguments of the command.
        device: where everything is computed.
        shares: the sections in order, and the part of the time that each has.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, shares: Mapping[str, float]):
        self.options, self.device, self.shares = options, device, dict(shares)
        self.end = self.deadline = time.monotonic() + 0.97 * options.seconds
        self.case = "start"
        self.figures: dict[str, Any] = {"hardware": hardware(device), "skipped": {}, "wrong": []}
        self.watch = threading.Timer(options.seconds, self.cut_short)
        self.watch.daemon = True
        self.watch.start()
        print(*(f"{name} {value}" for name, value in self.figures["hardware"].items()), sep=", ")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds left to this section."""
        return self.deadline - time.monotonic()

    def section(self, name: str, *parts: Callable[[Run], None]) -> None:
        """Run the parts of a section. What it leaves of its time goes to the later ones."""
        share = self.shares[name] / sum(self.shares.values())
        now = time.monotonic()
        self.deadline = now + (self.end - now) * share
        del self.shares[name]
        print(f"\n{name}, up to {self.left:.0f} s")
        for part in parts:
            with self.trying(part.__name__.replace("_", " ")):
                part(self)

    @contextlib.contextmanager
    def trying(self, case: str, required: bool = False) -> Iterator[None]:
        """Go on with the next case if this one fails; then the run is wrong if the case is required."""
        self.case = case
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            if required:
                self.figures["wrong"].append(f"{case}: {reason}")
                print(f"  WRONG {case}: {reason}")
            else:
                self.skip(case, reason)
        if self.on_gpu:
            with contextlib.suppress(RuntimeError):  # after some errors nothing on the GPU works any more
                torch.cuda.empty_cache()

    def skip(self, case: str, reason: str) -> None:
        self.figures["skipped"][case] = reason
        print(f"  skipped {case}: {reason}")

    def enough_for(self, case: str, seconds: float) -> bool:
        """Whether a case that takes so long on a GPU can begin; if not, it is noted."""
        needed = seconds if self.on_gpu else 0
        if self.left >= needed:
            return True
        self.skip(case, f"{max(self.left, 0):.0f} s left, some {needed:.0f} s needed")
        return False

    def finish(self) -> int:
        """Print the figures; returns the exit code."""
        self.watch.cancel()
        options = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(self.options).items()
        }
        print()
        print_figures("gpu", options, self.figures)
        return 1 if self.figures["wrong"] else 0

    def cut_short(self) -> None:
        """End the process from another thread, with the figures so far."""
        try:
            self.skip(self.case, f"still running after {self.options.seconds:g} s, and all that follows")
            self.finish()
            sys.stdout.flush()
        finally:
            os._exit(3)


def hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def seconds_of(function: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Seconds of a call; on a GPU by events, after all that was begun before has ended."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def median_seconds(function: Callable[[], Any], run: Run) -> float:
    """Median of the rounds, after a call to warm up or compile."""
    function()
    return statistics.median(seconds_of(function, run.device, 3) for _ in range(run.options.rounds))


def peak_mib(function: Callable[[], Any], device: torch.device) -> float | None:
    """Largest memory in use during a call: on a GPU all that is allocated, on a CPU the growth of the process."""
    if device.type == "cpu":
        return peak_memory(function)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20

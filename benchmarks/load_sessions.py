r"""Speed and memory of loading pi sessions, beside `json.loads` of every line and the trace loader of `datasets`.

    python benchmarks/load_sessions.py [--quick] [--megabytes N] [--rounds R] [--peer-rounds R] [--seed S]

Two corpora of synthetic sessions (`session_corpus.py`), *text* and *images*, are made in a temporary folder, read once
so that they are in the page cache, and loaded in four ways:

*floor*: bytes of each line, decoded, `json.loads`, dropped; one process. *one process* and *two processes*:
`load_sessions` with that `num_proc`, everything else by default (images become placeholders), nothing taken from the
cache. *datasets traces*: `load_dataset("json")`, which hands session files to the package `teich` and makes one row of
each file; it is left out where `teich` is not installed. It reads one conversation of each file, without its branches.

Each measurement has a process of its own. Time is from the call to the data set, without the start of the interpreter
and imports made beforehand. Peak memory is the whole process, not its growth, in three figures:

*peak*: `ru_maxrss`, of the process itself or of the largest child that it waited for, whichever is more. It counts
mapped file pages that are in memory, also those of the data set's Arrow file, which the system may drop at any time,
and is never below the 30 MB of the process that starts the others.
*anonymous*: memory that is no page of a file, sampled every 10 ms; again of the largest process. *all processes*: the
same, added up over the process and its descendants at one moment; pages that forked workers share count in each.
Samples need Linux; elsewhere they are null.

The target is a third of the floor's speed with one process, and a *peak* below ten times the longest line plus 300 MB
(MB = 10^6 bytes) in each process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import interleave, medians, print_figures

MB = 1_000_000
SPEED_TARGET = 1 / 3
LINES_TARGET, BASE_TARGET = 10, 300 * MB
SAMPLE_S = 0.01
FLOOR, ONE, TWO, PEER = "floor", "one process", "two processes", "datasets traces"
CORPORA = {"text": (), "images": ("--images",)}
"""Options of the generator for each corpus."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.case:
        print(json.dumps(load(options.case, options.folder)))
        return
    figures = {}
    for name, generator_options in CORPORA.items():
        with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
            figures[name] = measure(folder, generator_options, options)
        print_corpus(name, figures[name])
    shown = {name: value for name, value in vars(options).items() if name not in ("case", "folder")}
    print_figures("load_sessions", shown, {"corpora": figures})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--megabytes", type=float, default=1000, help="size of each corpus in 10^6 bytes (default 1000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument(
        "--peer-rounds", type=int, default=1, help="rounds of the trace loader of datasets (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the content (default 0)")
    parser.add_argument("--quick", action="store_true", help="same shape, 40 MB for each corpus, 2 rounds")
    parser.add_argument("--case", choices=tuple(LOADERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.megabytes, options.rounds = 40, 2
    return options


# The ways to load, each in its own process


def load(case: str, folder: str) -> dict[str, Any]:
    """Load a corpus in this process; seconds, peak memory in bytes, and what came out."""
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as cache:
        seconds, found = LOADERS[case](folder, cache)
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = (resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {"seconds": seconds, **dict(zip(("process", "largest_child"), peaks, strict=True)), "found": found}


def load_floor(folder: str, cache: str) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    lines = 0
    for path in session_files(folder):
        with open(path, "rb") as file:
            for line in file:
                json.loads(line.decode())
                lines += 1
    return time.perf_counter() - start, {"lines": lines}


def load_dagpack(folder: str, cache: str, num_proc: int) -> tuple[float, dict[str, Any]]:
    import datasets

    from dagpack_hf.pi import load_sessions

    datasets.disable_progress_bars()
    start = time.perf_counter()
    dataset, report = load_sessions(
        folder, num_proc=num_proc, cache_dir=cache, load_from_cache_file=False, return_report=True
    )
    seconds = time.perf_counter() - start
    assert report.complete, str(report)
    counts = {name: getattr(report, name) for name in ("files", "entries", "turns", "targets")}
    return seconds, {"rows": len(dataset), "row_bytes": dataset.data.nbytes, **counts}


def load_traces(folder: str, cache: str) -> tuple[float, dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    start = time.perf_counter()
    dataset = datasets.load_dataset("json", data_files=session_files(folder), split="train", cache_dir=cache)
    seconds = time.perf_counter() - start
    return seconds, {"rows": len(dataset), "row_bytes": dataset.data.nbytes}


def session_files(folder: str) -> list[str]:
    return sorted(map(str, Path(folder).rglob("*.jsonl")))


LOADERS: dict[str, Callable[[str, str], tuple[float, dict[str, Any]]]] = {
    FLOOR: load_floor,
    ONE: lambda folder, cache: load_dagpack(folder, cache, 1),
    TWO: lambda folder, cache: load_dagpack(folder, cache, 2),
    PEER: load_traces,
}


# Measurement


def measure(folder: str, generator_options: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one corpus."""
    corpus_folder = f"{folder}/corpus"
    corpus = make_corpus(corpus_folder, generator_options, options)
    for path in session_files(corpus_folder):
        with open(path, "rb") as file:
            while file.read(MB):
                pass
    results: dict[str, list[dict[str, Any]]] = {}

    def task(case: str) -> Callable[[], float]:
        def run() -> float:
            result = run_case(case, corpus_folder)
            results.setdefault(case, []).append(result)
            return result["seconds"]

        return run

    seconds = interleave({case: task(case) for case in (FLOOR, ONE, TWO)}, options.rounds, warm_up=False)
    if options.peer_rounds and has_teich():
        seconds |= interleave({PEER: task(PEER)}, options.peer_rounds, warm_up=False)
    found = {case: runs[0]["found"] for case, runs in results.items()}
    check(corpus, results)
    median = medians(seconds)
    limit = LINES_TARGET * corpus["longest_line"] + BASE_TARGET
    memory = {case: peak_figures(runs) for case, runs in results.items()}
    ratio = {case: median[FLOOR] / spent for case, spent in median.items()}
    return {
        "corpus": corpus,
        "found": found,
        "mb_per_s": {case: corpus["bytes"] / MB / spent for case, spent in median.items()},
        "speed_over_floor": ratio,
        "speed_target": SPEED_TARGET,
        "speed_target_met": ratio[ONE] >= SPEED_TARGET,
        "memory_mb": memory,
        "memory_limit_mb": limit / MB,
        "memory_limit_met": {case: memory[case]["peak"] < limit / MB for case in memory if case in (ONE, TWO)},
        "median_s": median,
        "seconds": seconds,
    }


def make_corpus(folder: str, generator_options: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Write a corpus in a process of its own: a child's `ru_maxrss` is no less than its parent's memory."""
    script = Path(__file__).with_name("session_corpus.py")
    size = ("--megabytes", str(options.megabytes), "--seed", str(options.seed))
    line = subprocess.run(
        [sys.executable, str(script), folder, *size, *generator_options], check=True, stdout=subprocess.PIPE
    )
    return json.loads(line.stdout)


def run_case(case: str, folder: str) -> dict[str, Any]:
    """Load in a fresh process, and sample its memory and that of its descendants from here."""
    command = [sys.executable, __file__, "--case", case, "--folder", folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    anonymous: dict[int, int] = {}
    together = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        while process.poll() is None:
            sizes = {pid: size for pid in descendants(process.pid) if (size := anonymous_bytes(pid)) is not None}
            together = max(together, sum(sizes.values()))
            for pid, size in sizes.items():
                anonymous[pid] = max(anonymous.get(pid, 0), size)
            time.sleep(SAMPLE_S)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"loading by {case!r} failed with exit status {process.returncode}; its error is above")
    result = json.loads(output.splitlines()[-1])
    own = anonymous.pop(process.pid, None)
    return {
        **result,
        "anonymous_process": own,
        "anonymous_largest_child": None if own is None else max(anonymous.values(), default=0),
        "anonymous_together": None if own is None else together,
    }


def descendants(pid: int) -> list[int]:
    """The process and its descendants that run now."""
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                pending += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def anonymous_bytes(pid: int) -> int | None:
    """Memory of a process that is no page of a file; `None` where it has ended or the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), None)


def peak_figures(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """The largest of all rounds, in MB."""

    def largest(*names: str) -> float | None:
        values = [run[name] for run in runs for name in names if run[name] is not None]
        return max(values) / MB if values else None

    return {
        "peak": largest("process", "largest_child"),
        "process": largest("process"),
        "largest_child": largest("largest_child"),
        "anonymous": largest("anonymous_process", "anonymous_largest_child"),
        "anonymous_process": largest("anonymous_process"),
        "anonymous_largest_child": largest("anonymous_largest_child"),
        "anonymous_all_processes": largest("anonymous_together"),
    }


def check(corpus: dict[str, Any], results: dict[str, list[dict[str, Any]]]) -> None:
    """Every way read everything, and both numbers of processes gave the same."""
    for case, runs in results.items():
        assert all(run["found"] == runs[0]["found"] for run in runs), f"rounds of {case!r} differ"
    one, two = results[ONE][0]["found"], results[TWO][0]["found"]
    assert one == {**two, "row_bytes": one["row_bytes"]}, f"one process found {one}, two found {two}"
    assert (one["files"], one["turns"]) == (corpus["files"], corpus["turns"])
    assert one["entries"] + one["files"] == corpus["lines"] == results[FLOOR][0]["found"]["lines"]


def has_teich() -> bool:
    from importlib.util import find_spec

    return find_spec("teich") is not None


def print_corpus(name: str, figures: dict[str, Any]) -> None:
    corpus, found = figures["corpus"], figures["found"][ONE]
    print(f"{name}: {corpus['bytes'] / MB:,.0f} MB in {corpus['files']} files of up to ", end="")
    print(f"{corpus['largest_file'] / MB:.1f} MB, {corpus['lines']:,} lines of up to ", end="")
    print(f"{corpus['longest_line'] / MB:.2f} MB, {corpus['images']} images ({corpus['image_bytes'] / MB:,.0f} MB)")
    print(f"  {found['targets']:,} targets in {found['rows']:,} rows of {found['row_bytes'] / MB:,.0f} MB in all")
    memory = ("peak", "anonymous", "all processes")
    print(f"  {'':<17}{'MB/s':>8}{'of floor':>10}" + "".join(f"{title:>15}" for title in memory) + "  seconds")
    for case, spent in figures["seconds"].items():
        peaks = figures["memory_mb"][case]
        cells = (peaks[key] for key in ("peak", "anonymous", "anonymous_all_processes"))
        print(f"  {case:<17}{figures['mb_per_s'][case]:>8,.0f}{figures['speed_over_floor'][case]:>10.2f}", end="")
        print("".join(f"{'-' if cell is None else f'{cell:,.0f} MB':>15}" for cell in cells), end="  ")
        print(" ".join(f"{value:.2f}" for value in spent))
    if PEER not in figures["seconds"]:
        print(f"  {PEER:<17}{'-':>8}  not measured (needs the package teich)")
    met = {True: "met", False: "missed"}
    print(f"  speed of one process at least {SPEED_TARGET:.2f} of the floor: {met[figures['speed_target_met']]}")
    print(f"  peak below {figures['memory_limit_mb']:,.0f} MB: ", end="")
    print(", ".join(f"{met[value]} with {case}" for case, value in figures["memory_limit_met"].items()), flush=True)


if __name__ == "__main__":
    main()

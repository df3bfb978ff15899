"""Speed, memory and gap of packing: trie, plan, rows and the whole, beside TRL's packing and a dictionary trie.

    python benchmarks/pack.py [--quick] [--tokens N] [--large N] [--linear N] [--rounds R] [--corpora NAME ...]
                              [--labels] [--tokenizer FILE]

Every corpus (`packing_corpora.py`) is written to an Arrow file, mapped into memory and read once, and then packed
with windows of four times its longest sequence. Agent corpora and documents are measured at two sizes. Both packers
get the same data set (`input_ids`, with `--labels` also `labels`) and the same window length, and both write an Arrow
file: ours five vectors for each position, TRL's one (two with labels). Speeds are per *raw* token, the tokens of the
sequences written out, which is what both read; that of *rows* is per position written, in memory, a portion at a
time. *plan* is all that decides which leaf goes where, with the lower bound. The dictionary trie, a dictionary for
each token, merges a part: the first sequences, at most 1,000. Seconds are processor time, so that what else the
machine does hardly shows; nothing runs in parallel. Compiled code is compiled beforehand, and before each run the
processor's caches are emptied, since a corpus is packed once and not again and again.

*Memory* is anonymous memory above the mapped tokens, in a fresh process for each corpus: the growth of its peak
resident memory from the moment where the whole file is mapped and resident and the kernels are warm (Linux only).
*B/sequence* is that of the trie divided by the number of sequences; *packing* is the same for all of `pack_dataset`.

*Linear*: speed of the trie on an agent corpus of `--linear` tokens over that on one of `--tokens`, and memory of
packing it. *Partitioned*: windows of that corpus if it is packed in partitions, as one larger than memory is.
*Tokenising*: time of `pack_dataset` over that of tokenising as many raw tokens, in batches, on one thread. The speed
of the tokenizer is measured on the lines of the bundled sessions, again and again, so that it has most words in its
cache: more than it reaches on new text. By default it is the bundled one, which is small and fast; `--tokenizer` takes
that of a model.

Targets are printed as met or missed where the corpus is one that they are for: gaps of forests where a window has
room for four of the longest sequences, or of 10,000 documents; memory per sequence of 50,000 sequences or more (of
fewer it is what the allocator keeps); speed of writing of a million positions or more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset
from measure import interleave, medians, peak_memory, print_figures
from packing_corpora import AGENTS, CORPORA, write_corpus

from dagpack_hf import TokenForest, pack_dataset
from dagpack_hf.columns import PORTION, ROW_FEATURES
from dagpack_hf.external.packing import LargeDataset, measure_dataset
from dagpack_hf.layout import RowWriter
from dagpack_hf.pack import Windows, lower_bound, pack_windows
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.segments import Segments, build_segments

LARGE = ", large"
PATHS_PER_WINDOW = 4
SHARED_TARGET, OTHER_TARGET = 1000, 200
"""Millions of raw tokens per second of the trie, on agent corpora and on all others."""
WRITING_TARGET, LEAST_POSITIONS = 150, 1_000_000
MEMORY_TARGET, LEAST_SEQUENCES = 140, 50_000
"""Bytes per sequence of the trie, and of how many sequences at least."""
LINEAR_MEMORY_TARGET = 1000
"""Megabytes of packing a corpus of `--linear` tokens."""
PARTITIONS, PARTITIONED_TARGET, LEAST_WINDOWS = 4, 0.02, 100
"""Partitions of the corpora of `--linear` tokens, windows more than in memory, and windows of a partition at least."""
LARGE_TOO = (*AGENTS, "documents")
SPEEDUP_TARGET = 10
LINEAR_TARGET = 0.8
GAP_TARGET, DOCUMENTS_GAP_TARGET, LEAST_DOCUMENTS = 0.05, 0.01, 10_000
TOKENIZING_TARGET = 0.01
BATCH = 1000
CACHES = 128 << 20
"""Bytes that are read so that nothing else is left in the processor's caches."""
MIB, MB = 1 << 20, 1_000_000


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of)))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sizes = {name: (name, options.tokens, options.rounds) for name in options.corpora}
    if options.large:
        sizes |= {
            name + LARGE: (name, options.large, options.large_rounds) for name in options.corpora if name in LARGE_TOO
        }
    figures = {}
    for title, (name, tokens, rounds) in sizes.items():
        with tempfile.TemporaryDirectory(prefix="packing-") as folder:
            path = write_corpus(f"{folder}/corpus.arrow", name, tokens, labels=options.labels)
            figures[title] = measure(path, rounds, options.dict_tokens)
            figures[title]["memory"] = memory_of(path)
        median = figures[title]["median_s"]
        print(f"{title}: pack_dataset {median['pack_dataset']:.3f} s, TRL {median['trl bfd']:.3f} s", flush=True)
    tokenizing = measure_tokenizer(options.tokenizer, options.rounds)
    for case in figures.values():
        case["share_of_tokenizing"] = (
            case["median_s"]["pack_dataset"] * tokenizing["tokens_per_s"] / case["raw_tokens"]
        )
    linear = {
        name: measure_linear(name, options.tokens, options.linear, options.large_rounds, options.labels)
        for name in options.corpora
        if name in AGENTS
    }
    found = targets(figures, linear)
    print_tables(figures, tokenizing, linear)
    print_targets(found)
    shown = {name: value for name, value in vars(options).items() if name != "memory_of"}
    results = {"corpora": figures, "tokenizing": tokenizing, "linear": linear, "targets": found}
    print_figures("pack", shown, results)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="raw tokens of each corpus (default 10,000,000)"
    )
    parser.add_argument(
        "--large",
        type=int,
        default=100_000_000,
        help="raw tokens of each agent corpus and of the documents the second time, 0 for no second time (default "
        "100,000,000)",
    )
    parser.add_argument(
        "--linear",
        type=int,
        default=800_000_000,
        help="raw tokens of the agent corpora whose trie is compared with that of --tokens (default 800,000,000)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one to warm up (default 5)")
    parser.add_argument(
        "--large-rounds", type=int, default=3, help="the same for large corpora and --linear (default 3)"
    )
    parser.add_argument(
        "--dict-tokens",
        type=int,
        default=400_000,
        help="raw tokens of the part that the dictionary trie merges (default 400,000)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="same shape, 2 M tokens, none of the large corpora, 3 rounds"
    )
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA), choices=list(CORPORA), help="only some of them")
    parser.add_argument("--labels", action="store_true", help="corpora with labels: half of each sequence is trained")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json instead of the bundled tokenizer")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.large, options.linear = 2_000_000, 0, 16_000_000
        options.rounds, options.dict_tokens = 3, 100_000
    return options


# What is packed


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk, mapped into memory.

    Args:
        dataset: its data set.
        tokens: token ids of each record batch.
        offsets: offsets of its sequences in each record batch.
        labels: their labels, if there are any.
    """

    dataset: Dataset
    tokens: list[np.ndarray]
    offsets: list[np.ndarray]
    labels: list[np.ndarray] | None

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Map a corpus and read it once."""
        dataset = Dataset.from_file(str(path))
        columns = {
            name: [chunk.values.to_numpy() for chunk in dataset.data[name].chunks] for name in dataset.column_names
        }
        for values in chain.from_iterable(columns.values()):
            values.max()
        offsets = [chunk.offsets.to_numpy() for chunk in dataset.data["input_ids"].chunks]
        return cls(dataset, columns["input_ids"], offsets, columns.get("labels"))

    @property
    def max_length(self) -> int:
        """Window length."""
        return PATHS_PER_WINDOW * int(max(np.diff(bounds).max() for bounds in self.offsets))

    @property
    def raw_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def part(self, tokens: int) -> Corpus:
        """The first sequences, until they have so many tokens or the first record batch is at its end."""
        bounds = self.offsets[0]
        count = min(int(np.searchsorted(bounds, tokens)), len(bounds) - 1)
        labels = None if self.labels is None else [self.labels[0][: bounds[count]]]
        return Corpus(self.dataset, [self.tokens[0][: bounds[count]]], [bounds[: count + 1]], labels)

    def merge(self) -> TokenForest:
        return TokenForest.from_arrays(self.tokens, self.offsets, self.labels)


# Measurement


def measure(path: Path, rounds: int, dict_tokens: int) -> dict[str, Any]:
    """Figures of one corpus, but for its memory."""
    import trl

    corpus = Corpus.open(path)
    length, raw = corpus.max_length, corpus.raw_tokens
    part = corpus.part(dict_tokens)
    lists = [values.tolist() for values in np.split(part.tokens[0], part.offsets[0][1:-1])]
    forest = corpus.merge()
    segments = build_segments(forest)
    windows = pack_windows(segments, length)
    walked = pack_windows(segments, length, strategy="dfs")
    found: dict[str, Any] = {}

    def ours() -> Dataset:
        rows, found["report"] = pack_dataset(corpus.dataset, length, progress=False)
        return rows

    def theirs() -> Dataset:
        rows = trl.pack_dataset(corpus.dataset, length, strategy="bfd")
        found["trl windows"] = len(rows)
        return rows

    seconds = interleave(
        {
            "trie": spent_on(corpus.merge),
            "plan": spent_on(lambda: plan(forest, length)),
            "rows": spent_on(lambda: write_rows(forest, segments, windows)),
            "pack_dataset": spent_on(ours, remove),
            "trl bfd": spent_on(theirs, remove),
            "trie (part)": spent_on(part.merge),
            "dict trie (part)": spent_on(lambda: dict_trie(lists)),
        },
        rounds,
    )
    median = medians(seconds)
    report, part_tokens = found["report"], part.raw_tokens
    assert (report.windows, report.logical_tokens) == (len(windows), raw)
    return {
        "sequences": len(corpus.dataset),
        "raw_tokens": raw,
        "unique_tokens": report.unique_tokens,
        "executed_tokens": report.executed_tokens,
        "reuse_ratio": report.reuse_ratio,
        "longest_path": report.longest_path,
        "max_length": length,
        "windows": report.windows,
        "lower_bound": report.lower_bound,
        "gap": report.gap,
        "dfs_windows": len(walked),
        "trl_windows": found["trl windows"],
        "raw_tokens_per_s": {name: (part_tokens if "part" in name else raw) / spent for name, spent in median.items()},
        "written_tokens_per_s": report.executed_tokens / median["rows"],
        "speedup_over_trl": median["trl bfd"] / median["pack_dataset"],
        "trie_over_dict": median["dict trie (part)"] / median["trie (part)"],
        "part_tokens": part_tokens,
        "median_s": median,
        "seconds": seconds,
    }


def plan(forest: TokenForest, max_length: int) -> None:
    """All that decides which leaf goes where, with the certificate."""
    pack_windows(build_segments(forest), max_length)
    lower_bound(forest, max_length)


def write_rows(forest: TokenForest, segments: Segments, windows: Windows) -> None:
    """All rows, so many positions at a time."""
    for _ in RowWriter(forest, segments, windows, seed=0).portions(PORTION):
        pass


def dict_trie(sequences: list[list[int]]) -> dict[int, Any]:
    """The plain way: a dictionary for each token."""
    root: dict[int, Any] = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    return root


def spent_on(function: Callable[[], Any], end: Callable[[Any], None] | None = None) -> Callable[[], float]:
    """The function as a task of `interleave` that begins with empty caches; what it returns is given to `end`."""

    def task() -> float:
        gc.collect()
        filler().max()
        start = time.process_time()
        result = function()
        spent = time.process_time() - start
        if end is not None:
            end(result)
        return spent

    return task


def remove(rows: Dataset) -> None:
    """Remove the files that a data set lies in."""
    for file in rows.cache_files:
        Path(file["filename"]).unlink()


@cache
def filler() -> np.ndarray:
    return np.ones(CACHES, np.uint8)


def memory_of(path: Path) -> dict[str, Any]:
    """Memory of merging and of packing a corpus, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        small = Corpus.open(write_corpus(f"{folder}/small.arrow", "agent 4x", 10_000))
        pack_dataset(small.dataset, small.max_length, progress=False)
        small.merge()
    corpus = Corpus.open(path)
    trie = _megabytes(peak_memory(corpus.merge))
    whole = _megabytes(peak_memory(lambda: pack_dataset(corpus.dataset, corpus.max_length, progress=False)))
    return {
        "mapped_mb": corpus.raw_tokens * 4 / MB,
        "trie_mb": trie,
        "bytes_per_sequence": None if trie is None else trie * MB / len(corpus.dataset),
        "pack_dataset_mb": whole,
    }


def _megabytes(mib: float | None) -> float | None:
    return None if mib is None else mib * MIB / MB


def measure_tokenizer(file: str | None, rounds: int) -> dict[str, Any]:
    """Speed of a tokenizer, by default the bundled one, on the lines of the bundled sessions."""
    from transformers import PreTrainedTokenizerFast

    from dagpack_hf.sample import sample_sessions, sample_tokenizer

    tokenizer = sample_tokenizer() if file is None else PreTrainedTokenizerFast(tokenizer_file=file)
    lines = [
        line for path in sorted(sample_sessions().glob("*.jsonl")) for line in path.read_text("utf-8").split("\n")
    ]
    batches = [lines[low : low + BATCH] for low in range(0, len(lines), BATCH)]
    tokens = sum(len(ids) for batch in batches for ids in tokenizer(batch)["input_ids"])
    seconds = interleave({"tokenizer": spent_on(lambda: [tokenizer(batch) for batch in batches])}, rounds)
    return {
        "tokens": tokens,
        "characters": sum(map(len, lines)),
        "tokens_per_s": tokens / medians(seconds)["tokenizer"],
        "seconds": seconds["tokenizer"],
    }


def measure_linear(name: str, tokens: int, more_tokens: int, rounds: int, labels: bool) -> dict[str, Any]:
    """Speed of the trie on a corpus and on a larger one of the same kind."""
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        few, many = (
            Corpus.open(write_corpus(f"{folder}/{size}.arrow", name, size, labels=labels))
            for size in (tokens, more_tokens)
        )
        seconds = interleave({"few": spent_on(few.merge), "many": spent_on(many.merge)}, rounds)
        sizes = {"few": few.raw_tokens, "many": many.raw_tokens}
        partitioned = measure_partitioned(many, Path(folder, "rows.arrow"))
        memory = memory_of(Path(folder, f"{more_tokens}.arrow"))
    speed = {size: sizes[size] / spent for size, spent in medians(seconds).items()}
    ratio = speed["many"] / speed["few"]
    return {
        "raw_tokens": sizes,
        "raw_tokens_per_s": speed,
        "ratio": ratio,
        "seconds": seconds,
        "memory": memory,
        "partitioned": partitioned,
    }


def measure_partitioned(corpus: Corpus, path: Path) -> dict[str, Any]:
    """Windows of a corpus that is packed in partitions, and of one that is packed in memory."""
    length = corpus.max_length
    whole = len(pack_windows(build_segments(corpus.merge()), length))
    blocks = measure_dataset(corpus.dataset, length)
    large = LargeDataset(corpus.dataset, PackOptions(length, seed=0), blocks, PARTITIONS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, ROW_FEATURES.arrow_schema) as stream:
        start = time.process_time()
        report = large.pack(stream.write_table)
        spent = time.process_time() - start
    assert report.partitions == PARTITIONS
    return {
        "windows": report.windows,
        "windows_in_memory": whole,
        "more": report.windows / whole - 1,
        "seconds": spent,
    }


def targets(figures: dict[str, dict[str, Any]], linear: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each target with what was measured and whether it is met."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float | None, limit: float, *, least: bool = False) -> None:
        if value is not None:
            met = value >= limit if least else value <= limit + 1e-9  # 21 windows over 20, minus one, is 0.05
            found[name] = {"value": value, "limit": limit, "met": met}

    for name, case in figures.items():
        agent = name.removesuffix(LARGE) in AGENTS
        speed = case["raw_tokens_per_s"]["trie"] / MB
        add(f"{name}: trie, M tokens/s", speed, SHARED_TARGET if agent else OTHER_TARGET, least=True)
        if case["executed_tokens"] >= LEAST_POSITIONS:
            add(f"{name}: rows, M positions/s", case["written_tokens_per_s"] / MB, WRITING_TARGET, least=True)
        add(f"{name}: times TRL's speed", case["speedup_over_trl"], SPEEDUP_TARGET, least=True)
        if case["sequences"] >= LEAST_SEQUENCES:
            add(f"{name}: bytes per sequence", case["memory"]["bytes_per_sequence"], MEMORY_TARGET)
        if name.removesuffix(LARGE) != "documents":
            add(f"{name}: gap", case["gap"], GAP_TARGET)
        elif case["sequences"] >= LEAST_DOCUMENTS:
            add(f"{name}: gap", case["gap"], DOCUMENTS_GAP_TARGET)
        add(f"{name}: windows / those of dfs", case["windows"] / case["dfs_windows"], 1)
        add(f"{name}: packing / tokenising", case["share_of_tokenizing"], TOKENIZING_TARGET)
    for name, case in linear.items():
        add(f"{name}: trie, speed at more tokens", case["ratio"], LINEAR_TARGET, least=True)
        partitioned = case["partitioned"]
        if partitioned["windows_in_memory"] >= PARTITIONS * LEAST_WINDOWS:
            add(f"{name}: windows more in partitions", partitioned["more"], PARTITIONED_TARGET)
        add(f"{name}: MB of packing more tokens", case["memory"]["pack_dataset_mb"], LINEAR_MEMORY_TARGET)
    return found


# Output


def print_tables(
    figures: dict[str, dict[str, Any]], tokenizing: dict[str, Any], linear: dict[str, dict[str, Any]]
) -> None:
    def table(title: str, columns: dict[str, Callable[[dict[str, Any]], str]]) -> None:
        print(f"\n{title:<26}" + "".join(f"{name:>14}" for name in columns))
        for name, case in figures.items():
            print(f"  {name:<24}" + "".join(f"{cell(case):>14}" for cell in columns.values()))

    def speed(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda case: f"{case['raw_tokens_per_s'][name] / MB:,.1f}"

    def memory(name: str, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda case: "-" if case["memory"][name] is None else f"{case['memory'][name]:,.{digits}f}"

    table(
        "windows",
        {
            "sequences": lambda case: f"{case['sequences']:,}",
            "M raw tokens": lambda case: f"{case['raw_tokens'] / MB:,.2f}",
            "reuse ratio": lambda case: f"{case['reuse_ratio']:,.2f}",
            "longest": lambda case: f"{case['longest_path']:,}",
            "max_length": lambda case: f"{case['max_length']:,}",
            "windows": lambda case: f"{case['windows']:,}",
            "lower bound": lambda case: f"{case['lower_bound']:,}",
            "gap": lambda case: f"{case['gap']:.2%}",
            "dfs": lambda case: f"{case['dfs_windows']:,}",
            "TRL's": lambda case: f"{case['trl_windows']:,}",
        },
    )
    table(
        "M raw tokens/s, median",
        {
            "trie": speed("trie"),
            "plan": speed("plan"),
            "rows": speed("rows"),
            "M positions/s": lambda case: f"{case['written_tokens_per_s'] / MB:,.1f}",
            "pack_dataset": speed("pack_dataset"),
            "TRL bfd": speed("trl bfd"),
            "over TRL": lambda case: f"{case['speedup_over_trl']:,.1f}x",
            "trie, part": speed("trie (part)"),
            "dict, part": speed("dict trie (part)"),
            "over dict": lambda case: f"{case['trie_over_dict']:,.0f}x",
        },
    )
    table(
        "memory",
        {
            "mapped, MB": memory("mapped_mb", 0),
            "trie, MB": memory("trie_mb", 1),
            "B/sequence": memory("bytes_per_sequence", 0),
            "packing, MB": memory("pack_dataset_mb", 1),
        },
    )
    table(
        "seconds",
        {
            "packing": lambda case: f"{case['median_s']['pack_dataset']:,.3f}",
            "tokenising": lambda case: f"{case['raw_tokens'] / tokenizing['tokens_per_s']:,.1f}",
            "share": lambda case: f"{case['share_of_tokenizing']:.2%}",
        },
    )
    print(f"\ntokenizer: {tokenizing['tokens_per_s'] / MB:.2f} M tokens/s on {tokenizing['tokens']:,} tokens")
    for name, case in linear.items():
        few, many = (
            f"{case['raw_tokens_per_s'][size] / MB:,.0f} M tokens/s at {case['raw_tokens'][size] / MB:,.0f} M"
            for size in ("few", "many")
        )
        packing = case["memory"]["pack_dataset_mb"]
        memory = "" if packing is None else f"; packing these takes {packing:,.0f} MB"
        print(f"trie, {name}: {few}, {many}, ratio {case['ratio']:.2f}{memory}")
        partitioned = case["partitioned"]
        print(
            f"  in {PARTITIONS} partitions {partitioned['windows']:,} windows, in memory "
            f"{partitioned['windows_in_memory']:,}: {partitioned['more']:+.2%}, in {partitioned['seconds']:.1f} s"
        )
    print()


def print_targets(found: dict[str, dict[str, Any]]) -> None:
    for name, target in found.items():
        verdict = "met" if target["met"] else "missed"
        print(f"  {name:<52}{target['value']:>12,.4g}  target {target['limit']:>6,}  {verdict}")
    print(f"{sum(target['met'] for target in found.values())} of {len(found)} targets are met", flush=True)


if __name__ == "__main__":
    main()

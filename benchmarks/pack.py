"""Speed of packing: trie, plan, rows and the whole, beside TRL's packing and a dictionary trie.

    python benchmarks/pack.py [--quick] [--tokens N] [--max-length T] [--rounds R]

Corpora are random tokens with the shape of real ones. *agent*: every session begins with one system prompt, explores
for some turns and branches into tasks; each turn is one sequence with its whole context, as fine-tuning on agent
sessions has it. *documents*: nothing is shared. Both packers get the same Arrow data set (`input_ids` only) and the
same window length. All speeds are per *raw* token, the tokens of the sequences written out, which is what both read.
`written tokens/s` is per position of the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import trl
from datasets import Dataset
from measure import interleave, medians, print_figures, timed

from dagpack_hf import TokenForest, pack_dataset
from dagpack_hf.layout import layout_rows
from dagpack_hf.pack import lower_bound, pack_windows
from dagpack_hf.segments import build_segments

VOCABULARY = 32_000
SYSTEM_PROMPT = 600
"""Tokens of the prompt that all agent sessions share."""
TURN = 400
"""Mean tokens of a turn: what the model writes and what the tools answer."""

AGENT_SHAPES = {"agent 4x": (2, 3, 1), "agent 12x": (8, 3, 8)}
"""Turns of exploration, branches, turns of each branch; the name says how often a token is reused."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    rng = np.random.default_rng(0)
    figures = {
        name: measure(list(corpus(rng, name, options.tokens, options.max_length)), options)
        for name in (*AGENT_SHAPES, "documents")
    }
    print_table(figures)
    print_figures("pack", vars(options), {"corpora": figures})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=8_000_000, help="raw tokens of each corpus (default 8,000,000)")
    parser.add_argument("--max-length", type=int, default=16_384, help="window length (default 16,384)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one to warm up (default 5)")
    parser.add_argument(
        "--dict-tokens",
        type=int,
        default=400_000,
        help="raw tokens of the part that the dictionary trie merges (default 400,000)",
    )
    parser.add_argument("--quick", action="store_true", help="same shape, a quarter of the tokens, 3 rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.rounds, options.dict_tokens = 2_000_000, 3, 100_000
    return options


# Corpora


def corpus(rng: np.random.Generator, name: str, tokens: int, max_length: int) -> Iterator[np.ndarray]:
    """Sequences of at least `tokens` tokens in all, none longer than a window."""
    made = 0
    sequences = documents(rng) if name == "documents" else agent_sessions(rng, *AGENT_SHAPES[name])
    while made < tokens:
        sequence = next(sequences)[:max_length]
        made += len(sequence)
        yield sequence


def agent_sessions(rng: np.random.Generator, explore: int, branches: int, turns: int) -> Iterator[np.ndarray]:
    system = _random_tokens(rng, SYSTEM_PROMPT)
    while True:
        trunk = system
        for _ in range(explore):
            trunk = np.concatenate([trunk, _turn(rng)])
            yield trunk
        for _ in range(branches):
            context = trunk
            for _ in range(turns):
                context = np.concatenate([context, _turn(rng)])
                yield context


def documents(rng: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        yield _random_tokens(rng, 1 + int(rng.lognormal(6.5, 0.8)))


def _turn(rng: np.random.Generator) -> np.ndarray:
    return _random_tokens(rng, 1 + int(rng.gamma(2, TURN / 2)))


def _random_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def as_dataset(sequences: list[np.ndarray]) -> Dataset:
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])])
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(sequences)))
    return Dataset(pa.table({"input_ids": ids}))


# Measurement


def measure(sequences: list[np.ndarray], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one corpus."""
    length = options.max_length
    raw = sum(map(len, sequences))
    dataset = as_dataset(sequences)
    sequences = np.split(np.concatenate(sequences), np.cumsum([len(sequence) for sequence in sequences])[:-1])
    part = list(take_tokens(sequences, options.dict_tokens))
    part_tokens = sum(map(len, part))

    forest = TokenForest.from_sequences(sequences)
    segments = build_segments(forest)
    windows = pack_windows(segments, length)
    _, report = pack_dataset(dataset, length, progress=False)
    trl_windows = len(trl.pack_dataset(dataset, length, strategy="bfd"))

    seconds = interleave(
        {
            "trie": timed(lambda: TokenForest.from_sequences(sequences)),
            "plan": timed(lambda: plan(forest, length)),
            "rows": timed(lambda: layout_rows(forest, segments, windows)),
            "pack_dataset": timed(lambda: pack_dataset(dataset, length, progress=False)),
            "trl bfd": timed(lambda: trl.pack_dataset(dataset, length, strategy="bfd")),
            "trie (part)": timed(lambda: TokenForest.from_sequences(part)),
            "dict trie (part)": timed(lambda: dict_trie(part)),
        },
        options.rounds,
    )
    median = medians(seconds)
    return {
        "sequences": len(sequences),
        "raw_tokens": raw,
        "unique_tokens": report.unique_tokens,
        "executed_tokens": report.executed_tokens,
        "reuse_ratio": report.reuse_ratio,
        "longest_path": report.longest_path,
        "windows": report.windows,
        "lower_bound": report.lower_bound,
        "gap": report.gap,
        "trl_windows": trl_windows,
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


def dict_trie(sequences: list[np.ndarray]) -> dict[int, Any]:
    """The plain way: a dictionary for each token."""
    root: dict[int, Any] = {}
    for sequence in sequences:
        node = root
        for token in sequence.tolist():
            node = node.setdefault(token, {})
    return root


def take_tokens(sequences: list[np.ndarray], tokens: int) -> Iterator[np.ndarray]:
    """The first sequences, until they have `tokens` tokens."""
    before = np.cumsum([0, *map(len, sequences)])
    return islice(sequences, int(np.searchsorted(before, tokens)))


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    def row(title: str, cell: Any) -> None:
        print(f"{title:<34}" + "".join(f"{cell(figures[name]):>14}" for name in figures))

    print(f"{'':<34}" + "".join(f"{name:>14}" for name in figures))
    row("sequences", lambda c: f"{c['sequences']:,}")
    row("raw tokens", lambda c: f"{c['raw_tokens']:,}")
    row("unique tokens", lambda c: f"{c['unique_tokens']:,}")
    row("reuse ratio", lambda c: f"{c['reuse_ratio']:.2f}")
    row("windows", lambda c: f"{c['windows']:,}")
    row("  lower bound", lambda c: f"{c['lower_bound']:,}")
    row("  gap", lambda c: f"{c['gap']:.1%}")
    row("  of TRL's packing (bfd)", lambda c: f"{c['trl_windows']:,}")
    print("\nmillions of raw tokens per second (median)")
    for name in next(iter(figures.values()))["raw_tokens_per_s"]:
        row(f"  {name}", lambda c, name=name: f"{c['raw_tokens_per_s'][name] / 1e6:,.1f}")
    row("  rows, per position written", lambda c: f"{c['written_tokens_per_s'] / 1e6:,.1f}")
    print("\nratios of medians")
    row("  pack_dataset over TRL's packing", lambda c: f"{c['speedup_over_trl']:.1f}x")
    row("  trie over a dictionary trie", lambda c: f"{c['trie_over_dict']:.0f}x")
    print()


if __name__ == "__main__":
    main()

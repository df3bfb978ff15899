"""Corpora for the packing benchmark: random tokens with the shape of real ones, in an Arrow file.

    python benchmarks/packing_corpora.py CORPUS FILE [--tokens N] [--labels] [--seed S]

*agent 4x*, *12x* and *39x*, named after how often a token is reused: every session begins with one system prompt,
explores for some turns and branches into tasks; each turn is one sequence with its whole context, as fine-tuning on
agent sessions has it, in random order. *documents*: nothing is shared. The others are what a trie finds hard.
*identical*: one sequence again and again. *prefixes*: every beginning of one sequence, in three orders. *stars*: one
prompt and many completions, as policy gradients with groups have them.

The file is the stream of record batches that `datasets` writes (`input_ids`, `list<int32>`, 1,000 sequences in each)
and maps into memory, so that the corpus takes no anonymous memory. In memory while it is made are the distinct tokens,
for every branch of a session with those of its trunk; a sequence is a view of them. 100 M tokens take a second or two.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

VOCABULARY = 32_000
IGNORE_INDEX = -100
ROWS = 1000
"""Sequences of a record batch."""

IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Agent:
    """The shape of agent sessions.

    Args:
        system: tokens of the prompt that all sessions share.
        turn: mean tokens of a turn: what the model writes and what the tools answer.
        explore: turns before the first branch point.
        branches: tasks that begin there.
        turns: turns of each task.
    """

    system: int
    turn: int
    explore: int
    branches: int
    turns: int


AGENTS = {
    "agent 4x": Agent(system=600, turn=400, explore=2, branches=3, turns=1),
    "agent 12x": Agent(system=600, turn=400, explore=8, branches=3, turns=8),
    "agent 39x": Agent(system=3000, turn=200, explore=12, branches=4, turns=27),
}

DOCUMENT = (6.5, 0.8, 4096)
"""Mean and deviation of the logarithm of a document's length, and its limit."""
SAME = 1000
"""Tokens of the sequence that *identical* repeats."""
PROMPT, COMPLETIONS = 1000, 512
"""Tokens of the prompt of a star, and completions of it."""
COMPLETION = (5.5, 0.6)
"""Mean and deviation of the logarithm of a completion's length."""


def agent(rng: np.random.Generator, tokens: int, shape: Agent) -> list[IntArray]:
    sequences = _take(_turns(rng, shape), tokens)
    return [sequences[index] for index in rng.permutation(len(sequences))]


def documents(rng: np.random.Generator, tokens: int) -> list[IntArray]:
    mean, deviation, limit = DOCUMENT
    lengths = (min(1 + int(rng.lognormal(mean, deviation)), limit) for _ in repeat(None))
    return _take((_random(rng, length) for length in lengths), tokens)


def identical(rng: np.random.Generator, tokens: int) -> list[IntArray]:
    return _take(repeat(_random(rng, SAME)), tokens)


def prefixes(rng: np.random.Generator, tokens: int, order: str) -> list[IntArray]:
    count = (math.isqrt(8 * tokens - 7) + 1) // 2  # the least whose 1 + 2 + ... + count reaches `tokens`
    whole = _random(rng, count)
    lengths = np.arange(1, count + 1)
    if order == "shuffled":
        rng.shuffle(lengths)
    return [whole[:length] for length in (lengths[::-1] if order == "longest first" else lengths)]


def stars(rng: np.random.Generator, tokens: int) -> list[IntArray]:
    def completions() -> Iterator[IntArray]:
        while True:
            prompt = _random(rng, PROMPT)
            for _ in range(COMPLETIONS):
                yield np.concatenate([prompt, _random(rng, 1 + int(rng.lognormal(*COMPLETION)))])

    return _take(completions(), tokens)


CORPORA: dict[str, Callable[[np.random.Generator, int], list[IntArray]]] = {
    **{name: partial(agent, shape=shape) for name, shape in AGENTS.items()},
    "documents": documents,
    "identical": identical,
    **{
        f"prefixes, {order}": partial(prefixes, order=order)
        for order in ("shortest first", "longest first", "shuffled")
    },
    "stars": stars,
}


def make_corpus(name: str, tokens: int, seed: int = 0) -> list[IntArray]:
    """Sequences of at least `tokens` tokens in all, and less than one sequence more."""
    return CORPORA[name](np.random.default_rng(seed), tokens)


def write_corpus(path: str | Path, name: str, tokens: int, seed: int = 0, labels: bool = False) -> Path:
    """Make a corpus and write it to an Arrow file; with labels the second half of each sequence is trained."""
    sequences = make_corpus(name, tokens, seed)
    schema = pa.schema(dict.fromkeys(("input_ids", "labels") if labels else ("input_ids",), pa.list_(pa.int32())))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for low in range(0, len(sequences), ROWS):
            some = sequences[low : low + ROWS]
            offsets = np.cumsum([0, *map(len, some)], dtype=np.int32)
            columns = [np.concatenate(some)]
            if labels:
                columns.append(columns[0].copy())
                for begin, sequence in zip(offsets.tolist(), some, strict=False):
                    columns[1][begin : begin + len(sequence) // 2] = IGNORE_INDEX
            lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in columns]
            stream.write_batch(pa.record_batch(lists, schema=schema))
    return Path(path)


def _turns(rng: np.random.Generator, shape: Agent) -> Iterator[IntArray]:
    """The context of each turn with the turn, session after session."""
    system = _random(rng, shape.system)
    while True:
        trunk, ends = _go_on(rng, system, shape.explore, shape.turn)
        yield from (trunk[:end] for end in ends)
        for _ in range(shape.branches):
            path, ends = _go_on(rng, trunk, shape.turns, shape.turn)
            yield from (path[:end] for end in ends)


def _go_on(
    rng: np.random.Generator, context: IntArray, turns: int, mean: int
) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """The context with more turns after it, and where each of them ends."""
    ends = len(context) + np.cumsum(1 + rng.gamma(2, mean / 2, turns).astype(np.int64))
    return np.concatenate([context, _random(rng, int(ends[-1]) - len(context))]), ends


def _random(rng: np.random.Generator, count: int) -> IntArray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _take(sequences: Iterator[IntArray], tokens: int) -> list[IntArray]:
    """The first sequences, until they have so many tokens."""
    taken: list[IntArray] = []
    while tokens > 0:
        taken.append(next(sequences))
        tokens -= len(taken[-1])
    return taken


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", choices=tuple(CORPORA))
    parser.add_argument("file", help="Arrow file, for `datasets.Dataset.from_file`")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="raw tokens (default 10,000,000)")
    parser.add_argument("--labels", action="store_true", help="with a column of labels")
    parser.add_argument("--seed", type=int, default=0, help="decides the content (default 0)")
    options = parser.parse_args(arguments)
    write_corpus(options.file, options.corpus, options.tokens, options.seed, options.labels)


if __name__ == "__main__":
    main()

"""Each benchmark runs at a tiny size and ends in one line of JSON. Nothing here depends on the speed of a machine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> dict:
    """Run a benchmark as a user does and return its figures."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    table, _, line = done.stdout.rstrip("\n").rpartition("\n")
    assert len(table.splitlines()) > 8
    figures = json.loads(line)
    assert figures["benchmark"] == script
    assert {"cores", "python", "numpy", "torch", "transformers", "trl"} <= set(figures["environment"])
    return figures


def check_rounds(case: dict, rounds: int) -> None:
    assert set(case["seconds"]) == set(case["median_s"])
    for name, seconds in case["seconds"].items():
        assert len(seconds) == rounds
        assert min(seconds) > 0 and min(seconds) <= case["median_s"][name] <= max(seconds)


def test_pack():
    figures = run("pack", "--tokens", "20000", "--rounds", "3", "--max-length", "8192", "--dict-tokens", "5000")
    assert figures["options"]["tokens"] == 20000
    assert set(figures["corpora"]) == {"agent 4x", "agent 12x", "documents"}
    for name, corpus in figures["corpora"].items():
        check_rounds(corpus, 3)
        assert 20000 <= corpus["raw_tokens"] < 20000 + 8192
        assert corpus["reuse_ratio"] == pytest.approx(corpus["raw_tokens"] / corpus["unique_tokens"], rel=1e-4)
        assert corpus["unique_tokens"] <= corpus["executed_tokens"]
        assert 1 <= corpus["lower_bound"] <= corpus["windows"] <= corpus["trl_windows"]
        assert corpus["gap"] == pytest.approx(corpus["windows"] / corpus["lower_bound"] - 1, abs=1e-4)
        assert corpus["trl_windows"] >= corpus["raw_tokens"] / 8192
        speed, median = corpus["raw_tokens_per_s"], corpus["median_s"]
        assert set(speed) == {"trie", "plan", "rows", "pack_dataset", "trl bfd", "trie (part)", "dict trie (part)"}
        for stage in ("trie", "plan", "rows", "pack_dataset", "trl bfd"):
            assert speed[stage] == pytest.approx(corpus["raw_tokens"] / median[stage], rel=1e-3)
        assert corpus["speedup_over_trl"] == pytest.approx(median["trl bfd"] / median["pack_dataset"], rel=1e-3)
        assert corpus["reuse_ratio"] > 2 if name.startswith("agent") else corpus["reuse_ratio"] < 1.01


@pytest.mark.parametrize(("name", "reuse"), [("agent 4x", 4), ("agent 12x", 12), ("documents", 1)])
def test_corpora_have_the_reuse_their_names_say(name, reuse, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("pack_benchmark", ROOT / "benchmarks" / "pack.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)

    def sequences():
        return list(benchmark.corpus(benchmark.np.random.default_rng(0), name, 2_000_000, 16_384))

    forest = benchmark.TokenForest.from_sequences(sequences())
    assert forest.logical_tokens / forest.num_tokens == pytest.approx(reuse, rel=0.1)
    assert forest.longest_path <= 16_384
    again = benchmark.TokenForest.from_sequences(sequences())
    assert (forest.tokens == again.tokens).all()


def test_train_step():
    sizes = {"groups": 1, "max-length": 256, "turns": 2, "session-length": 2048, "hidden-size": 32, "layers": 1}
    figures = run(
        "train_step", "--rounds", "1", *(word for name, size in sizes.items() for word in (f"--{name}", f"{size}"))
    )
    assert set(figures["cases"]) == {"shared, T=256", "sessions, T=2048"}
    ways = {"dagpack", "trl packing", "trl padding", "trl one by one"}
    for case in figures["cases"].values():
        check_rounds(case, 1)
        work = case["work"]
        assert set(work) == set(case["seconds"]) == set(case["peak_memory_mib"]) == ways
        assert len({way["targets"] for way in work.values()}) == 1, "all ways train the same targets"
        assert len({way["steps"] for way in work.values()}) == 1
        assert (
            work["trl one by one"]["positions"] == work["trl packing"]["positions"] <= work["trl padding"]["positions"]
        )
        assert case["token_ratio"] == pytest.approx(
            work["trl packing"]["positions"] / work["dagpack"]["positions"], rel=1e-3
        )
        for peer in ways - {"dagpack"}:
            ratio = case["median_s"][peer] / case["median_s"]["dagpack"]
            assert case["speedup"][peer] == pytest.approx(ratio, rel=1e-3)
            assert math.isclose(case["speedup_over_token_ratio"][peer], ratio / case["token_ratio"], rel_tol=1e-3)
    shared = figures["cases"]["shared, T=256"]
    assert shared["sequences"] == 16 and shared["work"]["dagpack"]["batches"] == 1
    assert 3.5 < shared["token_ratio"] < shared["reuse_ratio"] == 4
    assert figures["cases"]["sessions, T=2048"]["sequences"] == 2


def test_every_benchmark_is_described():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for script in (ROOT / "benchmarks").glob("*.py"):
        if script.name != "measure.py":
            assert f"python benchmarks/{script.name}" in text, script.name

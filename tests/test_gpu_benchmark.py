"""The GPU benchmark runs end to end on a CPU, computes what it says, and ends in time."""

from __future__ import annotations

import argparse
import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dagpack_hf import TokenForest
from dagpack_hf.attention import flex, visible
from tests.test_benchmarks import ROOT, check_rounds, load_benchmark, run

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:.gradient_checkpointing_enable"
)


@pytest.fixture
def parts(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("rows", "model", "run", "correctness", "kernel", "steps")
    return SimpleNamespace(**{name: importlib.import_module(f"gpu_parts.{name}") for name in names})


def test_tiny_run_on_a_cpu(tmp_path):
    figures = run("gpu", "--tiny", "--out", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out").read_text().splitlines()[-1]) == figures
    assert figures["skipped"] == {"flash varlen": "FlashAttention needs a GPU"} and figures["wrong"] == []
    assert figures["hardware"]["device"] == "cpu"
    masks = {case.split(", ", 1)[1] for case in figures["masks"]}
    assert len(figures["masks"]) == 2 * len(masks) == 24
    for case, result in figures["masks"].items():
        assert len(result["errors"]) == len(result["dense_errors"]) == (1 if case.startswith("flex") else 2)
        assert 0 < max(result["errors"]) < (1e-5 if "float32" in case else 1e-2)
        assert 0 < max(result["dense_errors"]) < (1e-5 if "float32" in case else 1e-2)
    assert figures["model"]["gradient_error"] < 1e-5
    rows = ("causal, sdpa", "one sequence", "reuse 2", "reuse 4")
    assert set(figures["kernel"]) == {f"{row}, T=256" for row in rows}
    for case, kernel in figures["kernel"].items():
        assert min(kernel.values()) > 0 and ("mask_s" in kernel) == ("both_s" not in kernel) == ("sdpa" not in case)
        assert (kernel["visible"] == 1) == ("reuse" not in case)
        operations = 4 * 4 * 16 * kernel["visible"] * 256 * 257 / 2
        assert kernel["forward_tflops"] == pytest.approx(operations / kernel["forward_s"] / 1e12, rel=1e-3)
    assert set(figures["steps"]) == {"T=256, reuse 2", "T=256, reuse 4"}
    for case, step in figures["steps"].items():
        reuse = int(case[-1])
        check_rounds(step, 2)
        assert set(step["seconds"]) == {"dagpack", "flex documents"}
        assert step["windows"] == {"dagpack": 1, "flex documents": reuse}
        assert step["token_ratio"] == pytest.approx(
            step["source_tokens"] / step["computed_tokens"]["dagpack"], rel=1e-3
        )
        assert 0.95 * reuse < step["token_ratio"] <= reuse
        documents = step["computed_tokens"]["flex documents"]
        assert documents == pytest.approx(step["source_tokens"] * min(2 / reuse, 1), rel=0.01)
        speedup = step["median_s"]["flex documents"] / step["median_s"]["dagpack"]
        assert step["speedup"]["flex documents"] == pytest.approx(speedup, rel=1e-3)


@pytest.mark.parametrize("reuse", [2, 4, 10])
@pytest.mark.parametrize("length", [256, 2000])
def test_random_trees_fill_a_window_and_have_the_reuse(parts, reuse, length):
    sequences = parts.rows.random_tree(length, reuse, 100_000, seed=1)
    forest = TokenForest.from_sequences(sequences)
    assert forest.logical_tokens / forest.num_tokens == pytest.approx(reuse, rel=0.12 if length == 256 else 0.02)
    (row,) = parts.rows.tree_rows(sequences, length)
    assert 0.75 * length < len(row["input_ids"]) <= length
    assert row["loss_weight"].sum() == sum(len(sequence) - 1 for sequence in sequences)
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_nodes)
    assert (children > 0).sum() > reuse, "branches leave at many places"


def test_rows_of_documents(parts):
    sequences = [list(range(10, 15)), [1, 2, 3], [7]]
    (row,) = parts.rows.document_rows(sequences, 9)
    found = row["input_ids"].tolist()
    starts = np.flatnonzero(row["position_ids"] == 0)
    assert sorted(map(list, np.split(row["input_ids"], starts[1:])), key=len) == sorted(sequences, key=len)
    seen = visible(torch.from_numpy(row["subtree_end"])[None], torch.from_numpy(row["position_ids"])[None])[0]
    assert seen.sum(1).tolist() == (row["position_ids"] + 1).tolist() and not seen.triu(1).any()
    for position in range(9):
        ends = position + 1 == 9 or row["position_ids"][position + 1] == 0
        assert row["shift_labels"][position] == (-100 if ends else found[position + 1])
        assert row["loss_weight"][position] == (not ends)


def test_flash_varlen_gets_the_sequences(parts, monkeypatch):
    """With a plain computation in the place of the kernel, loss and gradients are those under the mask."""
    calls = []

    def varlen_attn(query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size, enable_gqa):
        assert window_size == (-1, 0) and enable_gqa and starts is key_starts
        lengths = starts.diff().tolist()
        assert starts.dtype == torch.int32 and max(lengths) == longest == longest_key and sum(lengths) == len(query)
        calls.append(lengths)
        pieces = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in piece), is_causal=True, scale=scale, enable_gqa=True
            )
            for piece in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(pieces, dim=1).transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    device = torch.device("cpu")
    model = parts.model.make_model("tiny", device)
    rows = parts.rows.document_rows([list(range(n)) for n in (30, 20, 41, 1, 17)], 64)
    results = []
    for varlen in (False, True):
        way = parts.model.sequence_way(model, rows, 64, device, varlen=varlen)
        assert way.tokens == 109
        results.append((way.backward(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        model.zero_grad()
    (loss, gradients), (loss_varlen, gradients_varlen) = results
    assert {length for lengths in calls for length in lengths} == {30, 20, 41, 1, 17}
    assert loss_varlen == pytest.approx(loss, rel=1e-6)
    for name in gradients:
        torch.testing.assert_close(gradients_varlen[name], gradients[name], rtol=1e-4, atol=1e-4)


def test_times_of_some_windows_are_scaled_to_all(parts, monkeypatch):
    """Every task takes a second; two of four windows of documents are computed."""
    monkeypatch.setattr(
        parts.steps, "interleave", lambda tasks, rounds, warm_up: {name: [1.0] * rounds for name in tasks}
    )
    options = argparse.Namespace(peer_windows=2, rounds=3)
    run = SimpleNamespace(options=options, device=torch.device("cpu"), left=100.0)
    model = parts.model.make_model("tiny", run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    figures = parts.steps.time_case(run, model, optimizer, 256, 4, budget=100.0)
    assert figures["seconds"] == {"dagpack": [1.0] * 3, "flex documents": [2.0] * 3}
    assert figures["speedup"] == {"flex documents": 2.0}
    assert len(parts.steps.time_case(run, model, optimizer, 256, 4, budget=0.0)["seconds"]["dagpack"]) == 1


def test_wrong_results_are_told(monkeypatch, capsys):
    benchmark = load_benchmark("gpu", monkeypatch)
    monkeypatch.setattr(benchmark, "quiet", lambda: None)
    attend = flex.attend
    monkeypatch.setattr(
        flex, "attend", lambda *x, window=None, **options: attend(*x, window=window and window - 1, **options)
    )
    assert benchmark.main(["--tiny"]) == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    wrong = {case.split(": ")[0] for case in figures["wrong"]}
    assert wrong == {
        f"flex, {mask}, {dtype}" for mask in ("window 40", "window 40, sinks") for dtype in ("float32", "bfloat16")
    }
    assert len(figures["steps"]) == 2, "the rest is measured"


@pytest.fixture
def gpu_run(parts, monkeypatch):
    """A run that takes itself to be on a GPU, in its only section."""
    monkeypatch.setattr(parts.run, "hardware", lambda device: {"device": "none"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run = parts.run.Run(argparse.Namespace(seconds=100.0), torch.device("cuda"), {"first": 0.25, "last": 0.75})
    yield run
    run.watch.cancel()


def test_sections_have_their_part_of_the_time_and_cases_that_do_not_fit_are_left_out(gpu_run):
    seen = {}

    def first(run):
        seen["first"] = run.left
        assert run.enough_for("short", 20) and not run.enough_for("long", 30)

    def last(run):
        seen["last"] = run.left
        raise torch.OutOfMemoryError("CUDA out of memory.\nMuch more about it.")

    gpu_run.section("first", first)
    gpu_run.section("last", last)
    assert seen["first"] == pytest.approx(97 / 4, abs=1)
    assert seen["last"] == pytest.approx(97, abs=2), "what the first left"
    skipped = gpu_run.figures["skipped"]
    assert skipped["long"].endswith("s left, some 30 s needed")
    assert skipped["last"] == "OutOfMemoryError: CUDA out of memory."
    assert gpu_run.finish() == 0


def test_a_run_that_hangs_ends_with_the_figures_so_far(gpu_run, parts, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(parts.run.os, "_exit", codes.append)
    gpu_run.figures["kernel"] = {"a case": 1.0}
    with gpu_run.trying("another case"):
        gpu_run.cut_short()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert codes == [3] and figures["kernel"] == {"a case": 1.0}
    assert figures["skipped"] == {"another case": "still running after 100 s, and all that follows"}


def test_the_watch_is_set(parts, monkeypatch):
    timers, started = [], []
    watch = SimpleNamespace(start=lambda: started.append(True))
    monkeypatch.setattr(parts.run.threading, "Timer", lambda *arguments: timers.append(arguments) or watch)
    run = parts.run.Run(argparse.Namespace(seconds=7.0), torch.device("cpu"), {})
    assert timers == [(7.0, run.cut_short)] and started == [True] and watch.daemon


def test_without_a_gpu_only_tiny_runs(monkeypatch, capsys):
    benchmark = load_benchmark("gpu", monkeypatch)
    monkeypatch.setattr(benchmark, "quiet", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 2 and "--tiny" in capsys.readouterr().err

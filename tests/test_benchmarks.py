"""Each benchmark runs at a tiny size and ends in one line of JSON. Nothing here depends on the speed of a machine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
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
    assert len(table.splitlines()) > 7
    figures = json.loads(line)
    assert figures["benchmark"] == script
    assert {"cores", "python", "numpy", "torch", "transformers", "trl"} <= set(figures["environment"])
    return figures


def load_benchmark(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a benchmark for its parts."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    name = f"{script}_benchmark"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def check_rounds(case: dict, rounds: int) -> None:
    assert set(case["seconds"]) == set(case["median_s"])
    for name, seconds in case["seconds"].items():
        assert len(seconds) == rounds
        assert min(seconds) > 0 and min(seconds) <= case["median_s"][name] <= max(seconds)


PACK_SIZES = {
    "tokens": 20_000,
    "large": 40_000,
    "linear": 60_000,
    "rounds": 2,
    "large-rounds": 1,
    "dict-tokens": 5000,
}


def test_pack():
    corpora = ["agent 4x", "documents"]
    sizes = [word for name, size in PACK_SIZES.items() for word in (f"--{name}", f"{size}")]
    figures = run("pack", *sizes, "--labels", "--corpora", *corpora)
    given = {name.replace("-", "_"): size for name, size in PACK_SIZES.items()}
    assert figures["options"] == {**given, "corpora": corpora, "quick": False, "labels": True, "tokenizer": None}
    assert list(figures["corpora"]) == [*corpora, *(f"{name}, large" for name in corpora)]
    speed = figures["tokenizing"]["tokens_per_s"]
    assert speed == pytest.approx(
        figures["tokenizing"]["tokens"] / np.median(figures["tokenizing"]["seconds"]), rel=1e-3
    )
    for name, case in figures["corpora"].items():
        check_pack(case, *((40_000, 1) if "large" in name else (20_000, 2)))
        share = case["median_s"]["pack_dataset"] / (case["raw_tokens"] / speed)
        assert case["share_of_tokenizing"] == pytest.approx(share, rel=1e-3)
        assert (case["reuse_ratio"] > 2) == ("documents" not in name)
    assert set(figures["linear"]) == {"agent 4x"}
    linear = figures["linear"]["agent 4x"]
    partitioned = linear["partitioned"]
    more = partitioned["windows"] / partitioned["windows_in_memory"] - 1
    assert partitioned["more"] == pytest.approx(more, abs=1e-4) and more >= 0
    for size, least in (("few", 20_000), ("many", 60_000)):
        raw = linear["raw_tokens"][size]
        assert least <= raw < least + 8192
        assert linear["raw_tokens_per_s"][size] == pytest.approx(raw / linear["seconds"][size][0], rel=1e-3)
    check_pack_targets(figures)


def check_pack(case: dict, tokens: int, rounds: int) -> None:
    check_rounds(case, rounds)
    raw, length = case["raw_tokens"], case["max_length"]
    assert tokens <= raw < tokens + case["longest_path"]
    assert length == 4 * case["longest_path"]
    assert case["reuse_ratio"] == pytest.approx(raw / case["unique_tokens"], rel=1e-4)
    assert case["unique_tokens"] <= case["executed_tokens"] <= length * case["windows"]
    assert 1 <= case["lower_bound"] <= case["windows"] <= case["dfs_windows"]
    assert case["windows"] <= case["trl_windows"] >= raw / length
    assert case["gap"] == pytest.approx(case["windows"] / case["lower_bound"] - 1, abs=1e-4)
    speed, median = case["raw_tokens_per_s"], case["median_s"]
    assert set(speed) == {"trie", "plan", "rows", "pack_dataset", "trl bfd", "trie (part)", "dict trie (part)"}
    for stage, value in speed.items():
        read = case["part_tokens"] if "part" in stage else raw
        assert value == pytest.approx(read / median[stage], rel=1e-3)
    assert case["written_tokens_per_s"] == pytest.approx(case["executed_tokens"] / median["rows"], rel=1e-3)
    assert case["speedup_over_trl"] == pytest.approx(median["trl bfd"] / median["pack_dataset"], rel=1e-3)
    assert 0 < case["part_tokens"] < raw
    memory = case["memory"]
    assert memory["mapped_mb"] == pytest.approx(4e-6 * raw, rel=1e-3)
    if memory["trie_mb"] is not None:
        assert memory["trie_mb"] < 50 > memory["pack_dataset_mb"]
        assert memory["bytes_per_sequence"] == pytest.approx(1e6 * memory["trie_mb"] / case["sequences"], rel=1e-3)


def check_pack_targets(figures: dict) -> None:
    limits = {"trie, M tokens/s": 200, "times TRL's speed": 10, "windows / those of dfs": 1}
    expected = {f"{name}: {what}": limit for name in figures["corpora"] for what, limit in limits.items()}
    expected |= {f"{name}: packing / tokenising": 0.01 for name in figures["corpora"]}
    agents = ("agent 4x", "agent 4x, large")
    expected |= {f"{name}: trie, M tokens/s": 1000 for name in agents}
    expected |= {f"{name}: gap": 0.05 for name in agents}
    found = figures["targets"]
    assert {name: target["limit"] for name, target in found.items()} == {
        **expected,
        "agent 4x: trie, speed at more tokens": 0.8,
        "agent 4x: MB of packing more tokens": 1000,
    }
    for name, target in found.items():
        least = any(word in name for word in ("trie", "TRL"))
        assert target["met"] == (target["value"] >= target["limit"] if least else target["value"] <= target["limit"])
    case = figures["corpora"]["documents"]
    assert found["documents: times TRL's speed"]["value"] == case["speedup_over_trl"]
    assert found["documents: windows / those of dfs"]["value"] == 1 >= case["windows"] / case["dfs_windows"]


def test_targets_of_packing_are_for_corpora_of_some_size(monkeypatch):
    benchmark = load_benchmark("pack", monkeypatch)

    def judged(name: str, **changes: int) -> dict[str, bool]:
        case = {
            "sequences": 50_000,
            "executed_tokens": 1_000_000,
            "raw_tokens_per_s": {"trie": 5e8},
            "written_tokens_per_s": 1.6e8,
            "speedup_over_trl": 9,
            "memory": {"bytes_per_sequence": 140},
            "gap": 0.02,
            "windows": 10,
            "dfs_windows": 10,
            "share_of_tokenizing": 0.009,
        }
        partitioned = {"windows_in_memory": 400, "more": 0.021}
        linear = {"ratio": 0.9, "memory": {"pack_dataset_mb": 1001}, "partitioned": partitioned}
        found = benchmark.targets({name: {**case, **changes}}, {name: linear})
        return {key.removeprefix(f"{name}: "): target["met"] for key, target in found.items()}

    assert judged("documents") == {
        "trie, M tokens/s": True,
        "rows, M positions/s": True,
        "times TRL's speed": False,
        "bytes per sequence": True,
        "gap": False,
        "windows / those of dfs": True,
        "packing / tokenising": True,
        "trie, speed at more tokens": True,
        "MB of packing more tokens": False,
        "windows more in partitions": False,
    }
    few = judged("documents", sequences=9_999, executed_tokens=999_999)
    assert not {"gap", "bytes per sequence", "rows, M positions/s"} & set(few)
    agent = judged("agent 12x, large", sequences=9_999, dfs_windows=9, gap=21 / 20 - 1)
    assert (agent["trie, M tokens/s"], agent["gap"], agent["windows / those of dfs"]) == (False, True, False)
    assert not judged("stars", gap=0.0501)["gap"]


@pytest.mark.parametrize(
    ("name", "reuse", "longest"),
    [
        ("agent 4x", 4, 5000),
        ("agent 12x", 12, 12_000),
        ("agent 39x", 39, 14_000),
        ("documents", 1, 4096),
        ("identical", 4000, 1000),
        ("prefixes, shortest first", 4_000_000 / 2828, 2828),
        ("prefixes, longest first", 4_000_000 / 2828, 2828),
        ("prefixes, shuffled", 4_000_000 / 2828, 2828),
        ("stars", 4.4, 4000),
    ],
)
def test_packing_corpora(name, reuse, longest, monkeypatch, tmp_path):
    corpora = load_benchmark("packing_corpora", monkeypatch)
    benchmark = load_benchmark("pack", monkeypatch)
    sequences = corpora.make_corpus(name, 4_000_000)
    corpus = benchmark.Corpus.open(corpora.write_corpus(tmp_path / "corpus.arrow", name, 4_000_000))
    assert corpus.dataset.cache_files
    assert corpus.dataset["input_ids"][:3] == [sequence.tolist() for sequence in sequences[:3]]
    assert len(corpus.dataset) == len(sequences)
    assert 4_000_000 <= corpus.raw_tokens == sum(map(len, sequences)) < 4_000_000 + longest
    assert max(map(len, sequences)) <= longest and corpus.max_length == 4 * max(map(len, sequences))
    forest = corpus.merge()
    assert forest.logical_tokens == corpus.raw_tokens
    assert forest.logical_tokens / forest.num_tokens == pytest.approx(reuse, rel=0.15)
    part = corpus.part(100_000)
    assert part.raw_tokens - len(part.merge().path(part.merge().leaves[0])) < 100_000 + longest
    lengths = [len(sequence) for sequence in sequences]
    if name.startswith("prefixes"):
        assert (lengths == sorted(lengths)) == ("shortest" in name)
        assert (lengths == sorted(lengths, reverse=True)) == ("longest" in name)


def test_dictionary_trie(monkeypatch):
    benchmark = load_benchmark("pack", monkeypatch)
    assert benchmark.dict_trie([[1, 2, 3], [1, 2], [1, 4], []]) == {1: {2: {3: {}}, 4: {}}}


def test_load_sessions():
    figures = run("load_sessions", "--megabytes", "0.5", "--rounds", "1", "--peer-rounds", "0")
    assert figures["options"] == {"megabytes": 0.5, "rounds": 1, "peer_rounds": 0, "seed": 0, "quick": False}
    assert set(figures["corpora"]) == {"text", "images"}
    for name, case in figures["corpora"].items():
        check_rounds(case, 1)
        corpus, median = case["corpus"], case["median_s"]
        assert set(median) == set(case["memory_mb"]) == {"floor", "one process", "two processes"}
        assert 0.5e6 <= corpus["bytes"] < 1e6
        assert (corpus["images"] > 0) == (name == "images")
        one = case["found"]["one process"]
        assert (one["files"], one["turns"]) == (corpus["files"], corpus["turns"])
        assert case["found"]["floor"]["lines"] == one["entries"] + one["files"] == corpus["lines"]
        assert 0 < one["rows"] <= one["targets"] <= one["turns"]
        for way, seconds in median.items():
            assert case["mb_per_s"][way] == pytest.approx(corpus["bytes"] / 1e6 / seconds, rel=1e-3)
            assert case["speed_over_floor"][way] == pytest.approx(median["floor"] / seconds, rel=1e-3)
            memory = case["memory_mb"][way]
            assert 5 < memory["peak"] == max(memory["process"], memory["largest_child"])
            if memory["anonymous"] is not None:
                assert memory["anonymous"] <= memory["anonymous_all_processes"]
        assert case["speed_target_met"] == (case["speed_over_floor"]["one process"] >= 1 / 3)
        assert case["memory_limit_mb"] == pytest.approx(10 * corpus["longest_line"] / 1e6 + 300, rel=1e-4)
        assert case["memory_limit_met"] == {
            way: case["memory_mb"][way]["peak"] < case["memory_limit_mb"] for way in ("one process", "two processes")
        }


def test_peak_memory_is_that_of_the_largest_process(monkeypatch):
    benchmark = load_benchmark("load_sessions", monkeypatch)
    names = ("process", "largest_child", "anonymous_process", "anonymous_largest_child", "anonymous_together")

    def peaks(*runs):
        return benchmark.peak_figures([dict(zip(names, run, strict=True)) for run in runs])

    assert peaks((5e6, 7e6, 3e6, 6e6, 8e6), (4e6, 9e6, 2e6, 5e6, 7e6)) == {
        "peak": 9,
        "process": 5,
        "largest_child": 9,
        "anonymous": 6,
        "anonymous_process": 3,
        "anonymous_largest_child": 6,
        "anonymous_all_processes": 8,
    }
    assert peaks((5e6, 0, None, None, None))["anonymous"] is None


def test_memory_of_descendants_is_sampled(monkeypatch):
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    benchmark = load_benchmark("load_sessions", monkeypatch)
    script = (
        "import mmap; reserved = mmap.mmap(-1, 10**9); held = bytearray(b'x') * 50_000_000; print(flush=True); input()"
    )
    for _ in range(2):
        script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        found = benchmark.descendants(process.pid)
        sizes = [benchmark.anonymous_bytes(pid) for pid in found]
        process.communicate("\n")
    assert found[0] == process.pid and len(set(found)) == 3
    assert sizes[0] < 50_000_000 > sizes[1]
    assert 50_000_000 <= sizes[2] < 100_000_000
    assert benchmark.anonymous_bytes(process.pid) is None


@pytest.mark.parametrize("images", [False, True])
def test_session_corpus(images, monkeypatch, tmp_path):
    benchmark = load_benchmark("session_corpus", monkeypatch)
    stats = benchmark.write_corpus(tmp_path / "a", 8, images)
    assert stats == benchmark.write_corpus(tmp_path / "b", 8, images, processes=2)
    files = {path.relative_to(tmp_path / "a"): path.read_bytes() for path in (tmp_path / "a").rglob("*.jsonl")}
    again = {path.relative_to(tmp_path / "b"): path.read_bytes() for path in (tmp_path / "b").rglob("*.jsonl")}
    assert set(files) == set(again)
    assert all(
        data.replace(bytes(tmp_path / "a"), b"") == again[path].replace(bytes(tmp_path / "b"), b"")
        for path, data in files.items()
    )
    assert stats.files == len(files) and stats.largest_file == max(map(len, files.values()))
    assert 8e6 <= stats.bytes == sum(map(len, files.values())) < 11e6

    sessions = [[json.loads(line) for line in data.split(b"\n")[:-1]] for data in files.values()]
    lines = [line for data in files.values() for line in data.splitlines(keepends=True)]
    assert (stats.lines, stats.longest_line) == (len(lines), max(map(len, lines)))
    assert len(set(lines)) > 0.9 * len(lines)
    roles = [entry["message"]["role"] for session in sessions for entry in session if "message" in entry]
    assert stats.turns == roles.count("assistant")
    branches = forks = 0
    prompts = set()
    for header, *entries in sessions:
        ids = [entry["id"] for entry in entries]
        parents = [entry["parentId"] for entry in entries]
        assert len(set(ids)) == len(ids)
        assert parents[0] is None and set(parents[1:]) <= set(ids), "one root, no parent is missing"
        branches += len(parents) - len(set(parents))
        prompts.add((header["cwd"], json.dumps(entries[2]["message"]["sections"])))
        if "parentSession" in header:
            forks += 1
            lines = Path(header["parentSession"]).read_bytes().splitlines()
            origin = {entry["id"]: entry for entry in map(json.loads, lines)}
            repeated = [entry for entry in entries if entry["id"] in origin]
            assert len(entries) / 4 < len(repeated) < len(entries)
            assert all(entry == origin[entry["id"]] for entry in repeated)
    assert len(prompts) == len({cwd for cwd, _ in prompts}) > 3
    assert (branches, forks) == (stats.branches, stats.forks)
    pictures = [
        len(block["data"])
        for session in sessions
        for entry in session
        for block in entry.get("message", {}).get("content") or ()
        if isinstance(block, dict) and block["type"] == "image"
    ]
    assert (len(pictures), sum(pictures)) == (stats.images, stats.image_bytes)
    assert forks
    if images:
        assert 0.6 < stats.image_bytes / stats.bytes < 0.95
    else:
        assert branches and stats.compactions and not pictures
        assert 1000 < stats.bytes / stats.lines < 1600


def test_straight_session(monkeypatch, tmp_path):
    benchmark = load_benchmark("session_corpus", monkeypatch)
    path = benchmark.write_straight_session(tmp_path / "a", 40)
    data = path.read_bytes()
    assert data == benchmark.write_straight_session(tmp_path / "b", 40).read_bytes()
    assert data != benchmark.write_straight_session(tmp_path / "c", 40, seed=1).read_bytes()
    _, *entries = map(json.loads, data.splitlines())
    assert [entry["parentId"] for entry in entries] == [None, *(entry["id"] for entry in entries[:-1])]
    messages = [entry["message"] for entry in entries if entry["type"] == "message"]
    assert {entry["type"] for entry in entries} == {"model_change", "thinking_level_change", "message"}
    answers = [message["stopReason"] != "aborted" for message in messages if message["role"] == "assistant"]
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    earlier = sum(message["role"] == "assistant" for message in messages[:last_user])
    assert sum(answers) >= 40 > sum(answers[:earlier])


RENDER_SIZES = {
    "turns": 12,
    "long-turns": 24,
    "part-turns": 8,
    "session-share": 4,
    "long-share": 6,
    "rounds": 2,
    "cost-rounds": 2,
}


def test_render():
    figures = run("render", *(word for name, size in RENDER_SIZES.items() for word in (f"--{name}", f"{size}")))
    assert {name.replace("-", "_"): size for name, size in RENDER_SIZES.items()}.items() <= figures["options"].items()
    cases = figures["sessions"]
    assert {name: case["turns"] for name, case in cases.items()} == {"session": 12, "long": 24, "part": 8}
    for name, case in cases.items():
        check_rounds(case, 2 if name == "session" else 1)
        assert case["naive_turns"] == case["compared_turns"] == {"session": 3, "long": 4, "part": 1}[name]
        assert not case["skipped"] and not case["fallbacks"] and 0 < case["windowed"] < case["turns"]
        median = case["median_s"]
        assert set(median) == {"naive", "full", "windowed"}
        for way in ("full", "windowed"):
            assert case["speedup"][way] == pytest.approx(median["naive"] / median[way], rel=1e-3)
        assert 0 < case["naive_share"] < 1
        assert 0 < case["distinct_characters"] < case["characters"]
        assert 0 < case["tree_tokens"] < case["sequence_tokens"] < case["characters"]
        ratio = case["tokenized_characters"] / case["distinct_characters"]
        assert case["tokenized_over_distinct"] == pytest.approx(ratio, rel=1e-3)
    cost = figures["cost_per_turn"]
    assert {name: len(values) for name, values in cost["seconds"].items()} == {"long": 2, "part": 2}
    for name, values in cost["seconds"].items():
        assert cost["per_turn_ms"][name] == pytest.approx(1000 * min(values) / cases[name]["turns"], rel=1e-3)
    assert cost["ratio"] == pytest.approx(cost["per_turn_ms"]["long"] / cost["per_turn_ms"]["part"], rel=1e-3)
    targets = figures["targets"]
    for session in ("session", "long"):
        memory = targets[f"{session}: memory, MB"]["value"]
        assert memory == cases[session]["memory_mb"]
        assert memory is None or 0 < memory < 200
    assert {name: target["limit"] for name, target in targets.items()} == {
        **{
            f"{session}: {what}": limit
            for session in ("session", "long")
            for what, limit in {
                "speedup, full": 25,
                "speedup, windowed": 40,
                "tokenised / distinct characters": 1.2,
                "memory, MB": 200,
            }.items()
        },
        "cost per turn, long / part": 1.5,
    }
    for name, target in targets.items():
        value, limit = target["value"], target["limit"]
        if value is not None:
            assert target["met"] == (value >= limit if "speedup" in name else value <= limit)
    assert targets["long: speedup, windowed"]["value"] == cases["long"]["speedup"]["windowed"]


def test_render_of_a_recorded_session(monkeypatch, tmp_path):
    benchmark = load_benchmark("render", monkeypatch)
    tokenizer = str(ROOT / "dagpack_hf" / "sample" / "tokenizer")
    options = benchmark.parse(["--tokenizer", tokenizer, "--template", "original"])
    session = max((ROOT / "dagpack_hf" / "sample" / "sessions").glob("*.jsonl"), key=lambda path: path.stat().st_size)
    conversation = benchmark.load_conversation(session, str(tmp_path))
    case = benchmark.measure("session", benchmark.load_tokenizer(options), conversation, share=4, rounds=1)
    assert case["turns"] == conversation.turns > 8
    assert case["compared_turns"] == case["naive_turns"] == (case["turns"] + 1) // 4


def test_render_counts_the_characters_of_a_trie(monkeypatch):
    benchmark = load_benchmark("render", monkeypatch)
    texts = ["abcd", "abxy", "ab", "", "abxyz", "q", "abxq", "abcd", "aé🧪", "aé🧪b", "bbbb"]
    distinct, lengths = benchmark.count_distinct(texts)
    assert distinct == len({text[:size] for text in texts for size in range(1, len(text) + 1)})
    assert lengths == list(map(len, texts))
    rng = benchmark.np.random.default_rng(0)
    texts = ["".join(rng.choice(["a", "b"], size=rng.integers(12))) for _ in range(200)]
    assert benchmark.count_distinct(texts)[0] == len({t[:size] for t in texts for size in range(1, len(t) + 1)})


def test_render_compares_turns_with_their_naive_renderings(monkeypatch):
    benchmark = load_benchmark("render", monkeypatch)
    turn = SimpleNamespace(context_ids=[1, 2], target_ids=[3, 4])
    for whole in ([1, 2, 3, 4], [1, 2, 3, 4, 9], [1, 2, 3]):
        assert benchmark.check(turn, [1, 2], whole, "turn 0")
    assert not benchmark.check(turn, [1, 2], [1, 7, 3, 4], "turn 0")
    for context, whole in (([1, 5], [1, 5, 3, 4]), ([1, 2], [1, 2, 3, 5]), ([1, 2], [1, 2])):
        with pytest.raises(AssertionError, match="turn 0"):
            benchmark.check(turn, context, whole, "turn 0")


def test_train_step():
    sizes = {"groups": 1, "max-length": 256, "turns": 2, "session-length": 2048, "hidden-size": 32, "layers": 1}
    figures = run(
        "train_step", "--rounds", "1", *(word for name, size in sizes.items() for word in (f"--{name}", f"{size}"))
    )
    assert set(figures["cases"]) == {"shared, T=256", "sessions, T=2048"}
    assert (figures["prefix_grouper"] is None) == (find_spec("prefix_grouper") is None)
    for name, case in figures["cases"].items():
        ways = {"dagpack", "trl packing", "trl padding", "trl one by one"}
        if figures["prefix_grouper"] and name.startswith("shared"):
            ways.add("prefix-grouper")
            assert case["work"]["prefix-grouper"]["positions"] == case["work"]["dagpack"]["positions"]
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
        assert set(case["speedup_over_token_ratio"]) == ways - {"dagpack", "prefix-grouper"}
        for peer, share in case["speedup_over_token_ratio"].items():
            assert math.isclose(share, case["speedup"][peer] / case["token_ratio"], rel_tol=1e-3)
    shared = figures["cases"]["shared, T=256"]
    assert shared["sequences"] == 16 and shared["work"]["dagpack"]["batches"] == 1
    assert 3.5 < shared["token_ratio"] < shared["reuse_ratio"] == 4
    assert figures["cases"]["sessions, T=2048"]["sequences"] == 2


TINY_STEP = ["--max-length", "256", "--hidden-size", "32", "--layers", "2"]


def test_groups_of_prefix_grouper(monkeypatch):
    benchmark = load_benchmark("train_step", monkeypatch)
    monkeypatch.setattr(benchmark, "GROUP", 2)
    sequences = [[7, 8, 9, 1, 2], [7, 8, 9, 3, 4], [5, 6, 1, 2], [5, 6, 3, 1]]
    groups = benchmark.prefix_groups(benchmark.Dataset.from_dict({"input_ids": sequences}))
    assert groups.to_dict() == {
        "input_ids": [[7, 8, 9, 1, 2, 9, 3, 4], [5, 6, 1, 2, 6, 3, 1]],
        "shift_labels": [[8, 9, 1, 2, -100, 3, 4, -100], [6, 1, 2, -100, 3, 1, -100]],
        "position_ids": [[0, 1, 2, 3, 4, 2, 3, 4], [0, 1, 2, 3, 1, 2, 3]],
        "loss_weight": [[2, 2, 1, 1, 0, 1, 1, 0], [2, 1, 1, 0, 1, 1, 0]],
        "lengths": [[2, 3, 3], [1, 3, 3]],
    }


def test_prefix_grouper_trains_what_the_others_train(monkeypatch, tmp_path):
    pytest.importorskip("prefix_grouper", reason="the peer is not installed")
    benchmark = load_benchmark("train_step", monkeypatch)
    options = benchmark.parse(["--groups", "2", *TINY_STEP])
    sequences = benchmark.shared_sequences(2, 256)
    trainers = benchmark.make_trainers(sequences, 256, options, str(tmp_path), is_shared=True)
    trainer = trainers["prefix-grouper"]
    assert benchmark.count_work(trainer) == benchmark.count_work(trainers["dagpack"])
    for group, example in enumerate(trainer.train_dataset):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, benchmark.stack([example]))
        loss.backward()
        model = benchmark.tiny_llama(options)
        tokens = benchmark.torch.tensor(sequences[16 * group : 16 * group + 16]["input_ids"])
        expected = model(input_ids=tokens, labels=tokens).loss
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for (name, found), parameter in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
            assert benchmark.torch.allclose(found.grad, parameter.grad, rtol=1e-4, atol=1e-6), name


def test_train_step_without_prefix_grouper(monkeypatch, tmp_path, capsys):
    benchmark = load_benchmark("train_step", monkeypatch)
    monkeypatch.setattr(benchmark, "PrefixGrouper", None)
    options = benchmark.parse(TINY_STEP)
    trainers = benchmark.make_trainers(benchmark.shared_sequences(1, 256), 256, options, str(tmp_path), is_shared=True)
    assert list(trainers) == ["dagpack", "trl packing", "trl padding", "trl one by one"]
    case = {"sequences": 16, "reuse_ratio": 4.0, "token_ratio": 3.8, "work": {}, "speedup": {}}
    for name, lines in (("shared, T=256", 1), ("sessions, T=256", 0)):
        benchmark.print_case(name, case)
        assert capsys.readouterr().out.count("prefix-grouper not installed") == lines


def test_hybrid():
    sizes = ("--tokens", "300", "--hidden-size", "32", "--threads", "1")
    figures = run("hybrid", "--rounds", "1", *sizes, "--only", "gated DeltaNet", "convolution")
    shapes = ("star 16 x 80 %", "8 turns x 3", "comb of 10", "binary tree of 6")
    kinds = ("gated DeltaNet", "convolution")
    assert set(figures["cases"]) == {f"{kind}, {shape}" for kind in kinds for shape in shapes}
    for case in figures["cases"].values():
        check_rounds(case, 1)
        assert set(case["seconds"]) == {"tree", "row", "alone"}
        median = case["median_s"]
        assert case["tree_over_row"] == pytest.approx(median["tree"] / median["row"], rel=1e-3)
        assert case["token_ratio"] == pytest.approx(case["logical_tokens"] / case["tokens"], rel=1e-3)
        share = median["alone"] / median["tree"] / case["token_ratio"]
        assert case["speedup_over_token_ratio"] == pytest.approx(share, rel=1e-3)
    assert figures["goals"]["row"]["worst"] == max(case["tree_over_row"] for case in figures["cases"].values())
    star = figures["cases"]["convolution, star 16 x 80 %"]
    assert star["sequences"] == 16 and 3.5 < star["token_ratio"] < 4.5


def test_shapes_of_the_hybrid_benchmark(monkeypatch):
    benchmark = load_benchmark("hybrid", monkeypatch)
    for name, sequences in benchmark.shapes(2048).items():
        tokens = {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}
        assert 0.9 * 2048 < len(tokens) < 1.05 * 2048, name


def test_attention():
    figures = run("attention", "--rounds", "2", "--length", "600", "--head-size", "8")
    shapes = {"star 16 x 80 %", "star 64 x 50 %", "comb", "multi-turn", "chain", "documents"}
    assert set(figures["cases"]) == {f"{shape}, T=600" for shape in shapes}
    for case in figures["cases"].values():
        check_rounds(case, 2)
        assert set(case["seconds"]) == {"tile", "dense", "unpacked", "plan", "mask"}
        for peer, speedup in case["speedup"].items():
            assert speedup == pytest.approx(case["median_s"][peer] / case["median_s"]["tile"], rel=1e-3)
    assert figures["cases"]["chain, T=600"]["visible"] == pytest.approx(601 / 1200, rel=1e-4)
    assert figures["cases"]["star 16 x 80 %, T=600"]["sequences"] == 16
    assert len(figures["goals"]) == 1, "the goals of trees are for rows of 4,096"


def test_shapes_of_the_attention_benchmark(monkeypatch):
    benchmark = load_benchmark("attention", monkeypatch)
    for walk in benchmark.shapes(500).values():
        assert len(walk) == 500 and walk[0] == 0 and np.diff(walk).max() <= 1
        path: list[int] = []
        end = benchmark.ends(walk)
        for position, depth in enumerate(walk.tolist()):
            del path[depth:]
            path.append(position)
            assert [j for j in range(position + 1) if end[j] > position] == path
    assert benchmark.sequence_lengths(np.array([0, 1, 2, 1, 0, 1])).tolist() == [3, 2, 2]
    star = benchmark.sequence_lengths(benchmark.star(4096, 16, 0.8))
    assert (
        len(star) == 16
        and len(set(star)) == 1
        and (4096 - 16 * star[0]) / -15 == pytest.approx(0.8 * star[0], rel=0.02)
    )


def test_goals_of_attention(monkeypatch):
    benchmark = load_benchmark("attention", monkeypatch)
    fast = {f"{shape}, T=4096": {"speedup": {"dense": 2.0}} for shape in benchmark.TREES}
    fast["chain, T=2048"] = {"speedup": {"dense": 0.9}}
    assert list(benchmark.check(fast).values()) == [True] * 4
    for name, speedup in (("multi-turn, T=4096", 1.99), ("chain, T=2048", 0.89)):
        goals = benchmark.check(fast | {name: {"speedup": {"dense": speedup}}})
        assert [goal for goal, met in goals.items() if not met] == [
            next(goal for goal in goals if goal.startswith(name))
        ]


def test_every_benchmark_is_described():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for script in (ROOT / "benchmarks").glob("*.py"):
        if script.name != "measure.py":
            assert f"python benchmarks/{script.name}" in text, script.name

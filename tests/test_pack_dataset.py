"""`pack_dataset`: what it reads, its options, its cache, and that it may be killed at any time."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

import dagpack_hf
from dagpack_hf import TokenForest, pack_dataset, pack_forest, packing, row_cache
from dagpack_hf.advice import FACTORS
from dagpack_hf.code_digest import code_digest
from dagpack_hf.columns import ListColumn, SequenceColumns
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.pack import least_executed_tokens, lower_bound
from dagpack_hf.pack_report import PackReport, add_reports
from tests.corpora import labelled_sequences, prefix_counts, random_tree, row_prefixes

ROOT = Path(__file__).parents[1]


def plain(sequences, labels=None) -> Dataset:
    return Dataset.from_dict({"input_ids": sequences, **({} if labels is None else {"labels": labels})})


def trees_of(groups, weighted: bool = False) -> Dataset:
    """One token tree for each group of labelled sequences."""
    trees = [random_tree(np.random.default_rng(i), *group) for i, group in enumerate(groups)]
    names = ("input_ids", "target_count", "node_length", "node_parent", "logical_tokens")
    rows = [{name: np.asarray(getattr(tree, name)).tolist() for name in names} for tree in trees]
    if weighted:
        for row in rows:
            row["target_weight"] = [0.5 * count for count in row["target_count"]]
    return Dataset.from_list(rows)


def trained(rows: Dataset) -> dict[tuple[int, ...], float]:
    """Each target, as the tokens up to it, and its weight; fails where one is trained twice."""
    found: dict[tuple[int, ...], float] = {}
    for row in rows:
        for prefix, label, weight in zip(row_prefixes(row), row["shift_labels"], row["loss_weight"], strict=True):
            assert (label != -100) == (weight > 0)
            if label != -100:
                assert (*prefix, label) not in found, "trained twice"
                found[(*prefix, label)] = weight
    return found


def expected(sequences, labels, weighting) -> dict[tuple[int, ...], float]:
    counts = prefix_counts(sequences, labels)
    return {prefix: float(count if weighting == "paths" else 1) for prefix, count in counts.items() if count}


def shared_sequences(sessions: int = 20, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 99, 40).tolist()
    return [
        trunk[: 10 * int(rng.integers(1, 5))] + rng.integers(0, 99, int(rng.integers(5, 40))).tolist()
        for _ in range(sessions)
    ]


# What it reads


@pytest.mark.parametrize("kind", ["list", "large_list", "list_view", "fixed"])
@pytest.mark.parametrize("token_type", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("sliced", [False, True])
def test_lists_of_any_kind_in_any_chunks(kind, token_type, sliced):
    sequences = [[1, 2, 3, 4], [1, 2, 5, 9], [6, 7, 8, 8], [1, 2, 3, 8], [6, 9, 9, 9]]
    labels = [[-100, 2, 3, 4], [-100, -100, 5, 9], [-100, 7, -100, 8], [-100, 2, 3, 8], [6, 9, 9, 9]]
    value = getattr(pa, token_type)()
    kinds = {"list": pa.list_, "large_list": pa.large_list, "list_view": pa.list_view}
    make = kinds.get(kind, lambda value: pa.list_(value, 4))

    def column(lists, value):
        parts = [[*lists[:1], *lists[:2], *lists[2:3]], lists[2:2], [*lists[2:], lists[0]]]
        chunks = [pa.array(part, make(value)) for part in parts]
        return pa.chunked_array([chunks[0][1:3], chunks[1], chunks[2][:3]])

    table = pa.table({"input_ids": column(sequences, value), "labels": column(labels, pa.int64())})
    assert table["input_ids"].num_chunks == 3 and table["input_ids"].to_pylist() == sequences
    columns = SequenceColumns.of(table)
    assert columns.ids.lengths.tolist() == [4] * 5
    assert_same_forest(columns.forest(), TokenForest.from_sequences(sequences, labels))
    if sliced:
        mask = np.array([True, False, True, True, False])
        kept = SequenceColumns(columns.ids.only(mask), columns.labels.only(mask))
        pick = [index for index in range(5) if mask[index]]
        other = TokenForest.from_sequences([sequences[i] for i in pick], [labels[i] for i in pick])
        assert_same_forest(kept.forest(), other)
        assert [each.tolist() for each in columns.ids.lists(~mask)] == [sequences[1], sequences[4]]


def assert_same_forest(one: TokenForest, other: TokenForest) -> None:
    for name in ("tokens", "target_count", "parent", "start", "length", "depth", "logical_tokens"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_int32_tokens_are_read_where_they_lie():
    array = pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32()))
    column = ListColumn.of("input_ids", pa.chunked_array([array, array[1:]]))
    assert column.values[0].ctypes.data == array.values.buffers()[1].address
    assert column.values[1].ctypes.data == array.values.buffers()[1].address
    assert column.offsets[1].tolist() == [3, 5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1, 2], None]}, "input_ids has no value in example 1"),
        ({"input_ids": [[1, 2], [3, None]]}, "input_ids has a null among the values of example 1"),
        ({"input_ids": [[1.5, 2.0]]}, "input_ids has the type list<.*double>; packing needs lists of integers"),
        ({"input_ids": [1, 2]}, "input_ids has the type int32"),
        ({"input_ids": [[1, 2]], "labels": [[1]]}, "Sequence 0: 2 tokens but 1 labels"),
        ({"input_ids": [[1, -2]]}, "Sequence 0: token id -2 at position 1"),
    ],
)
def test_bad_columns_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(Dataset.from_dict(columns), 8, progress=False)


def test_a_selection_of_examples_in_several_files(tmp_path):
    parts = []
    for part in range(3):
        plain(shared_sequences(10, part)).save_to_disk(tmp_path / str(part))
        parts.append(datasets.load_from_disk(tmp_path / str(part)))
    whole = datasets.concatenate_datasets(parts)
    assert whole.data["input_ids"].num_chunks == 3
    for dataset in (whole, whole.select(range(25, 2, -2)), whole.shuffle(seed=1)):
        rows, report = pack_dataset(dataset, 128, progress=False)
        again, same = pack_dataset(plain(dataset["input_ids"][:]), 128, progress=False)
        assert rows[:] == again[:] and report == same


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "bfd"}, "strategy must be 'best' or 'dfs', got 'bfd'"),
        ({"effort": -1.0}, "effort must be a number of seconds, 0 or more, got -1.0"),
        ({"effort": float("nan")}, "effort must be a number of seconds"),
        ({"effort": float("inf")}, "effort must be a number of seconds"),
        ({"bucket_size": 0}, "bucket_size must be at least 1 example"),
        ({"bucket_size": 2.5}, "bucket_size must be at least 1 example, got 2.5"),
        ({"buffer_size": 0}, "buffer_size must be at least 1 example"),
    ],
)
def test_bad_options_are_named_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(plain([[1]]), 8, progress=False, **options)


def test_strategy_and_effort_reach_the_plan_and_the_report():
    dataset = plain([[i] * n for i, n in enumerate([6, 5, 4, 3, 2])])
    reports = {
        strategy: pack_dataset(dataset, 10, strategy=strategy, progress=False)[1] for strategy in ("best", "dfs")
    }
    assert (reports["best"].windows, reports["dfs"].windows) == (2, 3)
    for strategy, report in reports.items():
        assert report.to_dict()["strategy"] == strategy and f"strategy {strategy!r}" in str(report)
    _, searched = pack_dataset(dataset, 10, strategy="dfs", effort=0.2, progress=False)
    assert searched.windows == 2 and "0.2 s of search" in str(searched)


def test_each_split_is_packed_on_its_own():
    splits = DatasetDict({"train": plain([[1, 2, 3], [1, 2, 4]]), "test": plain([[1, 2, 5]])})
    rows, reports = pack_dataset(splits, 8, progress=False)
    assert isinstance(rows, DatasetDict) and {name: len(each) for name, each in rows.items()} == {
        "train": 1,
        "test": 1,
    }
    for name, split in splits.items():
        alone, report = pack_dataset(split, 8, progress=False)
        assert rows[name][:] == alone[:] and reports[name] == report


def test_the_stages_are_shown(capfd):
    pack_dataset(plain([[1, 2, 3]]), 8)
    shown = capfd.readouterr().err
    assert all(f"Packing: {stage}" in shown for stage in ("merging", "planning", "writing"))
    pack_dataset(plain([[1, 2, 3]]), 8, progress=False)
    assert capfd.readouterr().err == ""


# Advice


def test_advice_is_what_the_certificate_says():
    sequences = shared_sequences(60)
    forest = TokenForest.from_sequences(sequences)
    longest = forest.longest_path
    _, report = pack_dataset(plain(sequences), 2 * longest, progress=False)
    assert [each.factor for each in report.advice] == list(FACTORS) == [1, 2, 4]
    for each in report.advice:
        assert each.max_length == each.factor * longest
        assert each.executed_tokens == least_executed_tokens(forest, each.max_length)
        assert each.speedup_bound == sum(map(len, sequences)) / each.executed_tokens
        assert f"{each.max_length:,}  executes at least {each.executed_tokens:,}" in str(report)
    assert report.advice[1].executed_tokens <= report.executed_tokens
    assert json.loads(json.dumps(report.to_dict()))["advice"][2]["max_length"] == 4 * longest
    assert PackReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_the_share_of_lost_targets(overflow, caplog):
    # 2 + 4 targets, of which the last two lie beyond the window; the whole second sequence is dropped
    dataset = plain([[1, 2, 3], [1, 4, 5, 6, 7]])
    _, report = pack_dataset(dataset, 3, overflow=overflow, progress=False)
    lost = 2 if overflow == "truncate" else 4
    assert (report.source_targets, report.lost_share) == (6, lost / 6)
    assert report.to_dict()["lost_share"] == lost / 6
    assert f"{lost / 6:.2%}  of the labelled tokens, beyond the window" in str(report)
    assert f"{lost} labelled tokens are not trained ({100 * lost / 6:.2g}% of them)" in caplog.text
    assert pack_dataset(dataset, 8, progress=False)[1].lost_share == 0
    # advice is about the corpus as it is: truncation hides no length
    assert report.advice[0].max_length == (5 if overflow == "truncate" else 3)


# Buckets


@settings(max_examples=150, deadline=None)
@given(
    st.lists(labelled_sequences(4, 8), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 7),
    st.sampled_from(["once", "paths"]),
    st.sampled_from([None, 0, 1]),
)
def test_buckets_train_every_target_exactly_once(groups, as_trees, bucket_size, weighting, seed):
    sequences = list(itertools.chain.from_iterable(group[0] for group in groups))
    labels = list(itertools.chain.from_iterable(group[1] for group in groups))
    dataset = trees_of(groups) if as_trees else plain(sequences, labels)
    rows, report = pack_dataset(
        dataset, 10, loss_weighting=weighting, bucket_size=bucket_size, seed=seed, progress=False
    )
    assert trained(rows) == expected(sequences, labels, weighting)
    assert report.lower_bound <= report.windows and report.executed_tokens == sum(map(len, rows["input_ids"]))
    if bucket_size >= len(dataset):
        whole, same = pack_dataset(dataset, 10, loss_weighting=weighting, seed=seed, progress=False)
        assert whole[:] == rows[:] and same.executed_tokens == report.executed_tokens


def owners(rows: Dataset, sequences: list[list[int]]) -> list[set[int]]:
    """For each row, the sequences whose last token it holds; their last tokens are unique."""
    last = {sequence[-1]: index for index, sequence in enumerate(sequences)}
    return [{last[token] for token in row if token in last} for row in rows["input_ids"]]


@pytest.mark.parametrize("as_trees", [False, True])
def test_a_window_holds_examples_of_one_bucket(as_trees):
    rng = np.random.default_rng(0)
    trunk = [1, 2, 3, 4]
    sequences = [[*trunk[: int(rng.integers(1, 5))], 5, *[6] * int(rng.integers(0, 3)), 100 + i] for i in range(40)]
    groups = [([s], [s]) for s in sequences]
    dataset = trees_of(groups) if as_trees else plain(sequences)

    in_order, report = pack_dataset(dataset, 64, bucket_size=8, seed=None, progress=False)
    found = owners(in_order, sequences)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(40))
    assert all(len({index // 8 for index in row}) == 1 for row in found)
    assert len(in_order) == 5
    assert report.bucket_size == 8 and "buckets of 8 examples" in str(report)

    shuffled = [
        owners(pack_dataset(dataset, 64, bucket_size=8, seed=seed, progress=False)[0], sequences) for seed in (1, 2)
    ]
    assert all(len(row) == 8 for rows in shuffled for row in rows)
    assert sorted(map(sorted, shuffled[0])) != sorted(map(sorted, shuffled[1]))

    _, without = pack_dataset(dataset, 64, seed=None, progress=False)
    assert without.executed_tokens < report.executed_tokens, "sharing across buckets is lost"
    assert without.lower_bound == report.lower_bound


def test_a_tree_stays_in_its_bucket():
    """Leaves of one example go together, also those that hang far down."""
    groups = []
    for example in range(6):
        base = 100 * example
        stem = [base + i for i in range(8)]
        groups.append(([[*stem[:k], base + 50 + k] for k in range(1, 9)],) * 2)
    rows, _ = pack_dataset(trees_of(groups), 64, bucket_size=2, seed=3, progress=False)
    assert all(len({token // 100 for token in row}) == 2 for row in rows["input_ids"])


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
@pytest.mark.parametrize("as_trees", [False, True])
def test_buckets_of_paths_that_are_too_long(overflow, as_trees):
    sequences = shared_sequences(30)
    groups = [([s], [[-100] * 5 + s[5:]]) for s in sequences]
    dataset = trees_of(groups) if as_trees else plain(sequences, [g[1][0] for g in groups])
    options = {"overflow": overflow, "loss_weighting": "paths", "progress": False}
    rows, report = pack_dataset(dataset, 48, bucket_size=4, **options)
    whole, same = pack_dataset(dataset, 48, **options)
    assert trained(rows) == trained(whole) and trained(rows)
    assert report.overflow == same.overflow and report.overflow


@given(st.lists(labelled_sequences(3, 6), min_size=2, max_size=5), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_weights_of_trees_in_buckets(groups, bucket_size):
    dataset = trees_of(groups, weighted=True)
    options = {"loss_weighting": "paths", "progress": False}
    rows, whole = (pack_dataset(dataset, 8, **more, **options)[0] for more in ({"bucket_size": bucket_size}, {}))
    assert trained(rows) == trained(whole)


# Streams


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("as_trees", [False, True])
def test_a_stream_is_packed_a_buffer_at_a_time(typed, as_trees):
    sequences = shared_sequences(10)
    groups = [([s], [[-100, *s[1:]]]) for s in sequences]
    whole = trees_of(groups) if as_trees else plain(sequences, [g[1][0] for g in groups]).add_column("x", [0] * 10)
    stream = whole.to_iterable_dataset() if typed else datasets.IterableDataset.from_generator(lambda: iter(whole))
    packed, report = pack_dataset(stream, 96, buffer_size=4, seed=5)
    assert "nothing" in str(report) and report.total is None
    rows = list(packed)
    buffers = [
        pack_dataset(whole.select(part), 96, seed=5, progress=False) for part in (range(4), range(4, 8), (8, 9))
    ]
    assert [{k: list(v) for k, v in row.items()} for row in rows] == [row for part, _ in buffers for row in part]
    assert report.buffers == 3 and report.total == add_reports([each for _, each in buffers])
    assert report.total.windows == len(rows) and "in 3 buffers" in str(report)


def test_a_stream_is_read_no_further_than_it_is_used():
    seen = []

    def examples():
        for i in range(1000):
            seen.append(i)
            yield {"input_ids": [i, i + 1, i + 2]}

    stream = datasets.IterableDataset.from_generator(
        examples, features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    )
    packed, report = pack_dataset(stream, 6, buffer_size=10)
    next(iter(packed))
    assert len(seen) <= 20 and report.buffers <= 2


def test_splits_of_streams():
    splits = IterableDatasetDict({"train": plain([[1, 2, 3], [1, 2, 4]]).to_iterable_dataset()})
    packed, reports = pack_dataset(splits, 8)
    assert isinstance(packed, IterableDatasetDict)
    assert [list(row["input_ids"]) for row in packed["train"]] == [[1, 2, 3, 2, 4]]
    assert reports["train"].total.windows == 1


def test_a_stream_has_no_buckets():
    with pytest.raises(ValueError, match="buffer_size"):
        pack_dataset(plain([[1]]).to_iterable_dataset(), 8, bucket_size=2)
    with pytest.raises(ValueError, match="needs an input_ids column; the data set has text"):
        pack_dataset(Dataset.from_dict({"text": ["x"]}).to_iterable_dataset(), 8)


# Cache


@pytest.fixture
def on_disk(tmp_path: Path) -> Dataset:
    plain(shared_sequences()).save_to_disk(tmp_path / "data")
    return datasets.load_from_disk(tmp_path / "data")


def cache_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(("cache-", "tmp-"))}


def test_rows_are_found_again(on_disk, tmp_path, monkeypatch):
    rows, report = pack_dataset(on_disk, 128, progress=False)
    (name,) = (each for each in cache_files(tmp_path / "data") if each.endswith(".arrow"))
    assert name == f"cache-{rows._fingerprint}.arrow"
    assert Path(rows.cache_files[0]["filename"]) == tmp_path / "data" / name
    in_memory, same = pack_forest(TokenForest.from_sequences(on_disk["input_ids"][:]), 128, seed=0)
    assert all(rows[column][:] == [row[column].tolist() for row in in_memory] for column in ROW_COLUMNS)
    assert report == same

    def refuse(*args, **kwargs):
        raise AssertionError("packed again")

    with monkeypatch.context() as patch:
        patch.setattr(TokenForest, "from_arrays", refuse)
        again, same = pack_dataset(datasets.load_from_disk(tmp_path / "data"), 128, progress=False)
        assert again[:] == rows[:] and again._fingerprint == rows._fingerprint and same == report
        for change in ({"seed": 1}, {"loss_weighting": "paths"}, {"overflow": "drop"}, {"strategy": "dfs"}):
            with pytest.raises(AssertionError, match="packed again"):
                pack_dataset(on_disk, 128, progress=False, **change)
        for change in ({"effort": 0.1}, {"bucket_size": 3}):
            with pytest.raises(AssertionError, match="packed again"):
                pack_dataset(on_disk, 128, progress=False, **change)
        with pytest.raises(AssertionError, match="packed again"):
            pack_dataset(on_disk, 129, progress=False)
        with pytest.raises(AssertionError, match="packed again"):
            pack_dataset(on_disk.select(range(3)), 128, progress=False)
        with pytest.raises(AssertionError, match="packed again"):
            pack_dataset(on_disk, 128, load_from_cache_file=False, progress=False)
        patch.setattr(row_cache, "code_digest", lambda *names: "another version")
        with pytest.raises(AssertionError, match="packed again"):
            pack_dataset(on_disk, 128, progress=False)


def test_what_is_lost_is_said_of_cached_rows_too(on_disk, caplog):
    for _ in range(2):
        caplog.clear()
        pack_dataset(on_disk, 20, overflow="truncate", progress=False)
        assert "were cut short" in caplog.text


def imported(module: str, found: set[str]) -> set[str]:
    """A module of the package and all that it imports from it, by the text of its import lines."""
    path = Path(dagpack_hf.__file__).parent / f"{module.replace('.', '/')}.py"
    if module not in found and path.is_file():
        found.add(module)
        for name in re.findall(r"^ *from dagpack_hf\.(\S+) import", path.read_text(), re.M):
            imported(name, found)
    return found


def test_the_digest_is_of_all_code_that_makes_rows():
    used = {name.split(".")[0] for name in imported("packing", set())}
    assert used | {"kernels"} == set(row_cache._SOURCES)


def test_another_code_has_another_digest(tmp_path):
    for folder in ("", "external", "kernels"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in (Path(dagpack_hf.__file__).parent / folder).glob("*.py"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())

    def digest() -> str:
        return code_digest.__wrapped__(*row_cache._SOURCES, package=tmp_path)

    before = digest()
    assert before == code_digest(*row_cache._SOURCES)
    for changed in (tmp_path / "trie.py", tmp_path / "token_trees.py", tmp_path / "kernels" / "rows.py"):
        source = changed.read_bytes()
        changed.write_bytes(source + b"\n")
        assert digest() != before
        changed.write_bytes(source)


def test_without_caching_nothing_stays_beside_the_data(on_disk, tmp_path):
    datasets.disable_caching()
    try:
        rows, _ = pack_dataset(on_disk, 128, progress=False)
    finally:
        datasets.enable_caching()
    assert not cache_files(tmp_path / "data")
    assert len(rows) and rows.cache_files


def test_a_data_set_in_memory_gives_one_in_memory():
    dataset = plain(shared_sequences())
    rows, _ = pack_dataset(dataset, 128, progress=False)
    again, _ = pack_dataset(dataset, 128, progress=False)
    assert not rows.cache_files and rows._fingerprint == again._fingerprint and rows[:] == again[:]


def test_rows_in_many_portions_are_the_same(on_disk, monkeypatch):
    whole, report = pack_dataset(plain(on_disk["input_ids"][:]), 96, progress=False)
    monkeypatch.setattr(packing, "PORTION", 100)
    rows, same = pack_dataset(on_disk, 96, progress=False)
    assert rows.data["input_ids"].num_chunks == len(rows) > 3
    assert rows[:] == whole[:] and report == same


CHILD = """
import sys, time
import datasets
datasets.disable_progress_bars()
from dagpack_hf import TokenForest, layout, pack_dataset, packing
packing.PORTION = 100
folder, mode = sys.argv[1:]
write = layout.RowWriter.write
written = 0

def slowly(self, low, high):
    global written
    written += 1
    if written == 3:
        print("writing", flush=True)
        time.sleep(60)
    return write(self, low, high)

if mode == "die":
    layout.RowWriter.write = slowly
if mode == "find":
    TokenForest.from_arrays = None
rows, report = pack_dataset(
    datasets.load_from_disk(folder), 96, progress=False, load_from_cache_file=False if mode == "die" else None
)
import hashlib, json
print(hashlib.sha256(json.dumps([rows[:], report.to_dict()]).encode()).hexdigest())
"""


def start(folder: Path, mode: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), mode], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def result(folder: Path, mode: str) -> str:
    child = start(folder, mode)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return out.strip()


def kill_in_the_middle(folder: Path) -> None:
    child = start(folder, "die")
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)


def test_killed_while_writing_it_leaves_nothing_or_the_old(on_disk, tmp_path):
    folder = tmp_path / "data"
    kill_in_the_middle(folder)
    left = cache_files(folder)
    assert any(name.startswith("tmp-") for name in left), "the process was killed before it wrote"
    assert not any(name.startswith("cache-") and name.endswith((".arrow", ".json")) for name in left)
    made = result(folder, "make")
    assert not any(name.startswith("tmp-") for name in cache_files(folder)), "what was left is gone"
    assert result(folder, "find") == made, "a second process takes what the first one made"

    rows = next(path for path in folder.glob("cache-*.arrow"))
    before = rows.read_bytes()
    kill_in_the_middle(folder)
    assert rows.read_bytes() == before
    assert result(folder, "find") == made, "the old rows are still there"


def test_rows_without_report_are_made_again(on_disk, tmp_path):
    rows, report = pack_dataset(on_disk, 96, progress=False)
    next((tmp_path / "data").glob("cache-*.json")).unlink()
    again, same = pack_dataset(on_disk, 96, progress=False)
    assert again[:] == rows[:] and same == report


def test_processes_at_the_same_time_pack_once(on_disk, tmp_path):
    children = [start(tmp_path / "data", "make") for _ in range(2)]
    outputs = {child.communicate(timeout=60)[0].strip() for child in children}
    assert len(outputs) == 1 and len(outputs.pop()) == 64
    assert len(list((tmp_path / "data").glob("cache-*.arrow"))) == 1


def test_a_folder_that_cannot_be_written(on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    rows, _ = pack_dataset(on_disk, 96, progress=False)
    assert rows.cache_files and not cache_files(tmp_path / "data")


def test_packing_is_fast():
    """A floor far below the measured speed, for a Python loop over tokens or sequences."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 30_000, 400, dtype=np.int32)
    ids = np.concatenate([np.concatenate([trunk, rng.integers(0, 30_000, 100, dtype=np.int32)]) for _ in range(4_000)])
    offsets = pa.array(np.arange(4_001, dtype=np.int32) * 500)
    dataset = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids))}))
    spent = []
    for _ in range(3):
        before = time.thread_time()
        _, report = pack_dataset(dataset, 4096, progress=False)
        spent.append(time.thread_time() - before)
    assert report.reuse_ratio > 4.5
    assert report.lower_bound == lower_bound(TokenForest.from_arrays(ids, np.arange(4_001) * 500), 4096)
    assert len(ids) / min(spent) > 10e6

"""Windows and rows: the invariants of the design, on random corpora and by brute force."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import BatchPacker, TokenForest, pack_dataset, pack_forest, unpack
from dagpack_hf.layout import ROW_COLUMNS, ROW_DTYPES
from dagpack_hf.overflow import Overflow, limit_paths
from dagpack_hf.pack import (
    Windows,
    dissolve,
    lower_bound,
    pack_bottom_up,
    pack_nearest,
    pack_walk,
    pack_windows,
    window_sizes,
)
from dagpack_hf.segments import build_segments
from tests.corpora import (
    forest_prefixes,
    labelled_sequences,
    prefix_counts,
    random_tree,
    row_parents,
    row_prefixes,
)

window_slack = st.integers(0, 12)


def longest(sequences) -> int:
    return max(map(len, sequences))


@settings(max_examples=300)
@given(labelled_sequences(), window_slack, st.sampled_from(["once", "paths"]), st.integers(0, 3))
def test_every_target_is_trained_once_by_the_position_before_it(corpus, slack, weighting, seed):
    """Invariant 3: each labelled prefix is the target of exactly one position, which sees what comes before it."""
    sequences, labels = corpus
    forest = TokenForest.from_sequences(sequences, labels)
    rows, report = pack_forest(forest, longest(sequences) + slack, loss_weighting=weighting, seed=seed)
    expected = {prefix: count for prefix, count in prefix_counts(sequences, labels).items() if count}
    trained: dict[tuple[int, ...], float] = {}
    for row in rows:
        for prefix, label, weight in zip(row_prefixes(row), row["shift_labels"], row["loss_weight"], strict=True):
            assert (weight > 0) == (label != -100)
            if label != -100:
                target = (*prefix, int(label))
                assert target not in trained, "trained twice"
                trained[target] = float(weight)
    assert trained == {prefix: float(count if weighting == "paths" else 1) for prefix, count in expected.items()}
    assert report.loss_weight == sum(trained.values())
    assert report.loss_tokens == len(expected)


@settings(max_examples=300)
@given(labelled_sequences(), window_slack)
def test_unpacking_gives_the_sequences_back(corpus, slack):
    """Invariant 5; equal sequences, and a sequence that is a prefix of another one, are one path."""
    sequences, labels = corpus
    rows, _ = pack_forest(TokenForest.from_sequences(sequences, labels), longest(sequences) + slack)
    distinct = {tuple(s) for s in sequences}
    maximal = sorted(s for s in distinct if not any(t != s and t[: len(s)] == s for t in distinct))
    assert [tuple(path.tolist()) for path in unpack(rows)] == maximal


@settings(max_examples=300)
@given(labelled_sequences(), window_slack)
def test_rows_are_well_formed(corpus, slack):
    sequences, labels = corpus
    max_length = longest(sequences) + slack
    rows, report = pack_forest(TokenForest.from_sequences(sequences, labels), max_length)
    prefixes = prefix_counts(sequences, labels)
    for row in rows:
        assert {name: row[name].dtype for name in ROW_COLUMNS} == ROW_DTYPES
        assert 0 < len(row["input_ids"]) <= max_length
        parents = row_parents(row)
        assert all(prefix in prefixes for prefix in row_prefixes(row))
        for position, parent in enumerate(parents):
            assert row["position_ids"][position] == (row["position_ids"][parent] + 1 if parent >= 0 else 0)
        copies: dict[tuple[int, int], list[int]] = {}
        for position, parent in enumerate(parents):
            size = int(row["subtree_end"][position]) - position
            copies.setdefault((parent, int(row["input_ids"][position])), []).append(size)
        assert all(sizes == sorted(sizes, reverse=True) for sizes in copies.values()), "heavy child first"
    assert report.executed_tokens == sum(len(row["input_ids"]) for row in rows)
    assert report.padding_tokens == report.windows * max_length - report.executed_tokens


def brute_force_windows(segments, max_length: int) -> int:
    """The least number of windows over all set partitions of the leaves."""
    paths = []
    for leaf in segments.leaves.tolist():
        path, node = set(), leaf
        while node >= 0:
            path.add(node)
            node = int(segments.parent[node])
        paths.append(path)

    def size(members) -> int:
        return int(segments.length[list(set().union(*members))].sum())

    def search(index: int, windows: list[list[set]], best: int) -> int:
        if len(windows) >= best:
            return best
        if index == len(paths):
            return len(windows)
        for window in windows:
            window.append(paths[index])
            if size(window) <= max_length:
                best = search(index + 1, windows, best)
            window.pop()
        return search(index + 1, [*windows, [paths[index]]], best)

    return search(0, [], len(paths) + 1)


@settings(max_examples=300, deadline=None)
@given(labelled_sequences(max_sequences=7, max_tokens=7), window_slack)
def test_bound_optimum_and_windows(corpus, slack):
    """Invariant 4, by brute force."""
    sequences, labels = corpus
    max_length = longest(sequences) + slack
    forest = TokenForest.from_sequences(sequences, labels)
    segments = build_segments(forest)
    optimum = brute_force_windows(segments, max_length)
    windows = pack_windows(segments, max_length)
    assert lower_bound(forest, max_length) <= optimum <= len(windows)
    packings = [pack(segments, max_length) for pack in (pack_walk, pack_bottom_up, pack_nearest)]
    for packed in (windows, *packings, *(dissolve(segments, max_length, packing) for packing in packings)):
        assert sorted(packed.leaf.tolist()) == segments.leaves.tolist()
        assert max(window_sizes(segments, packed)) <= max_length


def test_dissolve_tries_on_after_a_window_that_stays():
    """Of windows with leaves of 6, of 4 and 3, and of 7 tokens the first cannot go, but takes a leaf of the second."""
    segments = build_segments(TokenForest.from_sequences([[1] * 6, [2] * 4, [3] * 3, [4] * 7]))
    lengths = dict(zip(segments.length.tolist(), range(4), strict=True))
    window_of = {lengths[6]: 0, lengths[4]: 1, lengths[3]: 1, lengths[7]: 2}
    numbers = np.array([window_of[leaf] for leaf in segments.leaves.tolist()])
    windows = Windows.from_assignment(segments.leaves, numbers)
    assert sorted(window_sizes(segments, dissolve(segments, 10, windows))) == [10, 10]


def test_packing_stays_close_to_the_bound():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 500, 400).tolist()
    sequences = [
        trunk[: 100 * group] + rng.integers(0, 500, int(rng.integers(20, 120))).tolist()
        for group in range(1, 5)
        for _ in range(60)
    ]
    _, report = pack_forest(TokenForest.from_sequences(sequences), 4 * longest(sequences))
    assert report.gap <= 0.05
    assert report.executed_tokens < 1.25 * report.unique_tokens


def table_bytes(dataset: Dataset) -> bytes:
    return b"".join(
        bytes(b) for c in dataset.data.table.columns for ch in c.chunks for b in ch.buffers() if b is not None
    )


@given(labelled_sequences(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_same_input_and_seed_same_bytes_in_any_order(corpus, random, seed):
    """Invariant 6; the order of the input does not matter either."""
    sequences, labels = corpus
    forest_a = TokenForest.from_sequences(sequences, labels)
    pairs = list(zip(sequences, labels, strict=True))
    random.shuffle(pairs)
    forest_b = TokenForest.from_sequences(*zip(*pairs, strict=True))
    (rows_a, _), (rows_b, _) = (pack_forest(f, longest(sequences) + 3, seed=seed) for f in (forest_a, forest_b))
    assert all(
        getattr(rows_a, name).tobytes() == getattr(rows_b, name).tobytes() for name in ("offsets", *ROW_COLUMNS)
    )


def test_another_process_gives_the_same_bytes():
    code = """
import hashlib, json, sys
from datasets import Dataset
from dagpack_hf import pack_dataset
sequences = [[1, 2, 3, 4], [1, 2, 5], [6, 7], [1, 2, 3, 8, 9], [6, 9, 9, 9]]
rows, _ = pack_dataset(Dataset.from_dict({"input_ids": sequences}), 6, seed=7, progress=False)
print(hashlib.sha256(json.dumps(rows[:]).encode()).hexdigest(), "torch" in sys.modules)
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 64


def test_windows_are_shuffled_by_the_seed_alone():
    dataset = Dataset.from_dict({"input_ids": [[i, i + 1, i + 2] for i in range(0, 90, 3)]})
    orders = [pack_dataset(dataset, 3, seed=seed, progress=False)[0]["input_ids"][:] for seed in (None, 0, 0, 1)]
    assert orders[0] == [[i, i + 1, i + 2] for i in range(0, 90, 3)]
    assert orders[1] == orders[2] != orders[3]
    assert sorted(orders[1]) == sorted(orders[3]) == orders[0]


def test_a_branch_point_is_copied_once_for_each_trained_child():
    # 1 2 | 3 and 4 trained, 5 is context: two copies of token 2, and 5 hangs from the first
    sequences = [[1, 2, 3, 3], [1, 2, 4], [1, 2, 5, 6]]
    labels = [[-100, 2, 3, 3], [-100, 2, 4], [-100, 2, -100, 6]]
    rows, report = pack_forest(TokenForest.from_sequences(sequences, labels), 16)
    (row,) = rows
    assert row["input_ids"].tolist() == [1, 2, 3, 3, 5, 6, 2, 4]
    assert row["shift_labels"].tolist() == [2, 3, 3, -100, 6, -100, 4, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 2, 3, 1, 2]
    assert row["subtree_end"].tolist() == [8, 6, 4, 4, 6, 6, 8, 8]
    assert row["loss_weight"].tolist() == [1, 1, 1, 0, 1, 0, 1, 0]
    assert (report.unique_tokens, report.executed_tokens, report.replay_tokens) == (7, 8, 1)


def test_replayed_ancestors_are_context():
    sequences = [[1, 2, 3, 4], [1, 2, 5, 6]]
    rows, report = pack_forest(TokenForest.from_sequences(sequences), 4, loss_weighting="paths")
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [row["shift_labels"].tolist() for row in rows] == [[2, 3, 4, -100], [-100, 5, 6, -100]]
    assert [row["loss_weight"].tolist() for row in rows] == [[2, 1, 1, 0], [0, 1, 1, 0]]
    assert (report.windows, report.lower_bound, report.replay_tokens) == (2, 2, 2)


def test_report_figures():
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]]})
    rows, report = pack_dataset(dataset, 10, loss_weighting="paths", progress=False)
    assert len(rows) == report.windows == report.lower_bound == 1
    assert (report.logical_tokens, report.unique_tokens, report.executed_tokens) == (12, 5, 6)
    assert (report.loss_tokens, report.loss_weight, report.padding_tokens) == (4, 9.0, 4)
    assert (report.longest_path, report.reuse_ratio, report.speedup_bound, report.gap) == (4, 2.4, 2.0, 0.0)
    assert json.loads(json.dumps(report.to_dict()))["overflow"] == {}
    assert "lower bound 1, gap 0.0%" in str(report)


def tree_dataset(corpora) -> Dataset:
    trees = [random_tree(np.random.default_rng(i), *corpus) for i, corpus in enumerate(corpora)]
    names = ("input_ids", "target_count", "node_length", "node_parent", "logical_tokens")
    return Dataset.from_list([{n: np.asarray(getattr(t, n)).tolist() for n in names} for t in trees])


@given(st.lists(labelled_sequences(), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=30)
def test_trees_and_sequences_pack_alike(corpora, select):
    trees = tree_dataset(corpora)
    if select:
        corpora = corpora[::-1]
        trees = trees.select(range(len(trees) - 1, -1, -1))
    plain = Dataset.from_dict(
        {
            "input_ids": list(itertools.chain(*(c[0] for c in corpora))),
            "labels": list(itertools.chain(*(c[1] for c in corpora))),
        }
    )
    (rows_a, report_a), (rows_b, report_b) = (pack_dataset(d, 12, progress=False) for d in (trees, plain))
    assert rows_a[:] == rows_b[:] and report_a == report_b


def test_batch_packer_packs_each_batch():
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4], [1, 2, 5]]})
    whole = dataset.map(BatchPacker(8), batched=True, remove_columns=dataset.column_names)
    assert whole["input_ids"][:] == [[1, 2, 3, 2, 4, 2, 5]]
    halves = dataset.map(BatchPacker(8), batched=True, batch_size=2, remove_columns=dataset.column_names)
    assert halves["input_ids"][:] == [[1, 2, 3, 2, 4], [1, 2, 5]]
    trees = tree_dataset([([[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [1, 2, 4]])])
    assert trees.map(BatchPacker(8), batched=True, remove_columns=trees.column_names)["input_ids"][:] == [
        [1, 2, 3, 2, 4]
    ]


# What is longer than a window


@settings(max_examples=300)
@given(labelled_sequences(), st.integers(1, 9))
def test_truncate_cuts_what_lies_beyond_and_then_trains_nothing(corpus, limit):
    sequences, labels = corpus
    forest = TokenForest.from_sequences(sequences, labels)
    clipped, lost = limit_paths(forest, limit, "truncate")
    counts = {prefix: count for prefix, count in prefix_counts(sequences, labels).items() if len(prefix) <= limit}
    maximal = [
        s
        for s in map(tuple, sequences)
        if not any(len(p) > len(s) and p[: len(s)] == s for p in map(tuple, sequences))
    ]
    ends = {prefix for prefix, count in counts.items() if count} | {path for path in maximal if len(path) <= limit}
    kept = {prefix: count for prefix, count in counts.items() if any(end[: len(prefix)] == prefix for end in ends)}
    assert forest_prefixes(clipped) == kept
    assert clipped.start.tolist() == (np.cumsum(clipped.length) - clipped.length).tolist()
    assert lost.lost_tokens == forest.num_tokens - len(kept)
    assert lost.lost_targets == forest.num_source_targets - sum(kept.values())


def turns(lengths, seed=0):
    """One session as one sequence per turn: three tokens of context, then a turn of the given length, and so on."""
    rng = np.random.default_rng(seed)
    text, sequences, labels = [], [], []
    for length in lengths:
        text = text + rng.integers(0, 100, 3).tolist()
        reply = rng.integers(0, 100, length).tolist()
        sequences.append(text + reply)
        labels.append([-100] * len(text) + reply)
        text = text + reply
    return sequences, labels


def test_drop_leaves_out_the_turns_that_reach_beyond():
    sequences, labels = turns([4, 5, 6])  # ends at 7, 15, 24
    clipped, lost = limit_paths(TokenForest.from_sequences(sequences, labels), 13, "drop")
    assert clipped.tokens.tolist() == sequences[0]
    assert clipped.target_count.tolist() == [0] * 3 + [1] * 4
    assert lost == Overflow(cut_sequences=1, lost_sequences=1, lost_tokens=24 - 7, lost_targets=5 + 6)


def test_drop_with_turns_that_begin_alike_takes_out_only_the_long_one():
    context = [1, 2, 3]
    sequences = [[*context, 7, 7, 8], [*context, 7, 7, 9, 9, 9, 9]]
    labels = [[-100] * 3 + s[3:] for s in sequences]
    clipped, lost = limit_paths(TokenForest.from_sequences(sequences, labels), 6, "drop")
    assert clipped.tokens.tolist() == [1, 2, 3, 7, 7, 8]
    assert clipped.target_count.tolist() == [0, 0, 0, 1, 1, 1]
    assert lost == Overflow(cut_sequences=1, lost_sequences=0, lost_tokens=4, lost_targets=6)


def test_drop_takes_from_a_run_no_more_than_crosses_the_limit():
    # the run of the first sequence ends where those of the two others begin
    sequences = [[0, 1, 2, 3]] * 3
    labels = [[-100, 1, -100, -100], [-100, -100, 2, 3], [-100, -100, 2, 3]]
    clipped, lost = limit_paths(TokenForest.from_sequences(sequences, labels), 3, "drop")
    assert clipped.target_count.min(initial=0) == 0
    assert lost.lost_targets == 5


def test_drop_of_plain_sequences_is_by_length():
    dataset = Dataset.from_dict(
        {"input_ids": [[1, 2, 3], [1, 2, 3, 4, 5]], "labels": [[-100, 2, 3], [-100, -100, 3, 4, 5]]}
    )
    rows, report = pack_dataset(dataset, 4, overflow="drop", progress=False)
    assert rows["input_ids"][:] == [[1, 2, 3]] and report.loss_weight == 2
    assert report.overflow == {"cut_sequences": 1, "lost_tokens": 5, "lost_targets": 3}


def test_a_path_that_is_too_long_is_an_error_with_a_remedy():
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4, 5, 6]]})
    with pytest.raises(ValueError, match=r"1 of 2 paths are longer than max_length=4 .*longest has 5.*overflow="):
        pack_dataset(dataset, 4, progress=False)


def test_truncation_is_reported(caplog):
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4, 5, 6]]})
    _, report = pack_dataset(dataset, 4, overflow="truncate", progress=False)
    assert report.overflow == {"cut_sequences": 1, "lost_tokens": 1, "lost_targets": 1}
    assert "1 sequences or turns were cut short" in caplog.text
    assert "lost targets" in str(report)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"messages": ["x"]}, {}, "tokenize_conversations"),
        ({"text": ["x"]}, {}, "needs an input_ids column; the data set has text"),
        ({"input_ids": [[1]], "assistant_masks": [[1]]}, {}, "assistant_masks but no labels"),
        ({"input_ids": [[1]]}, {"overflow": "cut"}, "overflow must be one of 'error', 'truncate', 'drop', got 'cut'"),
        ({"input_ids": [[1]]}, {"loss_weighting": "mean"}, "loss_weighting must be 'once' or 'paths', got 'mean'"),
        ({"input_ids": [[1]]}, {"max_length": 0}, "max_length must be at least 1"),
    ],
)
def test_bad_arguments_are_named(columns, options, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(Dataset.from_dict(columns), **{"max_length": 8, "progress": False, **options})


def test_what_is_no_data_set_is_named():
    with pytest.raises(TypeError, match=r"got list.*Dataset.from_dict"):
        pack_dataset([[1, 2, 3], [1, 2, 4]], 8)


def test_a_stream_is_packed_batch_by_batch():
    stream = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]}).to_iterable_dataset()
    packed = stream.map(BatchPacker(8), batched=True, remove_columns=["input_ids"])
    assert [list(row["input_ids"]) for row in packed] == [[1, 2, 3, 2, 4]]


def test_an_empty_data_set_packs_to_no_rows():
    rows, report = pack_dataset(Dataset.from_dict({"input_ids": [], "labels": []}), 8, progress=False)
    assert len(rows) == 0 and report.windows == report.lower_bound == 0

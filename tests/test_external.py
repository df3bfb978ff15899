"""Packing in partitions: the same targets, weights and figures as in memory, whatever the splitters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest, pack_dataset
from dagpack_hf.columns import SequenceColumns, table_trees
from dagpack_hf.external import edges, memory, packing
from dagpack_hf.external.border import SharedPath, Summary, draw_borders
from dagpack_hf.external.branches import Extent, measure, sample_paths
from dagpack_hf.external.lines import PartLine, WholeLine
from dagpack_hf.external.packing import (
    LargeDataset,
    batches,
    measure_dataset,
    pack_partitioned,
    packing_order,
    sample_splitters,
    total_extent,
)
from dagpack_hf.external.scatter import scatter
from dagpack_hf.external.splitters import Splitters, choose_splitters
from dagpack_hf.pack import LeafLine
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport
from tests.corpora import labelled_sequences, prefix_counts, random_tree
from tests.test_pack_dataset import plain, shared_sequences, trained

NEEDS_WINDOWS = {"windows", "executed_tokens", "padding_tokens", "partitions"}
"""Figures of a report that depend on how leaves are put into windows."""

TREE_LISTS = ("input_ids", "target_count", "node_length", "node_parent")
TREE_FEATURES = Features({**{name: List(Value("int32")) for name in TREE_LISTS}, "logical_tokens": Value("int64")})


def trees(groups, weights=None) -> Dataset:
    """One token tree for each group; `weights` is for each a factor of its counts, `None` for no weights."""
    rows = []
    for index, group in enumerate(groups):
        tree = random_tree(np.random.default_rng(index), *group)
        row = {name: np.asarray(getattr(tree, name)).tolist() for name in (*TREE_LISTS, "logical_tokens")}
        if weights is not None:
            factor = weights[index % len(weights)]
            row["target_weight"] = None if factor is None else [factor * count for count in row["target_count"]]
        rows.append(row)
    weighted = {} if weights is None else {"target_weight": List(Value("float32"))}
    return Dataset.from_list(rows, features=Features({**TREE_FEATURES, **weighted}))


def in_partitions(dataset: Dataset, options: PackOptions, splitters: Splitters) -> tuple[list[dict], PackReport]:
    tables: list[pa.Table] = []
    blocks = measure_dataset(dataset, options.max_length)
    report = pack_partitioned(dataset, options, tables.append, blocks=blocks, splitters=splitters)
    return [row for table in tables for row in table.to_pylist()], report


def in_memory(dataset: Dataset, options: PackOptions) -> tuple[Dataset, PackReport]:
    names = ("loss_weighting", "overflow", "strategy", "seed")
    return pack_dataset(
        dataset, options.max_length, progress=False, **{name: getattr(options, name) for name in names}
    )


def assert_same_figures(report: PackReport, other: PackReport) -> None:
    for name in PackReport.__dataclass_fields__:
        if name not in NEEDS_WINDOWS:
            assert getattr(report, name) == getattr(other, name), name


def assert_same_packing(dataset: Dataset, options: PackOptions, splitters: Splitters) -> list[dict]:
    rows, report = in_partitions(dataset, options, splitters)
    expected_rows, expected = in_memory(dataset, options)
    assert trained(rows) == trained(expected_rows)
    assert_same_figures(report, expected)
    assert report.windows == len(rows) >= report.lower_bound
    assert report.executed_tokens == sum(len(row["input_ids"]) for row in rows)
    assert all(len(row["input_ids"]) <= options.max_length for row in rows)
    return rows


@st.composite
def splitters_of(draw, sequences, max_length) -> Splitters:
    """Any splitters: beginnings of the sequences, and others; up to more than there are leaves."""
    prefix = st.sampled_from(sequences).flatmap(lambda s: st.integers(1, len(s)).map(lambda end: s[:end]))
    other = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    found = draw(st.lists(st.one_of(prefix, prefix, other), max_size=9))
    return Splitters.of(sorted({tuple(path[:max_length]) for path in found}))


@st.composite
def corpora_of(draw):
    """Groups of labelled sequences, a data set of them, options that fit, and splitters."""
    groups = draw(st.lists(labelled_sequences(4, 9), min_size=1, max_size=6))
    sequences, labels = (list(itertools.chain.from_iterable(group[part] for group in groups)) for part in (0, 1))
    kind = draw(st.sampled_from(["sequences", "labels", "trees", "weighted trees"]))
    if kind == "weighted trees":
        dataset = trees(groups, draw(st.lists(st.sampled_from([None, 0.0, 0.5, 3.0]), min_size=1, max_size=3)))
    elif kind == "trees":
        dataset = trees(groups)
    else:
        dataset = plain(sequences, labels if kind == "labels" else None)
    longest = max(map(len, sequences))
    max_length = draw(st.integers(1, longest + 3))
    options = PackOptions(
        max_length,
        draw(st.sampled_from(["once", "paths"])),
        "error" if longest <= max_length else draw(st.sampled_from(["truncate", "drop"])),
        draw(st.sampled_from(["best", "dfs"])),
        seed=draw(st.sampled_from([None, 0, 5])),
    )
    return dataset, options, draw(splitters_of(sequences, max_length)), draw(st.integers(1, 25))


def in_common(one, other) -> int:
    """How many tokens two paths begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# The whole


@settings(max_examples=120, deadline=None)
@given(corpora_of())
def test_targets_weights_and_figures_are_those_of_packing_in_memory(corpus):
    dataset, options, splitters, batch_tokens = corpus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_TOKENS", batch_tokens)
        patch.setattr(packing, "BLOCK_EXAMPLES", 1 + batch_tokens % 3)
        rows = assert_same_packing(dataset, options, splitters)
    again, _ = in_partitions(dataset, options, splitters)
    assert again == rows, "how the corpus is cut into batches must not matter"


@settings(max_examples=60, deadline=None)
@given(corpora_of(), st.integers(1, 30))
def test_sampled_splitters(corpus, partitions):
    dataset, options, _, _ = corpus
    found = []
    for examples in (256, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "BLOCK_EXAMPLES", examples)
            patch.setattr(packing, "SAMPLE_TOKENS", 12)
            found.append(sample_splitters(dataset, options, measure_dataset(dataset, options.max_length), partitions))
    splitters, again = found
    assert splitters.tokens.tolist() == again.tokens.tolist() and splitters.offset.tolist() == again.offset.tolist()
    assert len(splitters) < partitions
    assert_same_packing(dataset, options, splitters)


def test_one_prompt_over_all_partitions():
    """A border path that spans many partitions, some of which hold nothing else."""
    prompt = list(range(1, 21))
    sequences = [prompt[:n] for n in range(1, 21)] + [[*prompt, 30 + i, i] for i in range(8)]
    dataset = plain(sequences, [[-100, *s[1:]] for s in sequences])
    paths = [prompt[:5], prompt[:9], prompt, [*prompt, 5], [*prompt, 32], [*prompt, 33], [*prompt, 33, 9], [2]]
    for weighting, seed in itertools.product(("once", "paths"), (None, 1)):
        rows = assert_same_packing(dataset, PackOptions(32, weighting, seed=seed), Splitters.of(paths))
        weights = trained(rows)
        assert weights[tuple(prompt)] == (9 if weighting == "paths" else 1)


def test_dropping_across_partitions_is_handed_on():
    """Turns that reach beyond the window begin in a shared prefix; each takes its own count out of it, once."""
    prefix = [1, 2, 3]
    groups = [([[*prefix, branch, 5, 6, 7]], [[-100, *prefix[1:], branch, 5, 6, 7]]) for branch in (10, 20, 30)]
    groups.append(([[*prefix, 40]], [[-100, *prefix[1:], 40]]))
    options = PackOptions(5, "paths", "drop", seed=None)
    splitters = Splitters.of([[1, 2, 3, 15], [1, 2, 3, 25], [1, 2, 3, 35]])
    rows = assert_same_packing(trees(groups), options, splitters)
    assert trained(rows) == {(1, 2): 1, (1, 2, 3): 1, (1, 2, 3, 40): 1}
    first = Splitters.of([[1, 2, 3, 25]])
    assert_same_packing(trees([*groups[:2], groups[3]]), options, first)
    assert_same_packing(trees(groups[:3], [2.0]), options, splitters)
    # the second partition has one path, which the third one holds as well, and hands on what the first one left
    groups = [([path], [[-100, *path[1:]]]) for path in ([*prefix, 10, 5, 6], [*prefix, 20], [*prefix, 20, 30])]
    rows = assert_same_packing(trees(groups), options, Splitters.of([[1, 2, 3, 15], [1, 2, 3, 20, 25]]))
    assert trained(rows)[1, 2] == 2
    # nothing is left of the counts in the prefix, and the first partition keeps nothing of it
    groups = [([[*prefix, 10, 5, 6]], [[-100, *prefix[1:], 10, 5, 6]]), ([[*prefix, 20]], [[-100] * 4])]
    assert trained(assert_same_packing(trees(groups), options, Splitters.of([[1, 2, 3, 15]]))) == {}


def test_truncating_may_leave_nothing_of_what_is_shared():
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7], [1, 9, 8]]
    labels = [[-100, -100, -100, 4], [-100] * 6, [-100, -100, 8]]
    splitters = Splitters.of([[1, 2, 3, 5]])
    for overflow in ("truncate", "drop"):
        options = PackOptions(5, overflow=overflow, seed=None)
        assert_same_packing(
            trees([([ids], [marks]) for ids, marks in zip(sequences, labels, strict=True)]), options, splitters
        )
        assert_same_packing(plain(sequences, labels), options, splitters)
    # nothing is left of the second partition, whose paths share less than it shares with the others
    sequences = [[1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 5, 4, 9, 9], [1, 5, 6]]
    labels = [[-100] * (len(ids) - 1) + [-100 if len(ids) == 5 else ids[-1]] for ids in sequences]
    options = PackOptions(4, overflow="truncate", seed=None)
    assert_same_packing(plain(sequences, labels), options, Splitters.of([[1, 2, 3, 9], [1, 5, 6]]))


def test_few_more_windows():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 999, 60).tolist()
    sequences = []
    for _ in range(400):
        trunk = prompt + rng.integers(0, 999, int(rng.integers(20, 200))).tolist()
        for _ in range(int(rng.integers(1, 12))):
            sequences.append(trunk[: int(rng.integers(60, len(trunk)))] + rng.integers(0, 999, 60).tolist())
    rng.shuffle(sequences)
    dataset = plain(sequences)
    options = PackOptions(512, seed=0)
    splitters = sample_splitters(dataset, options, measure_dataset(dataset, 512), 4)
    _, report = in_partitions(dataset, options, splitters)
    _, expected = in_memory(dataset, options)
    assert report.partitions == 4 and expected.windows >= 4 * 90
    assert report.windows <= 1.02 * expected.windows
    assert_same_figures(report, expected)


def test_partitions_come_in_random_order_and_windows_in_random_order_within():
    sequences = [[i, j, j + 1, j + 2] for i in range(8) for j in range(20)]
    splitters = Splitters.of([[i] for i in range(1, 8)])

    def first_tokens(seed):
        rows, _ = in_partitions(plain(sequences), PackOptions(16, seed=seed), splitters)
        return [(row["input_ids"][0], row["input_ids"][1]) for row in rows]

    in_order = first_tokens(None)
    assert in_order == sorted(in_order)
    orders = [[first for first, _ in itertools.groupby(first_tokens(seed), lambda each: each[0])] for seed in (1, 2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == list(range(8)) == sorted(orders[1])
    assert orders[0] == packing_order(8, 1)
    within = {i: [second for first, second in first_tokens(1) if first == i] for i in range(8)}
    assert any(each != sorted(each) for each in within.values())
    assert len({tuple(each) for each in within.values()}) > 1, "each partition has a seed of its own"
    assert first_tokens(1) == first_tokens(1) and sorted(first_tokens(1)) == in_order


# Scattering


def paths_of(dataset: Dataset) -> set[tuple[int, ...]]:
    """Paths that go on no further within their example."""
    forests = (
        [TokenForest.from_trees([tree]) for tree in table_trees(dataset.with_format("arrow")[:])]
        if "node_parent" in dataset.column_names
        else [TokenForest.from_sequences([ids]) for ids in dataset["input_ids"]]
    )
    return {tuple(forest.path(leaf).tolist()) for forest in forests for leaf in forest.leaves.tolist()}


@settings(max_examples=150, deadline=None)
@given(corpora_of())
def test_each_path_goes_where_bisection_puts_it(corpus):
    dataset, options, splitters, _ = corpus
    options = replace(options, overflow="truncate")
    keys = [tuple(splitters.tokens[low:high].tolist()) for low, high in itertools.pairwise(splitters.offset)]
    scattered = scatter(dataset.with_format("arrow")[:], splitters, options)
    found = {
        partition: (
            TokenForest.from_trees(table_trees(table))
            if "node_parent" in table.column_names
            else SequenceColumns.of(table).forest()
        )
        for partition, table in scattered.pieces.items()
    }
    where: dict[int, set[tuple[int, ...]]] = {}
    for path in paths_of(dataset):
        where.setdefault(bisect_right(keys, path), set()).add(path)
    assert set(found) == set(where) == set(np.flatnonzero(scattered.summary.tokens).tolist())
    for partition, forest in found.items():
        assert {tuple(forest.path(leaf).tolist()) for leaf in forest.leaves.tolist()} == {
            path
            for path in where[partition]
            if not any(o[: len(path)] == path and o != path for o in where[partition])
        }
    _, expected = in_memory(dataset, replace(options, max_length=99))
    assert sum(forest.num_source_targets for forest in found.values()) == expected.source_targets


@settings(max_examples=100, deadline=None)
@given(corpora_of())
def test_borders_are_what_neighbours_share(corpus):
    dataset, options, splitters, _ = corpus
    options = replace(options, overflow="truncate", max_length=max(options.max_length, 9))
    table = dataset.with_format("arrow")[:]
    parts = [scatter(table.slice(at, 1), splitters, options).summary for at in range(table.num_rows)]
    forwards, backwards = (sum(each, Summary.empty(splitters)) for each in (parts, parts[::-1]))
    keys = [tuple(splitters.tokens[low:high].tolist()) for low, high in itertools.pairwise(splitters.offset)]
    where: dict[int, list[tuple[int, ...]]] = {}
    for path in sorted(paths_of(dataset)):
        where.setdefault(bisect_right(keys, path), []).append(path)
    borders = draw_borders(forwards, splitters)
    assert [border.partition for border in borders] == sorted(where)
    forest = (
        TokenForest.from_trees(table_trees(table))
        if "node_parent" in table.column_names
        else SequenceColumns.of(table).forest()
    )
    for one, other in itertools.pairwise(borders):
        last, first = where[one.partition][-1], where[other.partition][0]
        shared = in_common(last, first)
        assert len(one.last) == len(other.first) == shared
        totals = [count_at(forest, last[: end + 1]) for end in range(shared)]
        assert one.last.count.tolist() == other.first.count.tolist() == totals
    for border, again in zip(borders, draw_borders(backwards, splitters), strict=True):
        assert border.first.count.tolist() == again.first.count.tolist()
        assert (border.first.weight is None) == (again.first.weight is None) == (forest.target_weight is None)
        assert border.first.weight is None or border.first.weight.tolist() == again.first.weight.tolist()
        paths = where[border.partition]
        assert border.common == min(len(border.first), len(border.last), in_common(paths[0], paths[-1]))


def count_at(forest: TokenForest, prefix: tuple[int, ...]) -> int:
    """The count of the last token of a prefix."""
    count = forest.target_count
    for node in range(forest.num_nodes):
        depth = int(forest.depth[node])
        if depth < len(prefix) <= depth + forest.length[node] and tuple(forest.path(node)[: len(prefix)]) == prefix:
            return int(count[forest.start[node] + len(prefix) - 1 - depth])
    raise AssertionError(prefix)


def test_equal_sequences_are_together_and_a_tree_is_cut_once_per_partition():
    labels = [[-100, 2, 3], [-100, 2, 4], [-100, 2, 5], [-100, 2, 3]]
    tree = trees([([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 3]], labels)])
    splitters = Splitters.of([[1, 2, 4], [1, 2, 5]])
    pieces = scatter(tree.with_format("arrow")[:], splitters, PackOptions(8)).pieces
    forests = {partition: TokenForest.from_trees(table_trees(table)) for partition, table in pieces.items()}
    assert {p: (f.tokens.tolist(), f.target_count.tolist()) for p, f in forests.items()} == {
        0: ([1, 2, 3], [0, 4, 2]),
        1: ([1, 2, 4], [0, 0, 1]),
        2: ([1, 2, 5], [0, 0, 1]),
    }
    again = scatter(plain([[1, 2, 4], [1, 2], [1, 2, 4]]).with_format("arrow")[:], splitters, PackOptions(8)).pieces
    assert {p: table["input_ids"].to_pylist() for p, table in again.items()} == {0: [[1, 2]], 1: [[1, 2, 4]] * 2}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1, 2], [1, -2]]}, "Sequence 1: token id -2 at position 1"),
        ({"input_ids": [[1, 2], [1, 2]], "labels": [[1, 2], [1, 3]]}, "Sequence 1: label 3 at position 1"),
        ({"input_ids": [[1, 2], [1, 2]], "labels": [[1, 2], [1]]}, "Sequence 1: 2 tokens but 1 labels"),
        ({"input_ids": [[1, 2], None]}, "input_ids has no value in example 1"),
    ],
)
def test_bad_examples_are_named(columns, message):
    dataset = Dataset.from_dict({name: [[3, 3], *lists] for name, lists in columns.items()})
    blocks = [packing.Block(0, Extent(1, 2)), packing.Block(1, Extent(2, 4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_TOKENS", 5)
        with pytest.raises(ValueError, match=f"From example 1 of the data set on: .*{message}"):
            pack_partitioned(dataset, PackOptions(8), print, blocks=blocks, splitters=Splitters.of([]))


def test_bad_trees_are_named():
    rows = trees([([[1, 2, 3]], [[1, 2, 3]])] * 3).to_list()
    rows[1]["node_parent"] = [5]
    with pytest.raises(ValueError, match="Token tree 1: node 0 hangs from token 5"):
        measure_dataset(Dataset.from_list(rows), 8)
    rows[1]["node_parent"] = [-1, -1]
    with pytest.raises(ValueError, match="Token tree 1: 3 input_ids"):
        measure_dataset(Dataset.from_list(rows), 8)


# Splitters and samples


def test_splitters_ascend():
    for paths in ([[2], [1]], [[1], [1]], [[]]):
        with pytest.raises(ValueError, match="must be ascending"):
            Splitters.of(paths)
    splitters = Splitters.of([[1, 2], [1, 2, 3], [1, 3], [4]])
    assert splitters.shared.tolist() == [0, 2, 1, 0]
    assert [splitters.common(0, last) for last in range(4)] == [2, 2, 1, 0]
    with pytest.raises(ValueError, match="A splitter has 3 tokens, a window only max_length=2"):
        scatter(plain([[1]]).with_format("arrow")[:], splitters, PackOptions(2))


def test_splitters_are_short_and_partitions_even():
    rng = np.random.default_rng(3)
    sample = [rng.integers(0, 500, 50).astype(np.int32) for _ in range(2000)]
    splitters = choose_splitters(sample, 10)
    assert len(splitters) == 9 and splitters.tokens.size <= 2 * 9
    keys = [splitters.tokens[low:high].tolist() for low, high in itertools.pairwise(splitters.offset)]
    sizes = np.bincount([bisect_right(keys, path.tolist()) for path in sample])
    assert sizes.min() > 2000 / 10 * 0.7 and sizes.max() < 2000 / 10 * 1.3
    again = choose_splitters(sample[::-1], 10)
    assert np.array_equal(again.tokens, splitters.tokens) and np.array_equal(again.offset, splitters.offset)


def test_partitions_are_even_in_new_tokens_not_in_paths():
    """A thousand copies of one path and of its beginnings weigh little; a splitter is between what differs."""
    one = np.arange(400, dtype=np.int32)
    sample = [one[: 400 - i % 3] for i in range(500)] + [
        np.array([500 + i, *range(1000)], np.int32) for i in range(30)
    ]
    splitters = choose_splitters(sample, 3)
    keys = [splitters.tokens[low:high].tolist() for low, high in itertools.pairwise(splitters.offset)]
    assert len(keys) == 2 and all(len(key) == 1 and key[0] >= 500 for key in keys)


def test_splitters_where_paths_share_least():
    sample = [np.array([group, *range(90), i, i], np.int32) for group in range(9) for i in range(20)]
    splitters = choose_splitters(sample, 2)
    assert len(splitters.tokens) == 1


def test_no_more_splitters_than_paths():
    assert len(choose_splitters([np.array([1, 2], np.int32)] * 5, 4)) == 0
    assert len(choose_splitters([], 4)) == 0
    sample = [np.array([1, 2, i], np.int32) for i in range(3)]
    assert choose_splitters(sample, 50).tokens.tolist() == [1, 2, 1, 1, 2, 2]


@settings(max_examples=60, deadline=None)
@given(corpora_of(), st.integers(1, 5), st.integers(1, 4))
def test_the_sample_depends_on_places_in_the_corpus_alone(corpus, step, block):
    dataset, options, _, _ = corpus
    table = dataset.with_format("arrow")[:]
    whole = [path.tolist() for path in sample_paths(table, 0, step, options)]
    found, before, extent = [], 0, Extent()
    for at in range(0, table.num_rows, block):
        part = table.slice(at, block)
        found += [path.tolist() for path in sample_paths(part, before, step, options)]
        before += measure(part, options.max_length).paths
        extent += measure(part, options.max_length)
    assert found == whole and extent == measure(table, options.max_length)
    every = [path.tolist() for path in sample_paths(table, 0, 1, options)]
    assert all(path in every for path in whole)
    if "node_parent" not in table.column_names:
        lists = table["input_ids"].to_pylist()
        kept = [s for s in lists if options.overflow != "drop" or len(s) <= options.max_length]
        assert every == [s[: options.max_length] for s in kept]
        assert extent.path_tokens == extent.tokens == sum(map(len, lists))
        assert extent.longest == max(map(len, lists))
        assert extent.longer == sum(len(s) > options.max_length for s in lists)
    else:
        leaves = [tuple(path[: options.max_length]) for path in paths_of(dataset)]
        assert {tuple(path) for path in every} >= set(leaves)


def test_batches_hold_all_examples_once():
    extents = [Extent(3, tokens) for tokens in (5, 0, 90, 4, 4, 4, 30)]
    blocks = [packing.Block(3 * at, extent) for at, extent in enumerate(extents)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_TOKENS", 10)
        found = list(batches(blocks))
        alone = list(batches([packing.Block(0, Extent(2, 50)), packing.Block(2, Extent(1, 1))]))
    assert alone == [(0, 1), (1, 2), (2, 3)]
    assert found == [(0, 6), (6, 7), (7, 8), (8, 9), (9, 15), (15, 18), (18, 19), (19, 20), (20, 21)]
    assert list(batches([])) == []


# Edges


@settings(max_examples=80, deadline=None)
@given(labelled_sequences(6, 7), st.booleans(), st.booleans(), st.data())
def test_tallies_and_ends_of_a_forest(corpus, weighted, other_weighted, data):
    sequences, labels = corpus
    weights = [float(1 + i % 3) for i in range(len(sequences))] if weighted else None
    forest = TokenForest.from_sequences(sequences, labels, weights)
    token = np.array(data.draw(st.permutations(range(forest.num_tokens)))[: data.draw(st.integers(1, 5))], np.int64)
    path = SharedPath(np.arange(7, 7 + len(token)), np.arange(len(token)) / 2 if weighted or other_weighted else None)
    count, weight = forest.target_count.copy(), forest.path_weight.astype(np.float64)
    count[token], changed = path.count, edges.with_tallies(forest, token, path)
    assert changed.target_count.tolist() == count.tolist()
    assert (changed.target_weight is None) == (path.weight is None)
    if path.weight is not None:
        weight[token] = path.weight
        assert changed.target_weight.tolist() == weight.tolist()
    found = edges.tallies_of(changed, token)
    assert found.count.tolist() == path.count.tolist()
    assert path.weight is None or found.weight.tolist() == path.weight.tolist()

    tokens = forest.num_tokens - int(forest.length[-1])
    shorter = edges.without_last_leaf(forest)
    assert shorter.num_nodes == forest.num_nodes - 1 and shorter.tokens.tolist() == forest.tokens[:tokens].tolist()
    assert shorter.target_count.tolist() == forest.target_count[:tokens].tolist()
    assert not weighted or shorter.target_weight.tolist() == forest.target_weight[:tokens].tolist()

    leaf = int(forest.leaves[-1])
    length = data.draw(st.integers(0, len(forest.path(leaf))))
    assert forest.tokens[edges.path_tokens(forest, leaf, length)].tolist() == forest.path(leaf)[:length].tolist()


# Lines


@settings(max_examples=100, deadline=None)
@given(labelled_sequences(9, 8), st.data())
def test_the_line_of_the_whole(corpus, data):
    sequences, _ = corpus
    keys = sorted({tuple(s[: data.draw(st.integers(1, len(s)))]) for s in sequences if data.draw(st.booleans())})
    groups: dict[int, list[tuple[int, ...]]] = {}
    for sequence in sorted(map(tuple, sequences)):
        groups.setdefault(bisect_right(keys, sequence), []).append(sequence)
    held = [groups[each] for each in sorted(groups)]
    shared = [0, *(in_common(a[-1], b[0]) for a, b in itertools.pairwise(held)), 0]
    parts = [
        PartLine.of(
            TokenForest.from_sequences(group),
            shared[at],
            shared[at + 1],
            min(shared[at], shared[at + 1], in_common(group[0], group[-1])),
        )
        for at, group in enumerate(held)
    ]
    found, expected = WholeLine.of(parts), LeafLine.of(TokenForest.from_sequences(sequences))
    assert found.end.tolist() == expected.end.tolist() and found.shared.tolist() == expected.shared.tolist()


# Memory, disk and progress


@pytest.mark.parametrize(
    ("given_limit", "expected"),
    [(5, 5), ("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("500m", 5 * 10**8), ("12", 12), ("64KiB", 65536)],
)
def test_amounts_of_memory(given_limit, expected):
    assert memory.memory_limit(given_limit) == expected


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "much", "8XB", "0GB", "", "GB"])
def test_no_amount_of_memory(wrong):
    with pytest.raises(ValueError, match="max_memory must be a number of bytes above 0"):
        pack_dataset(plain([[1]]), 8, max_memory=wrong, progress=False)


def test_the_memory_of_the_machine():
    assert 2**28 < memory.memory_limit(None) == memory.physical_memory() <= 2**62


def test_partitions_fit():
    gib = 2**30
    assert memory.partitions_for(gib, 2 * gib) == 1
    assert memory.partitions_for(10 * gib, 2 * gib) * (2 * gib - memory.FIXED_BYTES) > 10 * gib
    assert memory.partitions_for(10 * gib, 1) == memory.MOST_PARTITIONS
    assert memory.partitions_for(0, 1) == 1
    extent = Extent(examples=2, tokens=100, nodes=2, paths=2, path_tokens=100, longest=60, longer=2)
    ids, labels = (memory.needed_memory(extent, names) for names in (["input_ids"], ["input_ids", "labels"]))
    assert labels - ids == 400 and ids > 400


@pytest.fixture
def on_disk(tmp_path):
    plain(shared_sequences(200)).save_to_disk(tmp_path / "data")
    return datasets.load_from_disk(tmp_path / "data")


def test_what_needs_more_memory_is_packed_in_partitions(on_disk, monkeypatch, capfd):
    rows, report = pack_dataset(on_disk, 256, max_memory=2**30)
    assert report.partitions is None and "partitions" not in str(report)
    assert "Packing: merging" in capfd.readouterr().err
    monkeypatch.setattr(memory, "FIXED_BYTES", 1000)
    limited, same = pack_dataset(on_disk, 256, max_memory=40_000)
    shown = capfd.readouterr().err
    assert all(f"Packing: {stage}" in shown for stage in packing.PARTITION_STAGES)
    assert same.partitions > 1 and f"{same.partitions} partitions" in str(same)
    assert trained(limited) == trained(rows) and limited.features == rows.features
    assert_same_figures(same, report)
    monkeypatch.setattr(LargeDataset, "pack", lambda *args, **kwargs: pytest.fail("packed again"))
    again, found = pack_dataset(on_disk, 256, max_memory=40_000, progress=False)
    assert again[:] == limited[:] and found == same


def test_buckets_are_packed_in_memory(on_disk, monkeypatch):
    monkeypatch.setattr(memory, "FIXED_BYTES", 1000)
    with pytest.raises(ValueError, match="bucket_size draws examples from all over the data set"):
        pack_dataset(on_disk, 256, bucket_size=10, max_memory=40_000, progress=False)
    monkeypatch.setattr(memory, "physical_memory", lambda: 40_000)
    assert pack_dataset(on_disk, 256, bucket_size=10, progress=False)[1].partitions is None
    assert pack_dataset(on_disk, 256, progress=False)[1].partitions > 1


def test_paths_that_are_too_long_are_refused_before_anything_is_read(on_disk, monkeypatch):
    monkeypatch.setattr(memory, "FIXED_BYTES", 1000)
    monkeypatch.setattr(packing, "scatter", lambda *args: pytest.fail("tokens were read"))
    with pytest.raises(ValueError, match=r"of 200 paths are longer than max_length=20 tokens \(the longest has \d+"):
        pack_dataset(on_disk, 20, max_memory=40_000, progress=False)


def test_nothing_is_left_on_disk(on_disk, tmp_path, monkeypatch):
    before = sorted(path.name for path in (tmp_path / "data").iterdir())
    blocks = measure_dataset(on_disk, 256)
    options = PackOptions(256, seed=0)
    seen = []

    def write(table):
        seen.append(sorted(path.name for path in (tmp_path / "data").iterdir()))
        raise OSError("disk full")

    large = LargeDataset(on_disk, options, blocks, 4)
    used = []
    real = packing.Spill

    def spill(folder, schema, partitions):
        used.append((folder, real(folder, schema, partitions)))
        return used[-1][1]

    monkeypatch.setattr(packing, "Spill", spill)
    with pytest.raises(OSError, match="disk full"):
        large.pack(write)
    assert seen == [before], "the file of pieces has no name, so a killed process leaves nothing either"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == before
    assert used[0][0] == tmp_path / "data" and used[0][1]._file.closed and used[0][1]._size > 0


def test_an_empty_data_set():
    for dataset in (plain([]), plain([[], []])):
        dataset = dataset.cast(Features({"input_ids": List(Value("int32"))}))
        rows, report = in_partitions(dataset, PackOptions(8), Splitters.of([[1]]))
        assert rows == [] and report.windows == report.lower_bound == report.unique_tokens == 0
        assert report.advice == () and total_extent(measure_dataset(dataset, 8)).paths == 0


def test_counts_of_a_known_corpus():
    sequences = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]
    rows, report = in_partitions(plain(sequences), PackOptions(8, "paths", seed=None), Splitters.of([[1, 2, 3, 4]]))
    expected = {prefix: float(count) for prefix, count in prefix_counts(sequences).items() if count}
    assert trained(rows) == expected == {(1, 2): 4, (1, 2, 3): 3, (1, 2, 3, 4): 1, (1, 2, 5): 1}
    assert [row["input_ids"] for row in rows] == [[1, 2, 3, 4, 2, 5]] or report.windows == 1

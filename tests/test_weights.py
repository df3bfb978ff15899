"""Weights of sequences, from token trees to the loss, against a dictionary of prefixes and ordinary training."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import (
    BatchPacker,
    DagSFTConfig,
    DagSFTTrainer,
    TokenForest,
    TokenTree,
    pack_dataset,
    pack_forest,
)
from dagpack_hf.attention import enable, ordinary_attention
from dagpack_hf.collator import DagCollator
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.overflow import limit_paths
from dagpack_hf.packing import TREE_COLUMNS, iter_trees
from dagpack_hf.preparation import source_targets
from tests.corpora import labelled_sequences, random_tree, row_prefixes
from tests.test_exactness import corpus, gradients, packed_loss, relative
from tests.tiny_models import tiny_model
from tests.toy import shared_sequences, tiny_llama, toy_tokenizer

WEIGHTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Sums of these are exact in float32 as well."""


@st.composite
def weighted_sequences(draw):
    sequences, labels = draw(labelled_sequences())
    size = len(sequences)
    return sequences, labels, draw(st.lists(st.sampled_from(WEIGHTS), min_size=size, max_size=size))


def prefix_weights(sequences, labels, weights) -> dict[tuple[int, ...], list[float]]:
    """For each distinct prefix, the weights of the sequences that train its last token."""
    found: dict[tuple[int, ...], list[float]] = {}
    for sequence, label, weight in zip(sequences, labels, weights, strict=True):
        for end in range(1, len(sequence) + 1):
            trainers = found.setdefault(tuple(sequence[:end]), [])
            if end > 1 and label[end - 1] != -100:
                trainers.append(weight)
    return found


def forest_tallies(forest: TokenForest) -> dict[tuple[int, ...], tuple[int, float]]:
    found = {}
    for node in range(forest.num_nodes):
        path = forest.path(node).tolist()
        for at in range(forest.length[node]):
            token = forest.start[node] + at
            found[tuple(path[: forest.depth[node] + at + 1])] = (
                int(forest.target_count[token]),
                float(forest.target_weight[token]),
            )
    return found


def weighted_tree(rng, sequences, labels, weights) -> TokenTree:
    """The sequences as one token tree cut at random, with the weights of its tokens by brute force."""
    tree = random_tree(rng, sequences, labels)
    found = prefix_weights([[-1, *s] for s in sequences], [[-1, *row] for row in labels], weights)
    prefixes: list[tuple[int, ...]] = []
    owner = np.repeat(np.arange(len(tree.node_length)), tree.node_length)
    for at, token in enumerate(tree.input_ids.tolist()):
        is_head = at == 0 or owner[at] != owner[at - 1]
        above = int(tree.node_parent[owner[at]]) if is_head else at - 1
        prefixes.append((*(prefixes[above] if above >= 0 else (-1,)), token))
    return replace(tree, target_weight=np.array([sum(found[prefix]) for prefix in prefixes], np.float32))


def tree_dataset(trees) -> Dataset:
    columns = [*TREE_COLUMNS, "target_weight"]
    values = [[getattr(tree, name) for tree in trees] for name in columns]
    lists = [[None if value is None else np.asarray(value).tolist() for value in column] for column in values]
    return Dataset.from_dict(dict(zip(columns, lists, strict=True)))


def assert_equal(a: TokenForest, b: TokenForest) -> None:
    for name in ("tokens", "target_count", "target_weight", "parent", "start", "length", "depth"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and left.tolist() == right.tolist(), name


def assert_same_rows(a, b) -> None:
    assert all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ("offsets", *ROW_COLUMNS))


# The trie


@given(weighted_sequences())
def test_the_forest_holds_the_weight_of_every_prefix(data):
    expected = prefix_weights(*data)
    forest = TokenForest.from_sequences(*data)
    assert forest.target_weight.dtype == np.float64
    assert forest_tallies(forest) == {prefix: (len(each), sum(each)) for prefix, each in expected.items()}
    assert forest.num_targets == sum(sum(each) > 0 for each in expected.values())


@given(weighted_sequences(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(data, random):
    triples = list(zip(*data, strict=True))
    random.shuffle(triples)
    assert_equal(TokenForest.from_sequences(*data), TokenForest.from_sequences(*zip(*triples, strict=True)))


@given(weighted_sequences(), st.integers(0, 2**32 - 1), st.integers(0, 7), st.permutations([0, 1]))
def test_trees_cut_anywhere_give_the_same_forest(data, seed, border, order):
    rng = np.random.default_rng(seed)
    parts = [[column[:border] for column in data], [column[border:] for column in data]]
    trees = [weighted_tree(rng, *parts[index]) for index in order]
    assert_equal(TokenForest.from_sequences(*data), TokenForest.from_trees(trees))


@given(weighted_sequences(), st.integers(0, 2**32 - 1), st.integers(0, 7), st.permutations([0, 1]))
def test_a_tree_without_weights_contributes_its_counts(data, seed, border, order):
    sequences, labels, weights = data
    rng = np.random.default_rng(seed)
    weights = [1.0] * len(weights[:border]) + weights[border:]
    trees = [
        random_tree(rng, sequences[:border], labels[:border]),
        weighted_tree(rng, sequences[border:], labels[border:], weights[border:]),
    ]
    forest = TokenForest.from_trees([trees[index] for index in order])
    assert_equal(forest, TokenForest.from_sequences(sequences, labels, weights))


@given(weighted_sequences(), st.integers(0, 4), st.booleans())
def test_without_weights_and_with_weights_of_one_the_rows_are_the_same(data, slack, once):
    sequences, labels, _ = data
    plain = TokenForest.from_sequences(sequences, labels)
    ones = TokenForest.from_sequences(sequences, labels, itertools.repeat(1.0, len(sequences)))
    assert plain.target_weight is None and ones.target_weight is not None
    options = {"max_length": max(map(len, sequences)) + slack, "loss_weighting": "once" if once else "paths"}
    (rows_a, report_a), (rows_b, report_b) = (pack_forest(forest, **options, seed=3) for forest in (plain, ones))
    assert_same_rows(rows_a, rows_b)
    assert report_a == report_b


def test_any_weights_are_summed_in_any_order_alike():
    """Weights are read as float32, so that their sums in float64 are exact."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.01, 10, 300).tolist()
    forests = [TokenForest.from_sequences([[1, 2]] * 300, weights=order) for order in (weights, sorted(weights))]
    assert forests[0].target_weight.tolist() == forests[1].target_weight.tolist()
    assert forests[0].target_weight[1] == pytest.approx(sum(weights), rel=1e-6)


def test_weights_follow_counts_through_splits_and_merges():
    sequences = [[7, 8, 9, 9], [7, 8, 1, 2], [7, 8], [7, 8, 9, 9, 4]]
    forest = TokenForest.from_sequences(sequences, weights=[0.5, 2, 0.25, 0])
    assert forest.tokens.tolist() == [7, 8, 1, 2, 9, 9, 4]
    assert forest.target_count.tolist() == [0, 4, 1, 1, 2, 2, 1]
    assert forest.target_weight.tolist() == [0, 2.75, 2, 2, 0.5, 0.5, 0]
    assert TokenForest.from_sequences([], weights=[]).target_weight.tolist() == []


# Rows


@settings(max_examples=300)
@given(weighted_sequences(), st.integers(0, 12), st.sampled_from(["once", "paths"]), st.integers(0, 3))
def test_every_target_has_its_weight_once(data, slack, weighting, seed):
    sequences, labels, weights = data
    forest = TokenForest.from_sequences(*data)
    rows, report = pack_forest(forest, max(map(len, sequences)) + slack, loss_weighting=weighting, seed=seed)
    trained: dict[tuple[int, ...], float] = {}
    for row in rows:
        for prefix, label, weight in zip(row_prefixes(row), row["shift_labels"], row["loss_weight"], strict=True):
            assert (weight > 0) == (label != -100)
            if label != -100:
                target = (*prefix, int(label))
                assert target not in trained, "trained twice"
                trained[target] = float(weight)
    summed = {prefix: each for prefix, each in prefix_weights(*data).items() if sum(each) > 0}
    scale = (lambda each: len(each)) if weighting == "once" else (lambda each: 1)
    assert trained == {p: float(np.float32(sum(each) / scale(each))) for p, each in summed.items()}
    assert report.loss_weight == sum(trained.values()) and report.loss_tokens == len(trained)
    if weighting == "paths":
        labelled = [sum(label != -100 for label in row[1:]) for row in labels]
        assert report.loss_weight == sum(w * n for w, n in zip(weights, labelled, strict=True))


def test_exact_rows():
    sequences = [[1, 2, 3, 3], [1, 2, 4], [1, 2, 5]]
    forest = TokenForest.from_sequences(sequences, weights=[0.5, 2, 0])
    rows = {weighting: pack_forest(forest, 16, loss_weighting=weighting)[0][0] for weighting in ("paths", "once")}
    # 5 weighs nothing: it is context, and hangs from the first copy of 2
    assert rows["paths"]["input_ids"].tolist() == [1, 2, 3, 3, 5, 2, 4]
    assert rows["paths"]["shift_labels"].tolist() == [2, 3, 3, -100, -100, 4, -100]
    assert rows["paths"]["loss_weight"].tolist() == [2.5, 0.5, 0.5, 0, 0, 2, 0]
    assert rows["once"]["loss_weight"].tolist() == [np.float32(2.5 / 3), 0.5, 0.5, 0, 0, 2, 0]


def test_the_report_shows_the_weight():
    forest = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4]], weights=[0.25, 1000])
    _, report = pack_forest(forest, 8, loss_weighting="paths")
    assert (report.loss_tokens, report.loss_weight) == (3, 2000.5)
    assert "total weight 2,000.5 ('paths')" in str(report)


# What is longer than a window

CONTEXT = 3


@st.composite
def turn_corpus(draw):
    """Turns as in a session: each after context, its targets a run that only context follows; many share a start."""
    text = st.lists(st.integers(0, 1), min_size=1, max_size=4)
    rounds = draw(st.lists(st.tuples(st.integers(0, 5), text), min_size=1, max_size=8))
    histories, sequences, labels, weights = [[]], [], [], []
    for parent, reply in rounds:
        history = [*histories[parent % len(histories)], CONTEXT]
        sequences.append([*history, *reply])
        labels.append([-100] * len(history) + reply)
        weights.append(draw(st.sampled_from(WEIGHTS)))
        histories.append(sequences[-1])
    return sequences, labels, weights


@settings(max_examples=500)
@given(turn_corpus(), st.integers(1, 12), st.sampled_from(["truncate", "drop"]), st.booleans())
def test_what_is_lost_takes_its_weight_along(data, limit, overflow, weighted):
    sequences, labels, weights = data
    if not weighted:
        weights = [1.0] * len(weights)
    forest = TokenForest.from_sequences(sequences, labels, weights if weighted else None)
    clipped, lost = limit_paths(forest, limit, overflow)
    kept = [index for index, s in enumerate(sequences) if overflow == "truncate" or len(s) <= limit]
    parts = [[column[index] for index in kept] for column in data[:2]]
    expected = prefix_weights(*parts, [weights[index] for index in kept])
    expected = {p: (len(each), sum(each)) for p, each in expected.items() if each and len(p) <= limit}
    found = forest_tallies(clipped if weighted else clipped.with_tally(clipped.target_count, clipped.target_count))
    assert {prefix: tally for prefix, tally in found.items() if any(tally)} == expected
    assert (clipped.target_weight is None) == (not weighted)
    assert lost.lost_targets == forest.num_source_targets - sum(count for count, _ in expected.values())


@settings(max_examples=300)
@given(weighted_sequences(), st.integers(1, 9), st.booleans())
def test_dropping_never_takes_more_than_there_is(data, limit, weighted):
    """Whatever the labels, also where runs of several sequences touch."""
    forest = TokenForest.from_sequences(*(data if weighted else data[:2]))
    clipped, lost = limit_paths(forest, limit, "drop")
    assert np.all(clipped.target_count >= 0) and np.all(clipped.path_weight >= 0)
    assert np.all(clipped.path_weight[clipped.target_count == 0] == 0)
    assert lost.lost_targets + clipped.num_source_targets == forest.num_source_targets


def test_of_two_turns_that_begin_alike_the_weight_of_the_long_one_goes():
    sequences = [[1, 2, 7, 7, 8], [1, 2, 7, 7, 9, 9, 9]]
    labels = [[-100] * 2 + s[2:] for s in sequences]
    clipped, _ = limit_paths(TokenForest.from_sequences(sequences, labels, [0.5, 2]), 5, "drop")
    assert clipped.tokens.tolist() == sequences[0]
    assert clipped.target_weight.tolist() == [0, 0, 0.5, 0.5, 0.5]


# Data sets


SEQUENCES, LABELS, TURN_WEIGHTS = [[1, 2, 3], [1, 2, 4], [1, 5]], [[-100, 2, 3], [-100, 2, 4], [-100, 5]], [0.5, 2, 0]


def two_trees() -> list[TokenTree]:
    rng = np.random.default_rng(0)
    weighted = weighted_tree(rng, SEQUENCES, LABELS, TURN_WEIGHTS)
    return [weighted, random_tree(rng, [[1, 2, 3]], [[-100, 2, 3]])]


def test_a_tree_data_set_may_have_weights_in_some_rows():
    trees = two_trees()
    joined = concatenate_datasets(
        [tree_dataset(trees[:1]), tree_dataset(trees[1:]).remove_columns("target_weight"), tree_dataset(trees[1:])]
    )
    joined = joined.cast_column("target_weight", List(Value("float32")))
    read = list(iter_trees(joined))
    assert [tree.target_weight is None for tree in read] == [False, True, True]
    assert read[0].target_weight.dtype == np.float32
    for dataset in (joined, joined.select([2, 0, 1])):
        rows, report = pack_dataset(dataset, 8, loss_weighting="paths", progress=False)
        assert rows["loss_weight"][:] == [[4.5, 2.5, 0, 2, 0, 0]] and report.loss_weight == 9
        assert source_targets(dataset, 8) == report.loss_weight
        packed = dataset.map(BatchPacker(8, "paths"), batched=True, remove_columns=dataset.column_names)
        assert sorted(packed[0]["loss_weight"]) == sorted(rows[0]["loss_weight"])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("as_null", [True, False])
def test_the_collator_keeps_weights_of_packed_batches(order, as_null):
    trees = two_trees()
    examples = [tree_dataset([trees[index]])[0] for index in order]
    if not as_null:
        examples = [{name: value for name, value in example.items() if value is not None} for example in examples]
    batch = DagCollator(8, packing_scope="batch", loss_weighting="paths")(examples)
    rows, _ = pack_forest(TokenForest.from_trees(trees), 8, loss_weighting="paths")
    assert batch["loss_weight"].tolist() == [rows[0]["loss_weight"].tolist()]
    assert batch["loss_weight"].sum() == 7


def test_a_data_set_of_nulls_has_no_weights():
    dataset = tree_dataset(two_trees()[1:])
    (tree,) = iter_trees(dataset)
    assert tree.target_weight is None
    assert source_targets(dataset, 8) == 2


# Errors


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "Sequence 1: weight is -0.5. A weight must be a finite float32 of at least 0; give 0"),
        ([float("nan"), 1], "Sequence 0: weight is nan"),
        ([1, float("inf")], "Sequence 1: weight is inf"),
        ([1, 1e39], r"Sequence 1: weight is 1e\+39"),
        ([1], "Sequence 1: no weight; weights must have one number for each sequence"),
        ([1, 1, 1], "more weights than sequences"),
    ],
)
def test_bad_weights_of_sequences_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        TokenForest.from_sequences([[1, 2], [3, 4]], weights=weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0, 1, -1], "Token tree 1: target_weight of token 2 is -1.0"),
        ([0, np.nan, 1], "Token tree 1: target_weight of token 1 is nan"),
        ([0, 1], "Token tree 1: 3 target_count and 2 target_weight contradict"),
        ([0.5, 1, 1], "Token tree 1: token 0 has target_weight 0.5, but its target_count is 0"),
    ],
)
def test_bad_weights_of_trees_are_named(weights, message):
    tree = TokenTree(np.array([1, 2, 3]), np.array([0, 1, 1]), np.array([3]), np.array([-1]), 3)
    with pytest.raises(ValueError, match=message):
        TokenForest.from_trees([tree, replace(tree, target_weight=np.array(weights))])


# Training


def unpacked_loss(model, sequences, labels, weights, weighting):
    """Ordinary forward passes: each sequence's summed cross entropy times its weight, or means over equal prefixes."""
    losses: dict[tuple[int, ...], list] = {}
    for sequence, label, weight in zip(sequences, labels, weights, strict=True):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        per_token = F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=-100, reduction="none")
        for at, target in enumerate(label[1:], start=1):
            if target != -100:
                losses.setdefault(tuple(sequence[: at + 1]), []).append(weight * per_token[at - 1])
    return sum(sum(each) / (len(each) if weighting == "once" else 1) for each in losses.values())


@pytest.mark.parametrize("weighting", ["paths", "once"])
def test_weighted_packed_training_equals_weighted_unpacked_training(weighting):
    sequences, labels = corpus()
    weights = [(0.5, 2.0, 0.25, 1.0, 4.0)[index % 5] for index in range(len(sequences))]
    tolerance = 1e-12 if weighting == "paths" else 1e-6  # a row holds the mean as float32
    model = tiny_model("gpt2", torch.float64)
    enable(model)
    forest = TokenForest.from_sequences(sequences, labels, weights)
    rows, report = pack_forest(forest, 40, loss_weighting=weighting, seed=1)
    assert report.windows > 2 and report.replay_tokens > 30
    with ordinary_attention(model, "eager"):
        reference = unpacked_loss(model, sequences, labels, weights, weighting)
        reference_gradients = gradients(model, reference)
    loss = packed_loss(model, DagCollator(max_length=40, padding="max_length")(list(rows)))
    packed_gradients = gradients(model, loss)
    assert abs(loss.item() - reference.item()) <= tolerance * abs(reference.item())
    worst = {name: relative(packed_gradients[name], reference_gradients[name]) for name in reference_gradients}
    assert max(worst.values()) <= tolerance, max(worst.items(), key=lambda item: item[1])
    with ordinary_attention(model, "eager"), torch.no_grad():
        plain = unpacked_loss(model, sequences, labels, [1.0] * len(weights), weighting)
    assert abs(plain.item() - reference.item()) > 0.01 * abs(plain.item()), "the weights matter"


# The trainer


@pytest.mark.parametrize("scope", ["dataset", "batch"])
def test_the_trainer_trains_the_weights_of_token_trees(tmp_path, scope):
    sequences, labels = shared_sequences(12)
    labels = [[-100, *row[1:]] for row in labels]
    weights = [(0.5, 2.0, 0.25)[index % 3] for index in range(12)]
    rng = np.random.default_rng(0)
    dataset = tree_dataset(
        [weighted_tree(rng, [s], [row], [w]) for s, row, w in zip(sequences, labels, weights, strict=True)]
    )
    trainer = DagSFTTrainer(
        model=tiny_llama(),
        args=DagSFTConfig(
            str(tmp_path),
            max_length=128,
            packing_scope=scope,
            loss_weighting="paths",
            per_device_train_batch_size=4,
            max_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=dataset,
        processing_class=toy_tokenizer(),
    )
    expected = sum(w * sum(label != -100 for label in row[1:]) for w, row in zip(weights, labels, strict=True))
    assert trainer._total_weight == expected
    assert sum(batch["loss_weight"].sum().item() for batch in trainer.get_train_dataloader()) == expected
    trainer.train()

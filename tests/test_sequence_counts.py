"""How many sequences pass through each position, against hashes of all paths and against counting by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import BatchPacker, DagCollator, TokenForest, pack_dataset, pack_forest
from dagpack_hf.sequence_counts import UncountedError, count_tree_sequences
from tests.corpora import random_tree
from tests.reference_counts import sequence_counts

TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=8)


def paths_of(row) -> list[tuple[int, ...]]:
    """The tokens up to each position of a row, by brute force."""
    ends, ids = row["subtree_end"], row["input_ids"]
    return [tuple(int(ids[j]) for j in range(i + 1) if i < ends[j]) for i in range(len(ends))]


def counted(rows) -> Counter:
    """Sequence counts of rows by path; each is that of all sequences, or 0."""
    found: Counter = Counter()
    for row in rows:
        for path, number in zip(paths_of(row), row["sequence_count"].tolist(), strict=True):
            assert number == int(number)
            if number:
                assert path not in found, "two positions stand for the same one"
                found[path] = int(number)
    return found


def expected_counts(sequences, limit: int = 1000) -> Counter:
    return Counter(tuple(s[: end + 1]) for s in sequences for end in range(min(len(s), limit)))


def random_labels(rng: np.random.Generator, sequences) -> list[list[int]]:
    return [[token if rng.random() < 0.6 else -100 for token in sequence] for sequence in sequences]


def turn_labels(rng: np.random.Generator, sequences) -> list[list[int]]:
    """Of each sequence, some tokens at its end are targets."""
    begins = [int(rng.integers(1, len(sequence))) for sequence in sequences]
    return [[-100] * b + list(s[b:]) for s, b in zip(sequences, begins, strict=True)]


@settings(max_examples=60)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(8, 20), st.integers(0, 3), st.booleans())
def test_each_token_of_each_sequence_is_counted_once(sequences, max_length, seed, labelled):
    labels = {"labels": random_labels(np.random.default_rng(seed), sequences)} if labelled else {}
    packer = BatchPacker(max_length, loss_weighting="paths", count_sequences=True)
    rows, _ = packer.pack({"input_ids": sequences, **labels})
    assert rows.sequence_count.dtype == np.float32
    assert counted(rows) == expected_counts(sequences)
    by_hash = sequence_counts([np.array(s) for s in sequences], rows)
    positive = [row["sequence_count"] > 0 for row in rows]
    assert sum(map(sum, by_hash)) == rows.sequence_count.sum() == sum(map(len, sequences))
    for row, count, here in zip(rows, by_hash, positive, strict=True):
        both = here & (count > 0)
        assert (row["sequence_count"][both] == count[both]).all()


@settings(max_examples=60)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.integers(0, 3))
def test_turns_of_trees_are_counted_rightly_or_refused(sequences, seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, sequences, turn_labels(rng, sequences))
    try:
        forest = count_tree_sequences(TokenForest.from_trees([tree]))
    except UncountedError:
        return
    rows, _ = pack_forest(forest, 10, loss_weighting="paths")
    assert counted(rows) == expected_counts(sequences)


@settings(max_examples=40)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.integers(0, 3))
def test_turns_that_context_follows_are_always_counted(sequences, seed):
    """As chat templates write them: no turn begins where another ends."""
    rng = np.random.default_rng(seed)
    sequences = [[*s, 9] for s in sequences]
    labels = [[*([-100] * (len(s) - 1)), 9] for s in sequences]
    longer = [[*s, 5, 9] for s in sequences[: len(sequences) // 2]]
    labels += [[-100] * (len(s) - 1) + [9] for s in longer]
    forest = count_tree_sequences(TokenForest.from_trees([random_tree(rng, sequences + longer, labels)]))
    assert forest.num_source_tokens == sum(map(len, sequences + longer))
    rows, _ = pack_forest(forest, 11, loss_weighting="paths")
    assert counted(rows) == expected_counts(sequences + longer)


def test_a_turn_that_ends_where_another_begins_is_refused():
    rng = np.random.default_rng(0)
    tree = random_tree(rng, [[1, 2], [1, 2, 3]], [[-100, 2], [-100, -100, 3]])
    with pytest.raises(UncountedError, match="by their targets they have 3 tokens, by logical_tokens 5"):
        count_tree_sequences(TokenForest.from_trees([tree]))


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
@pytest.mark.parametrize("is_tree", [False, True])
def test_what_does_not_fit_is_not_counted(overflow, is_tree):
    sequences = [[1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 9, 5, 6, 9], [1, 2]]
    kept = [s for s in sequences if len(s) <= 5] if overflow == "drop" else sequences
    labels = [[-100, *([-100] * (len(s) - 2)), s[-1]] for s in sequences]
    if is_tree:
        tree = random_tree(np.random.default_rng(0), sequences[:3], labels[:3])
        forest = count_tree_sequences(TokenForest.from_trees([tree]))
        rows, _ = pack_forest(forest, 5, loss_weighting="paths", overflow=overflow)
        kept = [s for s in kept if len(s) > 2]
        # what is cut off behind the last target, 5, is context and left out
        assert counted(rows) == {path: n for path, n in expected_counts(kept, 5).items() if 5 not in path}
        return
    packer = BatchPacker(5, loss_weighting="paths", overflow=overflow, count_sequences=True)
    rows, _ = packer.pack({"input_ids": sequences, "labels": labels})
    assert counted(rows) == {path: n for path, n in expected_counts(kept, 5).items() if 5 not in path}


def test_under_once_each_position_counts_once_and_padding_not():
    sequences = [[1, 2, 3], [1, 2, 4], [7, 8]]
    for weighting, root in (("once", 1), ("paths", 2)):
        collator = DagCollator(5, loss_weighting=weighting, packing_scope="batch", count_sequences=True)
        batch = collator([{"input_ids": sequence} for sequence in sequences])
        assert batch["input_ids"].tolist() == [[1, 2, 3, 2, 4], [7, 8, 0, 0, 0]]
        assert batch["sequence_count"].tolist() == [[root, root, 1, 0, 1], [1, 1, 0, 0, 0]]


def test_data_sets_streams_and_buckets_have_the_column():
    sequences = [[1, 2, 3, at % 5, at] for at in range(40)]
    dataset = Dataset.from_dict({"input_ids": sequences})
    options = {"loss_weighting": "paths", "count_sequences": True, "progress": False}
    for source in (dataset, dataset.to_iterable_dataset()):
        rows, _ = pack_dataset(source, 16, **options)
        assert list(rows.features)[-1] == "sequence_count"
        assert rows.features["sequence_count"].feature.dtype == "float32"
        assert sum(sum(row["sequence_count"]) for row in rows) == 200
    rows, _ = pack_dataset(dataset, 16, bucket_size=7, **options)
    assert sum(map(sum, rows["sequence_count"])) == 200
    plain, _ = pack_dataset(dataset, 16, progress=False)
    assert "sequence_count" not in plain.features


def test_it_is_refused_where_the_data_are_packed_in_partitions():
    dataset = Dataset.from_dict({"input_ids": [list(range(at, at + 200)) for at in range(4000)]})
    with pytest.raises(UncountedError, match=r"count_sequences .* packed in memory.* raise max_memory from 9"):
        pack_dataset(dataset, 256, count_sequences=True, max_memory=900_000, progress=False)

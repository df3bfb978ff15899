"""The trie against a dictionary with one entry per token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf import TokenForest, TokenTree
from dagpack_hf.trie import common_prefix
from tests.corpora import forest_prefixes, labelled_sequences, prefix_counts, random_tree


def assert_equal(a: TokenForest, b: TokenForest) -> None:
    for name in ("tokens", "target_count", "parent", "start", "length", "depth"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and left.tolist() == right.tolist(), name


@given(labelled_sequences())
def test_the_forest_holds_every_prefix_once_with_its_count(corpus):
    sequences, labels = corpus
    forest = TokenForest.from_sequences(sequences, labels)
    expected = prefix_counts(sequences, labels)
    assert forest_prefixes(forest) == expected
    assert forest.num_tokens == len(expected)
    assert forest.num_source_targets == sum(sum(label != -100 for label in row[1:]) for row in labels)
    assert forest.logical_tokens == sum(map(len, sequences))
    assert forest.longest_path == max(map(len, sequences))


@given(labelled_sequences(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(corpus, random):
    pairs = list(zip(*corpus, strict=True))
    forest = TokenForest.from_sequences(*corpus)
    random.shuffle(pairs)
    assert_equal(forest, TokenForest.from_sequences(*zip(*pairs, strict=True)))


@given(labelled_sequences(), st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_trees_cut_anywhere_give_the_same_forest(corpus, seed, border):
    sequences, labels = corpus
    rng = np.random.default_rng(seed)
    parts = [(sequences[:border], labels[:border]), (sequences[border:], labels[border:])]
    trees = [random_tree(rng, *part) for part in parts]
    assert_equal(TokenForest.from_sequences(sequences, labels), TokenForest.from_trees(trees))


@given(labelled_sequences())
def test_nodes_are_compressed_and_in_preorder(corpus):
    forest = TokenForest.from_sequences(*corpus)
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_nodes)
    assert not np.any(children == 1)
    assert np.all(forest.parent < np.arange(forest.num_nodes))
    assert np.all(forest.length > 0)
    assert forest.start.tolist() == (np.cumsum(forest.length) - forest.length).tolist()


def test_exact_arrays():
    forest = TokenForest.from_sequences([[7, 8, 9], [7, 8, 1, 2], [7, 8]], [[7, -100, 9], [7, 8, 1, 2], [7, 8]])
    assert forest.tokens.tolist() == [7, 8, 1, 2, 9]
    assert forest.target_count.tolist() == [0, 2, 1, 1, 1]
    assert forest.parent.tolist() == [-1, 0, 0]
    assert forest.depth.tolist() == [0, 2, 2]
    assert forest.leaves.tolist() == [1, 2]


def test_an_empty_corpus_is_an_empty_forest():
    forest = TokenForest.from_sequences([])
    assert (forest.num_nodes, forest.num_tokens, forest.longest_path, forest.leaves.size) == (0, 0, 0, 0)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 319, 320, 321, 1000])
def test_common_prefix_at_block_borders(length):
    a = np.arange(1000)
    b = a.copy()
    b[length:] = -1
    assert common_prefix(a, b) == length
    assert common_prefix(a[:length], a) == length


def test_a_long_chain_of_branches_does_not_recurse():
    sequences = [[1] * depth + [2] for depth in range(1, 3000)]
    forest = TokenForest.from_sequences(sequences)
    assert forest.num_tokens == 2999 + 2999


@pytest.mark.parametrize(
    ("sequences", "labels", "message"),
    [
        ([[1, 2], [3, -4]], None, "Sequence 1: token id -4 at position 1"),
        ([[1, 2**40]], None, r"Sequence 0: token id 1099511627776 at position 1"),
        ([[1.5]], None, "Sequence 0: token ids must be a flat list of integers"),
        ([[1, 2]], [[1]], "Sequence 0: 2 tokens but 1 labels"),
        ([[1, 2], [1, 3]], [[1, 2]], "Sequence 1: 2 tokens but 0 labels"),
        ([[1, 2]], [[-100, 3]], "Sequence 0: label 3 at position 1 differs from its token 2"),
    ],
)
def test_bad_sequences_are_named(sequences, labels, message):
    with pytest.raises(ValueError, match=message):
        TokenForest.from_sequences(sequences, labels)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TokenTree(np.array([1, 2]), np.array([1]), np.array([2]), np.array([-1]), 2), "Token tree 0: .* contradict"),
        (
            TokenTree(np.array([1, 2]), np.array([0, 1]), np.array([1]), np.array([-1]), 2),
            "Token tree 0: .* contradict",
        ),
        (
            TokenTree(np.array([1, 2]), np.array([0, 1]), np.array([1, 1]), np.array([-1, 1]), 2),
            "Token tree 0: node 1 hangs from token 1",
        ),
    ],
)
def test_bad_trees_are_named(tree, message):
    with pytest.raises(ValueError, match=message):
        TokenForest.from_trees([tree])

"""The trie against a dictionary with one entry per token, and against insertion in plain Python."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest, TokenTree
from dagpack_hf.growth import NEVER, NONE, PATIENCE
from dagpack_hf.kernels.radix import GROWN, HOPPY, common_prefix, fingerprint, grow
from dagpack_hf.spans import one_view, read_only
from dagpack_hf.token_trees import TREES_AT_ONCE, read_trees
from tests.corpora import forest_prefixes, labelled_sequences, prefix_counts, random_tree
from tests.reference_trie import reference_forest, reference_forest_of_trees


def assert_equal(a: TokenForest, b: TokenForest) -> None:
    for name in ("tokens", "target_count", "parent", "start", "length", "depth", "target_weight"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or (left.dtype == right.dtype and left.tolist() == right.tolist()), name
    assert a.logical_tokens == b.logical_tokens


def flat(sequences, dtype=np.int32) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets, as an Arrow column of lists has them."""
    values = np.concatenate([np.zeros(0, dtype), *(np.asarray(sequence, dtype) for sequence in sequences)])
    return values, np.cumsum([0, *map(len, sequences)])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels before anything is timed."""
    for labels in (None, [[1]]):
        TokenForest.from_sequences([[1]], labels, [1])
    TokenForest.from_trees([TokenTree(*(np.array([value]) for value in (1, 0, 1, -1)), 1, np.array([0.0]))])


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


# Against insertion in plain Python


@st.composite
def corpora(draw):
    """Sequences (empty ones too) with many prefixes and copies of each other, with or without labels and weights."""
    token = st.integers(0, draw(st.integers(0, 3)))
    sequences = draw(st.lists(st.lists(token, max_size=12), max_size=12))
    if sequences:
        for source, stop in draw(st.lists(st.tuples(st.sampled_from(sequences), st.integers(0, 12)), max_size=12)):
            sequences.append(source[:stop] + draw(st.lists(token, max_size=3)))
    sequences = draw(st.permutations(sequences))
    labels = weights = None
    if draw(st.booleans()):
        labels = [[t if draw(st.booleans()) else -100 for t in sequence] for sequence in sequences]
    if draw(st.booleans()):
        weights = [draw(st.sampled_from((0.0, 0.25, 1.0, 1.5, 3.0))) for _ in sequences]
    return sequences, labels, weights


@settings(max_examples=500)
@given(corpora(), st.sampled_from([PATIENCE, 0]))
def test_sequences_give_the_reference(corpus, patience):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagpack_hf.growth.PATIENCE", patience)
        assert_equal(TokenForest.from_sequences(*corpus), reference_forest(*corpus))


@settings(max_examples=200)
@given(corpora(), st.lists(st.integers(0, 24)), st.sampled_from([np.int32, np.int64, np.uint16]), st.data())
def test_arrays_give_the_reference_however_they_are_cut_into_chunks(corpus, cuts, dtype, data):
    sequences, labels, weights = corpus
    cuts = sorted({0, len(sequences), *(cut for cut in cuts if cut < len(sequences))})

    def chunked(column, dtype):
        chunks, offsets = [], []
        for low, high in pairwise(cuts):
            values, offset = flat(column[low:high], dtype)
            before = data.draw(st.integers(0, 3))  # a slice of a longer buffer
            chunks.append(np.concatenate([np.full(before, 7, dtype), values, np.full(2, 7, dtype)]))
            offsets.append(data.draw(st.sampled_from([np.int32, np.int64]))(offset + before))
        return chunks, offsets

    tokens, offsets = chunked(sequences, dtype)
    marks, label_offsets = (None, None) if labels is None else chunked(labels, data.draw(st.sampled_from("il")))
    forest = TokenForest.from_arrays(tokens, offsets, marks, weights, label_offsets=label_offsets)
    expected = reference_forest(sequences, labels, weights)
    assert_equal(forest, expected)
    marks = None if labels is None else flat(labels)[0]
    assert_equal(TokenForest.from_arrays(*flat(sequences), marks, weights), expected)


@st.composite
def odd_trees(draw):
    """Token trees as nobody writes them: empty nodes, siblings that begin alike, prefixes hung in many pieces."""
    trees = []
    weighted = draw(st.sampled_from(["none", "some", "all"]))
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.lists(st.integers(0, 4), max_size=8))
        size = sum(length)
        before = np.cumsum([0, *length]).tolist()
        hangs_from = [draw(st.integers(-1, before[node] - 1)) for node in range(len(length))]
        ids = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
        counts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        weight = None
        if weighted == "all" or (weighted == "some" and draw(st.booleans())):
            weight = np.array([count and draw(st.sampled_from((0.0, 0.5, 2.25))) for count in counts], np.float32)
        integers = st.sampled_from([np.int32, np.int64, np.uint16])
        trees.append(
            TokenTree(
                np.array(ids, draw(integers)),
                np.array(counts, draw(integers)),
                np.array(length, np.int32),
                np.array(hangs_from, np.int32),
                draw(st.integers(0, 100)),
                weight,
            )
        )
    return trees


@settings(max_examples=500)
@given(odd_trees(), st.sampled_from([TREES_AT_ONCE, 1, 2]))
def test_trees_give_the_reference(trees, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagpack_hf.token_trees.TREES_AT_ONCE", at_once)
        assert_equal(TokenForest.from_trees(iter(trees)), reference_forest_of_trees(trees))


def test_weights_are_read_as_float32():
    tree = TokenTree(*(np.array(each) for each in ([1, 2], [0, 1], [2], [-1])), 2, np.array([0, 0.1]))
    for forest in (
        TokenForest.from_trees([tree]),
        TokenForest.from_sequences([[1, 2]], weights=[0.1]),
        TokenForest.from_sequences([[1, 2]], [[-100, 2]], [0.1]),
    ):
        assert forest.target_weight.tolist() == [0, np.float64(np.float32(0.1))]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 319, 320, 321, 1000])
def test_common_prefix_at_block_borders(length):
    tokens = np.tile(np.arange(1000, dtype=np.int32), 2)
    tokens[1000 + length :] = -1
    assert common_prefix(read_only(tokens), 0, read_only(tokens), 1000, 1000) == length
    assert common_prefix(read_only(tokens), 0, read_only(tokens), 0, length) == length


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_sequences_that_part_at_block_borders(length):
    trunk = list(range(300))
    sequences = [trunk, trunk[:length], [*trunk[:length], 7], [*trunk[: length + 1], 8], [*trunk[: length - 1], 9]]
    assert_equal(TokenForest.from_sequences(sequences), reference_forest(sequences))


def test_a_span_that_goes_on_takes_the_place_of_its_branch():
    """Prefixes of each other are one branch in any order, so that no walk along them has more than one step."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 300)
    for ends in (np.arange(1, 301), np.arange(300, 0, -1), rng.permutation(300) + 1):
        tokens, offsets = flat([trunk[:end] for end in ends])
        status, source, *_ = grow_sequences(tokens, offsets, patience=300)
        assert status == GROWN and len(source) == 2


def grow_sequences(tokens, offsets, patience=NEVER, order=NONE):
    begin, end = read_only(offsets[:-1]), read_only(offsets[1:])
    return grow(read_only(tokens), begin, end, NONE, NONE, order, patience)


def comb(size: int, rng: np.random.Generator) -> list[list[int]]:
    """Every prefix of one sequence with its own end: a branch at each token."""
    trunk = rng.integers(3, 9, size).tolist()
    return [[*trunk[:end], 2] for end in range(1, size)]


@pytest.mark.parametrize("order", [1, -1, 0])
def test_where_paths_branch_at_every_token_the_longest_goes_first(order, monkeypatch):
    rng = np.random.default_rng(0)
    sequences = comb(200, rng)[:: order or 1]
    if not order:
        rng.shuffle(sequences)
    status, *_ = grow_sequences(*flat(sequences), PATIENCE)
    assert status == (HOPPY if order > 0 else GROWN)
    longest_first = read_only(np.argsort([-len(sequence) for sequence in sequences], kind="stable"))
    assert grow_sequences(*flat(sequences), 200, longest_first)[0] == GROWN

    orders = []
    monkeypatch.setattr("dagpack_hf.growth.grow", lambda *given: orders.append(given[5].tolist()) or grow(*given))
    assert_equal(TokenForest.from_sequences(sequences), reference_forest(sequences))
    assert orders == [[], longest_first.tolist()][: 2 if order > 0 else 1]


@pytest.mark.parametrize("bits", [16, 32])
def test_keys_that_collide_are_told_apart(bits):
    """Tokens whose keys have the same slot (all of `2**16` slots) or the same fingerprint."""
    groups: dict[int, list[int]] = {}
    for token in range(400_000):
        mark = int(fingerprint(np.int64(1), np.int64(1), np.int32(token))) & (2**bits - 1)
        groups.setdefault(mark, []).append(token)
    colliding = sorted((each for each in groups.values() if len(each) > 1), key=len)[-20:]
    assert len(colliding) > 5
    rng = np.random.default_rng(0)
    tokens = [token for each in colliding for token in each]
    sequences = [[5, token, 1 + token % 3] for token in tokens for _ in range(1 + token % 2)]
    rng.shuffle(sequences)
    assert_equal(TokenForest.from_sequences(sequences), reference_forest(sequences))


def test_places_whose_keys_collide_are_told_apart():
    """Two offsets of one branch whose keys have the same fingerprint for the same token."""
    seen: dict[int, int] = {}
    ends: list[int] = []
    for offset in range(1, 400_000):
        mark = int(fingerprint(np.int64(1), np.int64(offset), np.int32(7)))
        ends += [seen[mark], offset] if mark in seen else []
        seen[mark] = offset
    assert len(ends) > 5
    trunk = np.random.default_rng(0).integers(0, 7, 400_000)
    sequences = [trunk, *(np.append(trunk[:end], [7, end % 5]) for end in ends)]
    assert_equal(TokenForest.from_sequences(sequences), reference_forest(sequences))


@pytest.mark.parametrize("size", [30, 31, 32, 33, 5000])
def test_the_table_grows(size):
    rng = np.random.default_rng(size)
    tokens = rng.permutation(2 * size)[:size]
    sequences = [[1, 2, token, token % 7] for token in tokens.tolist()] * 2
    rng.shuffle(sequences)
    forest = TokenForest.from_sequences(sequences)
    assert_equal(forest, reference_forest(sequences))
    assert forest.num_nodes == size + 1


HUNDRED_THOUSAND = 100_000


@pytest.mark.parametrize("order", ["up", "down", "shuffled"])
@pytest.mark.parametrize("shape", ["identical", "prefixes", "star", "comb", "nothing shared", "binary"])
def test_adversarial_shapes_of_100_000_sequences(shape, order):
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 1000, 60).astype(np.int32)
    place = np.arange(HUNDRED_THOUSAND)
    if shape == "identical":
        sequences = [trunk] * HUNDRED_THOUSAND
    elif shape == "prefixes":
        sequences = [trunk[: 1 + at % 60] for at in place]
    elif shape == "star":
        sequences = [np.append(trunk, [1000 + at, at % 3]).astype(np.int32) for at in place]
    elif shape == "comb":
        sequences = [np.append(trunk[: 1 + at % 60], 1000 + at // 60 % 4).astype(np.int32) for at in place]
    elif shape == "nothing shared":
        sequences = [np.array([at, 1, 2, 3], np.int32) for at in place]
    else:
        sequences = list((place[:, None] >> np.arange(17)[None] & 1).astype(np.int32))
    if order == "down":
        sequences = sequences[::-1]
    elif order == "shuffled":
        sequences = [sequences[at] for at in rng.permutation(HUNDRED_THOUSAND)]
    forest = TokenForest.from_sequences(sequences)
    assert_equal(forest, TokenForest.from_sequences(sequences, sequences))
    expected = {
        "identical": (1, 60),
        "prefixes": (1, 60),
        "star": (1 + HUNDRED_THOUSAND, 60 + 2 * HUNDRED_THOUSAND),
        "comb": (60 + 60 * 4, 60 + 60 * 4),
        "nothing shared": (HUNDRED_THOUSAND, 4 * HUNDRED_THOUSAND),
        "binary": (forest.num_nodes, sum(len(np.unique(place & (2**bits - 1))) for bits in range(1, 18))),
    }[shape]
    assert forest.logical_tokens == sum(map(len, sequences))
    assert (forest.num_nodes, forest.num_tokens) == expected
    assert forest.num_source_targets == forest.logical_tokens - HUNDRED_THOUSAND
    if shape == "prefixes":
        passing = [sum(1 + at % 60 > depth for at in range(60)) * (HUNDRED_THOUSAND // 60) for depth in range(60)]
        beyond = [sum(1 + at % 60 > depth for at in range(HUNDRED_THOUSAND % 60)) for depth in range(60)]
        assert forest.target_count.tolist() == [0, *np.add(passing, beyond)[1:].tolist()]


def test_a_long_chain_of_tree_nodes():
    """A tree cut after each token, merged with the same written as one node, in both orders."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 20_000).astype(np.int32)
    count = np.ones(20_000, np.uint16)
    cut = TokenTree(ids, count, np.ones(20_000, np.int32), np.arange(-1, 19_999), 20_000)
    whole = TokenTree(ids, count, np.array([20_000]), np.array([-1]), 20_000)
    for trees in ([cut, whole], [whole, cut], [cut, cut]):
        forest = TokenForest.from_trees(trees)
        assert forest.tokens.tolist() == ids.tolist() and forest.num_nodes == 1
        assert forest.target_count.tolist() == [0] + [2] * 19_999


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


# Arrays


def test_several_arrays_are_seen_as_one_without_a_copy():
    arrays = [np.arange(5, dtype=np.int32) + 10 * at for at in range(4)]
    arrays[2] = arrays[2][:0]
    view, first = one_view(arrays)
    for array, at in zip(arrays, first.tolist(), strict=True):
        assert view[at : at + len(array)].tolist() == array.tolist()
        assert not len(array) or np.shares_memory(view[at : at + len(array)], array)
    assert not view.flags.writeable


def test_arrays_may_be_read_only_and_mapped(tmp_path):
    tokens, offsets = flat([[1, 2, 3], [1, 2, 4], [5]])
    np.save(tmp_path / "tokens.npy", tokens)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    expected = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4], [5]])
    assert_equal(TokenForest.from_arrays(mapped, offsets), expected)
    assert_equal(TokenForest.from_sequences([mapped[:3], mapped[3:6], mapped[6:]]), expected)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 9, 2, 9, 3], np.int32)[::2],
        np.array([1, 2, 3], ">i4"),
        np.frombuffer(b"x" + np.array([1, 2, 3], np.int32).tobytes(), np.int32, offset=1),
        np.array([1, 2, 3], np.uint8),
        (1, 2, 3),
    ],
)
def test_sequences_of_any_kind_of_integers(array):
    forest = TokenForest.from_sequences([array, [1, 2]], [array, array[:2]])
    assert forest.tokens.tolist() == [1, 2, 3] and forest.target_count.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3, -4], [0, 2, 4]), "Sequence 1: token id -4 at position 1 is outside"),
        ((np.array([1, 2, 2**31]), [0, 2, 3]), "Sequence 1: token id 2147483648 at position 0 is outside"),
        ((np.array([1.0, 2.0]), [0, 2]), "Sequence 0: token ids must be a flat list of integers"),
        (([1, 2, 3], [0, 2, 3], [1, 2, 4]), "Sequence 1: label 4 at position 0 differs from its token 3"),
        (([1, 2, 3], [0, 2, 3], np.array([1, 2, 2**32 + 3])), "Sequence 1: label 4294967299 at position 0 differs"),
        (([1, 2, 3], [0, 2, 3], None, [1, -1]), "Sequence 1: weight is -1.0"),
        (([1, 2, 3], [0, 2, 3], None, [1]), "Sequence 1: no weight"),
        (([1, 2, 3], [0, 2, 3], None, [1, 1, 1]), "more weights than sequences"),
        (([1, 2, 3], [0, 2, 4]), "Chunk 0: offsets must ascend from at least 0 to at most 3"),
        (([1, 2, 3], [0, 2, 1, 3]), "Chunk 0: offsets must ascend .* at 1 from 2 down to 1"),
        (([1, 2, 3], [-1, 3]), "Chunk 0: offsets must ascend from at least 0"),
        (([1, 2, 3], []), "Chunk 0: offsets must be a flat array of at least one integer"),
    ],
)
def test_bad_arrays_are_named(arguments, message):
    tokens, offsets, *others = arguments
    tokens = tokens if isinstance(tokens, np.ndarray) else np.array(tokens, np.int32)
    if others and isinstance(others[0], list):
        others[0] = np.array(others[0], np.int32)
    with pytest.raises(ValueError, match=message):
        TokenForest.from_arrays(tokens, np.array(offsets, None if offsets else np.float64), *others)


def test_labels_of_arrays_must_be_of_the_same_sequences():
    tokens, offsets = flat([[1, 2], [3]])
    with pytest.raises(ValueError, match="Sequence 0: 2 tokens but 1 labels"):
        TokenForest.from_arrays(tokens, offsets, tokens, label_offsets=np.array([0, 1, 3]))
    with pytest.raises(ValueError, match="labels of 1 sequences and tokens of 2"):
        TokenForest.from_arrays(tokens, offsets, tokens, label_offsets=np.array([0, 3]))
    with pytest.raises(ValueError, match="2 chunks but offsets of 1"):
        TokenForest.from_arrays([tokens, tokens], offsets)


@pytest.mark.parametrize(
    ("sequences", "labels", "weights", "message"),
    [
        ([[1], [-2], [1.5]], None, None, "Sequence 1: token id -2"),
        ([[1, 2], [1, 3], [4, 5]], [[1, 2], [1, 2], [4]], None, "Sequence 1: label 2"),
        ([[1, 2], [1, 3], [-4, 5]], [[1, 2], [1, 2], [4]], None, "Sequence 1: label 2"),
        ([[1, 2], [-1, 3]], [[1, 2], [1]], None, "Sequence 1: token id -1"),
        ([[1], [2], [-3]], None, [1, -1, 1], "Sequence 1: weight is -1.0"),
        ([[1], [-2], [3]], None, [1, 1], "Sequence 1: token id -2"),
        ([[1], [-2]], None, [1, 1, 1], "Sequence 1: token id -2"),
    ],
)
def test_of_several_errors_the_first_is_named(sequences, labels, weights, message):
    arrays = [
        np.array(sequence, np.int32 if all(isinstance(t, int) for t in sequence) else None) for sequence in sequences
    ]
    marks = None if labels is None else [np.array(row, np.int32) for row in labels]
    with pytest.raises(ValueError, match=message):
        TokenForest.from_sequences(arrays, marks, weights)


def test_errors_of_trees_count_all_trees():
    good = TokenTree(np.array([1, 2], np.int32), np.array([0, 1]), np.array([1, 1]), np.array([-1, 0]), 2)
    bad = {
        "Sequence {}: token id -2 at position 1": {"input_ids": np.array([1, -2], np.int32)},
        "Token tree {}: node 1 hangs from token 1": {"node_parent": np.array([-1, 1])},
        "Token tree {}: node 1 hangs from token -2": {"node_parent": np.array([-1, -2])},
        "Token tree {}: node 1 has -1 tokens": {"node_length": np.array([3, -1])},
        "Token tree {}: 2 input_ids, 1 target_count": {"target_count": np.array([1])},
    }
    for message, change in bad.items():
        for at in (0, 1, TREES_AT_ONCE - 1, TREES_AT_ONCE, TREES_AT_ONCE + 1):
            trees = [good] * at + [replace(good, **change), replace(good, target_count=np.array([1]))]
            with pytest.raises(ValueError, match=message.format(at)):
                TokenForest.from_trees(trees)


def test_trees_are_read_in_parts():
    tree = TokenTree(np.array([1, 2]), np.array([0, 1]), np.array([1, 1]), np.array([-1, 0]), 2)
    parts = read_trees(iter([tree] * (2 * TREES_AT_ONCE + 1))).parts
    assert [len(part.ids) for part in parts] == [2048, 2048, 2]
    forest = TokenForest.from_trees([tree] * (2 * TREES_AT_ONCE + 1))
    assert (
        forest.target_count.tolist() == [0, 2 * TREES_AT_ONCE + 1] and forest.logical_tokens == 4 * TREES_AT_ONCE + 2
    )


def test_a_view_of_several_arrays_keeps_them_alive():
    arrays = [np.arange(5, dtype=np.int32) + 10 * at for at in range(3)]
    alive = [weakref.ref(array) for array in arrays]
    view, first = one_view(arrays)
    part = view[first[1] : first[1] + 5]
    del arrays, view
    gc.collect()
    assert all(array() is not None for array in alive)
    assert part.tolist() == [10, 11, 12, 13, 14]
    del part
    gc.collect()
    assert all(array() is None for array in alive)


@pytest.mark.parametrize("weights", [None, [0.5, 2, 1]])
@pytest.mark.parametrize("copied", [lambda forest: pickle.loads(pickle.dumps(forest)), copy.copy, copy.deepcopy])
def test_a_copy_of_a_forest_holds_its_tokens_and_no_other_memory(copied, weights):
    arrays = [np.array(ids, np.int32) for ids in ([1, 2, 3], [9, 9, 9], [1, 2, 4], [5])]
    forest = TokenForest.from_sequences([arrays[at] for at in (0, 2, 3)], weights=weights)
    other = copied(forest)
    assert_equal(other, forest)
    assert len(other.values) == forest.num_tokens and not other.values.flags.writeable
    assert not np.shares_memory(other.values, arrays[0])
    assert other.path(2).tolist() == forest.path(2).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (np.array([0, -1]), "Token tree 1: target_count -1 of token 1 is outside 0 .. 2147483647"),
        (np.array([2**31, 1]), "Token tree 1: target_count 2147483648 of token 0 is outside"),
        (np.array([0, -1], np.int32), "Token tree 1: target_count -1 of token 1 is outside"),
        (np.array([0, 0.5]), "Token tree 1: target_count must be a flat list of integers, got float64 of shape"),
    ],
)
def test_bad_counts_of_trees_are_named(count, message):
    good = TokenTree(np.array([1, 2]), np.array([0, 1]), np.array([2]), np.array([-1]), 2)
    with pytest.raises(ValueError, match=message):
        TokenForest.from_trees([good, replace(good, target_count=count)])


@pytest.mark.parametrize("border", [1, 2, 63, 64, 65, 66, 127, 128, 129, 192])
def test_labels_that_change_at_block_borders(border):
    trunk = np.arange(200) % 5
    sequences = [trunk, trunk[: border + 1], np.append(trunk[:border], [7] * 130)]
    for mask in (np.arange(400) >= border, np.arange(400) < border, np.arange(400) == border):
        labels = [np.where(mask[: len(sequence)], sequence, -100) for sequence in sequences]
        for weights in (None, [0.5, 0, 3]):
            assert_equal(
                TokenForest.from_sequences(sequences, labels, weights), reference_forest(sequences, labels, weights)
            )
        counts = [(label != -100).astype(np.uint16) for label in labels]
        trees = [
            TokenTree(s, c, np.array([border, len(s) - border]), np.array([-1, border - 1]), len(s))
            for s, c in zip(sequences, counts, strict=True)
        ]
        weighted = [replace(tree, target_weight=tree.target_count * np.float32(0.25)) for tree in trees]
        assert_equal(TokenForest.from_trees(trees), reference_forest_of_trees(trees))
        assert_equal(TokenForest.from_trees(weighted), reference_forest_of_trees(weighted))


@pytest.mark.parametrize("size", [31, 32, 33, 5000])
def test_the_table_of_changes_grows(size):
    """Places where the count changes, more than the table has slots: in one sequence, and one in each of many."""
    ids = np.arange(2 * size)
    labels = np.where(ids % 2, ids, -100)
    assert_equal(TokenForest.from_sequences([ids], [labels]), reference_forest([ids], [labels]))
    ends = [ids[: end + 2] for end in range(0, 64 * (size // 64) + 64, max(size // 64, 1))]
    assert_equal(TokenForest.from_sequences(ends, ends), reference_forest(ends, ends))
    tree = TokenTree(ids, ids % 2, np.array([2 * size]), np.array([-1]), 2 * size)
    assert_equal(TokenForest.from_trees([tree]), reference_forest_of_trees([tree]))


@given(corpora())
def test_tallies_are_runs_that_differ_from_their_neighbours(corpus):
    tally = TokenForest.from_sequences(*corpus).tally
    assert np.all(tally.length > 0)
    differs = tally.count[1:] != tally.count[:-1]
    if tally.weight is not None:
        differs |= tally.weight[1:] != tally.weight[:-1]
    assert differs.all()


@pytest.mark.parametrize("label", [0, -1, -99, -101, 1])
@pytest.mark.parametrize("at", [1, 62, 63, 64, 65, 127, 128])
def test_a_label_that_is_not_its_token_is_found_wherever_it_is(at, label):
    """At the borders of the blocks that are compared at once, among targets and among context."""
    ids = np.arange(1, 130, dtype=np.int32)
    for others in (ids, np.full_like(ids, -100), np.where(ids % 2, ids, -100)):
        labels = others.copy()
        labels[at] = label
        with pytest.raises(ValueError, match=f"Sequence 1: label {label} at position {at} differs"):
            TokenForest.from_sequences([ids, ids], [ids, labels])


def test_the_largest_token_ids_are_ordered_by_place_and_token():
    largest = 2**31 - 1
    sequences = [[5, 6, 7], [5, largest], [5, 2**30], [5, 9], [5, 6, 0], [5, 6, largest], [largest, 1], [0]]
    forest = TokenForest.from_sequences(sequences)
    assert_equal(forest, reference_forest(sequences))
    assert forest.tokens.tolist() == [0, 5, 6, 0, 7, largest, 9, 2**30, largest, largest, 1]


@pytest.mark.parametrize("border", [1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 198, 199])
def test_weights_that_change_where_counts_do_not(border):
    ids = np.arange(200)
    weight = np.where(ids < border, 0.5, 2).astype(np.float32)
    tree = TokenTree(ids, np.ones(200, np.uint16), np.array([200]), np.array([-1]), 200, weight)
    in_turns = replace(tree, target_weight=np.where(ids % 3, weight, 4).astype(np.float32))
    branch = TokenTree(np.append(ids[:100], 7), np.full(101, 3, np.uint16), np.array([60, 41]), np.array([-1, 59]), 9)
    from_nothing = replace(tree, target_weight=np.where(ids < border, 0, 2).astype(np.float32))
    for trees in ([tree], [in_turns], [from_nothing], [tree, branch], [branch, in_turns, from_nothing]):
        assert_equal(TokenForest.from_trees(trees), reference_forest_of_trees(trees))

"""Visibility and the attention backends, without models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dagpack_hf.attention import DagVisibility, MissingVisibilityError, dense, flex, select_backend, visible
from dagpack_hf.attention.interface import dag_attention_forward
from tests.tiny_trees import ancestors, depths_from, lay_out, parents_of, random_sequences, subtree_end_of

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

steps_of_walk = st.lists(st.one_of(st.just(0), st.integers(0, 6)), min_size=1, max_size=40)


def vectors(*depths: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    """`subtree_end` and `position_ids` of one row per preorder walk."""
    ends, positions = [], []
    for walk in depths:
        parent = np.concatenate([parents_of(walk), np.full(padding, -1)]).astype(int)
        ends.append(subtree_end_of(parent))
        positions.append(walk + [0] * padding)
    return torch.tensor(np.array(ends)), torch.tensor(positions)


def long_walk(seed: int, length: int, turn_back: float) -> list[int]:
    """Depths of a preorder walk of a forest whose branches have some `1 / turn_back` positions."""
    random = np.random.default_rng(seed)
    depths = [0]
    while len(depths) < length:
        back = random.random() < turn_back
        depths.append(int(random.integers(0, depths[-1] + 1)) if back else depths[-1] + 1)
    return depths


# --- visibility ------------------------------------------------------------------------------------------------------


def test_visible_on_a_row_written_by_hand():
    """Two trees, `0 (1, 2 (3))` and `4`, and one position of padding."""
    mask = visible(torch.tensor([[4, 2, 4, 4, 5, 6]]), torch.tensor([[0, 1, 1, 2, 0, 0]]))
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert mask.int().tolist() == [[*expected, [0, 0, 0, 0, 0, 1]]]


def test_window_counts_depth_not_row_index():
    """Position 3 is the sibling of 1 and 2, three places after its parent but one deeper."""
    mask = visible(torch.tensor([[4, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1]]), window=2)
    assert mask[0, 3].tolist() == [True, False, False, True]


@given(steps_of_walk, st.integers(0, 3), st.one_of(st.none(), st.integers(1, 8)))
def test_visible_equals_walking_up_the_parents(steps, padding, window):
    depths = depths_from(steps)
    subtree_end, position_ids = vectors(depths, padding=padding)
    expected = ancestors(np.concatenate([parents_of(depths), np.full(padding, -1)]).astype(int))
    if window is not None:
        depth = position_ids[0].numpy()
        expected &= depth[:, None] - depth < window
    assert np.array_equal(visible(subtree_end, position_ids, window)[0].numpy(), expected)


def test_a_mask_is_built_once_per_window_that_hides_something():
    subtree_end, position_ids = vectors([0, 1, 2, 3])
    built: list[int | None] = []

    def build(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None) -> int:
        built.append(window)
        return len(built)

    visibility = DagVisibility(subtree_end, position_ids)
    cpu = torch.device("cpu")
    assert [visibility.mask(build, window, cpu) for window in (None, 2, 2, None, 3, 4, 100)] == [1, 2, 2, 1, 3, 1, 1]
    assert built == [None, 2, 3]


@pytest.mark.parametrize(
    ("subtree_end", "position_ids", "message"),
    [
        (torch.tensor([1]), torch.tensor([0]), r"shape \(batch, length\), got \(1,\)"),
        (torch.tensor([[2, 2]]), torch.tensor([[0]]), r"got \(1, 2\) and \(1, 1\)"),
        (torch.tensor([[1.0]]), torch.tensor([[0]]), "subtree_end must hold integers, got torch.float32"),
        (torch.tensor([[1]]), torch.tensor([[False]]), "position_ids must hold integers, got torch.bool"),
        (torch.tensor([[2, 2, 0]]), torch.tensor([[0, 1, 0]]), r"subtree_end\[0, 2\] is 0, outside 3..3"),
        (torch.tensor([[2, 3]]), torch.tensor([[0, 1]]), r"subtree_end\[0, 1\] is 3, outside 2..2"),
    ],
)
def test_malformed_vectors_are_refused(subtree_end, position_ids, message):
    with pytest.raises(ValueError, match=message):
        DagVisibility(subtree_end, position_ids)


# --- FlexAttention's tiles -------------------------------------------------------------------------------------------


def assert_same_tiles(found: BlockMask, expected: BlockMask) -> None:
    for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    for part in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.seq_lengths == expected.seq_lengths


@pytest.mark.parametrize("turn_back", [0.3, 0.02, 0.004, 0.0])
@pytest.mark.parametrize("window", [None, 1, 20, 128, 200, 400])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_equal_create_block_mask(turn_back, window, seed):
    """Two rows of five tiles with padding; branches shorter than a tile up to longer than the row."""
    subtree_end, position_ids = vectors(
        long_walk(seed, 570, turn_back), long_walk(seed + 100, 570, turn_back), padding=70
    )
    found = flex.block_mask_of(subtree_end.int(), position_ids.int(), window)

    def sees(b, h, q, k):
        inside = (k <= q) & (q < subtree_end[b, k])
        return inside if window is None else inside & (position_ids[b, q] - position_ids[b, k] < window)

    assert_same_tiles(found, create_block_mask(sees, 2, None, 640, 640, device="cpu"))


def test_tiles_of_a_length_that_is_no_multiple_of_the_tile():
    """The row is padded with positions that see themselves only."""
    subtree_end, position_ids = vectors(long_walk(7, 300, 0.01))
    padded_end, padded_positions = vectors(long_walk(7, 300, 0.01), padding=84)
    for window in (None, 50):
        found = flex.block_mask_of(subtree_end.int(), position_ids.int(), window)
        assert found.shape == (1, 1, 384, 384)
        assert_same_tiles(found, flex.block_mask_of(padded_end.int(), padded_positions.int(), window))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.one_of(st.none(), st.integers(1, 12)))
def test_tiles_of_small_forests(data, window):
    """With tiles of 4 positions, look at every pair of every tile."""
    depths = depths_from(data.draw(st.lists(st.one_of(st.just(0), st.integers(0, 6)), min_size=16, max_size=16)))
    subtree_end, position_ids = vectors(depths)
    patch = pytest.MonkeyPatch()
    patch.setattr(flex, "TILE", 4)
    some, every = flex._tile_pairs(subtree_end, position_ids, window)
    patch.undo()
    tiles = visible(subtree_end, position_ids, window).view(1, 4, 4, 4, 4).transpose(2, 3)
    assert torch.equal(some, tiles.flatten(3).any(3))
    assert torch.equal(every, tiles.flatten(3).all(3))


# --- backends --------------------------------------------------------------------------------------------------------


def attend_one_by_one(query, key, value, seen, scaling, softcap, sinks):
    """Attention written as sums over the keys that each query sees, in float64."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for b, h, i in np.ndindex(*query.shape[:3]):
        g = h * key.shape[1] // query.shape[1]
        scores = {j: (query[b, h, i] @ key[b, g, j]).item() * scaling for j in np.flatnonzero(seen[b, i])}
        if softcap is not None:
            scores = {j: softcap * np.tanh(score / softcap) for j, score in scores.items()}
        total = sum(np.exp(score) for score in scores.values()) + (0 if sinks is None else np.exp(sinks[h].item()))
        for j, score in scores.items():
            output[b, h, i] += np.exp(score) / total * value[b, g, j]
    return output


@pytest.mark.parametrize("backend", [dense, flex])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.9])
def test_backend_equals_sums_over_visible_keys(backend, window, softcap, with_sinks, scaling):
    """Two rows, grouped heads, values of another size than keys; FlexAttention's forward pass runs on CPU."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, sinks = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 6), (4,))
    )
    subtree_end, position_ids = vectors([0, 1, 2, 3, 4, 2, 3, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7, 3, 4], padding=2)
    options = {"window": window, "scaling": scaling, "softcap": softcap, "sinks_H": sinks if with_sinks else None}
    found = backend.attend(query, key, value, DagVisibility(subtree_end, position_ids), **options)
    seen = visible(subtree_end, position_ids, window).numpy()
    expected = attend_one_by_one(query, key, value, seen, scaling or 8**-0.5, softcap, sinks if with_sinks else None)
    assert found.dtype == torch.float64
    # FlexAttention keeps its log-sum-exp in float32, and so the sinks' share.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if backend is flex and with_sinks else 1e-12)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_flex_equals_dense_over_several_tiles(window, softcap, with_sinks):
    subtree_end, position_ids = vectors(long_walk(0, 290, 0.01), long_walk(1, 290, 0.05), padding=10)
    generator = torch.Generator().manual_seed(1)
    query, key, value, sinks = (
        torch.randn(*shape, generator=generator) for shape in ((2, 4, 300, 16), (2, 2, 300, 16), (2, 2, 300, 16), (4,))
    )
    options = {"window": window, "softcap": softcap, "sinks_H": sinks if with_sinks else None}
    found, expected = (
        backend.attend(query, key, value, DagVisibility(subtree_end, position_ids), **options)
        for backend in (flex, dense)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.7}, {"sinks_H": torch.tensor([0.1, -0.2, 0.3, 0.4])}])
def test_dense_in_bfloat16_takes_the_softmax_in_float32(options):
    subtree_end, position_ids = vectors(long_walk(0, 64, 0.1))
    query, key, value = torch.randn(3, 1, 4, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    visibility = DagVisibility(subtree_end, position_ids)
    found = dense.attend(query, key, value, visibility, **options)
    expected = dense.attend(query.float(), key.float(), value.float(), visibility, **options)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)


def test_flex_refuses_a_backward_pass_on_cpu():
    query, key, value = torch.randn(3, 1, 2, 8, 16).requires_grad_()
    subtree_end, position_ids = vectors([0, 1, 2, 3, 1, 2, 1, 0])
    with pytest.raises(NotImplementedError, match='no backward on CPU: use attention backend "dense"'):
        flex.attend(query, key, value, DagVisibility(subtree_end, position_ids))


def test_select_backend():
    assert select_backend("cpu") == "tile" and select_backend(torch.device("mps")) == "dense"
    assert select_backend("cuda:1") == "flex"
    assert select_backend("cuda", "dense") == "dense"
    assert select_backend("cpu", "flex") == "flex"
    with pytest.raises(ValueError, match="'flash' is not known, choose one of auto, dense, tile, flex"):
        select_backend("cuda", "flash")


# --- the attention function ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Stands for a model's layer; errors name it."""


def call(length: int = 3, rows: int = 1, **options):
    query, key, value = torch.randn(3, rows, 2, length, 8)
    subtree_end, position_ids = vectors([0, 1, 1])
    options = {"attention_mask": None, "dag_visibility": DagVisibility(subtree_end, position_ids), **options}
    return dag_attention_forward(Attention(), query, key, value, **options)


def test_output_has_positions_before_heads():
    output, weights = call()
    assert output.shape == (1, 3, 2, 8) and output.is_contiguous() and weights is None


def test_windows_asked_for_are_recorded():
    subtree_end, position_ids = vectors([0, 1, 1])
    visibility = DagVisibility(subtree_end, position_ids)
    for window in (None, 2, 4096):
        call(dag_visibility=visibility, sliding_window=window)
    assert visibility.windows == {None, 2, 4096}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dag_visibility": None}, 'Attention uses the attention "dagpack" but got no dag_visibility'),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "got an attention_mask beside dag_visibility"),
        ({"dropout": 0.1}, "drops attention weights with probability 0.1"),
        ({"is_causal": False}, "attends to later positions"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "passes position_bias, which the attention 'dagpack' does not"),
        ({"length": 4}, "got 1 rows of 4 queries and 4 keys, but dag_visibility is for 1 rows of 3"),
        ({"rows": 2}, "got 2 rows of 3 queries and 3 keys, but dag_visibility is for 1 rows of 3"),
        ({"sliding_window": 0}, "sliding window of 0; it must be at least 1"),
    ],
)
def test_calls_that_would_be_wrong_are_refused(options, message):
    with pytest.raises((ValueError, MissingVisibilityError), match=message):
        call(**options)


def test_terms_that_are_absent_do_not_matter():
    call(position_bias=None, is_causal=True, output_attentions=False, position_ids=torch.zeros(1, 3))


def test_rows_laid_out_for_the_model_tests_are_what_they_claim():
    row = lay_out([[1, 2, 3], [1, 2, 4, 5], [6], [1, 7]], padding=1)
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 6, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 2, 3, 1, 0, 0]
    assert row.subtree_end.tolist() == [6, 5, 3, 5, 5, 6, 7, 8]
    assert row.paths == [[0, 1, 2], [0, 1, 3, 4], [6], [0, 5]]
    for sequence, path in zip(row.sequences, row.paths, strict=True):
        assert row.input_ids[path].tolist() == sequence
    assert max(map(len, random_sequences(0, 20, 9, 5))) == 9

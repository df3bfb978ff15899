"""The tile backend equals the dense one, forward and backward, whatever the tree."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dagpack_hf.attention import DagVisibility, dense, enable, tile, tile_plan, visible
from dagpack_hf.attention.partial import Explicit, Fused
from dagpack_hf.attention.tile_plan import RowPlan, plan_of, tiles
from tests.test_attention import long_walk, vectors
from tests.test_attention_models import gradients, inputs_of, loss_on_rows, rows
from tests.tiny_models import tiny_model
from tests.tiny_trees import depths_from

torch.set_num_threads(1)

TOLERANCE = 1e-12
"""In float64; what is left is the order of summation."""


def star(trunk: int, branches: int, own: int) -> list[int]:
    return [*range(trunk), *branches * [*range(trunk, trunk + own)]]


def comb(trunk: int) -> list[int]:
    """A leaf at each position of the trunk, the deepest first."""
    return [*range(trunk), *range(trunk, 0, -1)]


def nested(branches: int) -> list[int]:
    """Branches of branches of 70 positions, deep enough for common ancestors that do not lie together."""
    walk = [*range(150)]
    for branch in range(branches):
        base = 150 + 10 * branch
        walk = [
            *walk,
            *range(base - 10 * branch, base + 100),
            *range(base + 60, base + 130),
            *range(base + 90, base + 99),
        ]
    return walk


def set_tiles(patch: pytest.MonkeyPatch, size: int) -> None:
    """Tiles of at most `size` positions; stretches of three times that are not cut."""
    patch.setattr(tile_plan, "TILE", size)
    patch.setattr(tile_plan, "POOL", size)
    patch.setattr(tile_plan, "WHOLE", 3 * size)


SHAPES = {
    "star of long branches": star(300, 4, 205),
    "star of short branches": star(200, 30, 9),
    "star of single tokens": star(140, 100, 1),
    "comb": comb(280),
    "nested": nested(3),
    "chain": [*range(700)],
    "unshared": [*range(300), *range(5), *range(150), *range(40), 0, 0, 0],
    "single tokens": [0] * 150,
    "bushy": long_walk(0, 600, 0.3),
    "branchy": long_walk(1, 600, 0.05),
    "turns": long_walk(2, 600, 0.01),
}


def inputs(
    rows: int, length: int, heads: int = 4, kv_heads: int = 2, size: int = 6, value_size: int = 6
) -> list[Tensor]:
    """Queries, keys, values in float64, and the gradient of the output; laid out as models have them."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    return [
        torch.randn(rows, length, *shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes
    ]


def assert_equals_dense(
    subtree_end: Tensor,
    position_ids: Tensor,
    window: int | None = None,
    tolerance: float = TOLERANCE,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scaling: float | None = None,
    **sizes: int,
) -> None:
    *leaves, grad = inputs(*subtree_end.shape, **sizes)
    if sinks is not None:
        leaves.append(sinks)
    found, expected = [], []
    for attend, results in ((tile.attend, found), (dense.attend, expected)):
        each = [x.detach().requires_grad_() for x in leaves]
        output = attend(
            *each[:3],
            DagVisibility(subtree_end, position_ids),
            window=window,
            scaling=scaling,
            softcap=softcap,
            sinks_H=each[3] if sinks is not None else None,
        )
        results += [output, *torch.autograd.grad(output, each, grad)]
    for name, a, b in zip(("output", "queries", "keys", "values", "sinks"), found, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


# --- equal to dense


@pytest.mark.parametrize("window", [None, 1, 3, 64, 10_000])
@pytest.mark.parametrize("size", [1, 7, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_dense(shape, size, window, monkeypatch):
    """Tiles of one position are slow, so the shapes are cut short for them."""
    set_tiles(monkeypatch, size)
    walk = SHAPES[shape][: 150 if size == 1 else 400 if size == 7 else None]
    assert_equals_dense(*vectors(walk, padding=11), window, heads=2, kv_heads=1)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_have_their_own_plans(window):
    shapes = ["star of long branches", "nested", "bushy", "comb", "chain"]
    assert_equals_dense(*vectors(*(SHAPES[shape][:500] for shape in shapes), padding=30), window)


walks = st.lists(st.one_of(st.just(0), st.just(0), st.just(0), st.integers(0, 30)), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(
    walks,
    walks,
    st.integers(0, 9),
    st.sampled_from([1, 2, 3, 5, 8, 16]),
    st.one_of(st.none(), st.integers(1, 40)),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([(5, 5), (8, 3), (3, 8)]),
    st.booleans(),
)
def test_equals_dense_on_any_forest(one, two, padding, size, window, heads, sizes, with_sinks):
    length = min(len(one), len(two))
    subtree_end, position_ids = vectors(depths_from(one[:length]), depths_from(two[:length]), padding=padding)
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, size)
        assert_equals_dense(
            subtree_end,
            position_ids,
            window,
            sinks=torch.linspace(-1, 2, heads[0], dtype=torch.float64) if with_sinks else None,
            heads=heads[0],
            kv_heads=heads[1],
            size=sizes[0],
            value_size=sizes[1],
        )


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(2, 40), st.sampled_from([1, 3, 8]), st.one_of(st.none(), st.integers(1, 9)))
def test_equals_dense_on_vectors_of_no_forest(data, length, size, window):
    """The plan takes the tree as a hint only."""
    ends = [data.draw(st.integers(position + 1, length)) for position in range(length)]
    depths = data.draw(st.lists(st.integers(0, 12), min_size=length, max_size=length))
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, size)
        assert_equals_dense(torch.tensor([ends]), torch.tensor([depths]), window)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0, 5.0, 0.0], dtype=torch.float64)])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("scaling", [None, 0.9])
def test_sinks_soft_cap_and_scaling(sinks, softcap, window, scaling):
    subtree_end, position_ids = vectors(SHAPES["nested"], padding=3)
    assert_equals_dense(subtree_end, position_ids, window, sinks=sinks, softcap=softcap, scaling=scaling)


@pytest.mark.parametrize("value_size", [3, 12])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_values_of_another_size_than_keys(value_size, softcap):
    assert_equals_dense(*vectors(SHAPES["nested"]), size=8, value_size=value_size, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.7}, {"sinks_H": torch.tensor([0.1, -0.2, 0.3, 0.4])}])
def test_coarser_dtypes(dtype, options):
    """Half precision as near to float64 as the dense backend is, with gradients that are summed in float32."""
    subtree_end, position_ids = vectors(SHAPES["turns"], padding=5)
    exact = inputs(1, subtree_end.shape[1], size=16, value_size=16)
    results = {}
    for name, attend, to in (
        ("exact", dense.attend, torch.float64),
        ("tile", tile.attend, dtype),
        ("dense", dense.attend, dtype),
    ):
        query, key, value = (x.to(to).requires_grad_() for x in exact[:3])
        own = {key: x.to(to) if isinstance(x, Tensor) else x for key, x in options.items()}
        output = attend(query, key, value, DagVisibility(subtree_end, position_ids), **own)
        assert output.dtype == to
        results[name] = [output, *torch.autograd.grad(output, (query, key, value), exact[3].to(to))]
    for of_exact, of_tile, of_dense in zip(results["exact"], results["tile"], results["dense"], strict=True):
        assert of_tile.dtype == dtype
        allowed = 2 * (of_dense - of_exact).norm() + torch.finfo(dtype).eps * of_exact.norm()
        assert (of_tile - of_exact).norm() <= allowed


def test_parts_are_added_up_in_float32():
    """Each of 64 branches adds to the gradient of the trunk; in bfloat16 that would be off by 2 %, not by 0.4 %."""
    visibility = DagVisibility(*vectors(star(60, 64, 40)))
    exact = [x.abs() for x in inputs(1, visibility.shape[1], size=16, value_size=16)]
    grads = []
    for attend, dtype in ((dense.attend, torch.float64), (tile.attend, torch.bfloat16)):
        query, key, value, grad = (x.bfloat16().to(dtype) for x in exact)
        value.requires_grad_()
        grads += torch.autograd.grad(attend(query, key, value, visibility), value, grad)
    of_trunk, expected = grads[1][:, :, :60], grads[0][:, :, :60]
    assert ((of_trunk - expected).abs() / expected).max() < 2**-7


@pytest.mark.parametrize("layout", ["heads first", "positions first", "every other number", "expanded gradient"])
def test_memory_layouts(layout):
    """PyTorch's kernel is wrong in silence where the last dimension is not contiguous."""
    subtree_end, position_ids = vectors(SHAPES["nested"])
    query, key, value, grad = inputs(1, subtree_end.shape[1])
    visibility = DagVisibility(subtree_end, position_ids)
    results = []
    for attend in (tile.attend, dense.attend):
        each = [x.clone() for x in (query, key, value)]
        if layout == "heads first":
            each = [x.contiguous() for x in each]
        elif layout == "every other number":
            each = [torch.stack([x, x], dim=-1).flatten(-2)[..., ::2] for x in each]
            assert each[0].stride(-1) == 2
        each = [x.requires_grad_() for x in each]
        output = attend(*each, visibility)
        upstream = torch.ones((), dtype=torch.float64).expand_as(output) if "gradient" in layout else grad
        results.append([output, *torch.autograd.grad(output, each, upstream)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_large_scores_do_not_overflow():
    subtree_end, position_ids = vectors(SHAPES["star of long branches"])
    assert_equals_dense(subtree_end, position_ids, scaling=200.0, tolerance=1e-8)


def test_gradients_are_those_of_finite_differences():
    subtree_end, position_ids = vectors([*range(6), *range(3, 7), *range(1, 3)])
    visibility = DagVisibility(subtree_end, position_ids)
    query, key, value, _ = (x.requires_grad_() for x in inputs(1, subtree_end.shape[1], heads=2, kv_heads=1, size=3))
    value = value[..., :3]
    sinks = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    for window, softcap in ((None, None), (3, 0.7)):
        attend = lambda q, k, v, s: tile.attend(q, k, v, visibility, window=window, softcap=softcap, sinks_H=s)  # noqa: E731, B023
        assert torch.autograd.gradcheck(attend, (query, key, value, sinks))


def test_only_what_needs_a_gradient_gets_one():
    visibility = DagVisibility(*vectors(SHAPES["nested"]))
    query, key, value, _ = inputs(1, visibility.shape[1])
    assert not tile.attend(query, key, value, visibility).requires_grad
    value.requires_grad_()
    tile.attend(query, key, value, visibility).sum().backward()
    assert value.grad is not None and query.grad is None and key.grad is None


def test_mixed_dtypes_are_refused_and_autocast_casts():
    visibility = DagVisibility(*vectors([0, 1, 2, 1]))
    query, key, value, _ = inputs(1, 4)
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float64, torch.float64"):
        tile.attend(query.float(), key, value, visibility)
    for softcap in (None, 0.7):
        with torch.autocast("cpu", torch.bfloat16):
            found = tile.attend(query.float(), key.bfloat16(), value, visibility, softcap=softcap)
        expected = tile.attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), visibility, softcap=softcap)
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_second_derivatives_are_refused():
    visibility = DagVisibility(*vectors([0, 1, 2, 1]))
    query, key, value, _ = (x.requires_grad_() for x in inputs(1, 4))
    (grad,) = torch.autograd.grad(tile.attend(query, key, value, visibility).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_ways_of_computing_a_part_agree(monkeypatch):
    """Few queries at a time, so that a part takes several steps."""
    monkeypatch.setattr("dagpack_hf.attention.partial._PAIRS", 100)
    generator = torch.Generator().manual_seed(0)
    query, grad = torch.randn(2, 17, 3, 2, 4, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 30, 3, 4, generator=generator, dtype=torch.float64)
    bias = torch.zeros(17, 30, dtype=torch.float64).masked_fill_(
        torch.rand(17, 30, generator=generator) < 0.5, -torch.inf
    )
    bias[:, 3] = 0
    fused, explicit = Fused(0.3), Explicit(0.3)
    for keys, each in ((30, (None, False)), (30, (bias, False)), (17, (None, True))):
        inputs = query, key[:keys], value[:keys]
        (output, lse), expected = explicit.forward(*inputs, *each), fused.forward(*inputs, *each)
        torch.testing.assert_close([output, lse], list(expected), rtol=0, atol=TOLERANCE)
        lse = lse + 0.2  # as if there were other parts
        found = explicit.backward(grad, *inputs, output, lse, *each)
        expected = fused.backward(grad, *inputs, output, lse, *each)
        torch.testing.assert_close(found, list(expected), rtol=0, atol=TOLERANCE)


# --- the plan


def pairs_of(plan: RowPlan, length: int) -> tuple[np.ndarray, np.ndarray]:
    """How many parts show a key to a query, and how many compute the pair."""
    shown, computed = np.zeros((2, length, length), dtype=int)
    for part in plan.own + plan.common:
        keys = np.arange(length)[part.keys] if isinstance(part.keys, slice) else part.keys.numpy()
        queries = np.arange(length)[part.queries]
        computed[np.ix_(queries, keys)] += 1
        mask = np.tri(len(queries), dtype=int) if part.is_causal else 1
        shown[np.ix_(queries, keys)] += mask if part.mask_QK is None else part.mask_QK.numpy()
    return shown, computed


@pytest.mark.parametrize("window", [None, 1, 30, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_parts_hold_each_visible_pair_once(shape, window):
    subtree_end, position_ids = vectors(SHAPES[shape], padding=9)
    (plan,) = plan_of(subtree_end, position_ids, window)
    shown, computed = pairs_of(plan, subtree_end.shape[1])
    assert np.array_equal(shown, visible(subtree_end, position_ids, window)[0].int().numpy())
    assert computed.max() == 1
    assert all(part.mask_QK is None and not part.is_causal for part in plan.common)
    covered = np.concatenate([np.arange(10_000)[part.queries] for part in plan.own])
    assert np.array_equal(covered, np.arange(subtree_end.shape[1]))


def test_a_star_gets_its_trunk_in_one_part():
    subtree_end, position_ids = vectors(star(300, 4, 205))
    (plan,) = plan_of(subtree_end, position_ids)
    trunk = [part for part in plan.common if part.keys == slice(0, 300)]
    assert [part.queries for part in trunk] == [slice(505, 1120)]
    assert all(len(range(1120)[part.queries]) <= tile_plan.TILE for part in plan.own)


@pytest.mark.parametrize(("window", "is_one"), [(None, True), (2020, True), (2019, False), (900, False)])
def test_a_very_long_stretch_is_one_causal_part(window, is_one):
    """Unless the sliding window ends within the row; its ancestors, though few, are a part of their own."""
    (plan,) = plan_of(*vectors([*range(30), *range(20, 2020)]), window)
    last = plan.own[-1]
    assert (last.is_causal and last.queries == slice(30, 2030)) == is_one
    assert ([part.keys for part in plan.common if part.queries == last.queries] == [slice(0, 20)]) == is_one


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ("star of long branches", 1.6),
        ("chain", 1.4),
        ("comb", 1.9),
        ("nested", 2.0),
        ("turns", 2.5),
        ("unshared", 2.0),
    ],
)
def test_little_more_is_computed_than_is_visible(shape, most):
    subtree_end, position_ids = vectors(SHAPES[shape])
    (plan,) = plan_of(subtree_end, position_ids)
    shown, computed = pairs_of(plan, subtree_end.shape[1])
    assert computed.sum() <= most * shown.sum()


@pytest.mark.parametrize("window", [1, 64, 500])
def test_a_window_leaves_out_what_is_out_of_reach(window):
    subtree_end, position_ids = vectors([*range(3000)])
    (plan,) = plan_of(subtree_end, position_ids, window)
    _, computed = pairs_of(plan, 3000)
    assert computed.sum(1).max() <= window + 2 * tile_plan.TILE


@given(walks, st.integers(1, 20))
def test_tiles_cover_the_row(steps, size):
    subtree_end, _ = vectors(depths_from(steps))
    found = list(tiles(subtree_end[0].numpy(), size, size, 3 * size))
    assert [start for _, start, _ in found] == [0, *(stop for _, _, stop in found[:-1])]
    assert found[-1][2] == len(steps)
    lengths = [stop - start for _, start, stop in found]
    assert all(above <= start < stop for above, start, stop in found)
    assert all(0 < length <= size or length >= 3 * size for length in lengths)


# --- in models


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "deepseek_v3", "mistral_sliding"])
@pytest.mark.parametrize("size", [4, 128])
def test_a_model_with_tiles_equals_one_with_the_mask(name, size, monkeypatch):
    """Plain, soft-capped, with sinks, with values of another size than keys, sliding."""
    set_tiles(monkeypatch, size)
    exact = name == "gpt2"
    model = tiny_model(name, torch.float64 if exact else torch.float32).train()
    enable(model, "tile")
    losses, grads = [], []
    for backend in ("tile", "dense"):
        loss = loss_on_rows(model, rows(), **inputs_of(rows(), backend))
        losses.append(loss.item())
        grads.append(gradients(model, loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-13 if exact else 1e-6)
    largest = max(grad.abs().max() for grad in grads[1].values())
    for parameter, grad in grads[1].items():
        assert (grads[0][parameter] - grad).abs().max() <= (TOLERANCE if exact else 1e-5) * largest, parameter


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, monkeypatch):
    set_tiles(monkeypatch, 8)
    model = tiny_model("gemma3_text").train()
    enable(model)
    expected = gradients(model, loss_on_rows(model, rows()))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    inputs = inputs_of(rows(), "tile")
    found = gradients(model, loss_on_rows(model, rows(), **inputs))
    assert len(inputs["dag_visibility"]._masks) == 2, "one plan for each window, none for the second pass"
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-6)


def test_a_compiled_model_computes_the_same():
    """The graph breaks at the attention; other trees do not compile anything again."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    enable(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    torch._dynamo.reset()
    for turn in range(3):
        if turn == 1:
            torch._dynamo.utils.counters.clear()
        some = rows()[::-1] if turn == 2 else rows()
        expected = gradients(model, loss_on_rows(model, some))
        found = gradients(compiled, loss_on_rows(compiled, some, **inputs_of(some)))
        for name, grad in expected.items():
            torch.testing.assert_close(found[f"_orig_mod.{name}"], grad, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["frames"]["total"] == 0

"""Recurrent layers on packed rows: each function against itself path by path, switching, refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from dagpack_hf import recurrent
from dagpack_hf.attention import (
    DagVisibility,
    UnsupportedModelError,
    check_model,
    enable,
    inputs_for,
    ordinary_attention,
    packed_attention,
    probe,
)
from dagpack_hf.recurrent import (
    DagStates,
    StatePlan,
    functions,
    packed_states,
    plan_of,
    recurrent_modules,
    states_for,
)
from dagpack_hf.recurrent.functions import is_stand_in, stand_in
from tests.packed_comparison import float64_everywhere
from tests.reference_recurrent import batch_of, path_to, recurrent_rows, row_of
from tests.shrunk_models import tiny_causal_model

torch.set_num_threads(1)

HEADS, KEYS, VALUES = 2, 4, 3


def modeling(model_type: str):
    return sys.modules[recurrent_modules(tiny_causal_model(model_type, torch.float32))[0].namespace["__name__"]]


def two_rows(padding: int = 3) -> tuple[np.ndarray, DagStates]:
    """Branches in branches down to three cells, nodes of one token, several roots; parents of the batch and states."""
    first = row_of([0] * 70 + [1, 1, *[0] * 66, 3, *[0] * 20, 60, *[0] * 30, 200, 1, *[0] * 5])
    second = row_of([0] * 150 + [149, *[0] * 3, 200, 0, 1])
    parent, end, lengths = batch_of([first, second], padding)
    return parent, DagStates(StatePlan(end, lengths))


def leaves(parent: np.ndarray) -> list[int]:
    return [i for i in range(len(parent)) if parent[i] != -2 and i not in set(parent.tolist())]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def compare(call, inputs: list[Tensor], parent: np.ndarray, states: DagStates) -> float:
    """Largest difference, relative, of outputs and gradients from those of each path computed alone.

    `call(states, *inputs)` takes inputs of shape `(B, T, ...)` and returns such; without states they are plain.
    """
    shape = states.plan.shape
    count = np.zeros(len(parent))
    paths = [path_to(parent, leaf) for leaf in leaves(parent)]
    for path in paths:
        count[path] += 1
    weight = random(len(parent))
    leaf_inputs = [x.detach().requires_grad_() for x in inputs]
    output = call(states, *(x.unflatten(0, shape) for x in leaf_inputs)).flatten(0, 1)
    scale = torch.tensor(count)[(...,) + (None,) * (output.dim() - 1)] * weight[(...,) + (None,) * (output.dim() - 1)]
    found = torch.autograd.grad((output * scale).sum(), leaf_inputs)
    total, worst = 0.0, 0.0
    for path in paths:
        alone = call(None, *(x[path][None] for x in leaf_inputs))[0]
        total = total + (alone * weight[path][(...,) + (None,) * (output.dim() - 1)]).sum()
        worst = max(worst, ((output[path] - alone).abs().max() / alone.abs().max()).item())
    expected = torch.autograd.grad(total, leaf_inputs)
    return max(
        worst, *((f - e).abs().max().item() / e.abs().max().item() for f, e in zip(found, expected, strict=True))
    )


def with_states(name: str, original):
    """The stand-in of a function, given the states or not."""
    function = stand_in(name, original)
    return lambda states, *args, **kwargs: function(*args, **kwargs, **({"dag_states": states} if states else {}))


# --- each function alone


@pytest.mark.parametrize("length", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [None, random(6)], ids=["no bias", "bias"])
def test_convolution(length, bias):
    parent, states = two_rows()
    weight = random(6, length)
    original = with_states("causal_conv1d_fn", modeling("lfm2").causal_conv1d_fn)

    def call(states, x_BTD):
        return original(states, x_BTD.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)

    assert compare(call, [random(len(parent), 6)], parent, states) < 1e-13


@pytest.mark.parametrize("channels", [False, True], ids=["gated delta rule", "kimi delta attention"])
def test_delta_rules(channels):
    parent, states = two_rows()
    name, model_type = (
        ("chunk_kimi_delta_attention", "kimi_linear") if channels else ("torch_chunk_gated_delta_rule", "qwen3_next")
    )
    original = with_states(name, getattr(modeling(model_type), name))
    decay = (HEADS, KEYS) if channels else (HEADS,)
    inputs = [
        random(len(parent), HEADS, KEYS),
        random(len(parent), HEADS, KEYS),
        random(len(parent), HEADS, VALUES),
        -random(len(parent), *decay).abs() / 50,
        random(len(parent), HEADS).sigmoid(),
    ]

    def call(states, query, key, value, g, beta):
        return original(states, query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    with float64_everywhere():
        assert compare(call, inputs, parent, states) < 1e-11


@pytest.mark.parametrize("chunk", [4, 64, 256])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.8)], ids=["no limit", "limited"])
def test_mamba2(chunk, limit):
    parent, states = two_rows()
    original = with_states("mamba2_chunk_scan", modeling("bamba").mamba2_chunk_scan)
    A, bias, D = -random(4).abs() / 20, random(4), random(4)
    inputs = [random(len(parent), 4, 3), random(len(parent), 4), random(len(parent), 2, 5), random(len(parent), 2, 5)]

    def call(states, x, dt, B, C):
        options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": limit, "z": None, "initial_states": None}
        return original(states, x, dt, A, B, C, chunk_size=chunk, D=D, return_final_states=False, **options)

    with float64_everywhere():
        assert compare(call, inputs, parent, states) < 1e-11
    assert states.plan.cell_length(chunk) == min(chunk, 16), "branches of few tokens"


def test_rows_of_padding_only():
    states = DagStates(StatePlan(np.tile(np.arange(1, 6), (2, 1)), np.array([0, 0])))
    function = stand_in("torch_chunk_gated_delta_rule", modeling("qwen3_next").torch_chunk_gated_delta_rule)
    query, value, g = torch.randn(2, 5, HEADS, KEYS), torch.randn(2, 5, HEADS, VALUES), -torch.rand(2, 5, HEADS)
    output, _ = function(query, query, value, g=g, beta=g.exp(), dag_states=states)
    assert output.shape == value.shape and output.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_state": torch.zeros(1)}, "got initial_state beside dag_states"),
        ({"output_final_state": True}, "got output_final_state beside dag_states"),
        ({"cu_seqlens": torch.zeros(1)}, "got cu_seqlens beside dag_states"),
        ({}, r"the delta rule got 1 rows of 4 positions, but dag_states is for 2 rows of"),
    ],
)
def test_calls_that_packed_rows_cannot_have(options, message):
    function = stand_in("torch_chunk_gated_delta_rule", modeling("qwen3_next").torch_chunk_gated_delta_rule)
    query, g = torch.randn(1, 4, HEADS, KEYS), -torch.rand(1, 4, HEADS)
    with pytest.raises(ValueError, match=message):
        function(query, query, query, g=g, beta=g, dag_states=two_rows()[1], **options)


def test_functions_without_a_way_are_refused_when_reached():
    function = stand_in("causal_conv1d_update", lambda x: x)
    assert function(3) == 3
    with pytest.raises(ValueError, match=r"causal_conv1d_update is not known for packed rows; .* use_cache=False"):
        function(3, dag_states=two_rows()[1])


def test_the_fused_function_of_mamba2_answers_nothing():
    function = stand_in("mamba2_split_conv1d_scan_combined", lambda x: x)
    assert function(3) == 3 and function(3, dag_states=two_rows()[1]) is None


# --- whole models


def vectors(rows) -> dict[str, Tensor]:
    return {name: torch.tensor(np.stack([getattr(row, name) for row in rows])) for name in _VECTORS}


_VECTORS = ("input_ids", "position_ids", "subtree_end")


def packed_logits(model, rows, **given) -> Tensor:
    batch = vectors(rows)
    visibility = DagVisibility(batch["subtree_end"], batch["position_ids"])
    with torch.no_grad(), packed_attention(model):
        return model(input_ids=batch["input_ids"], use_cache=False, **inputs_for(model, visibility), **given).logits


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_plan_made_beside_the_row_or_by_the_layers_is_the_same(model_type):
    rows = recurrent_rows()
    model = tiny_causal_model(model_type, torch.float32).eval()
    plan = plan_of(vectors(rows)["subtree_end"])
    assert torch.equal(packed_logits(model, rows), packed_logits(model, rows, **states_for(model, plan)))


def test_the_plan_is_made_once_for_all_layers(monkeypatch):
    made = []
    monkeypatch.setattr(functions, "plan_of", lambda ends: made.append(ends) or plan_of(ends))
    packed_logits(tiny_causal_model("qwen3_5_text", torch.float32), recurrent_rows())
    assert len(made) == 1


def test_with_lengths_a_sequence_of_one_token_at_the_end_is_no_padding():
    model = tiny_causal_model("qwen3_5_text", torch.float32).eval()
    input_ids, end = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([[2, 2, 3, 4, 5]])
    visibility = DagVisibility(end, torch.tensor([[0, 1, 0, 0, 0]]))
    states = states_for(model, plan_of(end, torch.tensor([3])))
    with torch.no_grad(), packed_attention(model):
        row = model(input_ids=input_ids, use_cache=False, **inputs_for(model, visibility), **states).logits[0]
        with ordinary_attention(model):
            for path in ([0, 1], [2]):
                alone = model(input_ids=input_ids[:, path], use_cache=False).logits[0]
                assert torch.allclose(row[path], alone, atol=1e-5)


def test_models_without_recurrent_layers_get_no_states():
    model = tiny_causal_model("llama", torch.float32)
    assert recurrent_modules(model) == [] and states_for(model, two_rows()[1].plan) == {}
    with packed_states(model):
        pass


def test_float32_errs_no_more_than_batches_do():
    """Five times the difference between a sequence alone and in a padded batch, for one of each kind of layer."""
    rows = recurrent_rows()
    for model_type in ("qwen3_5_text", "granitemoehybrid", "lfm2"):
        model = tiny_causal_model(model_type, torch.float32).eval()
        packed = packed_logits(model, rows)
        sequences = [
            (b, s, path) for b, row in enumerate(rows) for s, path in zip(row.sequences, row.paths, strict=True)
        ]
        padded = torch.zeros(len(sequences), max(len(s) for _, s, _ in sequences), dtype=torch.long)
        for at, (_, sequence, _) in enumerate(sequences):
            padded[at, : len(sequence)] = torch.tensor(sequence)
        with torch.no_grad():
            batched = model(input_ids=padded, use_cache=False).logits
            alone = [model(input_ids=torch.tensor([s]), use_cache=False).logits[0] for _, s, _ in sequences]
        noise = max((batched[i, : len(x)] - x).abs().max().item() for i, x in enumerate(alone))
        error = max((packed[b, path] - x).abs().max().item() for (b, _, path), x in zip(sequences, alone, strict=True))
        assert error < 5 * max(noise, 1e-6 * max(x.abs().max().item() for x in alone)), model_type


# --- switching


def originals(model) -> list[object]:
    return [module.namespace[name] for module in recurrent_modules(model) for name in sorted(module.functions)]


def test_functions_are_replaced_inside_the_block_only():
    model = tiny_causal_model("qwen3_5_text", torch.float32)
    before = originals(model)
    assert before and not any(map(is_stand_in, before))
    with pytest.raises(KeyError), packed_attention(model):
        assert all(map(is_stand_in, originals(model)))
        inside = originals(model)
        with packed_states(model):
            assert originals(model) == inside
        assert originals(model) == inside
        raise KeyError
    assert originals(model) == before


def test_importing_replaces_nothing():
    from transformers.models.qwen3_next import modeling_qwen3_next

    assert not any(is_stand_in(value) for value in vars(modeling_qwen3_next).values() if callable(value))


def test_enable_replaces_for_good_and_plain_calls_pass_through():
    model = tiny_causal_model("lfm2", torch.float32)
    input_ids = torch.randint(3, 60, (2, 9))
    before, expected = originals(model), model(input_ids=input_ids, use_cache=False).logits
    try:
        previous = enable(model)
        assert all(map(is_stand_in, originals(model)))
        with ordinary_attention(model, previous):
            assert torch.equal(model(input_ids=input_ids, use_cache=False).logits, expected)
            assert model.generate(input_ids, max_new_tokens=3, do_sample=False).shape[1] > 9
    finally:
        for module in recurrent_modules(model):
            for name, function in zip(sorted(module.functions), before, strict=False):
                module.namespace[name] = function


# --- refusals


def test_kernels_of_the_hub_are_refused():
    model = tiny_causal_model("qwen3_5_text", torch.float32)
    check_model(model)
    model._use_kernels = True
    with pytest.raises(UnsupportedModelError, match=r"kernels of the Hub .* load the model with use_kernels=False"):
        check_model(model)


@pytest.mark.parametrize(("version", "warns"), [("5.23.1", True), ("5.24.0", False), ("5.25.0.dev0", True)])
def test_untested_versions_are_named(monkeypatch, caplog, version, warns):
    monkeypatch.setattr(functions.transformers, "__version__", version)
    functions.warn_if_untested.cache_clear()
    functions.warn_if_untested()
    functions.warn_if_untested.cache_clear()
    assert (f"tested with transformers 5.24 up to but without 5.25; this is {version}" in caplog.text) == warns


def test_a_model_without_any_attention_passes():
    model = tiny_causal_model("granitemoehybrid", torch.float32, layer_types=["linear_attention"] * 4)
    with packed_attention(model):
        assert probe(model) < 1e-4


def test_the_public_names():
    assert all(hasattr(recurrent, name) for name in recurrent.__all__)

"""Every causal language model of transformers on packed rows: exact, or refused with a reason; none wrong in silence.

The default run takes one or two models of each kind. `pytest -m matrix tests/test_models.py` takes all of them and
compares the table with `docs/models.md`; with `DAGPACK_WRITE_DOCS=1` in the environment it writes the table instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from dagpack_hf.attention import (
    DagVisibility,
    MissingVisibilityError,
    UnsupportedModelError,
    check_model,
    enable,
    inputs_for,
    ordinary_attention,
    packed_attention,
    packed_implementation,
    probe,
    probe_head,
    ready_mask,
    route_of,
    support,
)
from tests import packed_comparison
from tests.model_outcomes import Outcome, outcomes_in_bounds, outcomes_of, table
from tests.packed_comparison import TOLERANCE, difference, float64_everywhere, rows
from tests.shrunk_models import LAYERS, VOCABULARY, WINDOW, causal_model_types, tiny_causal_model, tiny_config
from tests.tiny_trees import ancestors

torch.set_num_threads(1)

TABLE = Path(__file__).parents[1] / "docs" / "models.md"

BY_FUNCTION = {
    "cohere2": "sliding and full layers, the latter without positions; attention beside the MLP",
    "deepseek_v3": "latent keys and values, values of another size, experts",
    "diffllama": "two attentions subtracted",
    "gemma": "one key head",
    "gemma2": "soft-capped scores, sliding and full layers",
    "gemma3_text": "sliding and full layers with rotary tables of their own",
    "gemma4_text": "layers that share keys and values, heads of two sizes",
    "gpt2": "learned positions",
    "gpt_neox": "rotary positions on a part of the head, attention beside the MLP",
    "gpt_oss": "attention sinks, sliding and full layers, experts",
    "gptj": "interleaved rotary positions",
    "llama": "full attention, grouped heads",
    "mistral": "sliding layers only",
    "opt": "learned positions with an offset",
    "phi": "rotary positions on a part of the head, biases",
    "qwen3_moe": "experts, normalised heads",
    "smollm3": "some layers without positions",
}

BY_MASK = {
    "deepseek_v32": "keys chosen by an index",
    "doge": "a mask of the model's own on top",
    "dots3_note_text": "sliding layers and layers that choose keys by an index",
    "falcon": "attention code of its own, one key head",
    "llama4_text": "chunked and full layers, the latter without positions",
    "nemotron": "keyword arguments do not reach the layers",
    "stablelm": "keyword arguments do not reach the attention",
}

RECURRENT = {
    "bamba": "Mamba-2, which keeps its state by groups of heads",
    "falcon_h1": "Mamba-2 beside attention in each layer",
    "granitemoehybrid": "Mamba-2, experts",
    "lfm2": "short convolutions",
    "nemotron_h": "Mamba-2 with time steps limited from below; layers of experts and of MLPs only",
    "qwen3_5": "gated DeltaNet with fewer key heads than value heads",
    "zamba2": "Mamba-2 with time steps limited from below, attention that layers share",
}

REFUSED = {
    "bart": "its forward takes no position_ids",
    "bloom": "ALiBi biases count positions of the row",
    "deepseek_v4": "'compressed_sparse_attention', 'heavily_compressed_attention' pool keys by their place in the row",
    "gemma4_unified_assistant": "it is a draft model that reads keys and values of another",
    "inkling_text": "InklingAttention passes position_bias",
    "jamba": "JambaMambaMixer carries its state along the row with mamba_selective_scan",
    "mamba2": "its forward takes no position_ids",
    "minimax": "its layers of type 'linear_attention' carry information along the row in code of their own",
    "minimax_m3_vl_text": "'minimax_m3_sparse' pool keys by their place",
    "qwen4_exp": "it has recurrent layers beside layers that need the mask itself",
    "recurrent_gemma": "its layers of type 'linear_attention' carry information along the row in code of their own",
    "roberta": "its position embeddings do not begin at 0",
    "rwkv": "it keeps a recurrent state along the row",
    "xlnet": "its forward takes no position_ids",
    "gpt_neo": "it does not call its attention through transformers' AttentionInterface",
}


@pytest.mark.parametrize("model_type", [*BY_FUNCTION, *RECURRENT, *BY_MASK])
def test_exact_models(model_type):
    for outcome in outcomes_of(model_type):
        assert outcome.result == "exact", outcome
        assert outcome.route == ("ready mask" if model_type in BY_MASK else "registered function")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_models(model_type):
    [outcome] = outcomes_of(model_type)
    assert outcome.result == "refused"
    assert REFUSED[model_type] in outcome.note


@pytest.mark.parametrize("model_type", sorted(support.WINDOW_BY_MASK_MODEL_TYPES))
def test_a_window_that_is_not_handed_on_comes_by_the_mask(model_type, monkeypatch):
    full, sliding = outcomes_of(model_type)
    assert (full.result, full.route) == ("exact", "registered function")
    assert (sliding.result, sliding.route) == ("exact", "ready mask")
    monkeypatch.setattr(support, "WINDOW_BY_MASK_MODEL_TYPES", frozenset())
    _, sliding = outcomes_of(model_type)
    assert sliding.result == "refused" and "computes packed rows wrongly" in sliding.note


# --- all of them


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", causal_model_types())
def test_no_model_is_wrong_in_silence(model_type, outcomes):
    outcomes[model_type] = outcomes_in_bounds(model_type)
    assert [outcome for outcome in outcomes[model_type] if outcome.result == "wrong"] == []
    assert all(outcome.note for outcome in outcomes[model_type] if outcome.result != "exact")


@pytest.mark.matrix
def test_the_table_is_that_of_this_run(outcomes):
    if missing := set(causal_model_types()) - set(outcomes):
        pytest.skip(f"{len(missing)} model types were not run in this process")
    found = table(outcome for model_type in causal_model_types() for outcome in outcomes[model_type])
    if os.environ.get("DAGPACK_WRITE_DOCS"):
        TABLE.write_text(found)
    assert TABLE.read_text() == found, "run again with DAGPACK_WRITE_DOCS=1 to write docs/models.md"


# --- the tiny models and the comparison do what they are for


def test_every_type_of_layer_occurs_in_the_tiny_model():
    compared = 0
    for model_type in causal_model_types():
        try:
            whole, tiny = CONFIG_MAPPING[model_type](), tiny_config(model_type)
        except Exception:  # the table lists those that cannot be built
            continue
        whole, tiny = whole.get_text_config(decoder=True), tiny.get_text_config(decoder=True)
        if layer_types := getattr(whole, "layer_types", None):
            assert set(tiny.layer_types) >= set(layer_types), model_type
            assert len(tiny.layer_types) <= 2 * LAYERS or model_type == "hrm_text"
            compared += 1
    assert compared > 60


@pytest.mark.parametrize("fault", ["branches see each other", "no window", "positions of the row", "none"])
def test_the_comparison_sees_each_fault(monkeypatch, fault):
    def wrong(model, visibility):
        inputs = inputs_for(model, visibility)
        length = visibility.shape[1]
        if fault == "branches see each other":
            end = torch.full_like(visibility.subtree_end_BT, length)
            inputs["dag_visibility"] = DagVisibility(end, inputs["position_ids"])
        elif fault == "no window":
            flat = torch.zeros_like(visibility.position_ids_BT)
            inputs["dag_visibility"] = DagVisibility(visibility.subtree_end_BT, flat)
        elif fault == "positions of the row":
            inputs["position_ids"] = torch.arange(length).expand(visibility.shape)
        return inputs

    monkeypatch.setattr(packed_comparison, "inputs_for", wrong)
    with float64_everywhere():
        model = tiny_causal_model("gemma3_text")
        enable(model)
        worst = difference(model, rows()).worst
    assert worst < TOLERANCE if fault == "none" else worst > 1e-3


@pytest.mark.matrix
def test_outcomes_are_bounded_in_time(monkeypatch):
    monkeypatch.setattr("tests.model_outcomes.SECONDS", 0)
    [outcome] = outcomes_in_bounds("gpt2")
    assert outcome == Outcome("gpt2", "", "", "not built", note="took more than 0 s")


# --- ready masks


def batch() -> tuple[DagVisibility, list[np.ndarray]]:
    found = rows()
    vectors = (
        torch.tensor(np.stack([getattr(row, name) for row in found])) for name in ("subtree_end", "position_ids")
    )
    return DagVisibility(*vectors), [ancestors(row.parent) for row in found]


def test_masks_by_layer_type_equal_the_definition():
    visibility, sees = batch()
    model = tiny_causal_model("llama4_text", torch.float32)
    model.set_attn_implementation("sdpa")
    masks = inputs_for(model, visibility)["attention_mask"]
    assert masks.keys() == {"chunked_attention", "full_attention"}
    depth_BT = visibility.position_ids_BT.numpy()
    for b, sees_TT in enumerate(sees):
        same_chunk_TT = depth_BT[b][:, None] // WINDOW == depth_BT[b] // WINDOW
        assert np.array_equal(masks["full_attention"][b, 0], sees_TT)
        assert np.array_equal(masks["chunked_attention"][b, 0], sees_TT & same_chunk_TT)


def test_a_model_of_one_kind_of_layer_gets_one_mask():
    visibility, sees = batch()
    model = tiny_causal_model("doge", torch.float32, sliding_window=WINDOW)
    model.set_attn_implementation("sdpa")
    mask = inputs_for(model, visibility)["attention_mask"]
    depth_BT = visibility.position_ids_BT.numpy()
    for b, sees_TT in enumerate(sees):
        assert np.array_equal(mask[b, 0], sees_TT & (depth_BT[b][:, None] - depth_BT[b] < WINDOW))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_gets_the_mask_as_what_it_adds(dtype):
    visibility, sees = batch()
    model = tiny_causal_model("stablelm", dtype)
    assert packed_implementation(model) == "eager"
    bias = inputs_for(model, visibility)["attention_mask"]
    assert bias.dtype == dtype
    assert np.array_equal(bias[0, 0].float().numpy() == 0, sees[0])
    assert set(bias.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_each_mask_is_built_once_for_a_batch():
    visibility, _ = batch()
    model = tiny_causal_model("llama4_text", torch.float32)
    model.set_attn_implementation("sdpa")
    first, second = (inputs_for(model, visibility)["attention_mask"] for _ in range(2))
    assert all(first[name] is second[name] for name in first)


def test_depths_without_the_mask_would_be_wrong():
    """transformers takes every branch for a new document then; the ready mask is what keeps it from that."""
    visibility, _ = batch()
    input_ids = torch.tensor(np.stack([row.input_ids for row in rows()]))
    model = tiny_causal_model("stablelm", torch.float32)
    enable(model)
    inputs = inputs_for(model, visibility)
    with torch.no_grad():
        right = model(input_ids=input_ids, use_cache=False, **inputs).logits
        wrong = model(input_ids=input_ids, use_cache=False, position_ids=inputs["position_ids"]).logits
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("model_type", [*BY_MASK, "big_bird", "git", "megatron-bert", "xglm"])
def test_a_call_without_the_mask_is_refused(model_type):
    visibility, _ = batch()
    input_ids = torch.tensor(np.stack([row.input_ids for row in rows()]))
    model = tiny_causal_model(model_type, torch.float32)
    inputs = inputs_for(model, visibility)
    with torch.no_grad(), packed_attention(model):
        for wrong in ({}, {"attention_mask": torch.ones_like(input_ids)}):
            with pytest.raises(
                MissingVisibilityError, match=r"takes a ready mask for packed rows but got none\. Call"
            ):
                model(input_ids=input_ids, position_ids=inputs["position_ids"], use_cache=False, **wrong)
        with ordinary_attention(model):
            model(input_ids=input_ids, use_cache=False)
        with pytest.raises(MissingVisibilityError):
            model(input_ids=input_ids, use_cache=False)
        assert probe(model) < 1e-4
        model(input_ids=input_ids, use_cache=False, **inputs_for(model, visibility))
    model(input_ids=input_ids, use_cache=False)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_forward_method_itself_is_guarded_too():
    model = tiny_causal_model("stablelm", torch.float32)
    with packed_attention(model), pytest.raises(MissingVisibilityError):
        model.forward(input_ids=torch.randint(3, VOCABULARY, (1, 6)))


@pytest.mark.parametrize("loaded", ["eager", "sdpa"])
def test_attention_that_is_fixed_when_the_model_is_made_is_kept(loaded):
    """falcon has a class for each attention and cannot be switched."""
    config = tiny_config("falcon")
    config._attn_implementation = loaded
    model = type(tiny_causal_model("falcon"))(config)
    assert route_of(model) == "ready mask" and packed_implementation(model) == loaded
    enable(model)
    mask = inputs_for(model, batch()[0])["attention_mask"]
    assert mask.dtype == (torch.bool if loaded == "sdpa" else torch.float32)
    assert probe(model) < 1e-4
    with ordinary_attention(model), packed_attention(model):
        assert model.config._attn_implementation == loaded


def test_attention_that_knows_no_masks_is_replaced_and_given_back():
    model = tiny_causal_model("llama4_text", torch.float32)
    model.set_attn_implementation("flex_attention")
    assert enable(model) == "flex_attention"
    assert model.config._attn_implementation == "sdpa"
    assert probe(model) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        (
            "llama4_text",
            {"floor_scale": 20},
            r"from position 20 on .* set max_length below 20, or load .*tuning=False",
        ),
        ("doge", {"keep_window_size": 20}, r"keeps 20 keys .* set max_length to 20 at most"),
    ],
)
def test_rows_too_long_for_a_model_are_refused(model_type, options, message):
    visibility, _ = batch()
    model = tiny_causal_model(model_type, torch.float32, **options)
    with pytest.raises(UnsupportedModelError, match=message):
        inputs_for(model, visibility)
    name = next(iter(options))
    long_enough = visibility.shape[1] + (name == "floor_scale")
    inputs_for(tiny_causal_model(model_type, torch.float32, **{name: long_enough}), visibility)


def test_llama4_without_temperature_takes_rows_of_any_length():
    model = tiny_causal_model("llama4_text", torch.float32, floor_scale=20, attn_temperature_tuning=False)
    assert "attention_mask" in inputs_for(model, batch()[0])


@pytest.mark.parametrize("fault", ["no chunks", "chunks of the row"])
def test_the_probe_outgrows_chunks(monkeypatch, fault):
    model = tiny_causal_model("llama4_text", torch.float32, attention_chunk_size=40)
    enable(model)
    assert probe(model) < 1e-4
    right = ready_mask.chunk_visible

    def wrong(end, depth, chunk):
        by_row = torch.arange(end.shape[1]).expand_as(end)
        return right(end, depth, None) if fault == "no chunks" else right(end, by_row, chunk)

    monkeypatch.setattr(ready_mask, "chunk_visible", wrong)
    with pytest.raises(UnsupportedModelError, match="computes packed rows wrongly"):
        probe(model)


def test_peft_models_take_ready_masks():
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    config = peft.LoraConfig(r=2, **options)
    model = peft.get_peft_model(tiny_causal_model("stablelm", torch.float32), config)
    enable(model)
    assert route_of(model) == "ready mask"
    assert probe(model) < 1e-4
    input_ids = torch.randint(3, VOCABULARY, (2, batch()[0].shape[1]))
    with packed_attention(model), pytest.raises(MissingVisibilityError):
        model(input_ids=input_ids)
    with packed_attention(model):
        model(input_ids=input_ids, **inputs_for(model, batch()[0]))


# --- refusals that the defaults of a config do not show


def test_encoders_are_refused():
    config = tiny_config("bert")
    assert not config.is_decoder
    model = type(tiny_causal_model("bert"))(config)
    with pytest.raises(UnsupportedModelError, match=r"attends to later positions too; load it as a decoder \(is_dec"):
        check_model(model)


def test_configs_set_to_see_later_positions_are_refused():
    model = tiny_causal_model("llama", torch.float32)
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="attends to later positions too"):
        check_model(model)


def test_unknown_layer_types_are_refused():
    model = tiny_causal_model("llama", torch.float32)
    model.config.layer_types = ["full_attention", "window_attention"]
    with pytest.raises(UnsupportedModelError, match=r"layers of type 'window_attention' are not known here"):
        check_model(model)


# --- TRL's fused head


def test_the_fused_head_of_usual_models_passes():
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_causal_model("gemma2", torch.float32)
    add_fused_lm_head(model)
    enable(model)
    assert probe_head(model) < 1e-5
    assert model.training


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "gives other log-probabilities than BertLMHeadModel itself"),
        ("llama4_text", "does not work with Llama4"),
    ],
)
def test_a_fused_head_that_is_wrong_is_refused(model_type, message):
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_causal_model(model_type, torch.float32)
    add_fused_lm_head(model)
    with pytest.raises(UnsupportedModelError, match=message):
        probe_head(model)


def test_vocabulary_of_the_rows_fits_the_models():
    assert max(row.input_ids.max() for row in rows()) < VOCABULARY

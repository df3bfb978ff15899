"""Packed rows through whole models: exact where supported, refused where not."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

from dagpack_hf.attention import (
    NAME,
    DagVisibility,
    MissingVisibilityError,
    UnsupportedModelError,
    check_model,
    enable,
    interface,
    ordinary_attention,
    packed_attention,
    probe,
    support,
)
from tests.tiny_models import ARCHITECTURES, VOCABULARY, WINDOW, tiny_model
from tests.tiny_trees import TreeRow, lay_out, random_sequences

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

EXACT_IN_FLOAT64 = ("gpt2",)
"""Architectures that compute in float64 throughout; the others keep their norms in float32."""


def rows() -> list[TreeRow]:
    """Two rows of one length: branches, several roots, paths longer than any window, padding in one."""
    forests = [random_sequences(seed, 8, 24, VOCABULARY) for seed in (1, 2)]
    lengths = [len(lay_out(forest).input_ids) for forest in forests]
    padded = [lay_out(forest, max(lengths) + 2 - length) for forest, length in zip(forests, lengths, strict=True)]
    for row in padded:
        assert max(map(len, row.paths)) > 2 * WINDOW and (row.parent[:-2] == -1).sum() > 1
    return padded


def inputs_of(rows: list[TreeRow], backend: str = "auto") -> dict[str, object]:
    stack = {
        name: torch.tensor([getattr(row, name).tolist() for row in rows])
        for name in ("input_ids", "position_ids", "subtree_end")
    }
    visibility = DagVisibility(stack.pop("subtree_end"), stack["position_ids"], backend)
    return {**stack, "dag_visibility": visibility, "use_cache": False}


def largest_difference(packed: Tensor, model: PreTrainedModel, rows: list[TreeRow]) -> float:
    """Compare the logits at every token of every sequence with the sequence alone under eager attention."""
    worst = 0.0
    with ordinary_attention(model), torch.no_grad():
        for b, row in enumerate(rows):
            for sequence, path in zip(row.sequences, row.paths, strict=True):
                alone = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
                worst = max(worst, ((packed[b, path] - alone).abs().max() / alone.abs().max()).item())
    return worst


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_those_of_each_sequence_alone(name):
    exact = name in EXACT_IN_FLOAT64
    model = tiny_model(name, torch.float64 if exact else torch.float32)
    enable(model)
    with torch.no_grad():
        packed = model(**inputs_of(rows())).logits
    assert largest_difference(packed, model, rows()) < (1e-12 if exact else 1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gpt_oss", "deepseek_v3"])
def test_logits_through_flex(name):
    """Plain, sliding, soft-capped, with sinks, and with values of another size than keys."""
    model = tiny_model(name)
    enable(model, "flex")
    with torch.no_grad():
        packed = model(**inputs_of(rows(), "flex")).logits
    assert largest_difference(packed, model, rows()) < 1e-5


def test_each_window_is_built_once_for_all_layers():
    model = tiny_model("qwen2_sliding", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    enable(model)
    inputs = inputs_of(rows())
    with torch.no_grad():
        model(**inputs)
    assert inputs["dag_visibility"].windows == {WINDOW, None}
    assert len(inputs["dag_visibility"]._masks) == 2


# --- gradients


def loss_on_rows(model: nn.Module, rows: list[TreeRow], **inputs: object) -> Tensor:
    """Sum over the sequences of the loss of each next token, read off the row."""
    logits = model(**(inputs or inputs_of(rows))).logits
    losses = []
    for b, row in enumerate(rows):
        for sequence, path in zip(row.sequences, row.paths, strict=True):
            losses.append(F.cross_entropy(logits[b, path[:-1]], torch.tensor(sequence[1:]), reduction="sum"))
    return torch.stack(losses).sum()


def loss_of_sequences(model: nn.Module, rows: list[TreeRow]) -> Tensor:
    losses = []
    for sequence in (sequence for row in rows for sequence in row.sequences):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, torch.tensor(sequence[1:]), reduction="sum"))
    return torch.stack(losses).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name in expected:
        assert (found[name] - expected[name]).abs().max().item() < tolerance * largest, name


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama", "gemma2", "gemma3_text", "mistral_sliding", "qwen3_moe"])
def test_gradients_equal_unpacked_training(name):
    exact = name in EXACT_IN_FLOAT64
    model = tiny_model(name, torch.float64 if exact else torch.float32).train()
    enable(model)
    found = gradients(model, loss_on_rows(model, rows()))
    with ordinary_attention(model):
        expected = gradients(model, loss_of_sequences(model, rows()))
    assert_same_gradients(found, expected, 1e-12 if exact else 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_masks(use_reentrant):
    model = tiny_model("gemma3_text").train()
    enable(model)
    expected = gradients(model, loss_on_rows(model, rows()))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    inputs = inputs_of(rows())
    loss = loss_on_rows(model, rows(), **inputs)
    built = list(inputs["dag_visibility"]._masks.values())
    found = gradients(model, loss)
    assert_same_gradients(found, expected, 1e-6)
    assert all(a is b for a, b in zip(built, inputs["dag_visibility"]._masks.values(), strict=True))


def test_distributed_data_parallel_hands_the_visibility_on(tmp_path):
    model = tiny_model("llama").train()
    enable(model)
    expected = gradients(model, loss_on_rows(model, rows()))
    store = torch.distributed.FileStore(os.fspath(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        gradients(wrapped, loss_on_rows(wrapped, rows()))
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert_same_gradients(found, expected, 1e-6)


def test_autocast_keeps_the_row_apart():
    model = tiny_model("llama")
    enable(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        packed = model(**inputs_of(rows())).logits
    assert largest_difference(packed.float(), model, rows()) < 5e-2


# --- switching


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_enable_returns_what_was_there(before):
    model = tiny_model("llama")
    model.set_attn_implementation(before)
    assert enable(model) == before
    assert model.config._attn_implementation == model.model.config._attn_implementation == NAME
    with ordinary_attention(model, before):
        assert model.config._attn_implementation == before
        ids = torch.randint(3, VOCABULARY, (1, 6))
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 6
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation(before)
    assert model(input_ids=ids).logits.shape[1] == 6


def test_packed_attention_is_given_back_after_an_error():
    model = tiny_model("llama")
    with pytest.raises(KeyError), packed_attention(model):
        assert model.config._attn_implementation == NAME
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_other_models_keep_their_attention():
    other = tiny_model("llama")
    ids = torch.randint(3, VOCABULARY, (2, 6))
    before = other(input_ids=ids).logits
    enable(tiny_model("llama"))
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(other(input_ids=ids).logits, before)


def test_composite_models_are_switched_and_restored():
    """The parts of a vision-language model have configs of their own."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_model("gemma3_text").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    before = enable(model)
    assert before == {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    assert model.config.text_config._attn_implementation == NAME
    probe(model)
    model.set_attn_implementation(before)
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config._attn_implementation == "sdpa"


def test_the_name_is_not_saved(tmp_path):
    model = tiny_model("llama")
    enable(model)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_depths_without_visibility_are_refused():
    model = tiny_model("llama")
    enable(model)
    inputs = inputs_of(rows())
    del inputs["dag_visibility"]
    with pytest.raises(MissingVisibilityError, match=r"LlamaAttention uses .* call the model in `with ordinary"):
        model(**inputs)


def test_attention_dropout_set_after_loading_is_refused():
    model = tiny_model("gpt2").train()
    model.transformer.h[1].attn.attn_dropout.p = 0.25
    enable(model)
    with pytest.raises(ValueError, match=r"GPT2Attention drops attention weights with probability 0\.25"):
        model(**inputs_of(rows()))


def test_peft_models_are_switched_and_probed_with_their_adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(tiny_model("mistral_sliding"), config)
    assert enable(model) == "sdpa"
    assert probe(model) < 1e-4
    with torch.no_grad():
        packed = model.eval()(**inputs_of(rows())).logits
    assert largest_difference(packed, model, rows()) < 1e-5


# --- refusals

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "minimax",
            LINEAR,
            "MiniMaxForCausalLM cannot be trained on packed rows: its layers of type 'linear_attention' carry",
        ),
        ("recurrent_gemma", {}, "type 'linear_attention' carry information along the row in code of their own"),
        ("llama", {"layer_types": ["window_attention"] * 2}, "type 'window_attention' are not known here"),
        ("rwkv", {"attention_hidden_size": 32}, "RwkvForCausalLM .* it keeps a recurrent state along the row"),
        ("bloom", {}, "ALiBi biases count positions of the row, not depths; use a model with rotary or learned"),
        ("llama", {"alibi": True}, "ALiBi"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "AttentionInterface"),
        ("llama", {"rope_parameters": DYNAMIC}, 'rope type "dynamic" depends on the longest position'),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 16},
            'rope type "longrope" depends .* set rope_type to "default", "linear" or "yarn"',
        ),
        (
            "gpt2",
            {"attn_pdrop": 0.1},
            r"attention dropout is not supported; load the model with attn_pdrop=0\.0 \(it is 0",
        ),
        ("llama", {"attention_dropout": 0.5}, r"attention_dropout=0\.0 \(it is 0\.5\)"),
    ],
)
def test_models_that_would_be_wrong_are_refused(name, options, message):
    model = tiny_model(name, **options)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message):
        enable(model)
    assert model.config._attn_implementation == before


def test_encoder_decoder_models_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=9))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder model; use a causal"):
        check_model(model)


def test_a_forward_without_position_ids_is_refused():
    class WithoutPositions(type(tiny_model("llama"))):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids=input_ids, **kwargs)

    model = tiny_model("llama")
    model.__class__ = WithoutPositions
    with pytest.raises(UnsupportedModelError, match="forward takes no position_ids"):
        check_model(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        check_model(nn.Linear(1, 1))


# --- the probe


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_passes(name, dtype):
    model = tiny_model(name, dtype)
    enable(model)
    assert probe(model) < (1e-5 if dtype == torch.float32 else 5e-2)


def test_probe_leaves_no_trace():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    enable(model)
    state = torch.get_rng_state()
    probe(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["sees everything before", "window ignored", "window by row index"])
def test_probe_catches_wrong_attention(monkeypatch, fault, dtype):
    model = tiny_model("mistral_sliding", dtype)
    enable(model)
    right = interface.dag_attention_forward

    def wrong(module, query, key, value, attention_mask, sliding_window=None, dag_visibility=None, **kwargs):
        end, depth = dag_visibility.subtree_end_BT, dag_visibility.position_ids_BT
        if fault == "sees everything before":
            end = torch.full_like(end, end.shape[1])
        elif fault == "window by row index":
            depth = torch.arange(end.shape[1])[None]
        elsewhere = DagVisibility(end, depth)
        window = None if fault == "window ignored" else sliding_window
        dag_visibility.windows.add(sliding_window)
        return right(module, query, key, value, None, sliding_window=window, dag_visibility=elsewhere, **kwargs)

    monkeypatch.setattr(interface, "dag_attention_forward", wrong)
    interface.register()
    try:
        with pytest.raises(UnsupportedModelError, match=r"MistralForCausalLM computes packed rows wrongly: on the "):
            probe(model)
    finally:
        monkeypatch.undo()
        interface.register()
    probe(model)


def test_probe_catches_a_state_carried_along_the_row():
    """A short convolution over the row, the kind of layer that a config may not tell of."""
    model = tiny_model("llama")
    enable(model)
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + 0.05 * F.pad(output, (0, 0, 1, -1)))
    with pytest.raises(UnsupportedModelError, match=r"on the second (branch|tree)"):
        probe(model)


def test_probe_catches_positions_that_are_not_used():
    class Sequential(type(tiny_model("llama"))):
        def forward(self, input_ids, position_ids=None, **kwargs):
            return super().forward(input_ids=input_ids, **kwargs)

    model = tiny_model("llama")
    model.__class__ = Sequential
    enable(model)
    with pytest.raises(UnsupportedModelError, match="computes packed rows wrongly: on the second branch"):
        probe(model)


def test_probe_catches_ordinary_attention_left_on():
    model = tiny_model("llama")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(UnsupportedModelError, match=r"no attention layer of LlamaForCausalLM .* call enable\(model\)"):
        probe(model)


@pytest.mark.parametrize("where", ["forward", "layer"])
def test_probe_names_models_that_keep_keyword_arguments_to_themselves(where):
    model = tiny_model("llama")
    if where == "forward":

        class Closed(type(model)):
            def forward(self, input_ids, position_ids=None, use_cache=None):
                return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

        model.__class__ = Closed
    else:

        def drop(module, args, kwargs):
            return args, {name: value for name, value in kwargs.items() if name != "dag_visibility"}

        model.model.layers[1].self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    enable(model)
    with pytest.raises(UnsupportedModelError, match="does not hand keyword arguments on to its attention layers"):
        probe(model)


@pytest.mark.parametrize("window", [WINDOW, 4096])
def test_probe_catches_a_window_that_is_not_passed_on(monkeypatch, window):
    """A small window shows in the logits; of a large one, that no layer asks for it."""
    monkeypatch.setattr(support, "WINDOW_BY_MASK_MODEL_TYPES", frozenset())
    options = {"use_sliding_window": True, "sliding_window": window, "moe_intermediate_size": 24, "num_experts": 4}
    layer_types = ["sliding_attention", "full_attention"]
    model = tiny_model("qwen2_moe", layer_types=layer_types, num_experts_per_tok=2, **options)
    enable(model)
    message = "sliding window of 4096, but no layer passes it" if window == 4096 else "computes packed rows wrongly"
    with pytest.raises(UnsupportedModelError, match=message):
        probe(model)


def test_probe_takes_a_large_window_on_trust_when_a_layer_asks_for_it():
    model = tiny_model("mistral_sliding", sliding_window=4096)
    enable(model)
    assert probe(model) < 1e-5

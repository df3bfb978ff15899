"""Usual training set-ups beside `SFTTrainer`: mixed precision, compilation, adapters, checkpointing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from tests.tiny_models import tiny_model
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer

SAME_TRAJECTORY = {"packing_scope": "batch", "loss_weighting": "paths", "loss_normalization": "step"}


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(tmp_path, kind: str, model=None, peft_config=None, **options):
    trainer_class, config_class = {"dag": (DagSFTTrainer, DagSFTConfig), "sft": (SFTTrainer, SFTConfig)}[kind]
    defaults = {"max_length": 128, "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 5e-3}
    defaults |= {"save_strategy": "no", "report_to": [], "bf16": False, "logging_steps": 1, "use_cpu": True}
    defaults |= {"disable_tqdm": True, **(SAME_TRAJECTORY if kind == "dag" else {})}
    trainer = trainer_class(
        model=model or tiny_llama(),
        args=config_class(output_dir=str(tmp_path / kind), **{**defaults, **options}),
        train_dataset=shared_dataset(),
        processing_class=toy_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


def largest_difference(one, other) -> float:
    first, second = one.model.state_dict(), other.model.state_dict()
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_bf16_autocast_is_as_near_to_float32_as_that_of_sft_trainer(tmp_path):
    exact = trained(tmp_path, "sft")
    ours, theirs = (trained(tmp_path, kind, bf16=True) for kind in ("dag", "sft"))
    assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())
    away = [max(abs(a - b) for a, b in zip(losses(each), losses(exact), strict=True)) for each in (ours, theirs)]
    assert 0 < away[0] < 2 * away[1] + 1e-3 < 0.05, away


def test_a_model_in_bf16_trains(tmp_path):
    """Parameters and logits in bf16; the weights of targets and the sums stay in float32 and more."""
    ours, theirs = (trained(tmp_path, kind, tiny_llama().bfloat16()) for kind in ("dag", "sft"))
    assert all(parameter.dtype == torch.bfloat16 for parameter in ours.model.parameters())
    assert losses(ours) == pytest.approx(losses(theirs), abs=0.02)
    assert losses(ours)[-1] < losses(ours)[0] - 0.1


@pytest.mark.parametrize(
    "options", [{}, {"packing_scope": "dataset", "loss_normalization": "corpus"}], ids=["batch", "dataset"]
)
def test_a_compiled_model_trains_as_one_that_is_not(tmp_path, options):
    plain = trained(tmp_path, "dag", max_steps=2, **options)
    compiled = trained(tmp_path, "dag", max_steps=2, torch_compile=True, torch_compile_backend="eager", **options)
    assert torch._dynamo.utils.counters["frames"]["total"] > 0, "something was compiled"
    assert largest_difference(plain, compiled) <= 1e-5


def test_a_compiled_mixture_of_experts_has_its_router_loss(tmp_path):
    options = {"max_steps": 2, "router_aux_loss_coef": 0.5}
    plain, compiled = (
        trained(tmp_path, "dag", tiny_model("mixtral", vocab_size=264).train(), **options, **extra)
        for extra in ({}, {"torch_compile": True, "torch_compile_backend": "eager"})
    )
    logged = [[e["aux_loss"] for e in each.state.log_history if "aux_loss" in e] for each in (plain, compiled)]
    assert len(logged[0]) == 2 and logged[0] == pytest.approx(logged[1], rel=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_adapters_end_where_those_of_sft_trainer_do(tmp_path, checkpointing):
    peft = pytest.importorskip("peft")
    options = {"gradient_checkpointing": checkpointing, "learning_rate": 1e-2}
    ours, theirs = (
        trained(
            tmp_path,
            kind,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            **options,
        )
        for kind in ("dag", "sft")
    )
    adapted = [name for name, p in ours.model.named_parameters() if "lora_B" in name and p.abs().max() > 1e-3]
    assert len(adapted) == 4
    assert largest_difference(ours, theirs) <= 1e-4


def four_bits(tmp_path) -> torch.nn.Module:
    """A tiny Llama in four bits; a row of a weight must have as many columns as a block of the quantisation."""
    pytest.importorskip("bitsandbytes")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=quantization, device_map="cpu", dtype=torch.float32
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_adapters_of_a_model_in_four_bits_end_where_those_of_sft_trainer_do(tmp_path, checkpointing):
    """TRL keeps such adapters in bfloat16, so they are as near as its rounding, of updates of 5e-3, lets them."""
    peft = pytest.importorskip("peft")
    ours, theirs = (
        trained(
            tmp_path,
            kind,
            four_bits(tmp_path),
            peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            gradient_checkpointing=checkpointing,
        )
        for kind in ("dag", "sft")
    )
    assert {p.dtype for p in ours.model.parameters() if p.requires_grad} == {torch.bfloat16}
    assert {type(module).__name__ for module in ours.model.modules()} >= {"Linear4bit"}
    norms = [[e["grad_norm"] for e in each.state.log_history if "grad_norm" in e] for each in (ours, theirs)]
    assert min(norms[0]) > 0.05 and norms[0] == pytest.approx(norms[1], rel=0.05)
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-3)
    adapters = [{n: p for n, p in each.model.named_parameters() if p.requires_grad} for each in (ours, theirs)]
    assert len(adapters[0]) == 8
    for name, adapter in adapters[0].items():
        assert (adapter - adapters[1][name]).abs().max() <= 5e-3, name


def test_evaluation_of_a_model_in_four_bits_between_steps_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    options = {"max_length": 128, "eval_strategy": "steps", "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=r"gradients of zero\. Set eval_strategy='no'"):
        DagSFTTrainer(
            model=four_bits(tmp_path),
            args=DagSFTConfig(output_dir=str(tmp_path), **options),
            train_dataset=shared_dataset(),
            eval_dataset=shared_dataset(),
            processing_class=toy_tokenizer(),
            peft_config=peft.LoraConfig(r=2, task_type="CAUSAL_LM"),
        )


def test_checkpointing_of_a_mixture_of_experts_keeps_its_router_loss(tmp_path):
    options = {"max_steps": 3, "router_aux_loss_coef": 0.5, "learning_rate": 1e-3}
    plain, checkpointed = (
        trained(tmp_path, "dag", tiny_model("qwen3_moe", vocab_size=264).train(), **options, gradient_checkpointing=on)
        for on in (False, True)
    )
    assert largest_difference(plain, checkpointed) <= 1e-5
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="no gradients under reentrant checkpointing"):
        trained(tmp_path, "dag", tiny_model("qwen3_moe", vocab_size=264), **options, **reentrant)


def test_options_of_the_kernel_reach_every_layer(tmp_path):
    """Given as JSON, as on a command line; the backend of a CPU has none, so nothing else changes."""
    model, given = tiny_llama(), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs.get("kernel_options")), with_kwargs=True
        )
    with_options = trained(tmp_path, "dag", model, attn_kernel_options='{"BLOCK_M": 64}', max_steps=1)
    probed = 2 * len(model.model.layers)  # packed and apart, when the trainer is made
    assert given[-len(model.model.layers) :] == [{"BLOCK_M": 64}] * len(model.model.layers) and len(given) > probed
    assert largest_difference(with_options, trained(tmp_path, "dag", max_steps=1)) == 0

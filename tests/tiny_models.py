"""Tiny models with random weights, one per architecture, for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97

WINDOW = 5
"""Sliding window of the models that have one; keep the paths of a test longer."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_BOTH_LAYER_TYPES = ["sliding_attention", "full_attention"]

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}

_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "mistral": {"sliding_window": None},
    "mistral_sliding": {"sliding_window": WINDOW},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "phi3": {"original_max_position_embeddings": 512},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES},
    "smollm3": {},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES, "attn_logit_softcapping": 0.2},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES},
    "gpt_oss": {**_EXPERTS, "sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES},
    "granite": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _BOTH_LAYER_TYPES},
    "deepseek_v3": {
        **_EXPERTS,
        **_MLA,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": _GPT2,
}
"""Name to the options in which the architecture differs from the common sizes. The part before `_sliding` is its
type."""


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> PreTrainedModel:
    """
    Build a model of `VOCABULARY` tokens and two layers of width 32, in evaluation mode and without any dropout.

    The weights are larger than at an ordinary start and none is zero, biases and sinks included, so that attention
    weighs as much as in a trained model.

    Args:
        name (`str`):
            A key of `ARCHITECTURES`, or any model type of transformers that takes the usual options.
        dtype (`torch.dtype`, *optional*):
            Dtype of the parameters.
        seed (`int`, *optional*):
            Seed of the weights; the same seed gives the same model.
        **options:
            Options of the config that replace those of the table.

    Returns:
        [`~transformers.PreTrainedModel`]: The model, on CPU.
    """
    config = CONFIG_MAPPING[name.removesuffix("_sliding")](**{**_SIZES, **ARCHITECTURES.get(name, {}), **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            center = parameter.data.mean().round() if parameter.dim() == 1 else 0.0
            parameter.data.normal_(0.0, spread).add_(center)
    if dtype == torch.float64 and hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    return model.eval()

"""Every causal language model of transformers, shrunk to a few thousand weights, for tests.

Nothing is listed by hand: the model types come from transformers' own table, and a config is made small by the names
of its options. Options that are lists with one entry for each layer keep the entries of a few layers, chosen so that
every type of layer occurs. What the rule gets wrong for one model stands in `OVERRIDES`.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64

LAYERS = 4

WINDOW = 5
"""Sliding window, and length of a chunk; keep the sequences of a test longer."""

HEADS = 4

_SIZES: list[tuple[str, Any]] = [
    (r"vocab_size|unpadded_vocab_size|vocab_size_per_layer_input|patcher_vocab_size", VOCABULARY),
    (r"pad_token_id|bos_token_id|eos_token_id|sep_token_id|cls_token_id|eod_token_id|padding_idx", 0),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_size|embedding_dim|word_embed_proj_dim", 32),
    (r"input_embedding_size|output_embedding_size|lru_width|adapter_in_dim|adapter_input_size|adapter_out_dim", 32),
    (r"num_attention_heads|n_heads?|num_heads|.*attention_heads|swa_num_attention_heads", HEADS),
    (r"head_dim|.*_head_dim|attention_head_size|d_head|d_kv|kv_channels|dim_head|linear_head_dim|global_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r".*intermediate_size.*|.*ffn_dim|n_inner|d_inner|ffn_hidden_size|.*_ffn_hidden_size|dff|dim_ff", 48),
    (r"feed_forward_size", 48),
    (
        r"sliding_window|window_size|local_attention|attention_window_size|attention_chunk_size|sliding_window_size",
        WINDOW,
    ),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"kv_lora_rank|q_lora_rank|.*_rank", 16),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_source_positions|max_target_positions",
        512,
    ),
    (r"index_n_heads", 16),
    (r"index_topk", 8),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"chunk_size|mamba_chunk_size", 4),
    (r"mamba_n_heads|mamba_num_heads|linear_num_heads|linear_num_value_heads", 8),
    (r"linear_num_key_heads", 4),
    (r".*dropout.*|.*pdrop|.*layerdrop|.*drop_rate|.*jitter.*", 0.0),
    (r"decoder_layers|encoder_layers|num_(encoder|decoder)_layers", 2),
]

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_QWEN4_INDEXER = {
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "granitemoehybrid": {"mamba_d_head": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "reformer": {"axial_pos_embds": False, "num_hidden_layers": 2, "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"attention_head_dim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the rule gets wrong, and what has no default."""


def causal_model_types() -> list[str]:
    """All types of causal language model that transformers knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **options: Any) -> PreTrainedConfig:
    """The config of a model type with its defaults shrunk; `options` replace the shrunk ones."""
    config_class = CONFIG_MAPPING[model_type]
    shrunk = _shrunk(config_class())
    for name, value in {**OVERRIDES.get(model_type, {}), **options}.items():
        is_part = name in config_class.sub_configs and isinstance(value, dict) and name in shrunk
        shrunk[name] = type(shrunk[name])(**{**shrunk[name].to_dict(), **value}) if is_part else value
    return config_class(**shrunk)


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    options = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    layers = next((options[name] for name in _LAYER_COUNTS if isinstance(options.get(name), int)), 0)
    kept = _layers_to_keep(options, layers)
    shrunk: dict[str, Any] = {}
    for name, value in options.items():
        if name in config.sub_configs and isinstance(part := getattr(config, name), PreTrainedConfig):
            shrunk[name] = type(part)(**_shrunk(part))
        elif name == "per_layer_config":
            by_layer = {int(layer): _small(own) for layer, own in value.items()}
            for own in by_layer.values():
                if "qk_nope_head_dim" in own:
                    own["head_dim"] = 16  # both parts of the keys
            shrunk[name] = {new: by_layer[layer] for new, layer in enumerate(kept) if layer in by_layer}
        elif name in _LAYER_COUNTS:
            shrunk[name] = len(kept)
        elif isinstance(value, list) and len(value) == layers and layers:
            shrunk[name] = [value[layer] for layer in kept]
        elif name == "num_key_value_heads" or name.endswith("_key_value_heads") or name == "num_kv_heads":
            shrunk[name] = _kv_heads(options, name, value)
        else:
            shrunk.update(_small({name: value}))
    return shrunk


def _small(options: dict[str, Any]) -> dict[str, Any]:
    """The options that have a small value, with it."""
    small = {}
    for name, value in options.items():
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
        if size is None or isinstance(value, bool) or not isinstance(value, int | float | list):
            continue
        small[name] = type(value)(size) if isinstance(value, int | float) else size
    return small


def _layers_to_keep(options: dict[str, Any], layers: int) -> list[int]:
    """Layers to keep: the first of each kind, filled up from the start."""
    per_layer = [value for value in options.values() if isinstance(value, list) and len(value) == layers]
    kinds = [value for value in per_layer if len(set(map(str, value))) <= LAYERS]
    by_layer = list(zip(*(map(str, kind) for kind in kinds), strict=True)) if kinds else [()] * layers
    kept: list[int] = []
    for layer, kind in enumerate(by_layer):
        if kind not in [by_layer[k] for k in kept]:
            kept.append(layer)
    kept = kept[: 2 * LAYERS]
    fill = [layer for layer in range(layers) if layer not in kept]
    return sorted(kept + fill[: max(0, min(LAYERS, layers) - len(kept))])


def _kv_heads(options: dict[str, Any], name: str, value: Any) -> Any:
    if value is None or value == 1:
        return value
    heads = options.get(name.replace("key_value", "attention"), options.get("num_attention_heads"))
    return HEADS if value == heads else HEADS // 2


def sliding_options(model_type: str) -> dict[str, Any] | None:
    """Options that give a model a sliding window in every other layer, or in all; `None` if it has one or cannot."""
    config = tiny_config(model_type)
    layer_types = getattr(config, "layer_types", None)
    if not hasattr(config, "sliding_window") or set(layer_types or ()) - {"full_attention"}:
        return None
    options: dict[str, Any] = {"sliding_window": WINDOW}
    if hasattr(config, "use_sliding_window"):
        options["use_sliding_window"] = True
    if layer_types:
        options["layer_types"] = ["sliding_attention", "full_attention"] * (len(layer_types) // 2)
    elif config.sliding_window:
        return None
    return options


_NOT_FLIPPED = frozenset(
    {
        "add_cross_attention",
        "gradient_checkpointing",
        "is_decoder",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "reorder_and_upcast_attn",  # asserts float32
        "return_dict",
        "tie_word_embeddings",
        "use_cache",
    }
)


def flipped_options(model_type: str) -> list[dict[str, Any]]:
    """For each option of the language part that is true or false, the options that set it the other way."""
    config = tiny_config(model_type)
    parts = {name: getattr(config, name) for name in config.sub_configs if "text" in name}
    flipped = [({name: not value}, value) for name, value in config.to_dict().items()]
    for part_name, part in parts.items():
        flipped += [({part_name: {name: not value}}, value) for name, value in part.to_dict().items()]
    return [options for options, value in flipped if isinstance(value, bool) and not _names(options) & _NOT_FLIPPED]


def _names(options: dict[str, Any]) -> set[str]:
    [(name, value)] = options.items()
    return set(value) if isinstance(value, dict) else {name}


_DECAYS = ("A_log", "dt_bias")


def tiny_causal_model(model_type: str, dtype: torch.dtype = torch.float64, **options: Any) -> PreTrainedModel:
    """Build a model with random weights none of which is zero, set up as a decoder, in training mode, on CPU.

    Args:
        model_type (`str`):
            One of `causal_model_types()`.
        dtype (`torch.dtype`, *optional*):
            Dtype of the parameters.
        **options:
            Options of the config that replace the shrunk ones.

    Returns:
        [`~transformers.PreTrainedModel`]: The model, with eager attention.
    """
    config = tiny_config(model_type, **options)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "is_decoder"):
            part.is_decoder = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        part = _decoder_part(config)
        make = AutoModelForCausalLM.from_config if part is config else _model_class(config)._from_config
        model = make(part, attn_implementation="eager").to(dtype)
        with contextlib.suppress(AttributeError, ValueError):
            model.set_experts_implementation("eager")  # the grouped matrix product has no float64
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            center = parameter.data.mean().round() if parameter.dim() == 1 else 0.0
            if name.endswith(_DECAYS):
                spread, center = 1.0, -2.0  # half of a state lasts for some 40 tokens, of some heads for hundreds
            parameter.data.normal_(0.0, spread).add_(center)
    return model.train()


def _decoder_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a composite config that the causal language model is made for."""
    wanted = _model_class(config).config_class
    parts = [getattr(config, name) for name in config.sub_configs]
    return config if isinstance(config, wanted) else next((p for p in parts if isinstance(p, wanted)), config)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

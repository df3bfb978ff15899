"""Which models can be trained on packed rows.

Packing is exact when a position's output depends on its ancestors, in their order and at their depths, and on nothing
else in the row. [`check_model`] reads off the model and its config what breaks that, before any step is run. What
cannot be read off is left to [`probe`].

Cost: none; a look at attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dagpack_hf.recurrent import obstacles as recurrent_obstacles
from dagpack_hf.recurrent import recurrent_modules

EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"})
"""Layers whose output depends on what the mask and the positions say, and on nothing else in the row."""

RECURRENT_LAYER_TYPES = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"})
"""Layers with a state or a convolution along the row; hybrid ones have one beside their attention."""

ATTENTION_LAYER_TYPES = EXACT_LAYER_TYPES | {"hybrid", "hybrid_sliding"}
"""Layers with attention that is exact."""

STATELESS_LAYER_TYPES = frozenset({"mlp", "moe"})
"""Layers that compute each position alone."""

BLOCK_LAYER_TYPES = frozenset({"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"})
"""Layers that pool or choose blocks of keys by their place in the row."""

READY_MASK_LAYER_TYPES = frozenset({"chunked_attention", "indexed_attention"})
"""Exact layers that need the mask itself: they choose keys by it, or their window is not handed on."""

READY_MASK_MODEL_TYPES = frozenset(
    {
        "big_bird",
        "biogpt",
        "doge",
        "falcon",
        "git",
        "gpt_neox_japanese",
        "megatron-bert",
        "nemotron",
        "rembert",
        "stablelm",
        "xglm",
    }
)
"""Models that keep keyword arguments to themselves or have attention code of their own, and are exact under a ready
mask. Which they are is found by trying: `docs/models.md` has the table."""

WINDOW_BY_MASK_MODEL_TYPES = frozenset({"phimoe", "qwen2_moe"})
"""Models that put their sliding window into the mask and do not tell their layers."""

OWN_ATTENTION = ("sdpa", "eager")
"""Attention of transformers that takes a ready mask."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_ATTENTION_DROPOUT = (
    "attention_dropout",
    "attention_dropout_prob",
    "attention_dropout_rate",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
)


_REMEDY = "use a model with attention, gated DeltaNet, Mamba-2 or short convolutions"


class UnsupportedModelError(ValueError):
    """The model cannot be trained on packed rows, or not as it is configured."""


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside wrappers for parallel training and PEFT.

    Args:
        model (`torch.nn.Module`):
            A transformers model, or one wrapped by DDP, FSDP or PEFT.

    Returns:
        [`~transformers.PreTrainedModel`]: The model itself. PEFT's adapters stay where they were put in.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif hasattr(inner, "module"):
            inner = inner.module
        else:
            raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    return inner


def takes_ready_mask(model: PreTrainedModel) -> bool:
    """Whether a model must be given the mask itself, see `ready_mask`.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, not wrapped.

    Returns:
        `bool`: `False` for models whose layers call the registered function.
    """
    config = _text_config(model)
    layer_types = getattr(config, "layer_types", None) or [only_layer_type(config)]
    return (
        config.model_type in READY_MASK_MODEL_TYPES
        or not READY_MASK_LAYER_TYPES.isdisjoint(layer_types)
        or (config.model_type in WINDOW_BY_MASK_MODEL_TYPES and "sliding_attention" in layer_types)
    )


def only_layer_type(config: PreTrainedConfig) -> str:
    """Type of all layers of a config that does not list them, by the rule of transformers.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Config of a language model without `layer_types`.

    Returns:
        `str`: `"full_attention"`, `"sliding_attention"` or `"chunked_attention"`.
    """
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    return "full_attention" if getattr(config, "attention_chunk_size", None) is None else "chunked_attention"


def attention_of_text(model: PreTrainedModel) -> str | None:
    """Name of the attention of a model's language part.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, not wrapped.

    Returns:
        `str`: Such as `"sdpa"`.
    """
    return _text_config(model)._attn_implementation


def check_model(model: nn.Module) -> None:
    """Refuse a model that would be wrong on packed rows.

    Args:
        model (`torch.nn.Module`):
            The model to train, wrapped or not.

    Raises:
        UnsupportedModelError: Names the model, what it is that stands in the way, and the remedy where there is one.
    """
    model = base_model_of(model)
    for reason in _obstacles(model):
        raise UnsupportedModelError(f"{type(model).__name__} cannot be trained on packed rows: {reason}")


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _obstacles(model: PreTrainedModel) -> Iterator[str]:
    if model.config.is_encoder_decoder:
        yield "it is an encoder-decoder model; use a causal language model"
    config = _text_config(model)
    yield from _obstacles_in_layers(model, config)
    yield from _obstacles_in_positions(model, config)
    if not (model._supports_attention_backend or takes_ready_mask(model) or recurrent_modules(model)):
        yield (
            "it does not call its attention through transformers' AttentionInterface, and is not known to be exact "
            "under a mask made for it"
        )
    for name in _ATTENTION_DROPOUT:
        if isinstance(rate := getattr(config, name, None), int | float) and rate > 0:
            yield f"attention dropout is not supported; load the model with {name}=0.0 (it is {rate})"


def _obstacles_in_layers(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    layer_types = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(layer_types & RECURRENT_LAYER_TYPES)
    yield from recurrent_obstacles(model)
    if not recurrent_modules(model) and recurrent:
        yield (
            f"its layers of type {_listed(recurrent)} carry information along the row in code of their own, from one "
            f"branch to the next; {_REMEDY}"
        )
    if recurrent_modules(model) and takes_ready_mask(model):
        yield (
            f"it has recurrent layers beside layers that need the mask itself ({_listed(sorted(layer_types))}), which "
            f"cannot be combined; {_REMEDY}"
        )
    if blocks := sorted(layer_types & BLOCK_LAYER_TYPES):
        yield (
            f"its layers of type {_listed(blocks)} pool keys by their place in the row, across branches; use a model "
            "with full and sliding attention only"
        )
    known = EXACT_LAYER_TYPES | RECURRENT_LAYER_TYPES | STATELESS_LAYER_TYPES | BLOCK_LAYER_TYPES
    if unknown := sorted(layer_types - known):
        yield (
            f"its layers of type {_listed(unknown)} are not known here, so nothing tells whether they keep branches "
            "apart; use a model with full and sliding attention only"
        )
    if not recurrent_modules(model) and model._is_stateful:
        yield f"it keeps a recurrent state along the row in code of its own; {_REMEDY}"
    if getattr(config, "is_causal", None) is False or _is_encoder(model):
        yield "it attends to later positions too; load it as a decoder (is_decoder=True), or use a causal model"


def _obstacles_in_positions(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    if _uses_alibi(config):
        yield "ALiBi biases count positions of the row, not depths; use a model with rotary or learned positions"
    parameters = inspect.signature(type(model).forward).parameters
    if "shared_kv_states" in parameters:
        yield "it is a draft model that reads keys and values of another; train that one"
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids, which packed rows need for depths"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield (
            "its position embeddings do not begin at 0 but after the padding token, so depths mean other positions; "
            "use a model with rotary positions, or learned ones from 0"
        )
    for rope_type in _rope_types(config):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            yield (
                f'rope type "{rope_type}" depends on the longest position in the batch, so a sequence would be '
                'computed differently beside others; set rope_type to "default", "linear" or "yarn"'
            )


def _listed(layer_types: list[str]) -> str:
    return ", ".join(map(repr, layer_types))


def _is_encoder(model: PreTrainedModel) -> bool:
    """Whether the layers were made for an encoder, as BERT's are unless its config says otherwise."""
    return getattr(model.config, "is_decoder", None) is False and any(
        getattr(module, "is_decoder", None) is False for module in model.modules()
    )


def _uses_alibi(config: PreTrainedConfig) -> bool:
    nested = getattr(config, "attn_config", None)
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or getattr(nested, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return [each.get("rope_type") or each.get("type") or "default" for each in per_layer_type or [parameters]]

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

EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_ATTENTION_DROPOUT = (
    "attention_dropout",
    "attention_dropout_prob",
    "attention_dropout_rate",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
)


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


def check_model(model: nn.Module) -> None:
    """Refuse a model that would be wrong on packed rows.

    Args:
        model (`torch.nn.Module`):
            The model to train, wrapped or not.

    Raises:
        UnsupportedModelError: Names the model, what it is that stands in the way, and the remedy where there is one.
    """
    model = base_model_of(model)
    for reason in _obstacles(model, model.config.get_text_config()):
        raise UnsupportedModelError(f"{type(model).__name__} cannot be trained on packed rows: {reason}")


def _obstacles(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - EXACT_LAYER_TYPES)
    if others == ["chunked_attention"]:
        yield 'its layers of type "chunked_attention" are not supported'
    elif others:
        yield (
            f"its layers of type {', '.join(map(repr, others))} carry information along the row, from one branch to "
            "the next; use a model with full and sliding attention only"
        )
    if model._is_stateful:
        yield "it keeps a recurrent state along the row; use a model with full and sliding attention only"
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model; use a causal language model"
    if _uses_alibi(config):
        yield "ALiBi biases count positions of the row, not depths; use a model with rotary or learned positions"
    if not model._supports_attention_backend:
        yield "it does not call its attention through transformers' AttentionInterface"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield "its forward takes no position_ids, which packed rows need for depths"
    for rope_type in _rope_types(config):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            yield (
                f'rope type "{rope_type}" depends on the longest position in the batch, so a sequence would be '
                'computed differently beside others; set rope_type to "default", "linear" or "yarn"'
            )
    for name in _ATTENTION_DROPOUT:
        if isinstance(rate := getattr(config, name, None), int | float) and rate > 0:
            yield f"attention dropout is not supported; load the model with {name}=0.0 (it is {rate})"


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

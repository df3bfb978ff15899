"""Switching a loaded model's attention.

The model's config holds the name of its attention; changing the name is all there is to it. It must stay changed until
the backward pass is done, since gradient checkpointing calls the layers again. Recurrent layers are switched with it.

Cost: a walk over the model's modules, milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig

from dagpack_hf.recurrent import install, packed_states

from .interface import register, select_backend
from .ready_mask import mask_required, packed_implementation
from .support import (
    OWN_ATTENTION,
    UnsupportedModelError,
    attention_of_text,
    base_model_of,
    check_model,
    takes_ready_mask,
)

Implementation = str | dict
"""What `set_attn_implementation` of transformers takes: a name, or a name for each part of a composite model."""


def enable(model: nn.Module, backend: str = "auto") -> Implementation:
    """Make a model attend to what [`DagVisibility`] says.

    From then on every forward pass needs what [`inputs_for`] makes; see [`ordinary_attention`] for passes without. The
    name of the attention is not saved with the model.

    Args:
        model (`torch.nn.Module`):
            A transformers model loaded with any attention, or one wrapped by PEFT or for parallel training.
        backend (`str`, *optional*, defaults to `"auto"`):
            The backend that will be used, checked here; see [`select_backend`].

    Returns:
        `str` or `dict`:
            The attention that the model had before, for [`ordinary_attention`] or `model.set_attn_implementation`.

    Raises:
        UnsupportedModelError: If the model cannot be trained on packed rows; see [`check_model`].
        ValueError: If the backend is not known.
    """
    select_backend("cpu", backend)
    check_model(model)
    register()
    previous = _attention_of(base_model_of(model).config)
    _set_attention(model, packed_implementation(model))
    install(model)
    return previous


@contextmanager
def ordinary_attention(model: nn.Module, implementation: Implementation = "eager") -> Iterator[None]:
    """Give the model ordinary attention inside a `with` block: to generate, or to compute one plain sequence.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
        implementation (`str` or `dict`, *optional*, defaults to `"eager"`):
            The attention to use. What [`enable`] returned is faster; `"eager"` is there for every model.
    """
    with _attention(model, implementation), mask_required(model, False):
        yield


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[None]:
    """Give the model the attention for packed rows inside a `with` block and its own again afterwards.

    The block must hold the backward pass too. Inside it a forward pass without what [`inputs_for`] makes is refused.
    The model is not checked, see [`check_model`].

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
    """
    register()
    with packed_states(model), _attention(model, packed_implementation(model)), mask_required(model, True):
        yield


@contextmanager
def _attention(model: nn.Module, implementation: Implementation) -> Iterator[None]:
    before = _attention_of(base_model_of(model).config)
    _set_attention(model, implementation)
    try:
        yield
    finally:
        _set_attention(model, before)


def _set_attention(model: nn.Module, implementation: Implementation) -> None:
    base = base_model_of(model)
    base.set_attn_implementation(implementation)
    if isinstance(implementation, dict) or attention_of_text(base) == implementation:
        return
    if takes_ready_mask(base) and attention_of_text(base) in OWN_ATTENTION:
        return  # fixed when the model was made, and as good for what is asked here
    raise UnsupportedModelError(
        f"{type(base).__name__} did not take the attention {implementation!r}: it does not call its attention through "
        "transformers' AttentionInterface, or its source cannot be read"
    )


def _attention_of(config: PreTrainedConfig) -> Implementation:
    parts = {
        name: _attention_of(part) for name in config.sub_configs if (part := getattr(config, name, None)) is not None
    }
    own = config._attn_implementation
    return {"": own, **parts} if parts else own

"""Which way a model learns what each position sees, and what to pass for it.

There are two routes:

* the *registered function* (`interface`): the model hands keyword arguments on to its layers, and each layer calls the
  attention `"dagpack"` with the visibility of the batch. Nothing of size `T * T` need exist;
* a *ready mask*: models that keep keyword arguments to themselves, have attention code of their own, or work on the
  mask (chunked and indexed attention) get a mask of shape `(B, 1, T, T)`, and compute with their own attention. A
  model whose layers differ in kind gets one mask for each type of layer.

Both go through [`inputs_for`]. transformers passes a mask of four dimensions on as it is. It must not be left out
beside depths: the model would then take every branch for a new document. Inside [`packed_attention`] such a call is
refused, as the registered function refuses one without visibility.

Chunks count depth, as sliding windows do: a position sees its ancestors in its own chunk.

Cost: a ready mask takes `B * T * T` bytes for each kind of layer under PyTorch's scaled dot-product attention, and as
many numbers of the model's dtype for models that have eager attention only.

Shape suffixes: `B` rows, `T` positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from .interface import NAME, MissingVisibilityError
from .support import (
    OWN_ATTENTION,
    UnsupportedModelError,
    attention_of_text,
    base_model_of,
    only_layer_type,
    takes_ready_mask,
)
from .visibility import DagVisibility, visible

Route = Literal["registered function", "ready mask"]


def route_of(model: nn.Module) -> Route:
    """Tell by which route a model learns what each position sees.

    Args:
        model (`torch.nn.Module`):
            A model that [`check_model`] lets pass, wrapped or not.

    Returns:
        `str`: `"registered function"` or `"ready mask"`.
    """
    return "ready mask" if takes_ready_mask(base_model_of(model)) else "registered function"


def packed_implementation(model: nn.Module) -> str:
    """Name of the attention with which a model computes packed rows.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.

    Returns:
        `str`: `"dagpack"`. For models that take a ready mask the attention that they have; where that knows no masks,
        `"sdpa"`, or `"eager"` if there is nothing else.
    """
    base = base_model_of(model)
    if route_of(base) == "registered function":
        return NAME
    own = attention_of_text(base)
    if own in OWN_ATTENTION:
        return own
    return "sdpa" if base._supports_sdpa else "eager"


def inputs_for(model: nn.Module, visibility: DagVisibility) -> dict[str, Any]:
    """Make what a model needs beside `input_ids` to compute the rows of a batch.

    Call it once for each forward pass, with the model as [`enable`] or [`packed_attention`] has set it up:

    ```python
    model(input_ids=input_ids, use_cache=False, **inputs_for(model, visibility))
    ```

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
        visibility ([`DagVisibility`]):
            The rows of the batch.

    Returns:
        `dict`: `position_ids` of shape `(B, T)`, int64, and `dag_visibility` or `attention_mask`. The mask is a tensor
        of shape `(B, 1, T, T)` or, for a model whose layers differ in kind, a `dict` of them by layer type.

    Raises:
        UnsupportedModelError: If the rows are too long for the model, whose layers count positions of the row.
    """
    base = base_model_of(model)
    inputs: dict[str, Any] = {"position_ids": visibility.position_ids_BT.long()}
    if route_of(base) == "registered function":
        return {**inputs, "dag_visibility": visibility}
    config = base.config.get_text_config(decoder=True)
    _check_length(base, config, visibility.shape[1])
    return {**inputs, "attention_mask": _masks(base, config, visibility)}


@contextmanager
def mask_required(model: nn.Module, required: bool) -> Iterator[None]:
    """Refuse, inside a `with` block, forward passes without a ready mask, of a model that takes one.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
        required (`bool`):
            `False` lifts the refusal of a block around this one.
    """
    base = base_model_of(model)
    before = _GUARDS.get(base)
    _guard(base, required and takes_ready_mask(base))
    try:
        yield
    finally:
        _guard(base, before is not None)


_GUARDS: WeakKeyDictionary[PreTrainedModel, RemovableHandle] = WeakKeyDictionary()


def _guard(base: PreTrainedModel, required: bool) -> None:
    if required == (base in _GUARDS):
        return
    if not required:
        _GUARDS.pop(base).remove()
        return
    name = type(base).__name__

    def check(body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not any(map(_is_ready_mask, (*args, *kwargs.values()))):
            raise MissingVisibilityError(
                f"{name} takes a ready mask for packed rows but got none. Call model(..., **inputs_for(model, "
                "visibility)), or, to generate or compute ordinary sequences, call the model in "
                "`with ordinary_attention(model):`"
            )

    # The body, so that a call of the forward method itself, which passes the hooks of the whole, is refused too.
    _GUARDS[base] = base.base_model.register_forward_pre_hook(check, with_kwargs=True)


def _is_ready_mask(argument: Any) -> bool:
    if isinstance(argument, dict):
        return bool(argument) and all(map(_is_ready_mask, argument.values()))
    return isinstance(argument, Tensor) and argument.dim() == 4


def chunk_visible(subtree_end_BT: Tensor, position_ids_BT: Tensor, chunk: int | None = None) -> Tensor:
    """Dense mask of the pairs (query, key) that see each other and lie in the same chunk of depth.

    Args:
        subtree_end_BT (`torch.Tensor` of shape `(B, T)`, integer):
            One past the last position of each position's subtree.
        position_ids_BT (`torch.Tensor` of shape `(B, T)`, integer):
            Depth of each position.
        chunk (`int`, *optional*):
            Tokens of a chunk. `None` means full attention.

    Returns:
        `torch.Tensor` of shape `(B, 1, T, T)`, bool:
            `[b, 0, i, j]` tells whether query `i` sees key `j`.
    """
    mask_BTT = visible(subtree_end_BT, position_ids_BT)
    if chunk is not None:
        chunk_BT = position_ids_BT // chunk
        mask_BTT &= chunk_BT[:, :, None] == chunk_BT[:, None, :]
    return mask_BTT[:, None]


def window_visible(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None = None) -> Tensor:
    """Return [`visible`] for all heads, of shape `(B, 1, T, T)`."""
    return visible(subtree_end_BT, position_ids_BT, window)[:, None]


def _masks(model: PreTrainedModel, config: PreTrainedConfig, visibility: DagVisibility) -> Tensor | dict[str, Tensor]:
    """One mask if all layers are of one kind, else one for each layer type."""
    layer_types = set(getattr(config, "layer_types", None) or [only_layer_type(config)])
    masks = {layer_type: _mask(layer_type, config, visibility) for layer_type in layer_types}
    if attention_of_text(model) == "eager":
        biases = {id(mask): _as_bias(mask, model.dtype) for mask in masks.values()}
        masks = {layer_type: biases[id(mask)] for layer_type, mask in masks.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


def _mask(layer_type: str, config: PreTrainedConfig, visibility: DagVisibility) -> Tensor:
    device = visibility.subtree_end_BT.device
    if layer_type == "chunked_attention":
        return visibility.mask(chunk_visible, config.attention_chunk_size, device)
    window = config.sliding_window if layer_type == "sliding_attention" else None
    return visibility.mask(window_visible, window, device)


def _as_bias(mask_B1TT: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as what eager attention adds to the scores."""
    bias_B1TT = torch.zeros(mask_B1TT.shape, dtype=dtype, device=mask_B1TT.device)
    return bias_B1TT.masked_fill_(~mask_B1TT, torch.finfo(dtype).min)


def _check_length(model: PreTrainedModel, config: PreTrainedConfig, length: int) -> None:
    """Refuse rows so long that a layer would compute by the place in the row, or choose among equal keys by it."""
    name = type(model).__name__
    scale = getattr(config, "floor_scale", None)
    if scale is not None and getattr(config, "attn_temperature_tuning", False) and length >= scale:
        raise UnsupportedModelError(
            f"{name} scales its queries by their place in the row from position {scale} on (floor_scale), and the "
            f"rows have {length} positions; set max_length below {scale}, or load the model with "
            "attn_temperature_tuning=False"
        )
    kept = getattr(config, "keep_window_size", None)
    if kept is not None and length > kept:
        raise UnsupportedModelError(
            f"{name} keeps {kept} keys of each query (keep_window_size) and may keep others of equal weight in a row "
            f"of {length} positions than in the sequence alone; set max_length to {kept} at most"
        )

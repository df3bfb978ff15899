"""The attention function that transformers' models call, under the name `"dagpack"`.

transformers looks the attention of a layer up by the name in the model's config and hands on the keyword arguments of
`model(...)`. So `model(..., dag_visibility=visibility)` reaches every layer, with that layer's own sliding window,
soft cap and sinks. No mask function is registered for the name: the model then builds no mask of its own. That
matters: given depths as position ids, transformers would take every branch for a new document.

The function computes attention to ancestors and nothing else. A call without `dag_visibility` is refused, never
answered with plain causal attention: nothing tells an ordinary sequence from a packed row whose visibility got lost on
the way, and the latter would train on wrong values in silence. To generate, use [`ordinary_attention`].

Cost: that of the backend, see `dense`, `tile` and `flex`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from . import dense, flex, tile
from .visibility import DagVisibility

NAME = "dagpack"
"""Name of the attention implementation; transformers treats names with sdpa, flash or flex in them specially."""

BACKENDS = ("auto", "dense", "tile", "flex")

Backend = Literal["dense", "tile", "flex"]

_AUTO: dict[str, Backend] = {"cuda": "flex", "cpu": "tile"}

_ATTEND = {"dense": dense.attend, "tile": tile.attend, "flex": flex.attend}

_UNKNOWN_SCORE_TERMS = ("position_bias", "sinks", "indices", "block_indices", "head_mask")


class MissingVisibilityError(RuntimeError):
    """An attention layer was called without `dag_visibility`."""


def register() -> None:
    """Make `"dagpack"` known to transformers. Models that use another attention are not affected."""
    AttentionInterface.register(NAME, dag_attention_forward)


def select_backend(device: torch.device | str, requested: str = "auto") -> Backend:
    """Choose the backend for a device.

    Args:
        device (`torch.device` or `str`):
            Where attention is computed.
        requested (`str`, *optional*, defaults to `"auto"`):
            `"dense"`, `"tile"` or `"flex"` are taken as they are; `"auto"` is `"flex"` on CUDA, `"tile"` on CPU and
            `"dense"` elsewhere. `"flex"` on CPU computes the forward pass only.

    Returns:
        `str`: `"dense"`, `"tile"` or `"flex"`.

    Raises:
        ValueError: If the backend is not known.

    Example:
        >>> select_backend("cpu"), select_backend("cuda:1")
        ('tile', 'flex')
    """
    if requested not in BACKENDS:
        raise ValueError(f"attention backend {requested!r} is not known, choose one of {', '.join(BACKENDS)}")
    if requested == "auto":
        return _AUTO.get(torch.device(device).type, "dense")
    return requested  # type: ignore[return-value]


def dag_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dag_visibility: DagVisibility | None = None,
    kernel_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the signature of transformers' attention functions.

    Args:
        module (`torch.nn.Module`):
            The attention layer, named in errors.
        query (`torch.Tensor` of shape `(B, H, T, D)`):
            Queries, rotated.
        key (`torch.Tensor` of shape `(B, G, T, D)`):
            Keys, rotated.
        value (`torch.Tensor` of shape `(B, G, T, Dv)`):
            Values.
        attention_mask (`torch.Tensor`, *optional*):
            Must be `None`.
        scaling (`float`, *optional*):
            Factor of the scores, by default `D ** -0.5`.
        dropout (`float`, *optional*, defaults to `0.0`):
            Must be 0.
        sliding_window (`int`, *optional*):
            Window of the layer in tokens of depth, `None` for full attention.
        softcap (`float`, *optional*):
            Soft cap of the scores.
        s_aux (`torch.Tensor` of shape `(H,)`, *optional*):
            Attention sinks.
        is_causal (`bool`, *optional*):
            Must not be `False`.
        dag_visibility ([`DagVisibility`]):
            The rows of the batch.
        kernel_options (`dict`, *optional*):
            Options of FlexAttention's kernel; the other backends have none.
        **kwargs:
            Whatever else the model hands on; what would change the scores is refused.

    Returns:
        `tuple`: The output of shape `(B, T, H, Dv)`, contiguous, and `None` for the attention weights.

    Raises:
        MissingVisibilityError: If `dag_visibility` is missing.
        ValueError: If the call asks for something that attention on packed rows does not have: a mask, dropout,
            attention to later positions, a key-value cache with earlier tokens, or a term of the scores unknown here.
    """
    layer = type(module).__name__
    if dag_visibility is None:
        raise MissingVisibilityError(
            f'{layer} uses the attention "{NAME}" but got no dag_visibility. Pass it to model(...), or, to generate '
            "or compute ordinary sequences, call the model in `with ordinary_attention(model):`. If it was, the "
            "model does not hand keyword arguments on to its attention layers and cannot be trained on packed rows"
        )
    if attention_mask is not None:
        raise ValueError(
            f"{layer} got an attention_mask beside dag_visibility; pass none, subtree_end is the whole mask"
        )
    if dropout:
        raise ValueError(
            f"{layer} drops attention weights with probability {dropout}, which packed rows cannot reproduce; "
            "load the model with attention dropout 0"
        )
    if is_causal is False:
        raise ValueError(f"{layer} attends to later positions too; packed rows need a causal model")
    if found := [name for name in _UNKNOWN_SCORE_TERMS if kwargs.get(name) is not None]:
        raise ValueError(f"{layer} passes {found[0]}, which the attention {NAME!r} does not know")
    batch, length = dag_visibility.shape
    if query.shape[0] != batch or query.shape[2] != length or key.shape[2] != length:
        raise ValueError(
            f"{layer} got {query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys, but "
            f"dag_visibility is for {batch} rows of {length}. Packed rows cannot use a key-value cache, prompt "
            "tuning, context parallelism or torch.nn.DataParallel"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{layer} has a sliding window of {sliding_window}; it must be at least 1, or None")

    dag_visibility.windows.add(sliding_window)
    backend = select_backend(query.device, dag_visibility.backend)
    options = {"kernel_options": kernel_options} if backend == "flex" else {}
    output_BHTD = _ATTEND[backend](
        query,
        key,
        value,
        dag_visibility,
        window=sliding_window,
        scaling=scaling,
        softcap=softcap,
        sinks_H=s_aux,
        **options,
    )
    return output_BHTD.transpose(1, 2).contiguous(), None

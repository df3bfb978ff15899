"""Short causal convolutions on packed rows: each run of positions after its last ancestors, in one stock call.

transformers calls `causal_conv1d_fn` of the modeling file, which is the kernel of `causal_conv1d` where that is
installed. It gets one long row in which before every run stand as many ancestors as the convolution reaches back to.

Cost: for each leaf of the trees `K - 1` more positions, and the copies there and back.

Shape suffixes: `B` rows, `D` channels, `T` positions, `N = B * T`, `M` places, `K` length of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .states import DagStates


def convolve(
    original: Callable[..., Tensor],
    states: DagStates,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve each position with its ancestors.

    Args:
        original (`Callable`):
            The function of the modeling file.
        states ([`DagStates`]):
            The rows of the batch.
        hidden_states (`torch.Tensor` of shape `(B, D, T)`):
            Input.
        weight (`torch.Tensor` of shape `(D, K)`):
            Weights, the last of which is that of the position itself.
        bias (`torch.Tensor` of shape `(D,)`, *optional*):
            Bias.
        activation (`str`, *optional*):
            Activation.
        **kwargs:
            What else the layer passes, handed on.

    Returns:
        `torch.Tensor` of shape `(B, D, T)`: Output.
    """
    batch, channels, length = hidden_states.shape
    states.check_shape("causal_conv1d_fn", batch, length)
    runs = states.runs(weight.shape[-1] - 1, hidden_states.device)
    x_ND = hidden_states.transpose(1, 2).reshape(batch * length, channels)
    y_1DM = original(runs.spread(x_ND).t()[None], weight, bias, activation=activation, **kwargs)
    return runs.collect(y_1DM[0].t()).reshape(batch, length, channels).transpose(1, 2)

"""Gated delta rule and Kimi delta attention on packed rows: chains of cells, one level of branching after another.

Both functions take a state before each sequence and give that at its end. So the chains of a level are computed
together, from the states at the ends of their parents. Chains end where 64 depths end, which is where the flat
sequence ends a chunk, so no chunk is cut otherwise than there. Where branches are short they end where 32 or 16 depths
do, and chunks are as long. Padding writes nothing (beta 0) and forgets nothing (decay 0).

Cost: up to a quarter of the positions once more, those between such a depth and a branch point for each branch, and
some padding; one call or a few for each level.

Shape suffixes: `B` rows, `T` positions, `N = B * T`, `M` places, `C` chains of a call, `L` positions of each, `H`
heads, `K` and `V` sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .plan import CELL
from .states import DagStates


def delta_rule(
    original: Callable[..., tuple[Tensor, Tensor | None]],
    states: DagStates,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute each position from the state that its ancestors leave.

    Args:
        original (`Callable`):
            The function of the modeling file.
        states ([`DagStates`]):
            The rows of the batch.
        query (`torch.Tensor` of shape `(B, T, H, K)`):
            Queries.
        key (`torch.Tensor` of shape `(B, T, H, K)`):
            Keys.
        value (`torch.Tensor` of shape `(B, T, H, V)`):
            Values; there may be more heads of them.
        g (`torch.Tensor` of shape `(B, T, H)` or `(B, T, H, K)`):
            Logarithm of the decay, of a head or of each of its channels.
        beta (`torch.Tensor` of shape `(B, T, H)`):
            How much is written.
        **kwargs:
            What else the layer passes, handed on.

    Returns:
        `tuple`: Output of shape `(B, T, H, V)`, and `None` for the state at the end, of which there is none.
    """
    batch, length = value.shape[:2]
    states.check_shape("the delta rule", batch, length)
    chains, levels = states.chains(value.device)
    inputs = [chains.spread(x.reshape(batch * length, *x.shape[2:])) for x in (query, key, value, g, beta)]
    sizes = [call.shape[0] * call.shape[1] for calls in levels for call in calls]
    pieces = zip(*(x_M.split(sizes) for x_M in inputs), strict=True)
    if (chunk := states.plan.chain_length()) != CELL:
        kwargs["chunk_size"] = chunk  # kernels whose chunk is fixed are not asked
    outputs: list[Tensor] = []
    ends_CHKV: Any = None
    for calls in levels:
        ends: list[Tensor] = []
        for call in calls:
            query_CL, key_CL, value_CL, g_CL, beta_CL = (x.unflatten(0, call.shape) for x in next(pieces))
            goes_on_from = None if call.parents_C is None else ends_CHKV.index_select(0, call.parents_C)
            output_CL, end_CHKV = original(
                query_CL,
                key_CL,
                value_CL,
                g=g_CL,
                beta=beta_CL,
                initial_state=goes_on_from,
                output_final_state=call.goes_on,
                **kwargs,
            )
            outputs.append(output_CL.flatten(0, 1))
            if end_CHKV is not None:
                ends.append(end_CHKV)
        ends_CHKV = torch.cat(ends) if ends else None
    return chains.collect(torch.cat(outputs)).unflatten(0, (batch, length)), None

"""Mamba-2 scans on packed rows: one stock call over all cells, then the states along the tree of cells.

The scan is linear in the state before it. So all cells are computed at once from a state of zero; the states at their
ends are added up along the tree, which takes a product and a sum for each number of cells above; and what the state
before a cell adds to its outputs is added:

    y_t += exp(sum_{s <= t} A dt_s) C_t h_before        (Dao and Gu, "Transformers are SSMs", section 6)

The time steps are made here, as the function would make them, since their sums are needed. Empty places have a time
step of 0, whatever the model's lower limit: they neither decay a state nor add to it.

Where mamba_ssm is installed, a layer in training first asks a fused function for all it does at once. That gets no
states and is answered with nothing, as if it were not there; the layer then takes the way above.

Cost: copies as for the delta rule, and two states for each cell, which PyTorch keeps for the backward pass.

Shape suffixes: `B` rows, `T` positions, `N = B * T`, `M` places, `S` cells, `L` positions of a cell, `H` heads, `P`
their size, `G` groups of heads, `Z` size of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .states import DagStates


def scan(
    original: Callable[..., tuple[Tensor, Tensor]],
    states: DagStates,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """Compute each position from the state that its ancestors leave.

    Args:
        original (`Callable`):
            The function of the modeling file.
        states ([`DagStates`]):
            The rows of the batch.
        hidden_states (`torch.Tensor` of shape `(B, T, H, P)`):
            Input.
        dt (`torch.Tensor` of shape `(B, T, H)`):
            Time steps, before bias, softplus and limits.
        A (`torch.Tensor` of shape `(H,)`):
            Decay of each head, negative.
        B (`torch.Tensor` of shape `(B, T, G, Z)`):
            How input enters the state.
        C (`torch.Tensor` of shape `(B, T, G, Z)`):
            How the state is read.
        chunk_size (`int`):
            Positions that the model computes at once; cells are as long where that copies little.
        D (`torch.Tensor`, *optional*):
            Weight of the input itself.
        dt_bias (`torch.Tensor` of shape `(H,)`, *optional*):
            Bias of the time steps.
        dt_softplus (`bool`, *optional*, defaults to `False`):
            Whether time steps go through softplus.
        dt_limit (`tuple[float, float]`, *optional*):
            Limits of the time steps.
        **kwargs:
            What else the layer passes, handed on.

    Returns:
        `torch.Tensor` of shape `(B, T, H, P)`: Output.
    """
    batch, length = hidden_states.shape[:2]
    states.check_shape("the Mamba-2 scan", batch, length)
    size = states.plan.cell_length(chunk_size)
    cells, steps = states.cells(size, hidden_states.device)
    step_BTH = _time_steps(dt, dt_bias, dt_softplus, dt_limit)
    x_SLHP, dt_SLH, B_SLGZ, C_SLGZ = (
        cells.spread(x.reshape(batch * length, *x.shape[2:])).unflatten(0, (-1, size))
        for x in (hidden_states, step_BTH, B, C)
    )
    y_SLHP, added_SHPZ = original(
        x_SLHP, dt_SLH, A, B_SLGZ, C_SLGZ, chunk_size=size, D=D, return_final_states=True, **kwargs
    )
    if len(steps) > 1:
        decay_SLH = (A.to(added_SHPZ.dtype) * dt_SLH.to(added_SHPZ.dtype)).cumsum(1).exp()
        before_SHPZ = _states_before(added_SHPZ, decay_SLH[:, -1], steps)
        roots = len(steps[0])
        read_SLHP = _read(C_SLGZ[roots:], before_SHPZ) * decay_SLH[roots:, ..., None]
        y_SLHP = torch.cat([y_SLHP[:roots], (y_SLHP[roots:] + read_SLHP).to(y_SLHP.dtype)])
    return cells.collect(y_SLHP.flatten(0, 1)).unflatten(0, (batch, length))


def _time_steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]) -> Tensor:
    if dt.device.type == "cuda":
        dt = dt.float()  # as in the kernel, whose output is compared with this
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(min=dt_limit[0], max=dt_limit[1])


def _states_before(added_SHPZ: Tensor, decay_SH: Tensor, steps: list[Tensor]) -> Tensor:
    """State before each cell that has one above it: that before the parent, decayed, and what the parent added."""
    counts = [len(parents) for parents in steps]
    before = []
    end_SHPZ: Tensor | None = None
    for added, decay, parents in zip(added_SHPZ.split(counts), decay_SH.split(counts), steps, strict=True):
        if end_SHPZ is None:
            end_SHPZ = added
            continue
        before.append(end_SHPZ.index_select(0, parents))
        end_SHPZ = before[-1] * decay[..., None, None] + added
    return torch.cat(before)


def _read(C_SLGZ: Tensor, before_SHPZ: Tensor) -> Tensor:
    """What each position reads from the state before its cell, without its decay since."""
    groups = C_SLGZ.shape[2]
    before_SGRPZ = before_SHPZ.unflatten(1, (groups, -1))
    return torch.einsum("slgz,sgrpz->slgrp", C_SLGZ.to(before_SGRPZ.dtype), before_SGRPZ).flatten(2, 3)

"""The tile backend, for CPU.

A dense mask makes PyTorch compute every pair of a row and then drop most of them: 80 to 90 % for rows that share a
prefix. Here the row is cut into tiles of queries (`tile_plan`), each tile computes the keys that it sees and few
others (`partial`), and the parts are put together by their log-sum-exps. A sink is one more part, whose value is
zero.

The function has a backward pass of its own, which computes the scores again, part by part. It keeps queries, keys,
values, output and log-sum-exps, as flash attention does. There is no second derivative, and `torch.compile` breaks the
graph here: what is computed depends on the tree, and a graph for each tree would be compiled at each step.

Rows are computed one by one, each by its own plan; a part is computed for all heads at once. Values of another size
than keys are filled up with zeros. Logit soft-capping, and any device but CPU, take the explicit way. In half
precision parts are added up in float32.

Cost: beside what is kept, the gradients, for one row at a time keys and values of each query head, and the masks of
the plan. 3 to 17 times as fast as `dense` on trees at `T = 4096`, 1.7 times on a single sequence, see
`benchmarks/attention.py`.

Shape suffixes: `B` rows, `H` query heads, `G` key and value heads, `T` positions, `D` head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .partial import Explicit, Fused, accumulation_dtype
from .tile_plan import Keys, RowPlan, plan_of
from .visibility import DagVisibility


@torch.compiler.disable
def attend(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    visibility: DagVisibility,
    *,
    window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of each position to what it sees. Arguments and result are those of [`dense.attend`].

    Raises:
        ValueError: If queries, keys and values differ in dtype; under autocast they are cast.
    """
    device = query_BHTD.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query_BHTD, key_BGTD, value_BGTD = (x.to(dtype) for x in (query_BHTD, key_BGTD, value_BGTD))
    if not query_BHTD.dtype == key_BGTD.dtype == value_BGTD.dtype:
        found = ", ".join(str(x.dtype) for x in (query_BHTD, key_BGTD, value_BGTD))
        raise ValueError(f"queries, keys and values must have one dtype, got {found}")
    size, value_size = query_BHTD.shape[3], value_BGTD.shape[3]
    scaling = size**-0.5 if scaling is None else scaling
    fused = device.type == "cpu" and softcap is None
    with torch.autocast(device.type, enabled=False):
        output_BHTD = _TileAttention.apply(
            *(_widen(x, max(size, value_size)) for x in (query_BHTD, key_BGTD, value_BGTD)),
            sinks_H,
            visibility.mask(plan_of, window, device),
            Fused(scaling) if fused else Explicit(scaling, softcap),
        )
    return output_BHTD[..., :value_size]


class _TileAttention(torch.autograd.Function):
    """Queries, keys, values, sinks, plans of the rows and way of computing parts -> output."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: Tensor,
        key_BGTD: Tensor,
        value_BGTD: Tensor,
        sinks_H: Tensor | None,
        plans: list[RowPlan],
        kernel: Fused | Explicit,
    ) -> Tensor:
        batch, heads, length, size = query_BHTD.shape
        output_BTHD = query_BHTD.new_empty(batch, length, heads, size)
        lse_BTH = query_BHTD.new_empty(batch, length, heads, dtype=accumulation_dtype(query_BHTD.dtype))
        for row, plan in enumerate(plans):
            query_THD = _row(query_BHTD, row, heads)
            key_THD, value_THD = _row(key_BGTD, row, heads), _row(value_BGTD, row, heads)
            output_BTHD[row] = _forward_row(query_THD, key_THD, value_THD, sinks_H, plan, kernel, lse_BTH[row])
        output_BHTD = output_BTHD.transpose(1, 2)
        ctx.save_for_backward(query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BTH)
        ctx.plans, ctx.kernel = plans, kernel
        return output_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BTH = ctx.saved_tensors
        grads = [_positions_first(x) for x in (query_BHTD, key_BGTD, value_BGTD)]
        heads = query_BHTD.shape[1]
        with torch.autocast(query_BHTD.device.type, enabled=False):
            for row, plan in enumerate(ctx.plans):
                inputs = [_row(x, row, heads) for x in (grad_BHTD, query_BHTD, key_BGTD, value_BGTD, output_BHTD)]
                found = _backward_row(inputs, lse_BTH[row], plan, ctx.kernel)
                for grad_BTGD, found_THD in zip(grads, found, strict=True):
                    grad_BTGD[row] = found_THD.unflatten(1, (grad_BTGD.shape[2], -1)).sum(2)
        grad_sinks_H = None
        if sinks_H is not None:
            weights_BTH = (sinks_H - lse_BTH).exp()
            delta_BTH = (grad_BHTD * output_BHTD).sum(-1, dtype=lse_BTH.dtype).transpose(1, 2)
            grad_sinks_H = -(weights_BTH * delta_BTH).sum((0, 1)).to(sinks_H.dtype)
        return *(grad_BTGD.transpose(1, 2) for grad_BTGD in grads), grad_sinks_H, None, None


def _forward_row(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    sinks_H: Tensor | None,
    plan: RowPlan,
    kernel: Fused | Explicit,
    lse_TH: Tensor,
) -> Tensor:
    """Compute one row; its log-sum-exps are written to `lse_TH`."""
    output_THD = torch.empty_like(query_THD, dtype=lse_TH.dtype)
    for part in plan.own:
        rows, keys = part.queries, part.keys
        output_THD[rows], lse_TH[rows] = kernel.forward(
            query_THD[rows], _take(key_THD, keys), _take(value_THD, keys), part.bias(query_THD.dtype)
        )
    for part in plan.common:
        rows, keys = part.queries, part.keys
        found_QHD, found_QH = kernel.forward(query_THD[rows], _take(key_THD, keys), _take(value_THD, keys), None)
        share_QH1 = _add_to_lse(lse_TH[rows], found_QH, output_THD[rows])
        output_THD[rows] += found_QHD * share_QH1
    if sinks_H is not None:
        _add_to_lse(lse_TH, sinks_H.to(lse_TH.dtype), output_THD)
    return output_THD


def _add_to_lse(lse_QH: Tensor, other_QH: Tensor, output_QHD: Tensor) -> Tensor:
    """Add a part to the log-sum-exps, in place; shrink the output accordingly; return the share of the part."""
    both_QH = torch.logaddexp(lse_QH, other_QH)
    output_QHD *= (lse_QH - both_QH).exp_()[..., None]
    lse_QH.copy_(both_QH)
    return (other_QH - both_QH).exp_()[..., None]


def _backward_row(
    inputs: list[Tensor], lse_TH: Tensor, plan: RowPlan, kernel: Fused | Explicit
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, all of shape `(T, H, D)`."""
    grad_THD, query_THD, key_THD, value_THD, output_THD = inputs
    grad_query_THD, grad_key_THD, grad_value_THD = (torch.zeros_like(query_THD, dtype=lse_TH.dtype) for _ in range(3))
    for part in plan.own + plan.common:
        rows, keys = part.queries, part.keys
        from_query, from_key, from_value = kernel.backward(
            grad_THD[rows],
            query_THD[rows],
            _take(key_THD, keys),
            _take(value_THD, keys),
            output_THD[rows],
            lse_TH[rows],
            part.bias(query_THD.dtype),
        )
        grad_query_THD[rows] += from_query
        _add(grad_key_THD, keys, from_key)
        _add(grad_value_THD, keys, from_value)
    return grad_query_THD, grad_key_THD, grad_value_THD


def _row(x_BGTD: Tensor, row: int, heads: int) -> Tensor:
    """One row, positions first, contiguous, with each head as often as query heads use it."""
    x_TGD = x_BGTD[row].transpose(0, 1)
    times = heads // x_TGD.shape[1]
    return x_TGD.repeat_interleave(times, dim=1) if times > 1 else x_TGD.contiguous()


def _widen(x_BGTD: Tensor, size: int) -> Tensor:
    """Fill up with zeros; they change neither scores nor sums."""
    missing = size - x_BGTD.shape[3]
    return F.pad(x_BGTD, (0, missing)) if missing else x_BGTD


def _positions_first(x_BGTD: Tensor) -> Tensor:
    batch, heads, length, size = x_BGTD.shape
    return x_BGTD.new_empty(batch, length, heads, size)


def _take(x_THD: Tensor, keys: Keys) -> Tensor:
    return x_THD[keys] if isinstance(keys, slice) else x_THD.index_select(0, keys)


def _add(x_THD: Tensor, keys: Keys, addend_KHD: Tensor) -> None:
    if isinstance(keys, slice):
        x_THD[keys] += addend_KHD
    else:
        x_THD.index_add_(0, keys, addend_KHD.to(x_THD.dtype))

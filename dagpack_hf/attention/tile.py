"""The tile backend, for CPU.

A dense mask makes PyTorch compute every pair of a row and then drop most of them: 80 to 90 % for rows that share a
prefix. Here the row is cut into tiles of queries (`tile_plan`), each tile computes the keys that it sees and few
others (`partial`), and the parts are put together by their log-sum-exps. A sink is one more part, whose value is
zero.

The function has a backward pass of its own, which computes the scores again, part by part. It keeps queries, keys,
values, output and log-sum-exps, as flash attention does. There is no second derivative, and `torch.compile` breaks the
graph here: what is computed depends on the tree, and a graph for each tree would be compiled at each step.

Rows are computed one by one, each by its own plan; a part is computed for all heads at once, and query heads that
share keys and values read the same memory. Values of another size than keys are filled up with zeros. Logit
soft-capping, and any device but CPU, take the explicit way. In half precision parts are added up in float32.

Cost: beside what is kept, the gradients, and the masks of the plan. 3 to 17 times as fast as `dense` on trees at
`T = 4096`, twice on a single sequence, see `benchmarks/attention.py`.

Shape suffixes: `B` rows, `H` query heads, `G` key and value heads, `M` query heads of each, `T` positions, `D` head
size.
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
        query_BTGMD, key_BTGD, value_BTGD = _views(key_BGTD.shape[1], [query_BHTD], [key_BGTD, value_BGTD])
        sums = accumulation_dtype(query_BHTD.dtype)
        output_BTGMD = torch.empty_like(query_BTGMD, dtype=sums, memory_format=torch.contiguous_format)
        lse_BTGM = output_BTGMD.new_empty(output_BTGMD.shape[:4])
        for row, plan in enumerate(plans):
            _forward_row(
                query_BTGMD[row], key_BTGD[row], value_BTGD[row], plan, kernel, output_BTGMD[row], lse_BTGM[row]
            )
        if sinks_H is not None:
            with_sinks_BTGM = torch.logaddexp(lse_BTGM, sinks_H.to(sums).view(lse_BTGM.shape[2:]))
            output_BTGMD *= (lse_BTGM - with_sinks_BTGM).exp_()[..., None]
            lse_BTGM = with_sinks_BTGM
        output_BHTD = output_BTGMD.to(query_BHTD.dtype).flatten(2, 3).transpose(1, 2)
        ctx.save_for_backward(query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BTGM)
        ctx.plans, ctx.kernel = plans, kernel
        return output_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BTGM = ctx.saved_tensors
        inputs = _views(key_BGTD.shape[1], [grad_BHTD, output_BHTD, query_BHTD], [key_BGTD, value_BGTD])
        grads = [x.new_zeros(x.shape, dtype=lse_BTGM.dtype) for x in inputs[2:]]
        with torch.autocast(query_BHTD.device.type, enabled=False):
            for row, plan in enumerate(ctx.plans):
                _backward_row([x[row] for x in inputs], lse_BTGM[row], plan, ctx.kernel, [x[row] for x in grads])
        grad_sinks_H = None
        if sinks_H is not None:
            weights_BTH = (sinks_H - lse_BTGM.flatten(2)).exp()
            delta_BTH = (grad_BHTD * output_BHTD).sum(-1, dtype=lse_BTGM.dtype).transpose(1, 2)
            grad_sinks_H = -(weights_BTH * delta_BTH).sum((0, 1)).to(sinks_H.dtype)
        grads[0] = grads[0].flatten(2, 3)
        return *(x.to(query_BHTD.dtype).transpose(1, 2) for x in grads), grad_sinks_H, None, None


def _forward_row(
    query_TGMD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    plan: RowPlan,
    kernel: Fused | Explicit,
    output_TGMD: Tensor,
    lse_TGM: Tensor,
) -> None:
    """Compute one row; write its output and log-sum-exps."""
    for part in plan.own:
        rows, keys = part.queries, part.keys
        output_TGMD[rows], lse_TGM[rows] = kernel.forward(
            query_TGMD[rows], _take(key_TGD, keys), _take(value_TGD, keys), part.bias(query_TGMD.dtype), part.is_causal
        )
    for part in plan.common:
        rows, keys = part.queries, part.keys
        found_QGMD, found_QGM = kernel.forward(query_TGMD[rows], _take(key_TGD, keys), _take(value_TGD, keys))
        share_QGM = (found_QGM - lse_TGM[rows]).sigmoid_()  # of the part, in the softmax over both
        output_TGMD[rows].lerp_(found_QGMD.to(output_TGMD.dtype), share_QGM[..., None])
        lse_TGM[rows] = torch.logaddexp(lse_TGM[rows], found_QGM)


def _backward_row(
    inputs: list[Tensor], lse_TGM: Tensor, plan: RowPlan, kernel: Fused | Explicit, grads: list[Tensor]
) -> None:
    """Compute one row; add to the gradients of its queries, keys and values."""
    grad_TGMD, output_TGMD, query_TGMD, key_TGD, value_TGD = inputs
    grad_query_TGMD, grad_key_TGD, grad_value_TGD = grads
    for part in plan.own + plan.common:
        rows, keys = part.queries, part.keys
        from_query, from_key, from_value = kernel.backward(
            grad_TGMD[rows],
            query_TGMD[rows],
            _take(key_TGD, keys),
            _take(value_TGD, keys),
            output_TGMD[rows],
            lse_TGM[rows],
            part.bias(query_TGMD.dtype),
            part.is_causal,
        )
        grad_query_TGMD[rows] += from_query
        _add(grad_key_TGD, keys, from_key)
        _add(grad_value_TGD, keys, from_value)


def _views(kv_heads: int, of_queries_BHTD: list[Tensor], of_keys_BGTD: list[Tensor]) -> list[Tensor]:
    """Positions first, `(B, T, G, D)`, and the query heads of each head of keys and values apart, `(B, T, G, M, D)`.

    Only a last dimension that does not lie together is copied.
    """
    x_BTHD = [x if x.stride(-1) == 1 else x.contiguous() for x in of_queries_BHTD + of_keys_BGTD]
    x_BTHD = [x.transpose(1, 2) for x in x_BTHD]
    queries = len(of_queries_BHTD)
    return [x.unflatten(2, (kv_heads, -1)) for x in x_BTHD[:queries]] + x_BTHD[queries:]


def _widen(x_BGTD: Tensor, size: int) -> Tensor:
    """Fill up with zeros; they change neither scores nor sums."""
    missing = size - x_BGTD.shape[3]
    return F.pad(x_BGTD, (0, missing)) if missing else x_BGTD


def _take(x_TGD: Tensor, keys: Keys) -> Tensor:
    return x_TGD[keys] if isinstance(keys, slice) else x_TGD.index_select(0, keys)


def _add(x_TGD: Tensor, keys: Keys, addend_KGD: Tensor) -> None:
    if isinstance(keys, slice):
        x_TGD[keys] += addend_KGD
    else:
        x_TGD.index_add_(0, keys, addend_KGD.to(x_TGD.dtype))

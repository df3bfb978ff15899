"""Attention of some queries to some keys, so that the parts can be put together.

Softmax over keys that are computed in parts needs from each part its output and the log-sum-exp of its scores (Milakov
and Gimelshein 2018, online normalizer calculation for softmax; Dao 2022, FlashAttention, section 3.1). The backward
pass of a part needs the output and the log-sum-exp of the *whole*: then the gradients of the parts add up.

Two ways to compute a part. [`Fused`] calls PyTorch's flash attention for CPU, which gives both. It takes 10 ns for
each pair and head of size 64, forward and backward, on one core, hardly dependent on the shape of the part, and skips
nothing that is masked. [`Explicit`] writes the scores out; it knows logit soft-capping and runs on any device.

All tensors are of shape `(N, H, D)`: positions before heads, as models have them in memory.

Shape suffixes: `Q` queries, `K` keys, `H` heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_PAIRS = 2**18
"""Scores of a head that are written out at once."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and of log-sum-exps: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Fused:
    """Parts by PyTorch's flash attention for CPU.

    The kernel does not check that the last dimension is contiguous and that a mask has the dtype of the queries, and
    is wrong in silence where that is not so.
    """

    scaling: float

    def forward(self, query_QHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, bias_QK: Tensor | None):
        """Return the output `(Q, H, D)` and the log-sum-exp `(Q, H)`."""
        output, lse = _flash(
            _batch(query_QHD),
            _batch(key_KHD),
            _batch(value_KHD),
            attn_mask=None if bias_QK is None else bias_QK[None, None],
            scale=self.scaling,
        )
        return output[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self,
        grad_QHD: Tensor,
        query_QHD: Tensor,
        key_KHD: Tensor,
        value_KHD: Tensor,
        output_QHD: Tensor,
        lse_QH: Tensor,
        bias_QK: Tensor | None,
    ) -> list[Tensor]:
        """Return the part's share of the gradients of queries, keys and values."""
        gradients = _flash_backward(
            _batch(grad_QHD),
            _batch(query_QHD),
            _batch(key_KHD),
            _batch(value_KHD),
            _batch(output_QHD),
            _batch(lse_QH),
            0.0,
            False,
            attn_mask=None if bias_QK is None else bias_QK[None, None],
            scale=self.scaling,
        )
        return [gradient[0].transpose(0, 1) for gradient in gradients]


@dataclass(frozen=True)
class Explicit:
    """Parts by matrix products, a few queries at a time, in float32 at least."""

    scaling: float
    softcap: float | None = None

    def forward(self, query_QHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, bias_QK: Tensor | None):
        """Return the output `(Q, H, D)` and the log-sum-exp `(Q, H)`."""
        dtype = accumulation_dtype(query_QHD.dtype)
        query_HQD, key_HKD, value_HKD = (_heads_first(x, dtype) for x in (query_QHD, key_KHD, value_KHD))
        output_HQD, lse_HQ = torch.empty_like(query_HQD), query_HQD.new_empty(query_HQD.shape[:2])
        for some in _few_queries(len(query_QHD), len(key_KHD)):
            scores_HQK, _ = self._scores(query_HQD[:, some], key_HKD, bias_QK, some)
            lse_HQ[:, some] = scores_HQK.logsumexp(-1)
            output_HQD[:, some] = (scores_HQK - lse_HQ[:, some, None]).exp_() @ value_HKD
        return output_HQD.transpose(0, 1), lse_HQ.transpose(0, 1)

    def backward(
        self,
        grad_QHD: Tensor,
        query_QHD: Tensor,
        key_KHD: Tensor,
        value_KHD: Tensor,
        output_QHD: Tensor,
        lse_QH: Tensor,
        bias_QK: Tensor | None,
    ) -> list[Tensor]:
        """Return the part's share of the gradients of queries, keys and values."""
        dtype = accumulation_dtype(query_QHD.dtype)
        grad_HQD, query_HQD, key_HKD, value_HKD, output_HQD = (
            _heads_first(x, dtype) for x in (grad_QHD, query_QHD, key_KHD, value_KHD, output_QHD)
        )
        lse_HQ1 = lse_QH.transpose(0, 1)[..., None]
        delta_HQ1 = (grad_HQD * output_HQD).sum(-1, keepdim=True)
        grads = [torch.zeros_like(x) for x in (query_HQD, key_HKD, value_HKD)]
        for some in _few_queries(len(query_QHD), len(key_KHD)):
            scores_HQK, capped_HQK = self._scores(query_HQD[:, some], key_HKD, bias_QK, some)
            weights_HQK = (scores_HQK - lse_HQ1[:, some]).exp_()
            grads[2] += weights_HQK.transpose(1, 2) @ grad_HQD[:, some]
            slope_HQK = weights_HQK * (grad_HQD[:, some] @ value_HKD.transpose(1, 2) - delta_HQ1[:, some])
            slope_HQK *= self.scaling
            if self.softcap is not None:
                slope_HQK *= 1 - (capped_HQK / self.softcap) ** 2
            grads[0][:, some] = slope_HQK @ key_HKD
            grads[1] += slope_HQK.transpose(1, 2) @ query_HQD[:, some]
        return [gradient.transpose(0, 1) for gradient in grads]

    def _scores(
        self, query_HQD: Tensor, key_HKD: Tensor, bias_QK: Tensor | None, some: slice
    ) -> tuple[Tensor, Tensor]:
        """Scores with and without the mask."""
        capped_HQK = query_HQD @ key_HKD.transpose(1, 2) * self.scaling
        if self.softcap is not None:
            capped_HQK = self.softcap * torch.tanh(capped_HQK / self.softcap)
        return (capped_HQK if bias_QK is None else capped_HQK + bias_QK[some]), capped_HQK


def _batch(x_NH_: Tensor) -> Tensor:
    return x_NH_.transpose(0, 1)[None]


def _heads_first(x_NHD: Tensor, dtype: torch.dtype) -> Tensor:
    return x_NHD.transpose(0, 1).to(dtype)


def _few_queries(queries: int, keys: int) -> Iterator[slice]:
    step = max(_PAIRS // keys, 1)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))

"""Attention of some queries to some keys, so that the parts can be put together.

Softmax over keys that are computed in parts needs from each part its output and the log-sum-exp of its scores (Milakov
and Gimelshein 2018, online normalizer calculation for softmax; Dao 2022, FlashAttention, section 3.1). The backward
pass of a part needs the output and the log-sum-exp of the *whole*: then the gradients of the parts add up.

Two ways to compute a part. [`Fused`] calls PyTorch's flash attention for CPU, which gives both. It takes 10 ns for
each pair and head of size 64, forward and backward, on one core, and half as much again where the queries are a few
hundred or less. It skips nothing that a mask hides, and of a causal part what lies more than a block of 512 keys away.
[`Explicit`] writes the scores out; it knows logit soft-capping and runs on any device.

Queries are of shape `(Q, G, M, D)`, keys and values `(K, G, D)`: positions before heads, as models have them in
memory, and each head of keys and values once for the `M` query heads that use it.

Shape suffixes: `Q` queries, `K` keys, `G` heads of keys and values, `M` query heads of each, `D` head size.
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

    def forward(
        self,
        query_QGMD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        bias_QK: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the output `(Q, G, M, D)` and the log-sum-exp `(Q, G, M)`."""
        heads = query_QGMD.shape[2]
        output_GMQD, lse_GMQ = _flash(
            _queries(query_QGMD),
            _keys(key_KGD, heads),
            _keys(value_KGD, heads),
            0.0,
            is_causal,
            attn_mask=None if bias_QK is None else bias_QK[None, None],
            scale=self.scaling,
        )
        return output_GMQD.permute(2, 0, 1, 3), lse_GMQ.permute(2, 0, 1)

    def backward(
        self,
        grad_QGMD: Tensor,
        query_QGMD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        output_QGMD: Tensor,
        lse_QGM: Tensor,
        bias_QK: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Tensor]:
        """Return the part's share of the gradients of queries, keys and values."""
        heads = query_QGMD.shape[2]
        from_query_GMQD, *from_keys_GMKD = _flash_backward(
            _queries(grad_QGMD),
            _queries(query_QGMD),
            _keys(key_KGD, heads),
            _keys(value_KGD, heads),
            _queries(output_QGMD),
            lse_QGM.permute(1, 2, 0),
            0.0,
            is_causal,
            attn_mask=None if bias_QK is None else bias_QK[None, None],
            scale=self.scaling,
        )
        dtype = accumulation_dtype(query_QGMD.dtype)
        from_keys = [x_GMKD.sum(1, dtype=dtype) if heads > 1 else x_GMKD[:, 0] for x_GMKD in from_keys_GMKD]
        return [from_query_GMQD.permute(2, 0, 1, 3), *(x_GKD.transpose(0, 1) for x_GKD in from_keys)]


@dataclass(frozen=True)
class Explicit:
    """Parts by matrix products, a few queries at a time, in float32 at least."""

    scaling: float
    softcap: float | None = None

    def forward(
        self,
        query_QGMD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        bias_QK: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the output `(Q, G, M, D)` and the log-sum-exp `(Q, G, M)`."""
        dtype = accumulation_dtype(query_QGMD.dtype)
        query_GMQD = query_QGMD.permute(1, 2, 0, 3).to(dtype)
        key_G1KD, value_G1KD = (x_KGD.transpose(0, 1)[:, None].to(dtype) for x_KGD in (key_KGD, value_KGD))
        output_GMQD, lse_GMQ = torch.empty_like(query_GMQD), query_GMQD.new_empty(query_GMQD.shape[:3])
        for some in _few_queries(len(query_QGMD), len(key_KGD)):
            bias = _bias_of(some, len(key_KGD), bias_QK, is_causal, query_GMQD)
            scores_GMQK, _ = self._scores(query_GMQD[:, :, some], key_G1KD, bias)
            lse_GMQ[:, :, some] = scores_GMQK.logsumexp(-1)
            output_GMQD[:, :, some] = (scores_GMQK - lse_GMQ[:, :, some, None]).exp_() @ value_G1KD
        return output_GMQD.permute(2, 0, 1, 3), lse_GMQ.permute(2, 0, 1)

    def backward(
        self,
        grad_QGMD: Tensor,
        query_QGMD: Tensor,
        key_KGD: Tensor,
        value_KGD: Tensor,
        output_QGMD: Tensor,
        lse_QGM: Tensor,
        bias_QK: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Tensor]:
        """Return the part's share of the gradients of queries, keys and values."""
        dtype = accumulation_dtype(query_QGMD.dtype)
        grad_GMQD, query_GMQD, output_GMQD = (
            x_QGMD.permute(1, 2, 0, 3).to(dtype) for x_QGMD in (grad_QGMD, query_QGMD, output_QGMD)
        )
        key_G1KD, value_G1KD = (x_KGD.transpose(0, 1)[:, None].to(dtype) for x_KGD in (key_KGD, value_KGD))
        lse_GMQ1 = lse_QGM.permute(1, 2, 0)[..., None]
        delta_GMQ1 = (grad_GMQD * output_GMQD).sum(-1, keepdim=True)
        from_query_GMQD, from_key_GKD, from_value_GKD = (
            torch.zeros_like(x) for x in (query_GMQD, key_G1KD[:, 0], value_G1KD[:, 0])
        )
        for some in _few_queries(len(query_QGMD), len(key_KGD)):
            queries_GMQD, grads_GMQD = query_GMQD[:, :, some], grad_GMQD[:, :, some]
            bias = _bias_of(some, len(key_KGD), bias_QK, is_causal, query_GMQD)
            scores_GMQK, capped_GMQK = self._scores(queries_GMQD, key_G1KD, bias)
            weights_GMQK = (scores_GMQK - lse_GMQ1[:, :, some]).exp_()
            from_value_GKD += (weights_GMQK.transpose(2, 3) @ grads_GMQD).sum(1)
            slope_GMQK = weights_GMQK * (grads_GMQD @ value_G1KD.transpose(2, 3) - delta_GMQ1[:, :, some])
            slope_GMQK *= self.scaling
            if self.softcap is not None:
                slope_GMQK *= 1 - (capped_GMQK / self.softcap) ** 2
            from_query_GMQD[:, :, some] = slope_GMQK @ key_G1KD
            from_key_GKD += (slope_GMQK.transpose(2, 3) @ queries_GMQD).sum(1)
        return [from_query_GMQD.permute(2, 0, 1, 3), from_key_GKD.transpose(0, 1), from_value_GKD.transpose(0, 1)]

    def _scores(self, query_GMQD: Tensor, key_G1KD: Tensor, bias_QK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores with and without the mask."""
        capped_GMQK = query_GMQD @ key_G1KD.transpose(2, 3) * self.scaling
        if self.softcap is not None:
            capped_GMQK = self.softcap * torch.tanh(capped_GMQK / self.softcap)
        return (capped_GMQK if bias_QK is None else capped_GMQK + bias_QK), capped_GMQK


def _queries(x_QGM_: Tensor) -> Tensor:
    """As the kernel takes them: the heads of keys and values are its batch."""
    return x_QGM_.permute(1, 2, 0, 3)


def _keys(x_KGD: Tensor, heads: int) -> Tensor:
    """As the kernel takes them; the query heads read the same memory."""
    return x_KGD.transpose(0, 1)[:, None].expand(-1, heads, -1, -1)


def _bias_of(some: slice, keys: int, bias_QK: Tensor | None, is_causal: bool, like: Tensor) -> Tensor | None:
    """What is added to the scores of some queries."""
    if is_causal:
        return like.new_full((some.stop - some.start, keys), float("-inf")).triu_(some.start + 1)
    return None if bias_QK is None else bias_QK[some]


def _few_queries(queries: int, keys: int) -> Iterator[slice]:
    step = max(_PAIRS // keys, 1)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))

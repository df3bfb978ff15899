"""The dense backend: scaled dot-product attention under a boolean mask.

It is the reference of the other backends, and works on every device. Plain attention goes through PyTorch's fused
kernel. Logit soft-capping (gemma2) and attention sinks (gpt_oss) have no place in that kernel, so they take the
explicit path, which writes out the scores as the models' own eager attention does. The softmax is taken in float32 at
least: float64 stays float64, where some models' own code would fall to float32, and half precision is never used,
where gpt_oss would.

Cost: the mask, `B * T * T` bytes for each window, shared by all layers; on the explicit path also the scores,
`B * H * T * T` elements per layer, kept for the backward pass.

Shape suffixes: `B` rows, `H` query heads, `G` key and value heads, `T` positions, `D` head size (of the values it may
be another).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .visibility import DagVisibility, visible


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
    """Attention of each position to what it sees.

    Args:
        query_BHTD (`torch.Tensor` of shape `(B, H, T, D)`, floating point):
            Queries.
        key_BGTD (`torch.Tensor` of shape `(B, G, T, D)`):
            Keys; `H` is a multiple of `G`.
        value_BGTD (`torch.Tensor` of shape `(B, G, T, Dv)`):
            Values.
        visibility ([`DagVisibility`]):
            The rows.
        window (`int`, *optional*):
            Sliding window in tokens of depth.
        scaling (`float`, *optional*):
            Factor of the scores, by default `D ** -0.5`.
        softcap (`float`, *optional*):
            Scores `s` become `softcap * tanh(s / softcap)`.
        sinks_H (`torch.Tensor` of shape `(H,)`, *optional*):
            For each head, the score of a key that every query sees and whose value is zero.

    Returns:
        `torch.Tensor` of shape `(B, H, T, Dv)`:
            The attended values, in the dtype of the queries.
    """
    mask_B1TT = visibility.mask(_head_mask, window, query_BHTD.device)
    groups = query_BHTD.shape[1] // key_BGTD.shape[1]
    key_BHTD = key_BGTD.repeat_interleave(groups, dim=1) if groups > 1 else key_BGTD
    value_BHTD = value_BGTD.repeat_interleave(groups, dim=1) if groups > 1 else value_BGTD
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, attn_mask=mask_B1TT, scale=scaling)

    scaling = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHTT = query_BHTD @ key_BHTD.transpose(2, 3) * scaling
    if softcap is not None:
        scores_BHTT = softcap * torch.tanh(scores_BHTT / softcap)
    scores_BHTT = scores_BHTT.masked_fill(~mask_B1TT, float("-inf"))
    dtype = torch.promote_types(scores_BHTT.dtype, torch.float32)
    if sinks_H is None:
        weights_BHTT = scores_BHTT.softmax(-1, dtype=dtype)
    else:
        sinks_BHT1 = sinks_H.view(1, -1, 1, 1).to(scores_BHTT.dtype).expand(*scores_BHTT.shape[:3], 1)
        weights_BHTT = torch.cat([scores_BHTT, sinks_BHT1], dim=-1).softmax(-1, dtype=dtype)[..., :-1]
    return weights_BHTT.to(value_BHTD.dtype) @ value_BHTD


def _head_mask(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None) -> Tensor:
    return visible(subtree_end_BT, position_ids_BT, window)[:, None]

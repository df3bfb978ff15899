"""The FlexAttention backend, for CUDA.

FlexAttention skips the tiles of the score matrix that hold no visible pair and masks only those that hold some and not
all. Which tiles these are is read off the row in closed form. For a query tile `[q0, q1]` and a key tile before it:

* some pair is visible  <=>  the largest `subtree_end` of the key tile is above `q0`,
* all pairs are visible <=>  the smallest `subtree_end` of the key tile is above `q1`.

Both are exact: the keys lie before `q0`, so a key whose subtree reaches past `q0` is seen by `q0` itself. A tile on
the diagonal always has visible pairs (each position sees itself) and never all. A sliding window of depth adds that
no pair of a full tile is `window` apart, so its deepest query and shallowest key are not, and that a partial tile
keeps a pair that is nearer: for each key, the shallowest of the queries of the tile inside its subtree, a running
minimum.

The tiles equal those of `torch.nn.attention.flex_attention.create_block_mask`, which looks at all `T * T` pairs.

Cost: `O(B * T)` memory and a few small kernels for full attention; `O(B * T * T / 128)` for a window. Rows are padded
to a multiple of 128 here; a batch that has such a length, the same at every step, saves the copy and compiles once.

Shape suffixes: `B` rows, `H` query heads, `G` key and value heads, `T` positions, `D` head size, `N` tiles, `S`
positions of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .visibility import DagVisibility

TILE = 128
"""Side of a tile; a row is padded to a multiple of it."""


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

    Sinks enter after the kernel: they add `exp(sink)` to the denominator of the softmax, so the output shrinks by
    `sigmoid(lse - sink)`, with `lse` the log-sum-exp of the visible scores.

    Raises:
        NotImplementedError: On CPU when a gradient is asked for; FlexAttention has none there.
    """
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHTD, key_BGTD, value_BGTD))
    if needs_gradient and query_BHTD.device.type == "cpu":
        raise NotImplementedError('FlexAttention has no backward on CPU: use attention backend "dense" or "auto"')
    block_mask = visibility.mask(block_mask_of, window, query_BHTD.device)
    length = query_BHTD.shape[2]
    output = _kernel(query_BHTD.device)(
        _pad_to_tile(query_BHTD, dim=2),
        _pad_to_tile(key_BGTD, dim=2),
        _pad_to_tile(value_BGTD, dim=2),
        score_mod=None if softcap is None else _softcap_mod(softcap),
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query_BHTD.shape[1] != key_BGTD.shape[1],
        return_aux=None if sinks_H is None else AuxRequest(lse=True),
    )
    if sinks_H is None:
        return output[:, :, :length]
    output_BHTD, lse_BHT = output[0][:, :, :length], output[1].lse[:, :, :length]
    kept_BHT = torch.sigmoid(lse_BHT - sinks_H.to(lse_BHT.dtype)[:, None])
    return output_BHTD * kept_BHT[..., None].to(output_BHTD.dtype)


def block_mask_of(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None = None) -> BlockMask:
    """Tiles of the score matrix to compute, and which of them to mask.

    Args:
        subtree_end_BT (`torch.Tensor` of shape `(B, T)`, int32):
            One past the last position of each position's subtree.
        position_ids_BT (`torch.Tensor` of shape `(B, T)`, int32):
            Depth of each position.
        window (`int`, *optional*):
            Sliding window in tokens of depth.

    Returns:
        [`~torch.nn.attention.flex_attention.BlockMask`]:
            For `B` rows and all heads, of length `T` rounded up to a multiple of 128, on the device of the vectors.
    """
    length = subtree_end_BT.shape[1]
    position_ids_BT = _pad_to_tile(position_ids_BT, dim=1)
    padded = position_ids_BT.shape[1]
    if padded > length:
        own_end_T = torch.arange(length + 1, padded + 1, device=subtree_end_BT.device, dtype=subtree_end_BT.dtype)
        subtree_end_BT = torch.cat([subtree_end_BT, own_end_T.expand(len(subtree_end_BT), -1)], dim=1)
    some_BNN, all_BNN = _tile_pairs(subtree_end_BT, position_ids_BT, window)
    return BlockMask.from_kv_blocks(
        *_tile_table(some_BNN & ~all_BNN),
        *_tile_table(all_BNN),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(subtree_end_BT, position_ids_BT, window),
        seq_lengths=(padded, padded),
    )


def _tile_pairs(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Tell for each (query tile, key tile) whether some and whether all of its pairs are visible."""
    batch = len(subtree_end_BT)
    end_BNS = subtree_end_BT.view(batch, -1, TILE)
    tile_N = torch.arange(end_BNS.shape[1], device=subtree_end_BT.device)
    first_N1 = tile_N[:, None] * TILE
    before_NN = tile_N < tile_N[:, None]
    all_BNN = before_NN & (end_BNS.amin(2)[:, None, :] >= first_N1 + TILE)
    if window is None:
        some_BNN = before_NN & (end_BNS.amax(2)[:, None, :] > first_N1)
    else:
        depth_BNS = position_ids_BT.view(batch, -1, TILE)
        all_BNN &= depth_BNS.amax(2)[:, :, None] - depth_BNS.amin(2)[:, None, :] < window
        within_BNT = (subtree_end_BT[:, None, :] - first_N1).clamp(max=TILE)
        shallowest_BNT = depth_BNS.cummin(2).values.gather(2, (within_BNT.long() - 1).clamp(min=0))
        near_BNT = (within_BNT > 0) & (shallowest_BNT - position_ids_BT[:, None, :] < window)
        some_BNN = before_NN & near_BNT.view(batch, len(tile_N), len(tile_N), TILE).any(3)
    return some_BNN | torch.eye(len(tile_N), dtype=torch.bool, device=tile_N.device), all_BNN


def _tile_table(tiles_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list, per query tile, the key tiles; in `BlockMask`'s layout, with a head dimension of 1."""
    count_BN = tiles_BNN.sum(2, dtype=torch.int32)
    order_BNN = tiles_BNN.to(torch.int8).argsort(dim=2, descending=True, stable=True).int()
    return count_BN[:, None].contiguous(), order_BNN[:, None].contiguous()


def _mask_mod(
    subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_end_BT[row, key])

    if window is None:
        return sees

    def sees_near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(row, head, query, key) & (position_ids_BT[row, query] - position_ids_BT[row, key] < window)

    return sees_near


@lru_cache
def _softcap_mod(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def cap(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _kernel(device: torch.device) -> Callable[..., Any]:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex_attention()


@lru_cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _pad_to_tile(x: Tensor, dim: int) -> Tensor:
    missing = -x.shape[dim] % TILE
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x

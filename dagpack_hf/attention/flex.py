"""The FlexAttention backend, for CUDA.

FlexAttention skips the tiles of the score matrix that hold no visible pair and masks only those that hold some and not
all. Which tiles these are is read off the row in closed form. For a query tile `[q0, q1]` and a key tile before it:

* some pair is visible  <=>  the largest `subtree_end` of the key tile is above `q0`,
* all pairs are visible <=>  the smallest `subtree_end` of the key tile is above `q1`.

Both are exact: the keys lie before `q0`, so a key whose subtree reaches past `q0` is seen by `q0` itself. A tile on
the diagonal always has visible pairs (each position sees itself) and never all. A sliding window of depth adds that
no pair of a full tile is `window` apart, so its deepest query and shallowest key are not, and that some pair of a
partial tile is nearer. The nearest pair is found from where subtrees end. A key is seen by all queries of the tiles
between its own and the one in which its subtree ends, so for these count the deepest such key and the shallowest
query; and by the first queries of the one in which it ends, which happens in one tile for each key.

The tiles equal those of `torch.nn.attention.flex_attention.create_block_mask`, which looks at all `T * T` pairs. They
hang on a row's vectors alone, so one mask serves all layers, the backward pass, and layers computed again by gradient
checkpointing.

Cost of the mask: 50 small kernels, 80 with a window, and `O(B * T + B * (T / 128) ** 2)` memory either way: 60 to 80
bytes for each pair of tiles, that is 59 MiB for a row of 131,072 and 76 with a window, of which 16 stay. It is made
without reading values back, so nothing waits for the GPU.

Compiled once for each length, window, and grad mode; the trees do not matter. Rows are padded here to one of eight
lengths between a power of two and the next, so that batches of any width need few kernels. Padding costs attention
next to nothing; a batch with such a length saves the copy.

Shape suffixes: `B` rows, `H` query heads, `G` key and value heads, `T` positions, `D` head size, `N` tiles, `S`
positions of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .visibility import DagVisibility

TILE = 128
"""Side of a tile; a row is padded to a multiple of it."""

_COMPILATIONS = 128
"""Kernels for different lengths, windows and kinds of models, after which one more is an error.

PyTorch's own limit is 8, after which it falls back to writing out all scores.
"""

_OUT_OF_SIGHT = -(2**30)


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
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Attention of each position to what it sees. Arguments and result are those of [`dense.attend`].

    Sinks enter after the kernel: they add `exp(sink)` to the denominator of the softmax, so the output shrinks by
    `sigmoid(lse - sink)`, with `lse` the log-sum-exp of the visible scores.

    `kernel_options` are passed on to FlexAttention, see `torch.nn.attention.flex_attention.FlexKernelOptions`; smaller
    blocks, such as `{"BLOCK_M": 64, "BLOCK_N": 64}`, help where a GPU has too little shared memory for a head size.
    Under autocast queries, keys and values are cast.

    Raises:
        NotImplementedError: On CPU when a gradient is asked for; FlexAttention has none there.
    """
    device = query_BHTD.device
    if device.type == "cpu":
        _refuse_backward_on_cpu(query_BHTD, key_BGTD, value_BGTD)
    block_mask = visibility.mask(block_mask_of, window, device)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query_BHTD, key_BGTD, value_BGTD = (x.to(dtype) for x in (query_BHTD, key_BGTD, value_BGTD))
    length = query_BHTD.shape[2]
    output = _kernel(device)(
        _pad(query_BHTD, dim=2),
        _pad(key_BGTD, dim=2),
        _pad(value_BGTD, dim=2),
        score_mod=None if softcap is None else _softcap_mod(softcap),
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query_BHTD.shape[1] != key_BGTD.shape[1],
        return_aux=None if sinks_H is None else AuxRequest(lse=True),
        kernel_options=None if kernel_options is None else dict(kernel_options),
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
            For `B` rows and all heads, of length [`padded_length`]`(T)`, on the device of the vectors.
    """
    length = subtree_end_BT.shape[1]
    position_ids_BT = _pad(position_ids_BT, dim=1)
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


def padded_length(length: int) -> int:
    """Length that a row is padded to: a multiple of 128, at most an eighth longer.

    Example:
        >>> [padded_length(length) for length in (1, 128, 129, 4000, 4096, 4097, 100_000)]
        [128, 128, 256, 4096, 4096, 4608, 106496]
    """
    tiles = -(-length // TILE)
    step = 1 << max(tiles.bit_length() - 4, 0)
    return -(-tiles // step) * step * TILE


def _tile_pairs(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Tell for each (query tile, key tile) whether some and whether all of its pairs are visible."""
    end_BNS = subtree_end_BT.unflatten(1, (-1, TILE))
    tile_N = torch.arange(end_BNS.shape[1], device=subtree_end_BT.device)
    first_N1 = tile_N[:, None] * TILE
    before_NN = tile_N < tile_N[:, None]
    all_BNN = before_NN & (end_BNS.amin(2)[:, None, :] >= first_N1 + TILE)
    if window is None:
        some_BNN = before_NN & (end_BNS.amax(2)[:, None, :] > first_N1)
    else:
        depth_BNS = position_ids_BT.unflatten(1, (-1, TILE))
        all_BNN &= depth_BNS.amax(2)[:, :, None] - depth_BNS.amin(2)[:, None, :] < window
        some_BNN = before_NN & (_nearness(subtree_end_BT, depth_BNS) > -window)
    return some_BNN | torch.eye(len(tile_N), dtype=torch.bool, device=tile_N.device), all_BNN


def _nearness(subtree_end_BT: Tensor, depth_BNS: Tensor) -> Tensor:
    """Depth of a key above that of a query which sees it, the largest of each (query tile, earlier key tile)."""
    batch, tiles, _ = depth_BNS.shape
    last_BT = subtree_end_BT.long() - 1  # the last query that sees the key
    own_T = torch.arange(last_BT.shape[1], device=last_BT.device) // TILE
    pair_BT = last_BT // TILE * tiles + own_T

    def largest_where_it_ends(value_BT: Tensor) -> Tensor:
        value_BP = value_BT.new_full((batch, tiles * tiles), _OUT_OF_SIGHT)
        return value_BP.scatter_reduce_(1, pair_BT, value_BT, "amax").unflatten(1, (tiles, tiles))

    depth_BT = depth_BNS.flatten(1)
    shallowest_BT = depth_BNS.cummin(2).values.flatten(1)  # so far in its tile
    ending_BNN = largest_where_it_ends(depth_BT - shallowest_BT.gather(1, last_BT))
    deepest_BNN = largest_where_it_ends(depth_BT).flip(1).cummax(1).values.flip(1)
    passing_BNN = F.pad(deepest_BNN[:, 1:], (0, 0, 0, 1), value=_OUT_OF_SIGHT)  # ends in a later tile
    return torch.maximum(ending_BNN, passing_BNN - depth_BNS.amin(2)[:, :, None])


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


def _refuse_backward_on_cpu(*inputs: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise NotImplementedError(
            'FlexAttention has no backward on CPU: use attention backend "dense", "tile" or "auto"'
        )


def _kernel(device: torch.device) -> Callable[..., Any]:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex_attention()


@lru_cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload]  # the stubs lack two arguments
        flex_attention, fullgraph=True, dynamic=False, recompile_limit=_COMPILATIONS, isolate_recompiles=True
    )


def _pad(x: Tensor, dim: int) -> Tensor:
    missing = padded_length(x.shape[dim]) - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x

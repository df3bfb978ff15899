"""What each position of a row may see.

The rule is one line. Positions stand in depth-first preorder, so the descendants of `j` are the positions right after
it, up to `subtree_end[j]`, and a position sees its ancestors and itself:

    i sees j  <=>  j <= i < subtree_end[j]  and  (no window, or position_ids[i] - position_ids[j] < window)

A sliding window counts depth, not row index: between a position and its ancestor lie the positions of other branches,
which the unpacked sequence does not have.

[`visible`] writes the rule out as a dense mask; it is the specification that every backend is tested against.
[`DagVisibility`] carries the rule through a forward pass. A mask depends on the row and on the window only, so it is
built once per forward for each distinct window (one or two in all models known), not once per layer.

Cost: the two vectors, plus what the backends build: `B * T * T` bytes per window for the dense one (17 MB for one row
of 4096), `O(B * T)` for the others.

Shape suffixes: `B` rows of the batch, `T` positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Mask = TypeVar("Mask")


def visible(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None = None) -> Tensor:
    """Dense mask of the pairs (query, key) that see each other.

    Args:
        subtree_end_BT (`torch.Tensor` of shape `(B, T)`, integer):
            One past the last position of each position's subtree.
        position_ids_BT (`torch.Tensor` of shape `(B, T)`, integer):
            Depth of each position.
        window (`int`, *optional*):
            Sliding window, in tokens of depth, the position itself included. `None` means full attention.

    Returns:
        `torch.Tensor` of shape `(B, T, T)`, bool:
            `[b, i, j]` tells whether query `i` sees key `j`.

    Example:
        >>> visible(torch.tensor([[3, 2, 3]]), torch.tensor([[0, 1, 1]])).int()  # a root with two children
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [1, 0, 1]]], dtype=torch.int32)
    """
    index_T = torch.arange(subtree_end_BT.shape[1], device=subtree_end_BT.device)
    mask_BTT = (index_T[:, None] >= index_T) & (index_T[:, None] < subtree_end_BT[:, None, :])
    if window is not None:
        mask_BTT &= position_ids_BT[:, :, None] - position_ids_BT[:, None, :] < window
    return mask_BTT


class DagVisibility:
    """The rows of one batch, as every attention layer of one forward pass receives them.

    Make one per forward and pass it as `model(..., position_ids=position_ids, dag_visibility=visibility)`. Layers
    recomputed by gradient checkpointing get the same object and so the same masks.

    It is a plain class on purpose: DDP, FSDP and accelerate hand on an object they do not know as it is, but copy
    dataclasses field by field and send whatever has a `.to` to a device, which would lose the masks already built.

    Args:
        subtree_end (`torch.Tensor` of shape `(B, T)`, integer):
            One past the last position of each position's subtree; `i + 1` for padding, which sees itself only.
        position_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Depth of each position; the same values that the model gets.
        backend (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"dense"`, `"tile"` or `"flex"`; see [`select_backend`].

    Attributes:
        windows (`set`):
            The sliding windows that the layers have asked for so far, `None` for full attention.

    Raises:
        ValueError: If the vectors differ in shape or are not integers, or (looked at on CPU only, since it would
            stall a GPU) a `subtree_end` is not in `i + 1 .. T`.
    """

    def __init__(self, subtree_end: Tensor, position_ids: Tensor, backend: str = "auto"):
        if subtree_end.dim() != 2 or subtree_end.shape != position_ids.shape:
            raise ValueError(
                f"subtree_end and position_ids must both have shape (batch, length), got {tuple(subtree_end.shape)} "
                f"and {tuple(position_ids.shape)}"
            )
        for name, vector in (("subtree_end", subtree_end), ("position_ids", position_ids)):
            if vector.is_floating_point() or vector.dtype == torch.bool:
                raise ValueError(f"{name} must hold integers, got {vector.dtype}")
        if subtree_end.device.type == "cpu":
            _check_ends(subtree_end)
        self.subtree_end_BT = subtree_end.int()
        self.position_ids_BT = position_ids.int()
        self.backend = backend
        self.windows: set[int | None] = set()
        self._masks: dict[tuple[object, int | None, torch.device], object] = {}

    @property
    def shape(self) -> torch.Size:
        """`(B, T)`."""
        return self.subtree_end_BT.shape

    def mask(
        self, build: Callable[[Tensor, Tensor, int | None], Mask], window: int | None, device: torch.device
    ) -> Mask:
        """Return `build(subtree_end_BT, position_ids_BT, window)` on `device`, built at the first call.

        Args:
            build (`Callable`):
                Makes a backend's mask. It is part of the key, so pass the same function each time.
            window (`int`, *optional*):
                Sliding window in tokens of depth. A window of at least `T` hides nothing and counts as `None`.
            device (`torch.device`):
                Where the layer computes; layers may lie on several devices.

        Returns:
            What `build` returned.
        """
        if window is not None and window >= self.shape[1]:
            window = None
        key = (build, window, device)
        if key not in self._masks:
            self._masks[key] = build(self.subtree_end_BT.to(device), self.position_ids_BT.to(device), window)
        return self._masks[key]  # type: ignore[return-value]


def _check_ends(subtree_end_BT: Tensor) -> None:
    length = subtree_end_BT.shape[1]
    wrong_BT = (subtree_end_BT <= torch.arange(length)) | (subtree_end_BT > length)
    if wrong_BT.any():
        row, position = wrong_BT.nonzero()[0].tolist()
        found = subtree_end_BT[row, position].item()
        raise ValueError(
            f"subtree_end[{row}, {position}] is {found}, outside {position + 1}..{length}:"
            " every position, padding included, must see at least itself"
        )

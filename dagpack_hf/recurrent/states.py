"""What the recurrent layers of one forward pass receive: a plan, with its indices on the device of the layer.

It travels as the keyword argument `dag_states` of `model(...)`, which transformers hands on to the functions that
carry state. So adapters and gradient checkpointing, which call the layers again, have it too.

Cost: the indices, 16 bytes for each place, are copied once for each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .plan import Call, Layout, StatePlan

KEYWORD = "dag_states"
"""Keyword argument of `model(...)`."""

Made = TypeVar("Made")


class Places:
    """Positions laid out otherwise, on a device.

    Args:
        layout ([`Layout`]):
            Where each position goes.
        device (`torch.device`):
            Where the layer computes.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self._position_M = torch.from_numpy(layout.position_M).to(device)
        self._place_N = torch.from_numpy(layout.place_N).to(device)
        self._empty = torch.from_numpy(layout.empty).to(device) if len(layout.empty) else None

    def spread(self, x_N: Tensor) -> Tensor:
        """Lay positions out; empty places are zero.

        Args:
            x_N (`torch.Tensor` of shape `(N, ...)`):
                A value for each position.

        Returns:
            `torch.Tensor` of shape `(M, ...)`: A value for each place.
        """
        x_M = x_N.index_select(0, self._position_M)
        return x_M if self._empty is None else x_M.index_fill_(0, self._empty, 0)

    def collect(self, x_M: Tensor) -> Tensor:
        """Take from each position's place; the reverse of [`spread`].

        Args:
            x_M (`torch.Tensor` of shape `(M, ...)`):
                A value for each place.

        Returns:
            `torch.Tensor` of shape `(N, ...)`: A value for each position, any for padding.
        """
        return x_M.index_select(0, self._place_N)


class DagStates:
    """How states pass along the rows of a batch, as every recurrent layer of one forward pass receives it.

    It is a plain class on purpose, as [`~dagpack_hf.attention.DagVisibility`] is: what wraps models hands on an object
    it does not know as it is.

    Args:
        plan ([`StatePlan`]):
            The plan of the batch.

    Attributes:
        watch (`Callable`, *optional*):
            Called with the name of each function that is reached; the self-check sets it.
    """

    def __init__(self, plan: StatePlan):
        self.plan = plan
        self.watch: Callable[[str], None] | None = None
        self._made: dict[tuple[object, ...], object] = {}

    def check_shape(self, function: str, batch: int, length: int) -> None:
        """Refuse a call for other rows than those of the plan.

        Args:
            function (`str`):
                The function that is called.
            batch (`int`):
                Its rows.
            length (`int`):
                Their positions.

        Raises:
            ValueError: If the plan is for others.
        """
        if (batch, length) != self.plan.shape:
            rows, width = self.plan.shape
            raise ValueError(
                f"{function} got {batch} rows of {length} positions, but {KEYWORD} is for {rows} rows of {width}. "
                "Packed rows cannot use a cache, prompt tuning, context parallelism or torch.nn.DataParallel"
            )

    def runs(self, above: int, device: torch.device) -> Places:
        """Runs after `above` ancestors each, see [`StatePlan.runs`]."""
        return self._once(("runs", above, device), lambda: Places(self.plan.runs(above), device))

    def cells(self, length: int, device: torch.device) -> tuple[Places, list[Tensor]]:
        """Cells of `length` depths, and for each number of cells above the parents, see [`StatePlan.cells`]."""
        return self._once(("cells", length, device), lambda: _cells(self.plan, length, device))

    def chains(self, device: torch.device) -> tuple[Places, list[list[PlacedCall]]]:
        """Chains of cells, and the calls of each level, see [`StatePlan.chains`]."""
        return self._once(("chains", device), lambda: _chains(self.plan, device))

    def _once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]


class PlacedCall:
    """A [`Call`] with its indices on a device.

    Attributes:
        shape (`tuple[int, int]`): Chains and positions of each.
        parents_C (`torch.Tensor`, int64, *optional*): The chain of the level before from which each goes on.
        goes_on (`bool`): Whether a later level needs the states at the ends.
    """

    def __init__(self, call: Call, device: torch.device):
        self.shape = call.shape
        self.goes_on = call.goes_on
        self.parents_C = None if call.parents is None else torch.from_numpy(call.parents).to(device)


def _cells(plan: StatePlan, length: int, device: torch.device) -> tuple[Places, list[Tensor]]:
    cells = plan.cells(length)
    return Places(cells.layout, device), [torch.from_numpy(parents).to(device) for parents in cells.steps]


def _chains(plan: StatePlan, device: torch.device) -> tuple[Places, list[list[PlacedCall]]]:
    chains = plan.chains(plan.chain_length())
    levels = [[PlacedCall(call, device) for call in calls] for calls in chains.levels]
    return Places(chains.layout, device), levels


def plan_of(subtree_end: Tensor, lengths: Tensor | None = None) -> StatePlan:
    """Plan a batch of which only tensors are there.

    Args:
        subtree_end (`torch.Tensor` of shape `(B, T)`, integer):
            One past the last position of each position's subtree. On a GPU this waits for it; a collator that plans
            rows before they are sent there does not.
        lengths (`torch.Tensor` of shape `(B,)`, integer, *optional*):
            Positions of each row before its padding.

    Returns:
        [`StatePlan`]: The plan.
    """
    ends: np.ndarray = subtree_end.cpu().numpy()
    return StatePlan(ends, None if lengths is None else lengths.cpu().numpy())

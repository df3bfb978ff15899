"""The functions of transformers that carry state along a row, and what stands in for them on packed rows.

Each modeling file has these functions at its top level and calls them by name, with the keyword arguments of
`model(...)`. A stand-in takes `dag_states` out of them, or makes it of `dag_visibility`, once for each forward pass.
If there is neither, it calls the original and nothing else.

The names, and that keyword arguments reach them, are those of the transformers named in [`TESTED`]. In others the
self-check decides: what is not reached, or computed wrongly, is refused by it.

Cost: a dictionary look-up for each call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor

from .convolution import convolve
from .delta_rule import delta_rule
from .mamba2 import scan
from .states import KEYWORD, DagStates, plan_of

logger = logging.getLogger(__name__)

TESTED = (Version("5.24"), Version("5.25"))
"""From the first of these versions of transformers, up to but without the second, recurrent layers are tested."""

CARRIERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan,
    "torch_chunk_gated_delta_rule": delta_rule,
}
"""Functions that packed rows are computed with, and how."""

SHORTCUTS = frozenset({"mamba2_split_conv1d_scan_combined"})
"""Functions that may answer `None`; the layer then calls others in their place."""

UNKNOWN_CARRIERS = frozenset({"mamba_inner_fn", "mamba_selective_scan"})
"""Functions that carry state, and for which there is no way here."""

STEPS = frozenset(
    {
        "causal_conv1d_update",
        "mamba2_selective_state_update",
        "recurrent_kimi_delta_attention",
        "torch_recurrent_gated_delta_rule",
    }
)
"""Functions that compute one position from a cache, when generating."""

NAMES = frozenset(CARRIERS) | SHORTCUTS | UNKNOWN_CARRIERS | STEPS

_STATES = (
    "cu_seqlens",
    "initial_state",
    "initial_states",
    "output_final_state",
    "return_final_states",
    "seq_idx",
)
"""Arguments that begin or end in a state, or cut the row into sequences."""


def stand_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that carries state.

    Args:
        name (`str`):
            Its name, one of [`NAMES`].
        original (`Callable`):
            The function.

    Returns:
        `Callable`: Calls `original`, unless it is given `dag_states` or `dag_visibility`.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        visibility = kwargs.get("dag_visibility")
        states: DagStates | None = kwargs.pop(KEYWORD, None)
        if states is None and visibility is not None:
            states = visibility.mask(_states_of, None, visibility.subtree_end_BT.device)
        if states is None:
            return original(*args, **kwargs)
        if name in SHORTCUTS:
            return None
        if states.watch is not None:
            states.watch(name)
        if name not in CARRIERS:
            raise ValueError(f"{name} is not known for packed rows; call the model with use_cache=False")
        for each in _STATES:
            if (given := kwargs.pop(each, None)) is not None and given is not False:
                raise ValueError(f"{name} got {each} beside {KEYWORD}, which says all about the states of packed rows")
        if states.plan.is_empty:
            return original(*args, **kwargs)  # nothing is read off rows of padding only
        return CARRIERS[name](original, states, *args, **kwargs)

    call.__dict__[_ORIGINAL] = original
    return call


_ORIGINAL = "_dagpack_original"


def is_stand_in(function: Callable[..., Any]) -> bool:
    """Whether a function was made by [`stand_in`]."""
    return _ORIGINAL in getattr(function, "__dict__", {})


def _states_of(subtree_end_BT: Tensor, position_ids_BT: Tensor, window: int | None) -> DagStates:
    """The states of the rows that a visibility is of, kept there for all layers."""
    return DagStates(plan_of(subtree_end_BT))


@functools.cache
def warn_if_untested() -> None:
    """Say once that this version of transformers is not one that recurrent layers are tested with."""
    version = Version(transformers.__version__)
    low, high = TESTED
    if not low <= Version(version.base_version) < high:
        logger.warning(
            "Recurrent layers on packed rows are tested with transformers %s up to but without %s; this is %s. The "
            "self-check at start compares with plain sequences and refuses what it finds wrong. If it refuses this "
            "model, install a tested version, and report it.",
            low,
            high,
            version,
        )

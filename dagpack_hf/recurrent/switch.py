"""Switching the recurrent layers of a model to packed rows and back.

The functions that carry state are replaced in the model's modeling file. The stand-ins do what these did, for any
model of that file, unless they are given the rows of a batch.

Cost: a look at the modules that carry state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .functions import is_stand_in, stand_in, warn_if_untested
from .modules import recurrent_modules
from .plan import StatePlan
from .states import KEYWORD, DagStates


def install(model: nn.Module) -> Callable[[], None]:
    """Replace the functions that carry state, for good or until what is returned is called.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not. One without recurrent layers is left alone.

    Returns:
        `Callable`: Puts back what was replaced here. What stood in before is left to who replaced it.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in recurrent_modules(model):
        for name in sorted(module.functions):
            original = module.namespace[name]
            if not is_stand_in(original):
                warn_if_untested()
                module.namespace[name] = stand_in(name, original)
                replaced.append((module.namespace, name, original))

    def put_back() -> None:
        for namespace, name, original in replaced:
            namespace[name] = original
        replaced.clear()

    return put_back


@contextmanager
def packed_states(model: nn.Module) -> Iterator[None]:
    """Let the recurrent layers of a model take packed rows inside a `with` block.

    The block must hold the backward pass too, since gradient checkpointing calls the layers again. Blocks may lie
    inside each other.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
    """
    put_back = install(model)
    try:
        yield
    finally:
        put_back()


def states_for(model: nn.Module, plan: StatePlan) -> dict[str, Any]:
    """Make what a model needs, besides what its attention needs, to compute the rows of a batch.

    Call it once for each forward pass:

    ```python
    model(input_ids=input_ids, use_cache=False, **inputs_for(model, visibility), **states_for(model, plan))
    ```

    Without it the layers plan the rows themselves, from the visibility, which on a GPU waits for them to arrive.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not.
        plan ([`StatePlan`]):
            The plan of the batch.

    Returns:
        `dict`: `dag_states`, or nothing for a model without recurrent layers.
    """
    return {KEYWORD: DagStates(plan)} if recurrent_modules(model) else {}

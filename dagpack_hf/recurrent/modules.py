"""Which modules of a model carry state along the row, and whether that is known here.

Nothing is listed by the name of a model. What a module's forward calls stands in its code: the functions of its
modeling file that carry state, by name. A module that carries state in code of its own is none of these; nothing here
reaches it, and the types of layers in the config, or the self-check, tell of it.

Cost: a walk over the modules, milliseconds; kept for each model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .functions import NAMES, UNKNOWN_CARRIERS


@dataclass(frozen=True, eq=False)
class RecurrentModule:
    """A module that carries state.

    Attributes:
        name (`str`):
            Where it stands in the model.
        class_name (`str`):
            What it is.
        namespace (`dict`):
            The top level of its modeling file, where its forward looks functions up.
        functions (`frozenset[str]`):
            Functions with state that its forward names.
    """

    name: str
    class_name: str
    namespace: dict[str, Any]
    functions: frozenset[str]


def recurrent_modules(model: nn.Module) -> list[RecurrentModule]:
    """Find the modules that carry state.

    Args:
        model (`torch.nn.Module`):
            A model, wrapped or not.

    Returns:
        `list` of [`RecurrentModule`]: In the order of the model; empty for models with attention only.
    """
    if model not in _FOUND:
        _FOUND[model] = [found for name, module in model.named_modules() if (found := _look_at(name, module))]
    return _FOUND[model]


_FOUND: WeakKeyDictionary[nn.Module, list[RecurrentModule]] = WeakKeyDictionary()


def obstacles(model: nn.Module) -> Iterator[str]:
    """Reasons why the recurrent layers of a model cannot compute packed rows.

    Args:
        model (`torch.nn.Module`):
            A model, wrapped or not.

    Yields:
        `str`: A reason; none for models without such layers.
    """
    modules = recurrent_modules(model)
    for class_name, functions in dict.fromkeys((module.class_name, module.functions) for module in modules):
        if unknown := sorted(functions & UNKNOWN_CARRIERS):
            yield (
                f"{class_name} carries its state along the row with {unknown[0]}, for which there is no way to go on "
                "from a branch point here; use a model with attention, gated DeltaNet, Mamba-2 or short convolutions"
            )
    if modules and getattr(model, "use_kernels", False):
        yield (
            "kernels of the Hub take the place of the functions that carry state along the row; load the model with "
            "use_kernels=False"
        )


def _look_at(name: str, module: nn.Module) -> RecurrentModule | None:
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    functions = NAMES & set(forward.__code__.co_names)
    return RecurrentModule(name, type(module).__name__, forward.__globals__, functions) if functions else None

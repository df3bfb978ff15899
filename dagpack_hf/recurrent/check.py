"""Does every recurrent module of a model get the states of the rows?

That a function is replaced in the modeling file says nothing of whether a layer calls it, or hands on what it gets. So
each recurrent module is watched while the model computes a row.

Cost: two hooks for each recurrent module, for one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .functions import CARRIERS
from .modules import RecurrentModule, recurrent_modules
from .states import KEYWORD, DagStates

Reached = dict[str, set[str]]
"""The functions that each recurrent module called with the states, by the name of the module; only those that ran."""


@contextmanager
def watched(model: nn.Module, states: DagStates) -> Iterator[Reached]:
    """Record inside a `with` block which functions each recurrent module calls with the states of a row.

    Args:
        model (`torch.nn.Module`):
            The model, inside [`packed_states`].
        states ([`DagStates`]):
            What the forward pass in the block is given.

    Yields:
        `dict[str, set[str]]`: The functions, filled as modules are called.
    """
    reached: Reached = {}
    running: list[str] = []
    handles: list[RemovableHandle] = []

    def begin(name: str) -> Any:
        def hook(module: nn.Module, args: tuple) -> None:
            running.append(name)
            reached.setdefault(name, set())

        return hook

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        running.pop()

    def record(function: str) -> None:
        if running:
            reached[running[-1]].add(function)

    try:
        for found in recurrent_modules(model):
            module = model.get_submodule(found.name)
            handles += [module.register_forward_pre_hook(begin(found.name)), module.register_forward_hook(end)]
        states.watch = record
        yield reached
    finally:
        states.watch = None
        for handle in handles:
            handle.remove()


def unreached(model: nn.Module, reached: Reached) -> Iterator[str]:
    """Reasons why a model is wrong on packed rows, of what [`watched`] recorded.

    Args:
        model (`torch.nn.Module`):
            The model.
        reached (`dict[str, set[str]]`):
            What was recorded.

    Yields:
        `str`: A reason for each module that did not call what it names with the states.
    """
    modules = recurrent_modules(model)
    if modules and not reached:
        yield f"none of its recurrent layers ran, {modules[0].name} ({modules[0].class_name}) and others"
    for module in modules:
        if missing := _missing(module, reached):
            yield (
                f"{module.class_name} at {module.name} did not call {missing[0]} with {KEYWORD}, so its state passes "
                "from one branch to the next. The layers above it keep keyword arguments of model(...) to themselves, "
                "or something has replaced the function"
            )


def _missing(module: RecurrentModule, reached: Reached) -> list[str]:
    if module.name not in reached:
        return []
    return sorted((module.functions & set(CARRIERS)) - reached[module.name])

"""The options of packing, checked before anything is read. The trainer's options of other names are checked alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagpack_hf.layout import LOSS_WEIGHTINGS
from dagpack_hf.overflow import OVERFLOW_CHOICES
from dagpack_hf.pack import STRATEGIES


@dataclass(frozen=True)
class PackOptions:
    """The options of packing; see `pack_dataset`.

    Raises:
        ValueError: an option has no such value.
    """

    max_length: int
    loss_weighting: str = "once"
    overflow: str = "error"
    strategy: str = "best"
    effort: float = 0.0
    bucket_size: int | None = None
    seed: int | None = None
    count_sequences: bool = False

    def __post_init__(self) -> None:
        check_choice("loss_weighting", self.loss_weighting, LOSS_WEIGHTINGS)
        check_choice("overflow", self.overflow, OVERFLOW_CHOICES)
        check_choice("strategy", self.strategy, STRATEGIES)
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}.")
        check_seconds("effort", self.effort)
        if self.bucket_size is not None:
            check_examples("bucket_size", self.bucket_size)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that an option does not have."""
    if value not in choices:
        shown = list(map(repr, choices))
        listed = " or ".join(shown) if len(shown) == 2 else f"one of {', '.join(shown)}"
        raise ValueError(f"{name} must be {listed}, got {value!r}.")


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is no time to search for."""
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {value!r}.")


def check_examples(name: str, value: Any) -> None:
    """Refuse what is no number of examples."""
    if not (isinstance(value, int | np.integer) and value >= 1):
        raise ValueError(f"{name} must be at least 1 example, got {value!r}.")

"""Compiled loops over nodes and tokens.

Each module holds the loops of one part, which the part of the same name calls with numpy arrays. They are compiled on
first use and kept in numba's cache, beside the code or where `NUMBA_CACHE_DIR` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a function for the types it is called with."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def inlined(function: F) -> F:
    """Compile a function into the kernels that call it."""
    return cast(F, numba.njit(cache=True, inline="always")(function))

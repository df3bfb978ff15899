"""Compiled loops over nodes and tokens.

Each module holds the loops of one part, which the part of the same name calls with numpy arrays. They are compiled on
first use and kept in numba's cache: beside the code, where `NUMBA_CACHE_DIR` says, or in the user's cache folder.

numba compiles a loop anew when its own file has changed, not when the file of a loop that it calls has. So what is
kept is dropped when any of these files has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a function for the types it is called with."""
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    if isinstance(compiled, numba.core.registry.CPUDispatcher):  # a plain function under NUMBA_DISABLE_JIT
        drop_stale(Path(str(compiled.stats.cache_path)), Path(__file__).parent)
    return cast(F, compiled)


def inlined(function: F) -> F:
    """Compile a function into the kernels that call it."""
    return cast(F, numba.njit(cache=True, inline="always")(function))


@cache
def drop_stale(kept: Path, folder: Path) -> None:
    """Drop the compiled loops that are kept in one folder, if the code in another is not that which they were made of.

    Args:
        kept: where numba keeps the loops of `folder`, and of no other.
        folder: the code.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    stamp = kept / "kernels.digest"
    try:
        if stamp.is_file() and stamp.read_text("ascii") == digest.hexdigest():
            return
        for path in kept.glob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        kept.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest.hexdigest(), "ascii")
    except OSError:
        pass  # the folder cannot be written, so numba keeps nothing in it either

"""Compiled loops over nodes and tokens.

Each module holds the loops of one part, which the part of the same name calls with numpy arrays. They are compiled on
first use and kept in numba's cache, beside the code or where `NUMBA_CACHE_DIR` says.

numba compiles a loop anew when its own file has changed, not when the file of a loop that it calls has. So what is
kept beside the code is dropped when any of these files has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a function for the types it is called with."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def inlined(function: F) -> F:
    """Compile a function into the kernels that call it."""
    return cast(F, numba.njit(cache=True, inline="always")(function))


def drop_stale(folder: Path) -> None:
    """Drop compiled loops beside the code if some of the code in the folder is not that which they were made of."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    cache = folder / "__pycache__"
    stamp = cache / "kernels.digest"
    try:
        if stamp.is_file() and stamp.read_text("ascii") == digest.hexdigest():
            return
        for path in cache.glob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        cache.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest(), "ascii")
    except OSError:
        pass  # the folder cannot be written, so numba keeps nothing in it either


drop_stale(Path(__file__).parent)

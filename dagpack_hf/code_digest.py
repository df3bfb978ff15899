"""Hash of a part of the code, so that results in a cache are not taken for those of another version."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xxhash

TRIE = ("trie", "growth", "spans", "tally", "token_trees", "kernels")
"""Modules and folders that decide what a forest is."""


_PACKAGE = Path(__file__).parent


@cache
def code_digest(*names: str, package: Path = _PACKAGE) -> str:
    """Hash the sources of modules, and of all modules in folders, of this package.

    Args:
        *names: modules without `.py`, or folders, below the package.
        package: folder of the package.

    Raises:
        FileNotFoundError: there is no such module.
    """
    digest = xxhash.xxh3_128()
    for name in names:
        folder = package / name
        for path in sorted(folder.glob("*.py")) if folder.is_dir() else [package / f"{name}.py"]:
            digest.update(path.read_bytes())
    return digest.hexdigest()

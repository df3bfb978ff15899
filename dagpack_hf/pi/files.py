"""Which session files there are, and how far reading them has come."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from datasets.utils import tqdm

from dagpack_hf.pi.options import PathLike

Result = TypeVar("Result")


def default_session_dir() -> Path:
    """Return pi's own session folder.

    `PI_CODING_AGENT_SESSION_DIR`, else `sessions` under `PI_CODING_AGENT_DIR`, else `~/.pi/agent/sessions`.
    """
    if sessions := os.environ.get("PI_CODING_AGENT_SESSION_DIR"):
        return Path(sessions).expanduser()
    agent = os.environ.get("PI_CODING_AGENT_DIR")
    return (Path(agent).expanduser() if agent else Path.home() / ".pi" / "agent") / "sessions"


def session_files(paths: PathLike | Iterable[PathLike] | None = None) -> list[str]:
    """List session files.

    Args:
        paths: A file, a folder (searched at any depth for `*.jsonl`), several of these, or `None` for pi's own folder.

    Returns:
        Paths in the order given, those of a folder sorted; each file once.

    Raises:
        FileNotFoundError: If a path, or pi's own folder, is not there.
    """
    if paths is None:
        paths = default_session_dir()
        if not paths.exists():
            raise FileNotFoundError(
                f"pi's session folder {paths} does not exist: name the files or folders to read, or set "
                "PI_CODING_AGENT_SESSION_DIR"
            )
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: dict[str, str] = {}
    for path in (os.path.expanduser(os.fspath(path)) for path in given):
        if not os.path.exists(path):
            raise FileNotFoundError(f"no such session file or folder: {path}")
        for file in _files_under(path) if os.path.isdir(path) else [path]:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def _files_under(folder: str) -> list[str]:
    found = []
    for parent, _, names in os.walk(folder):
        found += [os.path.join(parent, name) for name in names if name.endswith(".jsonl")]
    return sorted(path for path in found if os.path.isfile(path))


def with_progress(files: Sequence[str], results: Iterable[Result], *, disable: bool) -> Iterator[Result]:
    """Yield one result for each file, with a bar that moves by bytes.

    Args:
        files: Paths of files.
        results: As many.
        disable: Show nothing.
    """
    sizes = [file_size(path) for path in files]
    with tqdm(total=sum(sizes), desc="Reading sessions", unit="B", unit_scale=True, disable=disable) as bar:
        for result, size in zip(results, sizes, strict=True):
            yield result
            bar.update(size)


def file_size(path: str) -> int:
    """Return the size of a file in bytes, 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

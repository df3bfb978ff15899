"""Progress of rendering by turns, whichever processes they are rendered in.

Conversations differ in length by orders of magnitude, so a bar over rows says little. Every turn adds one byte to a
file that all processes append to, and the size of that file is what the bar shows.

Cost. A microsecond and a half for each turn.
"""

from __future__ import annotations

import os
import tempfile
import threading
from types import TracebackType

import datasets
from datasets.utils import tqdm

_FILE = "DAGPACK_TURN_PROGRESS"
"""Environment variable with the file of the bar that is shown. Processes that start meanwhile inherit it."""

_INTERVAL = 0.2


class TurnProgress:
    """Shows a bar over turns in place of the bar of `datasets.map`.

    Args:
        total: number of turns; if it is not known, `datasets` shows its own bar over conversations.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._shown = total is not None and not datasets.are_progress_bars_disabled()

    def __enter__(self) -> TurnProgress:
        if self._shown:
            descriptor, self._path = tempfile.mkstemp(prefix="dagpack-turns-")
            os.close(descriptor)
            os.environ[_FILE] = self._path
            self._bar = tqdm(total=self._total, desc="Rendering turns", unit=" turns")
            datasets.disable_progress_bars()
            self._done = threading.Event()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._done.set()
            self._thread.join()
            self._show()
            self._bar.leave = self._bar.n > 0  # nothing was rendered if the result was in the cache
            self._bar.close()
            datasets.enable_progress_bars()
            del os.environ[_FILE]
            _close()
            os.unlink(self._path)

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL):
            self._show()

    def _show(self) -> None:
        self._bar.update(os.path.getsize(self._path) - self._bar.n)


def count_turn() -> None:
    """Note that a turn is done."""
    path = os.environ.get(_FILE)
    if path is None:
        return
    if path != _open_file.get("path"):
        _close()
        _open_file.update(path=path, descriptor=os.open(path, os.O_WRONLY | os.O_APPEND))
    os.write(_open_file["descriptor"], b".")


_open_file: dict = {}


def _close() -> None:
    if _open_file:
        os.close(_open_file["descriptor"])
        _open_file.clear()

"""Episodes from recordings of ARC-AGI-3 games, `*.recording.jsonl`.

A line is what the game answered to an action: `data.action_input` is the action, and the last grid of `data.frame`,
where things have come to rest, the state that it led to. RESET begins a new episode, in the state that it answers.
Where a line is missing, two states follow each other that one action does not lead to, so the episode is parted there,
and goes on from the next line as an episode of its own.

The format is that of the recorder of ARC-AGI-3-Agents as its documentation gives it (docs.arcprize.org/recordings).
Its fields changed over time (`score` became `levels_completed`); only those above are read. Recorders that keep no
actions write RESET on every line; then nothing is left but starts, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from dagpack_hf.graph.episodes import Episode
from dagpack_hf.graph.files import EpisodeReport, Paths, files_of, read_lines

PATTERNS = ("*.recording.jsonl", "*.recording.jsonl.gz")

RESET = 0

LARGEST_SIDE = 64
COLOURS = 16
_DIGITS = "0123456789abcdef"

Observe = Callable[[tuple[str, ...], dict[str, Any]], Hashable]
"""Takes the grid of a line and its `data`, and gives the state."""


class _Wrong(Exception):
    """A line that cannot be used, and why."""


def load_recordings(
    paths: Paths, *, observe: Observe | None = None, progress: bool = True
) -> tuple[list[Episode], EpisodeReport]:
    """Read the episodes of ARC-AGI-3 recordings.

    Args:
        paths: a file or a folder, or several; folders are searched at any depth for `*.recording.jsonl`, gzipped too.
        observe: makes the state from the grid, a tuple of its rows in hexadecimal digits, and the line's `data`. By
            default the grid is the state. Data are what the file holds, unchecked: what `observe` raises is not
            caught.
        progress: show a progress bar, if it takes longer than a second.

    Returns:
        The episodes with at least one action, in the order of files and lines, and what was read and skipped. An
        action is its number, 1 to 7, or for one with coordinates the tuple of number, x and y.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no such file.
    """
    report = EpisodeReport()
    reader = _Reader(report, observe or (lambda grid, data: grid))
    for path, line, value in read_lines(files_of(paths, PATTERNS), report, progress):
        if line == 0:
            reader.end_file(path)
        elif value is None:
            reader.part()
        else:
            reader.read(path, line, value)
    return reader.episodes, report


class _Reader:
    """Puts the lines of files together to episodes."""

    def __init__(self, report: EpisodeReport, observe: Observe) -> None:
        self.episodes: list[Episode] = []
        self._report = report
        self._observe = observe
        self._states: list[Hashable] = []
        self._actions: list[Hashable] = []
        self._begins = ("", 0)
        self._known: dict[Hashable, Hashable] = {}
        self._frames = self._taken = 0

    def read(self, path: str, line: int, value: dict[str, Any]) -> None:
        """Go on with a line."""
        data = value.get("data")
        if isinstance(data, dict) and "frame" not in data and "action_input" not in data:
            self._report.skip(path, line, "no frame, as in the scorecard at the end")
            return
        try:
            if not isinstance(data, dict):
                raise _Wrong("no object data")
            action, grid = _action(data), _grid(data)
        except _Wrong as wrong:
            self._report.skip(path, line, str(wrong))
            self.part()
            return
        state = self._observe(grid, data)
        state = self._known.setdefault(state, state)
        self._frames += 1
        self._taken += action != RESET
        if action == RESET:
            self.part()
        if self._states:
            self._states.append(state)
            self._actions.append(action)
        else:
            if action != RESET:
                self._report.skip(path, line, "action whose state before is not known")
            self._states, self._begins = [state], (path, line)

    def part(self) -> None:
        """End the episode."""
        if self._actions:
            self._report.add(*self._begins, len(self._actions))
            self.episodes.append(Episode(self._states, self._actions))
        self._states, self._actions = [], []

    def end_file(self, path: str) -> None:
        """End the file."""
        self.part()
        if self._frames > 1 and not self._taken:
            self._report.skip(path, 1, "file without an action but RESET: its recorder kept none")
        self._frames = self._taken = 0


def _action(data: dict[str, Any]) -> Hashable:
    """The action of a line."""
    given = data.get("action_input")
    if not isinstance(given, dict):
        raise _Wrong("no action_input")
    action = given.get("id")
    if type(action) is not int or action < 0:
        raise _Wrong("action_input without a number as id")
    where = given.get("data")
    if not isinstance(where, dict) or not {"x", "y"} & where.keys():
        return action
    x, y = where.get("x"), where.get("y")
    if type(x) is not int or type(y) is not int:
        raise _Wrong("action with coordinates that are no numbers")
    return action if action == RESET else (action, x, y)


def _grid(data: dict[str, Any]) -> tuple[str, ...]:
    """The last grid of a line as rows of hexadecimal digits."""
    frame = data.get("frame")
    if not isinstance(frame, list):
        raise _Wrong("frame that is no list of grids")
    if not frame:
        raise _Wrong("frame without a grid")
    grid = frame[-1]
    if not isinstance(grid, list) or not 0 < len(grid) <= LARGEST_SIDE:
        raise _Wrong(f"grid that has not 1 to {LARGEST_SIDE} rows")
    rows = []
    for row in grid:
        if not isinstance(row, list) or len(row) != len(grid[0]) or not 0 < len(row) <= LARGEST_SIDE:
            raise _Wrong(f"grid with rows of unequal length, or not 1 to {LARGEST_SIDE} wide")
        if not all(type(cell) is int and 0 <= cell < COLOURS for cell in row):
            raise _Wrong(f"grid with something else than colours 0 to {COLOURS - 1}")
        rows.append("".join(map(_DIGITS.__getitem__, row)))
    return tuple(rows)

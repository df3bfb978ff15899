"""Episodes from plain JSONL: an object `{"states": [...], "actions": [...]}` on each line, gzipped or not.

States and actions may be any JSON. Lists become tuples, and objects tuples of their sorted items, so that they can be
hashed. What is equal is what Python calls equal: 1, 1.0 and true are one state.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dagpack_hf.graph.episodes import Episode
from dagpack_hf.graph.files import EpisodeReport, Paths, files_of, read_lines

PATTERNS = ("*.jsonl", "*.jsonl.gz")


def load_episodes(paths: Paths, *, progress: bool = True) -> tuple[list[Episode], EpisodeReport]:
    """Read episodes from JSONL files.

    Args:
        paths: a file or a folder, or several; folders are searched at any depth for `*.jsonl` and `*.jsonl.gz`.
        progress: show a progress bar, if it takes longer than a second.

    Returns:
        The episodes in the order of files and lines, and what was read and skipped.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no such file.
    """
    report = EpisodeReport()
    episodes: list[Episode] = []
    known: dict[Hashable, Hashable] = {}
    for path, line, value in read_lines(files_of(paths, PATTERNS), report, progress):
        if value is None:
            continue
        states, actions = value.get("states"), value.get("actions")
        if not isinstance(states, list) or not isinstance(actions, list):
            report.skip(path, line, "no lists of states and actions")
        elif len(states) != len(actions) + 1:
            report.skip(path, line, "not one state more than actions", f"{len(states)} states, {len(actions)} actions")
        else:
            try:
                episode = Episode(*([_once(known, each) for each in things] for things in (states, actions)))
            except RecursionError:
                report.skip(path, line, "nested too deep")
                continue
            report.add(path, line, len(actions))
            episodes.append(episode)
    return episodes, report


def _once(known: dict[Hashable, Hashable], value: Any) -> Hashable:
    """A JSON value as something that can be hashed; texts and tuples that are equal are one object."""
    if isinstance(value, list | dict):
        value = _frozen(value)
    return known.setdefault(value, value) if isinstance(value, str | tuple) else value


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((name, _frozen(each)) for name, each in value.items()))
    return value

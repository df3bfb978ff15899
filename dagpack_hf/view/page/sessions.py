"""Session files as a page shows them: every entry of every file, and for each turn whether it is trained.

Cost: the files are read twice, once for their entries and once for their turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dagpack_hf.pi.files import session_files
from dagpack_hf.pi.options import PathLike
from dagpack_hf.pi.reader import SessionError, SessionFile, read_session
from dagpack_hf.pi.tree import EntryTree, build_tree
from dagpack_hf.pi.turns import iter_turns
from dagpack_hf.view.entries import caption
from dagpack_hf.view.page.locate import Key
from dagpack_hf.view.page.model import Entry, File
from dagpack_hf.view.page.parts import entry_details, entry_parts
from dagpack_hf.view.page.texts import Texts

TRAINED = "trained"
"""Status of a turn that is trained."""

_REPEATED = "repeats a turn that is trained elsewhere"
_NOT_RENDERED = "the chat template cannot render it"
_LOADING = ("num_proc", "load_from_cache_file", "cache_dir")


@dataclass(frozen=True)
class Sessions:
    """What the files hold, before tokens are known.

    Args:
        files: The files.
        entries: Their entries, file by file.
        index: The first entry of each path and entry id.
        numbers: The number of each file by its path.
    """

    files: tuple[File, ...]
    entries: tuple[Entry, ...]
    index: dict[Key, int]
    numbers: dict[str, int]


def read_sessions(
    paths: PathLike | Iterable[PathLike] | None,
    texts: Texts,
    targets: Iterable[Key],
    rendered: Iterable[Key],
    reading: Mapping[str, Any],
) -> Sessions:
    """Read files for showing. Files that cannot be read are left out; the report of `load_sessions` counts them.

    Args:
        paths: As for `load_sessions`.
        texts: Takes every text.
        targets: Turns that are to be trained.
        rendered: Of those the ones that the chat template could render.
        reading: Options of `load_sessions`.
    """
    status = _statuses(paths, set(targets), set(rendered), reading)
    files: list[File] = []
    entries: list[Entry] = []
    index: dict[Key, int] = {}
    numbers: dict[str, int] = {}
    for path in session_files(paths):
        try:
            session = read_session(path)
        except (SessionError, OSError):
            continue
        first = len(entries)
        numbers[path] = len(files)
        for number, each in enumerate(session.entries):
            index.setdefault((path, each["id"]), first + number)
        entries += _entries(session, len(files), first, status.get(path, []), texts)
        files.append(_file(session, path, first, entries[first:], texts))
    return Sessions(tuple(files), tuple(entries), index, numbers)


def _statuses(
    paths: PathLike | Iterable[PathLike] | None, targets: set[Key], rendered: set[Key], reading: Mapping[str, Any]
) -> dict[str, list[str]]:
    """What becomes of each turn of each file, in file order."""
    options = {name: value for name, value in reading.items() if name not in _LOADING}
    found: dict[str, list[str]] = {}
    for turn in iter_turns(paths, **options):
        key = (turn.session, turn.entry)
        if turn.untrained is not None:
            status = turn.untrained
        elif turn.duplicate or key not in targets:
            status = _REPEATED
        else:
            status = TRAINED if key in rendered else _NOT_RENDERED
        found.setdefault(turn.session, []).append(status)
    return found


def _entries(session: SessionFile, file: int, first: int, statuses: Iterable[str], texts: Texts) -> list[Entry]:
    tree = build_tree(session)
    labels = _labels(tree)
    status_of = iter(statuses)
    found = []
    for entry, parent in zip(tree.entries, tree.parents, strict=True):
        turn = entry["type"] == "message" and entry["message"]["role"] == "assistant"
        status = next(status_of, "") if turn else ""
        shown = caption(entry, status == TRAINED)
        found.append(
            Entry(
                file=file,
                parent=parent if parent < 0 else first + parent,
                kind=shown.kind,
                name=texts.line(shown.name, 40),
                caption=texts.line(shown.text),
                id=texts.line(entry["id"], 40),
                label=texts.line(labels.get(entry["id"], ""), 40),
                status=status,
                details=entry_details(entry, texts),
                parts=entry_parts(entry, texts),
            )
        )
    return found


def _labels(tree: EntryTree) -> dict[str, str]:
    """The label each entry has in the end, by id."""
    labels: dict[str, str] = {}
    for entry in tree.entries:
        target, label = entry.get("targetId"), entry.get("label")
        if entry["type"] == "label" and isinstance(target, str):
            labels[target] = label if isinstance(label, str) else ""
    return labels


def _file(session: SessionFile, path: str, first: int, entries: list[Entry], texts: Texts) -> File:
    turns = [entry.status for entry in entries if entry.kind in ("trained", "untrained")]
    return File(
        name=texts.line(PurePath(path).name, 200),
        title=texts.line(session.name or "", 80),
        cwd=texts.line(session.cwd or "", 200),
        first=first,
        count=len(entries),
        turns=len(turns),
        trained=turns.count(TRAINED),
    )

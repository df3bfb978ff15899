"""What a caller can say about reading sessions: `ReadOptions`, and which turns are selected.

What a file does not say is decided here, once:

    * A model takes images unless the file shows that it does not (a tool result that pi marked so, before or after
      the turn), or the caller names it in `text_only_models`.
    * A model gets later system messages folded into the first one, pi's default, unless the caller names it in
      `system_update_models`.
    * A request follows the rules of pi before 1.x if no system message is recorded above it (those files hold none)
      and the reply lacks the duration that 1.x records, unless the caller gives `pi_version`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from fnmatch import fnmatchcase
from typing import Any, Literal

from dagpack_hf.pi.reader import SessionFile

PathLike = str | os.PathLike[str]
Images = Literal["placeholder", "keep", "reference"]
TARGET_STOP_REASONS = ("stop", "toolUse")
_ENDED = {"stop", "toolUse", "length"}
_FAILED = {"error", "aborted"}
_LISTS = (
    "text_only_models",
    "system_update_models",
    "target_stop_reasons",
    "html_exports",
    "models",
    "providers",
    "cwd",
    "names",
    "labels",
)


@dataclass(frozen=True)
class ReadOptions:
    """How sessions are read. Every field is a keyword of `load_sessions`, `iter_turns` and `export_turns`.

    Attributes:
        images: `"placeholder"` puts pi's text for models without image input in place of images, so that all content
            is text; `"keep"` leaves images where the model of the turn takes them, as parts of content;
            `"reference"` puts `pi-image:` references there, which `resolve_images` turns into images.
        on_error: `"skip"` leaves out what cannot be read and counts it; `"raise"` stops at the first such place.
        text_only_models: Models without image input, as `model` or `provider/model`; what files show is added.
        system_update_models: Models that accept system messages in mid-session, as `model` or `provider/model`. For
            all others pi folds them into the first message.
        pi_version: Version of pi whose rules requests follow where they differ (before 1.x, and since), `"0.74.2"`
            say. `None` goes by what each file shows.
        target_stop_reasons: Stop reasons of turns that are targets; `"length"` is the one that may be added.
        system_prompt: System prompt of turns for which none is recorded (sessions of pi before 0.86, and the old part
            of a session resumed since), or a function of the session that returns it.
        tools: Their function schemas, or a function of the session that returns them.
        html_exports: HTML files that pi exported from live sessions, for the prompt and tools of these sessions.
        models: Only turns of these models are targets: patterns of `model` or `provider/model`, as in a shell.
        providers: Only turns of these providers.
        since: Only turns at or after this time: `datetime`, `date`, or ISO text; UTC unless it says otherwise.
        until: Only turns before this time.
        cwd: Only sessions in these working directories, or below one of them.
        names: Only sessions with these names: patterns of the name that was given last.
        labels: Only turns of branches through an entry with one of these labels: patterns.
    """

    images: Images = "placeholder"
    on_error: Literal["skip", "raise"] = "skip"
    text_only_models: Collection[str] = ()
    system_update_models: Collection[str] = ()
    pi_version: str | None = None
    target_stop_reasons: Collection[str] = TARGET_STOP_REASONS
    system_prompt: str | Callable[[SessionFile], str | None] | None = None
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None = None
    html_exports: PathLike | Iterable[PathLike] | None = None
    models: str | Collection[str] | None = None
    providers: str | Collection[str] | None = None
    since: datetime | date | str | None = None
    until: datetime | date | str | None = None
    cwd: PathLike | Iterable[PathLike] | None = None
    names: str | Collection[str] | None = None
    labels: str | Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.images not in ("placeholder", "keep", "reference"):
            raise ValueError(f"images={self.images!r} is unknown: use 'placeholder', 'keep' or 'reference'")
        if self.on_error not in ("skip", "raise"):
            raise ValueError(f"on_error={self.on_error!r} is unknown: use 'skip' or 'raise'")
        for name in _LISTS:
            object.__setattr__(self, name, _listed(getattr(self, name), name))
        if failed := _FAILED & set(self.target_stop_reasons):
            raise ValueError(f"target_stop_reasons holds {sorted(failed)}: a failed turn is never a target")
        if unknown := set(self.target_stop_reasons) - _ENDED:
            raise ValueError(
                f"target_stop_reasons holds {sorted(unknown)}: use {', '.join(map(repr, sorted(_ENDED)))}"
            )
        if self.pi_version is not None:
            legacy_version(self.pi_version)
        for name in ("since", "until"):
            moment(getattr(self, name), name)


def _listed(value: Any, name: str) -> Any:
    """Return the value of an option that takes several texts: one text as a tuple, what can be read once as well."""
    if isinstance(value, str | os.PathLike):
        return (value,)
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r} is neither a text nor a list of texts")
    values = tuple(value)
    if any(not isinstance(item, str | os.PathLike) for item in values):
        raise ValueError(f"{name}={value!r} holds something that is no text")
    return values if isinstance(value, Iterator) else value


def legacy_version(version: str) -> bool:
    """Say whether a version of pi is before 1.x."""
    major = str(version).partition(".")[0]
    if not major.isdecimal():
        raise ValueError(f"pi_version={version!r} is no version of pi, such as '0.74.2' or '1.6.0'")
    return int(major) < 1


def moment(value: datetime | date | str | None, name: str) -> datetime | None:
    """Return a time with its zone.

    Args:
        value: A time; without a zone it is UTC.
        name: The option it is given for.

    Raises:
        ValueError: If it is no time.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError as error:
            raise ValueError(
                f"{name}={value!r} is no time in ISO form, such as '2026-01-31' or '2026-01-31T09:30'"
            ) from error
    elif not isinstance(value, date):
        raise ValueError(f"{name}={value!r} is no time: use a datetime, a date, or text in ISO form")
    elif not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


class Selection:
    """Which turns of one session the caller wants as targets.

    Args:
        options: The options.
        session: The session file.
        parents: For each entry the index of its parent, -1 for a root.
    """

    def __init__(self, options: ReadOptions, session: SessionFile, parents: Sequence[int]) -> None:
        self._models = _patterns(options.models)
        self._providers = _patterns(options.providers)
        self._since, self._until = moment(options.since, "since"), moment(options.until, "until")
        self._whole = _unwanted_session(options, session)
        self._labelled = (
            None if options.labels is None else _labelled(session, parents, _patterns(options.labels) or ())
        )
        given = (self._models, self._providers, self._since, self._until, self._whole, self._labelled)
        self.unwanted = None if given == (None,) * 6 else self._unwanted
        """Says why a turn is not wanted; `None` if all are."""

    def _unwanted(self, index: int, provider: str, model: str, timestamp: str | None) -> str | None:
        """Say why a turn is not wanted, `None` if it is.

        Args:
            index: Index of the assistant entry.
            provider: Its provider.
            model: Its model.
            timestamp: Its time, as stored.
        """
        if self._whole:
            return self._whole
        if self._models is not None and not _matches(self._models, model, f"{provider}/{model}"):
            return "not selected: model"
        if self._providers is not None and not _matches(self._providers, provider):
            return "not selected: provider"
        if not self._in_time(timestamp):
            return "not selected: time"
        if self._labelled is not None and index not in self._labelled:
            return "not selected: label"
        return None

    def _in_time(self, timestamp: str | None) -> bool:
        if self._since is None and self._until is None:
            return True
        try:
            time = moment(timestamp, "timestamp")
        except ValueError:
            return False
        if time is None or (self._since is not None and time < self._since):
            return False
        return self._until is None or time < self._until


def _unwanted_session(options: ReadOptions, session: SessionFile) -> str | None:
    if options.cwd is not None:
        given = [options.cwd] if isinstance(options.cwd, str | os.PathLike) else options.cwd
        wanted = [os.path.abspath(os.path.expanduser(os.fspath(path))) for path in given]
        cwd = session.cwd
        if cwd is None or not any(cwd == path or cwd.startswith(os.path.join(path, "")) for path in wanted):
            return "not selected: working directory"
    names = _patterns(options.names)
    if names is not None and not _matches(names, session.name or ""):
        return "not selected: session name"
    return None


def _labelled(session: SessionFile, parents: Sequence[int], patterns: Collection[str]) -> set[int]:
    """Return the entries on the branches through entries whose last label matches."""
    labels: dict[str, Any] = {}
    for entry in session.entries:
        if entry["type"] == "label" and isinstance(entry.get("targetId"), str):
            labels[entry["targetId"]] = entry.get("label")
    marked = {
        index
        for index, entry in enumerate(session.entries)
        if isinstance(label := labels.get(entry["id"]), str) and label and _matches(patterns, label)
    }
    above = set()
    for index in marked:
        while index >= 0 and index not in above:
            above.add(index)
            index = parents[index]
    below = _below(parents, marked)
    return above | below


def _below(parents: Sequence[int], roots: set[int]) -> set[int]:
    """Return the entries under some roots, these included, whatever the order of parents and children."""
    inside = {-1: False, **dict.fromkeys(roots, True)}
    for start in range(len(parents)):
        path = []
        index = start
        while index not in inside:
            path.append(index)
            index = parents[index]
        inside.update(dict.fromkeys(path, inside[index]))
    return {index for index, value in inside.items() if value}


def _patterns(given: str | Collection[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else list(given)


def _matches(patterns: Collection[str], *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

"""Lines of files as JSON values, gzipped or not; what cannot be read costs no more than itself.

Files are untrusted: a line that is too long, that is no JSON, or that is nested too deep is noted and skipped, and a
gzip file that ends in the middle, or is damaged, ends where it can be read no further.

Cost: one line of text at a time, at most `LONGEST_LINE` bytes.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
from tqdm.auto import tqdm

LONGEST_LINE = 64 * 1024 * 1024
"""Bytes of a line beyond which it is skipped."""

KEPT = 1000
"""Problems that a report keeps; all are counted."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

decode = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class Problem:
    """Something that was skipped.

    Args:
        path: the file.
        line: its line, from 1.
        reason: why.
        detail: what was there, if that helps.
    """

    path: str
    line: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclass
class EpisodeReport:
    """What was read of files, and what was not.

    Args:
        files: files.
        lines: lines, blank ones not counted.
        episodes: episodes that were read.
        transitions: their actions.
        skipped: lines and other things that were left out, by reason.
        problems: the first of them.
        origins: file and line where each episode begins, so that episodes can be found by their numbers.
    """

    files: int = 0
    lines: int = 0
    episodes: int = 0
    transitions: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    origins: list[tuple[str, int]] = field(default_factory=list)

    def skip(self, path: str, line: int, reason: str, detail: str = "") -> None:
        """Note that something was left out."""
        self.skipped[reason] += 1
        if len(self.problems) < KEPT:
            self.problems.append(Problem(path, line, reason, detail))

    def add(self, path: str, line: int, transitions: int) -> None:
        """Note an episode."""
        self.episodes += 1
        self.transitions += transitions
        self.origins.append((path, line))

    def __str__(self) -> str:
        rows = [
            f"files        {self.files:>9,}  {self.lines:,} lines",
            f"episodes     {self.episodes:>9,}  {self.transitions:,} transitions",
        ]
        rows += [f"skipped      {count:>9,}  {reason}" for reason, count in self.skipped.most_common()]
        rows += [f"  {problem}" for problem in self.problems[:10]]
        if self.skipped.total() > 10:
            rows.append(f"  and {self.skipped.total() - 10:,} more")
        return "\n".join(rows)


def files_of(paths: Paths, patterns: tuple[str, ...]) -> list[Path]:
    """Files, and in folders at any depth those with such names, in order.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no such file.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[Path] = []
    for path in map(Path, given):
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist.")
            found.append(path)
            continue
        inside = sorted({each for pattern in patterns for each in path.rglob(pattern) if each.is_file()})
        if not inside:
            raise FileNotFoundError(f"{path} has no file {' or '.join(patterns)}.")
        found += inside
    return found


def read_lines(files: list[Path], report: EpisodeReport, progress: bool) -> Iterator[tuple[str, int, Any]]:
    """JSON values of files, line by line.

    Yields:
        File, line number from 1, and the value; `None` in place of a line that was skipped, and after the last line
        of each file, with the line number 0.
    """
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, desc="Reading", unit="B", unit_scale=True, disable=not progress, delay=1) as bar:
        for path in files:
            report.files += 1
            name = str(path)
            with open(path, "rb") as raw:
                is_gzip = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                before = bar.n
                with gzip.open(raw) if is_gzip else nullcontext(raw) as file:
                    for number, line in _lines(file, name, report):
                        yield name, number, None if line is None else _value(line, name, number, report)
                        bar.update(before + raw.tell() - bar.n)
            yield name, 0, None


def _lines(file: Any, name: str, report: EpisodeReport) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines of a file that are not blank; `None` for one that is too long."""
    number = 0
    try:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                _skip_line(file)
                report.lines += 1
                report.skip(name, number, f"line longer than {LONGEST_LINE:,} bytes")
                yield number, None
            elif line.strip():
                report.lines += 1
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        report.skip(name, number + 1, "damaged gzip data, the rest of the file was not read", str(error))
        yield number + 1, None


def _skip_line(file: IO[bytes]) -> None:
    while (piece := file.readline(LONGEST_LINE)) and not piece.endswith(b"\n"):
        pass


def _value(line: bytes, name: str, number: int, report: EpisodeReport) -> Any:
    try:
        value = decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        report.skip(name, number, "no JSON", str(error)[:80])
        return None
    if not isinstance(value, dict):
        report.skip(name, number, "no JSON object")
        return None
    return value

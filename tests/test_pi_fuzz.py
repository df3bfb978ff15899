"""Real session files, damaged at random: nothing hangs, nothing crashes, and nothing is lost without a word.

What a line should give is decided here anew, from its bytes, so that a reader which swallows something is found out.
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagpack_hf.pi import SessionError, load_sessions
from dagpack_hf.pi.reader import UNREADABLE, SessionFile, read_session
from dagpack_hf.pi.report import Tally
from dagpack_hf.pi.tree import build_tree
from dagpack_hf.pi.turns import iter_turns
from dagpack_hf.sample import sample_sessions

CORPUS = Path(__file__).parents[1] / ".." / "shared" / "pi" / "corpus"
FILES = [
    path.read_bytes()
    for folder in (sample_sessions(), CORPUS / "sessions", CORPUS / "odd")
    for path in sorted(Path(str(folder)).rglob("*.jsonl"))
]


# Damage: each function takes the lines of a file and changes them.

Lines = list[bytes]


def drop(lines: Lines, random: Random) -> None:
    del lines[random.randrange(len(lines))]


def double(lines: Lines, random: Random) -> None:
    lines.insert(random.randrange(len(lines) + 1), random.choice(lines))


def move(lines: Lines, random: Random) -> None:
    line = lines.pop(random.randrange(len(lines)))
    lines.insert(random.randrange(len(lines) + 1), line)


def shuffle(lines: Lines, random: Random) -> None:
    random.shuffle(lines)


def end_early(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    del lines[place + 1 :]
    lines[place] = lines[place][: random.randrange(len(lines[place]) + 1)]


def tear(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    lines[place] = lines[place][: random.randrange(len(lines[place]) + 1)]


def tear_and_glue(lines: Lines, random: Random) -> None:
    tear(lines, random)
    glue(lines, random)


def glue(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    lines[place : place + 2] = [random.choice([b"", b"\0\0", b"  "]).join(lines[place : place + 2])]


def split(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    at = random.randrange(len(lines[place]) + 1)
    lines[place : place + 1] = [lines[place][:at], lines[place][at:]]


def change_bytes(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    line = bytearray(lines[place])
    for _ in range(random.randint(1, 4) if line else 0):
        line[random.randrange(len(line))] = random.choice([*b'{}[]",:\\u0', 0, 0xFF, random.randrange(256)])
    lines[place : place + 1] = bytes(line).split(b"\n")


def cut_out(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    start = random.randrange(len(lines[place]) + 1)
    lines[place] = lines[place][:start] + lines[place][start + random.randrange(60) :]


GARBAGE = [
    b"\0" * 512,
    b"\xef\xbb\xbf",
    b"\r",
    b" ",
    b"null",
    b"[[]]",
    b'"text"',
    b"{}",
    b"17",
    b"<html>",
    b"\xff\xfe\x80",
    b'{"type":"message",',
    b"[" * 3000,
    b'{"kind":"entry","seq":1}',
    b'{"type":"title","title":"t"}',
    b'{"type":"session","version":1,"id":"inner","timestamp":"t"}',
    b'{"type":"label","id":"inner","parentId":null,"timestamp":"t"}',
    "\u2028\u0085".encode(),
]


def insert_garbage(lines: Lines, random: Random) -> None:
    place = random.randrange(len(lines))
    if random.random() < 0.5:
        lines.insert(place, random.choice(GARBAGE))
    else:
        at = random.choice([0, random.randrange(len(lines[place]) + 1), len(lines[place])])
        lines[place] = lines[place][:at] + random.choice(GARBAGE) + lines[place][at:]


HEADERS = [
    (rb'"version":\d+,', b""),
    (rb'"version":\d+', b'"version":2'),
    (rb'"version":\d+', b'"version":"3"'),
    (rb'"version":\d+', b'"version":' + b"9" * 400),
    (rb'"version":\d+', b'"version":null'),
    (rb'"id":"[^"]*"', b'"id":7'),
    (rb'"type":"session"', b'"type":"message"'),
    (rb'"cwd":"[^"]*"', b'"cwd":["\\ud800"]'),
    (rb"^", b"\0\0"),
]


def change_header(lines: Lines, random: Random) -> None:
    pattern, new = random.choice(HEADERS)
    lines[0] = re.sub(pattern, lambda _: new, lines[0], count=1)


DAMAGES: list[Callable[[Lines, Random], None]] = [
    drop,
    double,
    move,
    shuffle,
    end_early,
    tear,
    tear_and_glue,
    glue,
    split,
    change_bytes,
    cut_out,
    insert_garbage,
    change_header,
]


# Damage to what lines say, which stay JSON.

VALUES: list[Any] = [None, True, False, 0, -1, 1.5, 2**70, 1e300, "", "x", "\ud800", "\0", [], {}, [None], [[["x"]]]]
VALUES += [{"type": "image"}, {"type": "text", "text": 5}, {"type": "toolCall"}, {"content": "x"}, "\0offset"]
VALUES += [[{"type": "image", "data": "aGk=", "mimeType": "image/png"}], [{"type": "thinking", "thinking": None}]]
WORDS = ["message", "compaction", "branch_summary", "custom_message", "context_edit", "custom", "label", "session"]
WORDS += ["user", "assistant", "toolResult", "bashExecution", "system", "hookMessage", "error", "length", "\0offset"]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of all that a value holds, at any depth."""
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        yield value, key
        yield from places(value[key])


def change_value(values: list[Any], random: Random) -> None:
    holder, key = random.choice(list(places(random.choice(values))) or [(values, 0)])
    choice = random.random()
    if choice < 0.15 and isinstance(holder, dict):
        del holder[key]
    elif choice < 0.3:
        other, name = random.choice(list(places(random.choice(values))) or [(values, 0)])
        holder[key] = json.loads(json.dumps(other[name]))
    elif choice < 0.5:
        holder[key] = random.choice(WORDS)
    else:
        holder[key] = json.loads(json.dumps(random.choice(VALUES)))


def change_link(values: list[Any], random: Random) -> None:
    entries = [value for value in values if isinstance(value, dict)] or [{}]
    names = [entry.get("id") for entry in entries]
    key = random.choice(["id", "parentId", "parentId", "targetId", "firstKeptEntryId"])
    random.choice(entries)[key] = random.choice(names)


# What must hold


def whole_values(line: bytes) -> list[Any] | None:
    """Return the JSON values of a line that holds nothing else but space and NUL bytes, else `None`."""
    text = line.removeprefix(b"\xef\xbb\xbf").strip(b"\0 \t\r\v\f").decode(errors="replace")
    decoder = json.JSONDecoder(parse_constant=lambda name: int(name))
    values, place = [], 0
    while place < len(text):
        if text[place] in "\0 \t\r\v\f":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        values.append(value)
    return values


def is_entry(value: Any) -> bool:
    """Say whether a value is an entry that can be used (in version 1 it needs no id), and can be told from others."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] == "session":
        return False
    message = value.get("message")
    if value["type"] == "message" and not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        return False
    return "timestamp" in value or "parentId" in value


def check_lines(data: bytes, session: SessionFile) -> None:
    """Check that each line is an entry, or the header, or is named as skipped, and gave no more than it holds."""
    used, skipped = Counter[int](), Counter[int]()
    for number, entry in zip(session.lines, session.entries, strict=True):
        used[number] += entry["type"] != UNREADABLE
    for problem in session.problems:
        skipped[problem.line] += problem.skipped
    old = any(entry["id"].startswith("v1-") for entry in session.entries)
    silent: list[Any] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        values = whole_values(line)
        if values is None:
            assert skipped[number], f"line {number} is damaged, and nothing says so"
            continue
        if not values:
            assert skipped[number] == (b"\0" in line)
            continue
        expected = [value for value in values if is_entry(value) and (old or isinstance(value.get("id"), str))]
        entries = [entry for at, entry in zip(session.lines, session.entries, strict=True) if at == number]
        assert used[number] >= len(expected), f"line {number} lost an entry"
        assert len(entries) <= len(values), f"line {number} gave entries that are not in it"
        if not old:
            assert {value["id"] for value in expected} <= {entry["id"] for entry in entries}
        missing = len(values) - used[number] - skipped[number]
        if len(values) > 1 and skipped[number]:
            continue
        assert missing in (0, 1), f"line {number} is counted {-missing} times too often"
        silent += [value for value in values if not is_entry(value)][:1] if missing else []
    kinds = [value.get("type") for value in silent]
    assert kinds.count("session") <= 1 and kinds.count("title") <= 1 and set(kinds) <= {"session", "title"}


def check_refusal(data: bytes, error: SessionError) -> None:
    """Check that a file that is refused holds no header, and no entry with a parent, near its beginning."""
    values: list[Any] = []
    for line in data.split(b"\n"):
        values += whole_values(line) or []
    for value in values[:32]:
        if isinstance(value, dict):
            if value.get("kind") == "header":
                break
            assert value.get("type") != "session", error
            known = value.get("type") in ("message", "model_change", "label") and is_entry(value)
            assert not (known and isinstance(value.get("id"), str) and "parentId" in value), error


@contextmanager
def seconds(limit: float) -> Iterator[None]:
    """Raise an error where something takes longer than that, or hangs."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes longer than {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_file(path: Path, **options: Any) -> None:
    """Check one file, read in two ways."""
    data = path.read_bytes()
    with seconds(5):
        try:
            session = read_session(path, images="reference")
        except SessionError as error:
            check_refusal(data, error)
            assert list(iter_turns(path)) == []
            return
        check_lines(data, session)
        for images in ("placeholder", "keep"):
            check_turns(path, session, images=images, **options)


def check_turns(path: Path, session: SessionFile, **options: Any) -> None:
    """Check that each assistant entry gives one turn, and that the counts add up."""
    tree = build_tree(session)
    replies = [
        entry["id"] for entry in tree.entries if entry["type"] == "message" and entry["message"]["role"] == "assistant"
    ]
    tally = Tally()
    turns = list(iter_turns(path, tally=tally, **options))
    assert [turn.entry for turn in turns] == replies
    assert all(turn.reply["role"] == "assistant" for turn in turns)
    for turn in turns[-1:]:
        assert all(isinstance(message["role"], str) for message in turn.messages)
        assert turn.tools is None or turn.tools
    assert tally.turns == len(turns) == tally.targets + total(tally.untrained_turns) + total(tally.duplicate_turns)
    assert tally.targets == sum(turn.trained for turn in turns)
    assert (tally.files, tally.entries) == (1, len(session.entries))
    problems = [problem.skipped for problem in (*session.problems, *tree.problems)]
    assert (total(tally.skipped_lines), total(tally.repaired_lines)) == (problems.count(True), problems.count(False))


def total(counts: dict[str, int]) -> int:
    return sum(counts.values())


SEEDS = st.integers(0, 2**32)
DAMAGE = st.lists(st.tuples(st.sampled_from(DAMAGES), SEEDS), min_size=1, max_size=8)


def damaged(file: int, damage: list[tuple[Callable[[Lines, Random], None], int]]) -> bytes:
    lines = FILES[file].split(b"\n")
    for change, seed in damage:
        change(lines, Random(seed))
        lines = lines or [b""]
    return b"\n".join(lines)


def with_changed_values(file: int, seed: int, count: int) -> bytes:
    random = Random(seed)
    values = []
    for line in FILES[file].splitlines(keepends=False):
        values += whole_values(line) or []
    for _ in range(count):
        random.choice([change_value, change_value, change_link])(values or [{}], random)
    return b"".join(json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in values)


def fuzz(cases: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=5),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@given(file=st.integers(0, len(FILES) - 1), damage=DAMAGE)
@fuzz(1400)
def test_damaged_lines_cost_no_more_than_is_said(
    tmp_path: Path, file: int, damage: list[tuple[Callable[[Lines, Random], None], int]]
) -> None:
    path = tmp_path / "2026-01-01T00-00-00-000Z_name.jsonl"
    path.write_bytes(damaged(file, damage))
    check_file(path)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"pi_version": "0.74.2", "since": "2020-01-01", "names": "*"},
    {"system_update_models": ["fake-coder", "x"], "text_only_models": ["fake-coder"], "labels": "*"},
]


@given(file=st.integers(0, len(FILES) - 1), seed=SEEDS, count=st.integers(1, 20), options=st.sampled_from(OPTIONS))
@fuzz(450)
def test_entries_that_say_anything_are_read(
    tmp_path: Path, file: int, seed: int, count: int, options: dict[str, Any]
) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(with_changed_values(file, seed, count))
    check_file(path, **options)


@given(files=st.lists(st.tuples(st.integers(0, len(FILES) - 1), DAMAGE, SEEDS), min_size=1, max_size=4))
@fuzz(150)
def test_the_report_of_damaged_files_adds_up(
    files: list[tuple[int, list[tuple[Callable[[Lines, Random], None], int]], int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, (file, damage, seed) in enumerate(files):
            path = Path(folder) / f"{number}.jsonl"
            path.write_bytes(damaged(file, damage) if seed % 3 else with_changed_values(file, seed, len(damage)))
        with seconds(10):
            dataset, report = load_sessions(folder, return_report=True, cache_dir=Path(folder) / "cache")
        assert report.files + total(report.skipped_files) == len(files)
        assert report.turns == report.targets + total(report.untrained_turns) + total(report.duplicate_turns)
        assert report.targets == sum(sum(row["trained"]) for row in dataset)
        assert all(message["role"] for row in dataset for message in row["messages"])
        tally = Tally()
        assert len(list(iter_turns(folder, tally=tally))) == report.turns
        for name in ("files", "entries", "skipped_files", "skipped_lines", "repaired_lines", "untrained_turns"):
            assert getattr(report, name) == getattr(tally, name), name


def test_there_are_files_of_all_kinds() -> None:
    if not CORPUS.exists():
        pytest.skip("needs the pi corpus in ../shared/pi/corpus")
    assert len(FILES) > 80

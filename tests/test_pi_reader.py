"""Reading damaged files: a bad line costs that line, a bad tree costs nothing, and everything is counted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf.pi import SessionError, load_sessions
from dagpack_hf.pi.reader import SessionFile, read_session
from dagpack_hf.pi.tree import build_tree
from tests.pi_sessions import SessionBuilder


def header(version: object = 3) -> bytes:
    return json.dumps({"type": "session", "version": version, "id": "s", "timestamp": "t", "cwd": "/w"}).encode()


def label(entry_id: str, parent: str | None) -> bytes:
    return json.dumps({"type": "label", "id": entry_id, "parentId": parent}).encode()


def test_bad_lines_are_skipped_and_named(tmp_path: Path) -> None:
    lines = [
        header(),
        label("a", None),
        b"",
        b"null",
        b"7",
        b'{"id": "x"}',
        b'{"type": "label", "parentId": "a"}',
        b'{"type": "message", "id": "m", "parentId": "a"}',
        b'{"type": "label", "id": "n", "parentId": "a", "x": NaN}',
        b"[" * 100_000,
        header(),
        label("b", "a"),
        b'{"type": "label", "id": "c", "par',
    ]
    (tmp_path / "s.jsonl").write_bytes(b"\n".join(lines))
    session = read_session(tmp_path / "s.jsonl")
    assert [entry["id"] for entry in session.entries] == ["a", "b"]
    assert session.lines == [2, 12]
    assert [(problem.line, problem.reason) for problem in session.problems] == [
        (4, "not a JSON object"),
        (5, "not a JSON object"),
        (6, "entry without a type"),
        (7, "entry without an id"),
        (8, "message entry without a message that has a role"),
        (9, "not JSON"),
        (10, "not JSON"),
        (11, "second session header"),
        (13, "torn last line"),
    ]
    assert all(problem.skipped for problem in session.problems)


def test_only_newline_ends_a_line(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.user("one\u2028two\u0085three\x0cfour")
    builder.assistant("five\u2029six")
    dataset = load_sessions(builder.write(tmp_path / "s.jsonl"))
    contents = [message["content"] for message in dataset[0]["messages"]]
    assert contents == ["one\u2028two\u0085three\x0cfour", "five\u2029six"]


def test_crlf_bom_and_invalid_utf8_are_read(tmp_path: Path) -> None:
    entry = b'{"type": "message", "id": "a", "parentId": null, "message": {"role": "user", "content": "x\xff"}}'
    (tmp_path / "s.jsonl").write_bytes(b"\xef\xbb\xbf" + header() + b"\r\n" + entry + b"\r\n")
    session = read_session(tmp_path / "s.jsonl")
    assert session.entries[0]["message"]["content"] == "x\ufffd"
    assert [(problem.line, problem.skipped) for problem in session.problems] == [(2, False)]


@pytest.mark.parametrize("version", [3, "3", 99])
def test_versions_from_three_on_are_read(tmp_path: Path, version: object) -> None:
    (tmp_path / "s.jsonl").write_bytes(header(version) + b"\n" + label("a", None) + b"\n")
    assert read_session(tmp_path / "s.jsonl").session_id == "s"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no session header: the file is empty or holds no JSON line"),
        (header(2), "session version 2 is older than 3: open it once in pi, which migrates it"),
        (header("x"), "session header with a version that is no known number"),
        (
            b'{"type": "session", "id": "s"}',
            "session version 1 is older than 3: open it once in pi, which migrates it",
        ),
        (
            b'{"kind": "header", "version": 4, "id": "s"}',
            "written by pi-agent-core's own harness (version 4), not a pi session",
        ),
        (
            label("a", None) + b"\n" + header(),
            "not a pi session: the first JSON line is no session header with an id",
        ),
    ],
)
def test_files_that_are_no_session_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(SessionError) as error:
        read_session(path)
    assert error.value.reason == reason
    assert str(error.value).startswith(str(path))
    dataset, report = load_sessions(path, return_report=True)
    assert len(dataset) == 0
    assert report.skipped_files == {reason: 1}
    with pytest.raises(SessionError):
        load_sessions(path, on_error="raise")


def tree_of(*edges: tuple[str, str | None]) -> tuple[list[int], list[str]]:
    entries = [{"type": "label", "id": entry_id, "parentId": parent} for entry_id, parent in edges]
    session = SessionFile("s", {"id": "s"}, entries, list(range(2, len(entries) + 2)), [])
    tree = build_tree(session)
    return tree.parents, [f"{problem.line}: {problem.reason}" for problem in tree.problems]


def test_parents_and_roots() -> None:
    assert tree_of(("a", None), ("b", "a"), ("c", "a"), ("d", None), ("e", "b")) == ([-1, 0, 0, -1, 1], [])


def test_a_missing_parent_makes_a_root() -> None:
    assert tree_of(("a", "gone"), ("b", "a")) == ([-1, 0], ["2: parent is not in the file"])


def test_a_parent_that_is_no_id_makes_a_root(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(header() + b'\n{"type": "label", "id": "a", "parentId": ["a"]}\n')
    tree = build_tree(read_session(tmp_path / "s.jsonl"))
    assert tree.parents == [-1]
    assert [problem.reason for problem in tree.problems] == ["parent is not in the file"]


def test_a_duplicate_id_resolves_to_the_entry_before() -> None:
    parents, problems = tree_of(("a", None), ("b", "a"), ("a", "b"), ("c", "a"))
    assert parents == [-1, 0, 1, 2]
    assert problems == ["4: duplicate entry id"]


def test_cycles_are_cut_once() -> None:
    assert tree_of(("a", "a"), ("b", "a")) == ([-1, 0], ["2: entry is its own ancestor"])
    parents, problems = tree_of(("a", "c"), ("b", "a"), ("c", "b"), ("d", "c"))
    assert parents == [2, -1, 1, 2]
    assert problems == ["3: entry is its own ancestor"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["a", "b", "c", "d", "e", "f", "x", None]))))
@settings(max_examples=200, deadline=None)
def test_any_links_make_a_forest(edges: list[tuple[str, str | None]]) -> None:
    parents, _ = tree_of(*edges)
    for start in range(len(parents)):
        steps, index = 0, start
        while index >= 0:
            steps, index = steps + 1, parents[index]
            assert steps <= len(parents)


def test_loading_damaged_trees_neither_hangs_nor_recurses(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.user("hello", parent="e3")
    builder.assistant("one")
    builder.user("again")
    for _ in range(20_000):
        builder.entry("label", targetId="e1")
    builder.assistant("two", parent=builder.entry("label", entry_id="e3"))
    started = time.perf_counter()
    _, report = load_sessions(builder.write(tmp_path / "s.jsonl"), return_report=True)
    assert time.perf_counter() - started < 5
    assert report.turns == 2
    assert report.repaired_lines == {"entry is its own ancestor": 1, "duplicate entry id": 1}


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(header() + b"\n{oops\n")
    with pytest.raises(SessionError, match=r"s\.jsonl:2: not JSON"):
        load_sessions(path, on_error="raise")
    _, report = load_sessions(path, return_report=True)
    assert report.examples["not JSON"] == (f"{path}:2",)
    assert f"lines skipped: 1 x not JSON ({path}:2)" in str(report)

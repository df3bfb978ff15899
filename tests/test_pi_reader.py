"""Reading damaged files: a bad line costs that line, a bad tree costs nothing, and everything is counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf.pi import SessionError, lines, load_sessions, reader
from dagpack_hf.pi.context import ContextBuilder
from dagpack_hf.pi.lines import Problem, read_values
from dagpack_hf.pi.reader import UNREADABLE, SessionFile, read_session
from dagpack_hf.pi.tree import build_tree
from dagpack_hf.pi.turns import iter_turns
from tests.pi_sessions import SessionBuilder

BOM = b"\xef\xbb\xbf"
TORN = "torn entry; the rest of its line was read"
GLUED = "several entries on one line"
PADDED = "NUL padding, removed"
NO_HEADER = "no session header; read as version 3, id from the file's name"
NO_SESSION = "not a pi session: neither a session header nor an entry of a session"


def encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def header(version: Any = 3, **fields: Any) -> bytes:
    return encoded({"type": "session", "version": version, "id": "s", "timestamp": "t", "cwd": "/w", **fields})


def label(entry_id: str, parent: str | None, **fields: Any) -> bytes:
    return encoded({"type": "label", "id": entry_id, "parentId": parent, **fields})


def user(entry_id: str, parent: str | None, content: Any = "x", **fields: Any) -> bytes:
    message = {"role": "user", "content": content}
    return encoded({"type": "message", "id": entry_id, "parentId": parent, "message": message, **fields})


def read(folder: Path, *content: bytes, end: bytes = b"\n", name: str = "s.jsonl") -> SessionFile:
    (folder / name).write_bytes(b"\n".join(content) + end)
    return read_session(folder / name)


def ids(session: SessionFile) -> list[str]:
    return [entry["id"] for entry in session.entries]


def skipped(session: SessionFile) -> list[tuple[int, str]]:
    return [(problem.line, problem.reason) for problem in session.problems if problem.skipped]


def mended(session: SessionFile) -> list[tuple[int, str]]:
    return [(problem.line, problem.reason) for problem in session.problems if not problem.skipped]


# Lines


def test_bad_lines_are_skipped_and_named(tmp_path: Path) -> None:
    session = read(
        tmp_path,
        header(),
        label("a", None),
        b"",
        b" \t\r",
        b"null",
        b"7",
        b'["a", {"type": "label", "id": "x", "parentId": "a"}]',
        b'{"type": "label", "parentId": "a"}',
        b'{"type": "label", "id": 5, "parentId": "a"}',
        b'{"type": "label", "id": "n", "parentId": "a", "x": NaN}',
        b"[" * 100_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        header(),
        label("b", "a"),
        b'{"type": "label", "id": "c", "par',
        end=b"",
    )
    assert ids(session) == ["a", "b"]
    assert session.lines == [2, 14]
    assert skipped(session) == [
        (5, "not a JSON object"),
        (6, "not a JSON object"),
        (7, "not a JSON object"),
        (8, "entry without an id"),
        (9, "entry without an id"),
        (10, "not JSON"),
        (11, "not JSON: nested too deeply"),
        (12, "not JSON: nested too deeply"),
        (13, "second session header"),
        (15, "torn last line"),
    ]
    assert mended(session) == []


def test_what_is_no_entry_keeps_its_place_in_the_tree(tmp_path: Path) -> None:
    broken: list[dict[str, Any]] = [
        {"id": "b", "parentId": "a"},
        {"type": 7, "id": "c", "parentId": "b"},
        {"type": "message", "id": "d", "parentId": "c"},
        {"type": "message", "id": "e", "parentId": "d", "message": {"content": "x"}},
        {"type": "message", "id": "f", "parentId": "e", "message": {"role": None}},
    ]
    session = read(tmp_path, header(), user("a", None, "kept"), *map(encoded, broken), user("g", "f", "below"))
    assert session.lines == [2, 3, 4, 5, 6, 7, 8]
    assert session.entries[1] == {"type": UNREADABLE, "id": "b", "parentId": "a"}
    assert [entry["type"] for entry in session.entries] == ["message", *[UNREADABLE] * 5, "message"]
    assert skipped(session) == [
        (3, "entry without a type"),
        (4, "entry without a type"),
        *((line, "message entry without a message that has a role") for line in (5, 6, 7)),
    ]
    tree = build_tree(session)
    assert tree.parents == [-1, 0, 1, 2, 3, 4, 5] and tree.problems == []
    context = ContextBuilder(tree).at(6)
    assert context is not None
    assert [item.message["content"] for item in context.items()] == ["kept", "below"]


def test_what_is_no_entry_keeps_its_place_in_a_list_without_ids(tmp_path: Path) -> None:
    first, second = ({"type": "message", "message": {"role": "user", "content": text}} for text in ("one", "two"))
    session = read(tmp_path, header(1), encoded(first), b'{"type":"message"}', b"7", encoded(second))
    assert build_tree(session).parents == [-1, 0, 1]
    assert [entry["type"] for entry in session.entries] == ["message", UNREADABLE, "message"]
    assert skipped(session) == [
        (3, "message entry without a message that has a role"),
        (4, "not a JSON object"),
    ]


def test_only_newline_ends_a_line(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.user("one\u2028two\u0085three\x0cfour")
    builder.assistant("five\u2029six")
    dataset, report = load_sessions(builder.write(tmp_path / "s.jsonl"), return_report=True)
    contents = [message["content"] for message in dataset[0]["messages"]]
    assert contents == ["one\u2028two\u0085three\x0cfour", "five\u2029six"]
    assert not report.skipped_lines and not report.repaired_lines


def test_crlf_bom_and_blank_lines_are_no_damage(tmp_path: Path) -> None:
    session = read(tmp_path, BOM + header() + b"\r", b"", b"\r", b" ", label("a", None) + b"\r", BOM + label("b", "a"))
    assert ids(session) == ["a", "b"] and session.lines == [5, 6]
    assert session.session_id == "s" and session.problems == []


def test_nul_bytes(tmp_path: Path) -> None:
    """A crash of the machine leaves NUL bytes: before a line, after it, in place of it, or between two."""
    session = read(
        tmp_path,
        header(),
        b"\0" * 4096 + label("a", None),
        label("b", "a") + b"\0" * 3 + b"\r",
        b"\0" * 7,
        b"\0 \0",
        label("c", "b") + b"\0\0" + label("d", "c"),
        b'{"type":"label","id":"e","par\0\0\0' + label("f", "d"),
    )
    assert ids(session) == ["a", "b", "c", "d", "f"]
    assert session.lines == [2, 3, 6, 6, 7]
    assert mended(session) == [(2, PADDED), (3, PADDED), (6, GLUED)]
    assert skipped(session) == [
        (4, "NUL bytes in place of a line"),
        (5, "NUL bytes in place of a line"),
        (7, TORN),
    ]


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    session = read(tmp_path, header(), user("a", None).replace(b'"x"', b'"x\xff\xe2\x82y"'))
    assert session.entries[0]["message"]["content"] == "x\ufffd\ufffdy"
    assert mended(session) == [(2, "invalid UTF-8, replaced by U+FFFD")] and skipped(session) == []


def test_lone_surrogates_are_read_and_reach_no_message(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.lines[0]["cwd"] = "/\udc00"
    builder.user("a\ud800b")
    builder.assistant("c\udfffd", model="m\udfff")
    (tmp_path / "s.jsonl").write_bytes(b"".join(encoded(line) + b"\n" for line in builder.lines))
    session = read_session(tmp_path / "s.jsonl")
    assert session.entries[0]["message"]["content"][0]["text"] == "a\ud800b" and session.problems == []
    dataset, report = load_sessions(tmp_path / "s.jsonl", return_report=True)
    assert [message["content"] for message in dataset[0]["messages"]] == ["ab", "cd"]
    assert report.targets == 1 and not report.repaired_lines


def test_numbers_of_any_size(tmp_path: Path) -> None:
    content = b'{"a":18446744073709551616,"b":-9223372036854775809,"c":1e999,"d":-1E+400,"e":1.0,"f":-0.0,"g":0.1}'
    session = read(tmp_path, header(), label("a", None)[:-1] + b',"data":' + content + b"}")
    values = session.entries[0]["data"]
    assert values == {"a": 2**64, "b": -(2**63) - 1, "c": float("inf"), "d": float("-inf"), "e": 1, "f": 0, "g": 0.1}
    assert [type(value) for value in values.values()] == [int, int, float, float, float, float, float]
    assert str(values["f"]) == "-0.0" and session.problems == []


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"01", b"1" * 5000])
def test_numbers_that_are_none_cost_their_line(tmp_path: Path, number: bytes) -> None:
    session = read(tmp_path, header(), label("a", None)[:-1] + b',"x":' + number + b"}", label("b", "a"))
    assert ids(session) == ["b"] and skipped(session) == [(2, "not JSON")]


def test_whole_entries_on_one_line(tmp_path: Path) -> None:
    glued = b"".join(label(str(count), None) for count in range(100))
    session = read(
        tmp_path,
        header() + label("a", None),
        label("b", "a") + b" \t" + encoded({"type": "of_a_fork", "id": "c", "parentId": "b"}),
        glued,
    )
    assert ids(session) == ["a", "b", "c", *map(str, range(100))]
    assert session.lines == [1, 2, 2, *[3] * 100]
    assert mended(session) == [(1, GLUED), (2, GLUED), (3, GLUED)] and skipped(session) == []


def test_a_whole_entry_after_a_torn_one(tmp_path: Path) -> None:
    blocks = [{"type": "text", "text": '{"type":"message"}'}, {"type": "text", "text": "two"}, {"type": "image"}]
    whole = user("b", "a", blocks, timestamp="t")
    session = read(
        tmp_path,
        header(),
        label("a", None),
        user("t1", "a", blocks)[:-20] + whole,
        whole[:30] + user("c", "b", blocks) + label("d", "c"),
        label("e", "d") + label("t2", "e")[:25],
        label("f", "e") + b"]",
        whole[:-1] + b',"parentId":{"type":"label","a":[{"type":"label","id":"g","parentId":"f"}',
    )
    assert ids(session) == ["a", "b", "c", "d", "e", "f", "g"]
    assert session.lines == [2, 3, 4, 4, 5, 6, 7]
    assert session.entries[1] == json.loads(whole)
    assert skipped(session) == [(3, TORN), (4, TORN), (5, TORN), (6, TORN), (7, TORN)] and mended(session) == []


def test_glued_values_that_are_no_entries_are_named(tmp_path: Path) -> None:
    session = read(
        tmp_path,
        header(),
        label("a", None) + b'{"type":"label","timestamp":"t"}',
        label("b", "a") + b"7" + label("c", "b"),
        b'{"type":"text"}{"type":"text"}',
    )
    assert ids(session) == ["a", "b", "c"]
    assert skipped(session) == [(2, "entry without an id"), (3, TORN), (4, "not JSON")]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (b"\n", (["a", "b"], [])),
        (b"", (["a", "b"], [])),
        (b"\0" * 512, (["a", "b"], [])),
        (b"\n{", (["a", "b"], [(4, "torn last line")])),
        (b'\n{"type":"label","id":"c"', (["a", "b"], [(4, "torn last line")])),
        (b"\nx\n", (["a", "b"], [(4, "not JSON")])),
    ],
)
def test_the_end_of_a_file(tmp_path: Path, end: bytes, expected: tuple[list[str], list[tuple[int, str]]]) -> None:
    session = read(tmp_path, header(), label("a", None), label("b", "a"), end=end)
    assert (ids(session), skipped(session)) == expected


@pytest.mark.parametrize("more", [b'"}\n' + label("c", "b") + b"\n", b'"}', b"x" * 3_000_000])
def test_only_what_is_there_when_a_file_is_opened_is_read(tmp_path: Path, more: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(header() + b"\n" + label("a", None) + b"\n" + label("b", "a")[:-2])
    problems: list[Problem] = []
    values = read_values(path, problems)
    first = next(values)
    with open(path, "ab") as file:
        file.write(more)
    rest = [value["id"] for _, _, _, value in values]
    assert first[3]["type"] == "session" and rest == ["a"]
    assert problems == [Problem(3, "torn last line")]


def test_places_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    content = [header(), b"\0\0" + label("a", None), b"", label("b", "a") + label("c", "b")]
    path.write_bytes(b"\n".join(content))
    places = [(number, offset, length) for number, offset, length, _ in read_values(path, [])]
    whole = path.read_bytes()
    assert [number for number, _, _ in places] == [1, 2, 4, 4]
    assert [whole[offset : offset + length].rstrip(b"\n") for _, offset, length in places] == [
        *content[:2],
        content[3],
        content[3],
    ]


def test_contents_are_read_again_from_mended_lines(tmp_path: Path) -> None:
    """The last turn follows older rules, so that all messages are needed in a second form."""
    builder = SessionBuilder()
    builder.user("padded")
    builder.assistant("one")
    builder.user("glued")
    builder.entry("label")
    builder.user("glued second")
    builder.user("torn before")
    builder.user("bad \ufffd bytes")
    builder.assistant("two", durationMs=1)
    builder.user("last")
    builder.assistant("three")
    builder.lines[-1]["message"].pop("durationMs")
    raw = [json.dumps(line, ensure_ascii=False).encode() for line in builder.lines]
    raw[1] = b"\0" * 9 + raw[1]
    raw[3:6] = [raw[3] + raw[4] + raw[5]]
    raw[4] = b'{"type":"message","id":"x","message":{"role":"user","content":"no' + raw[4]
    raw[5] = raw[5].replace("\ufffd".encode(), b"\xff")
    (tmp_path / "s.jsonl").write_bytes(b"\n".join(raw))
    turns = list(iter_turns(tmp_path / "s.jsonl"))
    contents = [[message["content"] for message in turn.messages] for turn in turns]
    assert contents[1] == ["padded", "one", "glued", "glued second", "torn before", "bad \ufffd bytes"]
    assert contents[2] == [*contents[1], "two", "last"]


HOSTILE = {
    "openings": b'{"type":"message",',
    "nested": b'{"type":"message","a":',
    "in a string": b'{"type":"message","id":"',
    "fragments": b'{"type":"message","a":1}',
    "torn and whole": b'{"type":"message","id":"' + label("a", None),
    "brackets": b"[",
    "bytes": b"\xff",
    "spaces": b'{"type":"label"' + b" " * 1000,
    "padding": b"\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_line_is_searched_a_few_times(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, text: str, position: int = 0) -> tuple[Any, int]:
            decoded.append(position)
            return super().raw_decode(text, position)

    monkeypatch.setattr(lines, "_DECODER", Counting(parse_constant=lines._refuse_constant))
    line = HOSTILE[name] * (1_000_000 // len(HOSTILE[name]))
    started = time.perf_counter()
    session = read(tmp_path, header(), line, label("last", None))
    assert time.perf_counter() - started < 5
    assert ids(session)[-1] == "last"
    assert [number for number, _ in skipped(session)] == [2]
    assert len([position for position in decoded if position]) <= 2 * 32


def test_thousands_of_whole_entries_on_one_line(tmp_path: Path) -> None:
    count = 20_000
    started = time.perf_counter()
    session = read(tmp_path, header(), b"".join(label(str(number), None) for number in range(count)))
    assert time.perf_counter() - started < 5
    assert len(session.entries) == count and mended(session) == [(2, GLUED)] and skipped(session) == []


# Headers


@pytest.mark.parametrize("version", [3, "3", 3.0, 4, 99, 1e300])
def test_versions_from_three_on_are_read(tmp_path: Path, version: Any) -> None:
    session = read(tmp_path, header(version), label("a", None))
    assert session.session_id == "s" and session.header["version"] == version
    assert ids(session) == ["a"] and session.problems == []


@pytest.mark.parametrize("version", [b'"x"', b'""', b"[3]", b"{}", b"9" * 400])
def test_a_version_that_is_no_number_is_read_as_three(tmp_path: Path, version: bytes) -> None:
    first = header().replace(b'"version":3', b'"version":' + version)
    session = read(tmp_path, first, label("a", None), label("b", "a"))
    assert ids(session) == ["a", "b"] and build_tree(session).parents == [-1, 0]
    assert mended(session) == [(1, "version in the header is no number; read as version 3")]


def test_a_late_header(tmp_path: Path) -> None:
    session = read(tmp_path, b"{oops", label("a", None), b"7", label("b", "a"), header(), label("c", "b"))
    assert session.session_id == "s" and session.cwd == "/w"
    assert ids(session) == ["a", "b", "c"] and session.lines == [2, 4, 6]
    assert mended(session) == [(5, "session header is not the first line")]
    assert skipped(session) == [(1, "not JSON"), (3, "not a JSON object")]


def test_the_first_of_several_headers_counts(tmp_path: Path) -> None:
    content = header(), label("a", None), header(1, id="other"), label("b", "a"), header()
    session = read(tmp_path, *content)
    assert session.session_id == "s" and ids(session) == ["a", "b"]
    assert skipped(session) == [(3, "second session header"), (5, "second session header")]


NAME = "2026-01-01T00-00-00-000Z_0199-a.b_c.jsonl"


@pytest.mark.parametrize(
    ("name", "session_id"), [(NAME, "0199-a.b_c"), ("2026_0199.jsonl", "0199"), ("my.jsonl", "my")]
)
def test_a_header_without_an_id_takes_it_from_the_name(tmp_path: Path, name: str, session_id: str) -> None:
    session = read(tmp_path, header(id=None), label("a", None), name=name)
    assert session.session_id == session_id and session.cwd == "/w"
    assert mended(session) == [(1, "session header without an id; taken from the file's name")]


@pytest.mark.parametrize("first", [b"", b"null", header()[:40], b'{"type":"of_a_fork","id":"z","parentId":null}'])
def test_no_header(tmp_path: Path, first: bytes) -> None:
    session = read(tmp_path, first, label("a", None), label("b", "a"), name="2026_0199.jsonl")
    assert session.session_id == "0199" and ids(session)[-2:] == ["a", "b"] and session.cwd is None
    assert [reason for _, reason in mended(session)] == [NO_HEADER]


def test_a_title_line_before_the_header(tmp_path: Path) -> None:
    """As oh-my-pi writes it; a name given later counts."""
    title = b'{"type":"title","title":"Work"}'
    session = read(tmp_path, title, header(), label("a", None))
    assert session.name == "Work" and session.session_id == "s" and session.problems == []
    session = read(tmp_path, title, label("a", None))
    assert session.name == "Work" and mended(session) == [(2, NO_HEADER)]
    named = encoded({"type": "session_info", "id": "b", "parentId": None, "name": "Play"})
    session = read(tmp_path, title, title, header(), named)
    assert session.name == "Play" and skipped(session) == [(2, "entry without an id")]


def test_a_header_alone_is_a_session(tmp_path: Path) -> None:
    session = read(tmp_path, header())
    assert session.entries == [] and session.problems == []
    dataset, report = load_sessions(tmp_path / "s.jsonl", return_report=True)
    assert len(dataset) == 0 and report.files == 1 and report.complete


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", None, "not a pi session: the file holds no JSON line"),
        (b"\n\0\0\n \n", None, "not a pi session: the file holds no JSON line"),
        (b"Dear diary,\nnothing.\n", None, "not a pi session: the file holds no JSON line"),
        (b'{"a": 1}\n{"messages": []}\n', None, NO_SESSION),
        (b'{"type":"title","title":"t"}\n', None, NO_SESSION),
        (b'{"type":"label","id":"a"}\n', None, NO_SESSION),
        (b'[{"type":"session","id":"s"}]\n', None, NO_SESSION),
        (
            b'{"kind":"header","version":4,"id":"s","createdAt":1,"cwd":"/w"}\n' + label("a", None),
            1,
            "written by pi-agent-core's own harness (version 4), not by pi: another format, which is not read",
        ),
    ],
)
def test_files_that_are_no_session_are_refused(tmp_path: Path, content: bytes, line: int | None, reason: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(SessionError) as error:
        read_session(path)
    assert (error.value.path, error.value.line, error.value.reason) == (str(path), line, reason)
    place = str(path) if line is None else f"{path}:{line}"
    assert str(error.value) == f"{place}: {reason}"
    dataset, report = load_sessions(path, return_report=True)
    assert len(dataset) == 0 and report.files == 0
    assert report.skipped_files == {reason: 1} and report.examples == {reason: [place]}
    with pytest.raises(SessionError):
        load_sessions(path, on_error="raise")


def test_other_json_lines_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def counted(path: Path, problems: list[Problem], *decoder: Any) -> Iterator[tuple[int, int, int, Any]]:
        nonlocal taken
        for value in read_values(path, problems, *decoder):
            taken += 1
            yield value

    monkeypatch.setattr(reader, "read_values", counted)
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"messages": []}\n' * 100_000)
    with pytest.raises(SessionError, match="neither a session header nor an entry of a session"):
        read_session(path)
    assert taken == 32


# Old versions


def entry(kind: str, **fields: Any) -> bytes:
    return encoded({"type": kind, "timestamp": "t", **fields})


def test_version_1_is_linked_in_file_order(tmp_path: Path) -> None:
    said = entry("message", message={"role": "user", "content": "x"})
    first = header().replace(b'"version":3,', b"")
    for content in ([first, said, said, entry("model_change")], [header(1), said, said, entry("model_change")]):
        session = read(tmp_path, *content)
        assert ids(session) == ["v1-00000", "v1-00001", "v1-00002"] and session.problems == []
        assert [line["parentId"] for line in session.entries] == [None, "v1-00000", "v1-00001"]


def test_a_lost_version_costs_the_tree_as_in_pi(tmp_path: Path) -> None:
    session = read(tmp_path, header(None), label("a", None), label("b", "a"), label("c", "a"))
    assert ids(session) == ["v1-00000", "v1-00001", "v1-00002"] and build_tree(session).parents == [-1, 0, 1]
    reason = "entries have parents but the header no version: linked in file order, as pi does"
    assert mended(session) == [(1, reason)]


@pytest.mark.parametrize(
    ("index", "kept"),
    [
        *[(0, None), (1, "v1-00000"), (2, "v1-00001"), (3, "v1-00002"), (4, None), (99, None), (-1, None)],
        *[(None, None), ("1", None), (1.5, None), (True, None)],
    ],
)
def test_kept_entries_of_version_1_are_counted_from_the_header(tmp_path: Path, index: Any, kept: str | None) -> None:
    said = [entry("message", message={"role": "user", "content": text}) for text in ("a", "b")]
    session = read(
        tmp_path,
        header(1),
        said[0],
        b"",
        said[1],
        entry("compaction", summary="s", firstKeptEntryIndex=index),
        entry("message", message={"role": "user", "content": "later"}),
    )
    compaction = session.entries[2]
    assert compaction.get("firstKeptEntryId") == kept and "firstKeptEntryIndex" not in compaction
    context = ContextBuilder(build_tree(session)).at(3)
    assert context is not None
    texts = [item.message["content"] for item in context.items()]
    assert texts[1:-1] == {"v1-00000": ["a", "b"], "v1-00001": ["b"]}.get(str(kept), [])


def test_values_that_pi_drops_do_not_count_among_kept_entries(tmp_path: Path) -> None:
    """pi keeps what is true in JavaScript: numbers but 0, strings but the empty one, lists and objects."""
    said = entry("message", message={"role": "user", "content": "x"})
    nothing, something = [b"null", b"0", b"false", b'""'], [b"[]", b"7", b"{}", header(1)]
    last = entry("compaction", summary="s", firstKeptEntryIndex=5)
    session = read(tmp_path, header(1), *nothing, *something, said, last)
    assert session.entries[-1]["firstKeptEntryId"] == session.entries[-2]["id"]


def test_hook_messages_become_custom_messages(tmp_path: Path) -> None:
    hook = {"role": "hookMessage", "customType": "note", "content": "from a hook"}
    for version in (1, 2, 2.9, "2"):
        session = read(tmp_path, header(version), encoded({**json.loads(user("a", None)), "message": hook}))
        assert session.entries[0]["message"]["role"] == "custom" and session.problems[:-1] == []
    session = read(tmp_path, header(3), encoded({**json.loads(user("a", None)), "message": hook}))
    assert session.entries[0]["message"]["role"] == "hookMessage"


def test_version_2_keeps_its_tree(tmp_path: Path) -> None:
    session = read(tmp_path, label("a", None), header(2), label("b", "a"), label("c", "a"), b"{}")
    assert ids(session) == ["a", "b", "c"] and build_tree(session).parents == [-1, 0, 0]
    assert mended(session) == [(2, "session header is not the first line")]
    assert skipped(session) == [(5, "entry without a type")]


# Trees


def tree_of(*edges: tuple[str, str | None]) -> tuple[list[int], list[str]]:
    entries = [{"type": "label", "id": entry_id, "parentId": parent} for entry_id, parent in edges]
    session = SessionFile("s", {"id": "s"}, entries, list(range(2, len(entries) + 2)), [])
    tree = build_tree(session)
    return tree.parents, [f"{problem.line}: {problem.reason}" for problem in tree.problems]


def test_parents_and_roots() -> None:
    assert tree_of(("a", None), ("b", "a"), ("c", "a"), ("d", ""), ("e", "b")) == ([-1, 0, 0, -1, 1], [])


def test_a_missing_parent_makes_a_root() -> None:
    assert tree_of(("a", "gone"), ("b", "a")) == ([-1, 0], ["2: parent is not in the file"])


def test_a_parent_that_is_no_id_makes_a_root(tmp_path: Path) -> None:
    tree = build_tree(read(tmp_path, header(), b'{"type": "label", "id": "a", "parentId": ["a"]}'))
    assert tree.parents == [-1]
    assert [problem.reason for problem in tree.problems] == ["parent is not in the file"]


def test_a_parent_may_stand_after_its_child() -> None:
    assert tree_of(("b", "a"), ("c", "b"), ("a", None)) == ([2, 0, -1], [])


def test_a_duplicate_id_resolves_to_the_entry_before() -> None:
    parents, problems = tree_of(("c", "a"), ("a", None), ("b", "a"), ("a", "b"), ("d", "a"), ("a", "a"), ("e", "a"))
    assert parents == [1, -1, 1, 2, 3, 3, 5]
    assert problems == ["5: duplicate entry id", "7: duplicate entry id"]


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


# Reports


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(header() + b"\n{oops\n" + BOM + b"\n\0" + label("a", "gone") + b"\n")
    with pytest.raises(SessionError, match=r"s\.jsonl:2: not JSON"):
        load_sessions(path, on_error="raise")
    _, report = load_sessions(path, return_report=True)
    assert report.skipped_lines == {"not JSON": 1}
    assert report.repaired_lines == {PADDED: 1, "parent is not in the file": 1}
    assert report.examples == {
        "not JSON": [f"{path}:2"],
        PADDED: [f"{path}:4"],
        "parent is not in the file": [f"{path}:4"],
    }
    assert f"lines skipped: 1 x not JSON ({path}:2)" in str(report)


def test_a_file_of_text_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"no json\n" * 5000)
    problems: list[Problem] = []
    assert list(read_values(path, problems)) == []
    assert len(problems) == 1000
    with pytest.raises(SessionError, match="the file holds no JSON line"):
        read_session(path)
    path.write_bytes(b"{}\n" + b"no json\n" * 5000)
    problems.clear()
    assert len(list(read_values(path, problems))) == 1
    assert len(problems) == 5000


def test_a_hostile_stop_reason_is_not_repeated(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.user("hello")
    builder.assistant("one", stop="\ud800" * 5000)
    builder.assistant("two", stop="error")
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in builder.lines))
    _, report = load_sessions(path, return_report=True)
    assert report.untrained_turns == {"stop reason that is no word": 1, "stop reason error": 1}

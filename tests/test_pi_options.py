"""What a caller can say about reading: which turns are targets, and what files do not say."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from dagpack_hf.pi import LoadReport, iter_turns, load_sessions
from dagpack_hf.pi.options import ReadOptions, legacy_version, moment
from tests.pi_sessions import SessionBuilder, call, schema, thinking, tool

UTC = timezone.utc


def choice_session() -> SessionBuilder:
    """A trunk with two models and two branches: e2 tiny, e4 big, then e6 or e8 tiny; timestamps are 00:00:0N."""
    session = SessionBuilder(cwd="/a/b")
    session.user("1")
    session.assistant("one")
    session.user("2")
    fork = session.assistant("two", model="big", provider="cloud")
    session.user("3")
    session.assistant("three")
    session.user("4", parent=fork)
    session.assistant("four")
    return session


def labelled(session: SessionBuilder, target: str, label: Any) -> SessionBuilder:
    session.entry("label", targetId=target, label=label)
    return session


@pytest.fixture
def selected(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, int]]]:
    """Return the entries of the targets, and why the others are none; checks that requests stay whole."""

    def select(session: SessionBuilder, **options: Any) -> tuple[list[str], dict[str, int]]:
        path = session.write(tmp_path / "s.jsonl")
        turns = list(iter_turns(path, **options))
        assert [turn.messages for turn in turns] == [turn.messages for turn in iter_turns(path)]
        entries = [turn.entry for turn in turns if turn.trained]
        dataset, report = load_sessions(path, return_report=True, **options)
        assert sorted(
            entry
            for row in dataset
            for entry, trained in zip(row["entry_ids"], row["trained"], strict=True)
            if trained
        ) == sorted(entries)
        assert report.targets == len(entries)
        assert sum(report.untrained_turns.values()) + report.targets == report.turns == len(turns)
        return entries, report.untrained_turns

    return select


ALL = ["e2", "e4", "e6", "e8"]


@pytest.mark.parametrize(
    ("options", "entries", "reason"),
    [
        ({"models": "big"}, ["e4"], "model"),
        ({"models": "t*"}, ["e2", "e6", "e8"], "model"),
        ({"models": ["cloud/big", "nothing"]}, ["e4"], "model"),
        ({"models": "cloud/*"}, ["e4"], "model"),
        ({"models": {"big", "tiny"}}, ALL, None),
        ({"models": "Big"}, [], "model"),
        ({"models": []}, [], "model"),
        ({"providers": "cloud"}, ["e4"], "provider"),
        ({"providers": ("l*l", "x")}, ["e2", "e6", "e8"], "provider"),
        ({"since": "2026-01-01T00:00:06"}, ["e6", "e8"], "time"),
        ({"since": "2026-01-01T00:00:06.001Z"}, ["e8"], "time"),
        ({"since": "2026-01-01T01:00:06+01:00"}, ["e6", "e8"], "time"),
        ({"until": "2026-01-01T00:00:06"}, ["e2", "e4"], "time"),
        ({"until": datetime(2026, 1, 1, 0, 0, 6, 1, UTC)}, ["e2", "e4", "e6"], "time"),
        ({"since": datetime(2026, 1, 1, 2, 0, 6, tzinfo=timezone(timedelta(hours=2)))}, ["e6", "e8"], "time"),
        ({"since": "2026-01-01"}, ALL, None),
        ({"since": date(2026, 1, 1), "until": date(2026, 1, 2)}, ALL, None),
        ({"until": date(2026, 1, 1)}, [], "time"),
        ({"since": date(2026, 1, 2)}, [], "time"),
        ({"since": "2026-01-01T00:00:04Z", "until": "2026-01-01T00:00:08Z"}, ["e4", "e6"], "time"),
        ({"cwd": "/a/b"}, ALL, None),
        ({"cwd": "/a/b/"}, ALL, None),
        ({"cwd": Path("/a")}, ALL, None),
        ({"cwd": "/"}, ALL, None),
        ({"cwd": ["/x", "/a/../a/b"]}, ALL, None),
        ({"cwd": "/a/bc"}, [], "working directory"),
        ({"cwd": "/a/b/c"}, [], "working directory"),
        ({"cwd": "/a/"}, ALL, None),
        ({"cwd": "a/b"}, [], "working directory"),
        ({"models": "tiny", "since": "2026-01-01T00:00:03Z"}, ["e6", "e8"], None),
    ],
)
def test_targets_are_selected(selected: Any, options: dict[str, Any], entries: list[str], reason: str | None) -> None:
    found, reasons = selected(choice_session(), **options)
    assert found == entries
    if reason is not None:
        assert reasons == {f"not selected: {reason}": 4 - len(entries)}


def test_reasons_are_counted_one_for_each_turn(selected: Any) -> None:
    session = choice_session()
    session.assistant("cut", stop="length")
    found, reasons = selected(session, models="tiny", providers="nobody", until="2026-01-01T00:00:08Z")
    assert found == []
    assert reasons == {"not selected: model": 1, "not selected: provider": 3, "stop reason length": 1}


def test_what_is_not_selected_stays_context(tmp_path: Path) -> None:
    dataset = load_sessions(choice_session().write(tmp_path / "s.jsonl"), since="2026-01-01T00:00:05Z")
    assert dataset["trained"][:] == [[False] * 5 + [True]] * 2
    assert [message["content"] for message in dataset[0]["messages"]] == ["1", "one", "2", "two", "3", "three"]


@pytest.mark.parametrize(
    ("cwd", "kept"),
    [("/a/b", True), ("/a/b/", True), ("/a/b/c", True), ("/a/bc", False), ("/a", False), (None, False)],
)
def test_directories_end_where_their_names_do(selected: Any, cwd: Any, kept: bool) -> None:
    session = choice_session()
    session.lines[0]["cwd"] = cwd
    assert selected(session, cwd="/a/b")[0] == (ALL if kept else [])


def test_home_is_written_out(selected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/a")
    assert selected(choice_session(), cwd="~/b")[0] == ALL
    assert selected(choice_session(), cwd=Path("~/c"))[0] == []
    monkeypatch.chdir(tmp_path)
    session = choice_session()
    session.lines[0]["cwd"] = str(tmp_path.resolve() / "x")
    assert selected(session, cwd=".")[0] == ALL


@pytest.mark.parametrize("since", ["2026-01-01", None])
@pytest.mark.parametrize("stored", [7, None, "yesterday", "", [], "2026-13-01T00:00:00Z", {"$date": 1}])
def test_a_turn_without_a_time_is_not_selected_by_time(selected: Any, stored: Any, since: str | None) -> None:
    session = choice_session()
    session.lines[2]["timestamp"] = stored
    session.lines[4]["timestamp"] = "0001-01-01T00:00:00+23:59"
    session.lines[6]["timestamp"] = "9999-12-31T23:59:59-23:59"
    found, reasons = selected(session, since=since)
    assert found == (["e6", "e8"] if since else ALL)
    assert reasons == ({"not selected: time": 2} if since else {})


@pytest.mark.parametrize(
    ("names", "given", "kept"),
    [
        (["draft", "final"], "final", True),
        (["draft", "final"], "draft", False),
        (["draft", "final"], ["x", "fin*"], True),
        (["final"], "Final", False),
        ([], "f*", False),
        ([], "*", True),
        ([7], "*7*", False),
    ],
)
def test_the_last_name_of_a_session_counts(selected: Any, names: list[Any], given: Any, kept: bool) -> None:
    session = choice_session()
    for name in names:
        session.entry("session_info", name=name)
    found, reasons = selected(session, names=given)
    assert found == (ALL if kept else [])
    assert reasons == ({} if kept else {"not selected: session name": 4})


def test_a_title_in_the_file_is_a_name(selected: Any) -> None:
    session = choice_session()
    session.lines[0]["title"] = "from the header"
    assert selected(session, names="from*")[0] == ALL
    session.lines.insert(0, {"type": "title", "title": "before the header"})
    assert selected(session, names="before*")[0] == ALL
    session.entry("session_info", name="last")
    assert selected(session, names="before*")[0] == []
    assert selected(session, names="last")[0] == ALL


@pytest.mark.parametrize(
    ("labels", "entries"),
    [
        ([("e1", "good")], ALL),
        ([("e3", "good")], ALL),
        ([("e5", "good")], ["e2", "e4", "e6"]),
        ([("e6", "good")], ["e2", "e4", "e6"]),
        ([("e8", "good")], ["e2", "e4", "e8"]),
        ([("e6", "good"), ("e8", "good")], ALL),
        ([("e6", "bad"), ("e8", "good")], ["e2", "e4", "e8"]),
        ([("e6", "good"), ("e6", "bad")], []),
        ([("e6", "bad"), ("e6", "good")], ["e2", "e4", "e6"]),
        ([("e6", "good"), ("e6", None)], []),
        ([("e6", "good"), ("e6", "")], []),
        ([("gone", "good"), ("e6", 7)], []),
        ([], []),
    ],
)
def test_labels_select_branches(selected: Any, labels: list[tuple[str, Any]], entries: list[str]) -> None:
    session = choice_session()
    for target, label in labels:
        labelled(session, target, label)
    found, reasons = selected(session, labels="go*")
    assert found == entries
    assert sum(reasons.values()) == reasons.get("not selected: label", 0) == 4 - len(entries)


def test_any_label_is_not_a_cleared_one(selected: Any) -> None:
    session = labelled(labelled(choice_session(), "e6", "x"), "e6", "")
    assert selected(session, labels="*")[0] == []
    assert selected(labelled(choice_session(), "e6", "x"), labels=("*",))[0] == ["e2", "e4", "e6"]
    session = choice_session()
    session.entry("label", targetId="e6")
    session.entry("label", targetId=["e6"], label="x")
    assert selected(session, labels="*")[0] == []


def test_labels_reach_children_that_stand_before_their_parents(selected: Any) -> None:
    session = labelled(choice_session(), "e5", "x")
    session.lines[6], session.lines[5] = session.lines[5], session.lines[6]  # e6 before e5
    assert sorted(selected(session, labels="x")[0]) == ["e2", "e4", "e6"]


def test_one_text_is_one_name_not_its_letters() -> None:
    for name in ("models", "providers", "names", "labels", "text_only_models", "system_update_models"):
        assert getattr(ReadOptions(**{name: "tiny"}), name) == ("tiny",)
    assert ReadOptions(target_stop_reasons="stop").target_stop_reasons == ("stop",)
    assert ReadOptions(cwd=Path("/a")).cwd == (Path("/a"),)


def test_what_can_be_read_once_counts_for_every_file(tmp_path: Path) -> None:
    for name in ("1", "2"):
        session = choice_session()
        session.lines[0]["id"] = name
        for line in session.lines[1:]:
            line["id"] = name + line["id"]
            line["parentId"] = line["parentId"] and name + line["parentId"]
            if line["message"]["role"] == "user":
                line["message"]["content"][0]["text"] += name
        session.write(tmp_path / f"{name}.jsonl")
    dataset = load_sessions(tmp_path, cwd=iter(["/a"]), models=iter(["tiny"]), num_proc=2)
    assert dataset["session_id"][:] == ["1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("images", "drop", "images='drop' is unknown: use 'placeholder', 'keep' or 'reference'"),
        ("on_error", "ignore", "on_error='ignore' is unknown: use 'skip' or 'raise'"),
        ("pi_version", "new", "pi_version='new' is no version of pi, such as '0.74.2' or '1.6.0'"),
        ("pi_version", "", "pi_version=''"),
        ("pi_version", "v1.6", "pi_version='v1.6'"),
        ("since", "last week", "since='last week' is no time in ISO form, such as '2026-01-31'"),
        ("until", "31.01.2026", "until='31.01.2026' is no time in ISO form"),
        ("until", 5, "until=5 is no time: use a datetime, a date, or text"),
        ("target_stop_reasons", ["stop", "error"], r"target_stop_reasons holds \['error'\]: a failed turn is never"),
        ("target_stop_reasons", "aborted", r"target_stop_reasons holds \['aborted'\]"),
        ("target_stop_reasons", ["cut"], r"holds \['cut'\]: use 'length', 'stop', 'toolUse'"),
        ("models", 5, "models=5 is neither a text nor a list of texts"),
        ("labels", [None], r"labels=\[None\] holds something that is no text"),
        ("names", ["a", 3], r"names=\['a', 3\] holds something"),
        ("cwd", 7, "cwd=7 is neither"),
        ("html_exports", [3], r"html_exports=\[3\] holds"),
        ("text_only_models", [b"x"], "text_only_models="),
    ],
)
def test_bad_values_are_refused_before_anything_is_read(option: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ReadOptions(**{option: value})
    with pytest.raises(ValueError, match=message):
        load_sessions(tmp_path / "nowhere", **{option: value})


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model"):
        load_sessions(tmp_path, model="tiny")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("system_prompt", 5, r"system_prompt= gives 5 for .*s\.jsonl: it must be a text or None"),
        ("system_prompt", lambda session: ["x"], r"system_prompt= gives \['x'\] for .*s\.jsonl"),
        ("tools", [{"no": "name"}], r"tools= gives \[{'no': 'name'}\] for .*s\.jsonl: it must be a list of function"),
        ("tools", "read", r"tools= gives 'read'"),
        ("tools", lambda session: [{"function": None}], r"tools= gives \[{'function': None}\]"),
    ],
)
def test_prompts_and_tools_of_a_wrong_kind_are_refused(option: str, value: Any, message: str, tmp_path: Path) -> None:
    path = choice_session().write(tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match=message):
        load_sessions(path, **{option: value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T09:30", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T09:30:00.500Z", datetime(2026, 1, 31, 9, 30, 0, 500000, UTC)),
        ("2026-01-31T09:30-05:00", datetime(2026, 1, 31, 14, 30, tzinfo=UTC)),
        (date(2026, 1, 31), datetime(2026, 1, 31, tzinfo=UTC)),
        (datetime(2026, 1, 31, 9), datetime(2026, 1, 31, 9, tzinfo=UTC)),
    ],
)
def test_times(value: Any, expected: datetime | None) -> None:
    assert moment(value, "since") == expected


def test_versions() -> None:
    assert [legacy_version(version) for version in ("0.74.2", "0", "0.99", "1.0.0", "1", "10.2")] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_length_is_a_target_by_option_only(selected: Any) -> None:
    session = choice_session()
    cut = session.assistant("long", stop="length")
    for stop in ("error", "aborted", "deferred", None):
        session.assistant("x", stop=stop, **({"stopReason": None} if stop is None else {}))
    found, reasons = selected(session)
    assert found == ALL
    wanted = {f"stop reason {stop}": 1 for stop in ("length", "error", "aborted", "deferred", "None")}
    assert reasons == wanted
    found, reasons = selected(session, target_stop_reasons={"stop", "length"})
    assert found == [*ALL, cut]
    assert selected(session, target_stop_reasons="length")[0] == [cut]
    del wanted["stop reason length"]
    assert reasons == wanted
    session = SessionBuilder()
    session.user("1")
    session.assistant(call("c1", "read"))
    assert selected(session)[0] == ["e2"]
    assert selected(session, target_stop_reasons="stop") == ([], {"stop reason toolUse": 1})


def test_the_version_of_pi_can_be_given(tmp_path: Path) -> None:
    session = SessionBuilder()
    session.user("1")
    session.assistant(thinking("aloud. "), "c", model="big")
    session.assistant("d")
    path = session.write(tmp_path / "s.jsonl")

    def seen(**options: Any) -> str:
        *_, turn = iter_turns(path, **options)
        return turn.messages[1]["content"]

    assert [seen(), seen(pi_version="1.6.0"), seen(pi_version="0.74.2")] == ["c", "c", "aloud. c"]
    for line in session.lines[1:]:
        line["message"].pop("durationMs", None)
    session.write(path)
    assert [seen(), seen(pi_version="1"), seen(pi_version="0")] == ["aloud. c", "c", "aloud. c"]


def test_system_messages_stay_in_place_for_models_that_take_them(tmp_path: Path) -> None:
    session = SessionBuilder()
    session.system("Base.")
    session.user("1")
    session.assistant("one")
    session.system("More.")
    session.assistant("two")
    path = session.write(tmp_path / "s.jsonl")
    folded = load_sessions(path)
    assert [[message["content"] for message in row] for row in folded["messages"]] == [
        ["Base.", "1", "one"],
        ["Base.\n\nMore.", "1", "one", "two"],
    ]
    in_place = load_sessions(path, system_update_models="tiny")
    assert [[message["content"] for message in row] for row in in_place["messages"]] == [
        ["Base.", "1", "one", "More.", "two"]
    ]
    assert in_place["trained"][:] == [[False, False, True, False, True]]


def test_prompt_and_tools_may_depend_on_the_session(tmp_path: Path) -> None:
    for name, cwd in (("1", "/a"), ("2", "/b")):
        session = SessionBuilder(name, cwd=cwd)
        session.user("hi " + name)
        session.assistant("ho " + name)
        session.write(tmp_path / f"{name}.jsonl")
    dataset, report = load_sessions(
        tmp_path,
        system_prompt=lambda session: f"You are in {session.cwd}." if session.cwd == "/b" else None,
        tools=lambda session: [tool("read")] if session.session_id == "1" else [],
        return_report=True,
    )
    assert [row[0] for row in dataset["messages"]] == [
        {"role": "user", "content": "hi 1"},
        {"role": "system", "content": "You are in /b."},
    ]
    assert dataset["tools"][:] == [[schema("read")], None]
    assert report.unrecorded_prompts == 0
    _, report = load_sessions(tmp_path, system_prompt="", tools=(), return_report=True)
    assert report.unrecorded_prompts == 2


def export_html(path: Path, session_id: str, prompt: str) -> Path:
    data = {"header": {"id": session_id}, "systemPrompt": prompt, "tools": [tool("bash")]}
    encoded = base64.b64encode(json.dumps(data).encode()).decode()
    path.write_text(f'<script id="session-data" type="application/json">{encoded}</script>')
    return path


def test_prompts_come_from_html_exports_before_what_is_supplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = choice_session().write(tmp_path / "s.jsonl")
    export = export_html(tmp_path / "s.html", "s1", "Live.")
    export_html(tmp_path / "other.html", "other", "Not this.")

    def prompts(**options: Any) -> tuple[set[str], LoadReport]:
        dataset, report = load_sessions(path, return_report=True, **options)
        assert all(row == [schema("bash")] for row in dataset["tools"])
        return {row[0]["content"] for row in dataset["messages"]}, report

    found, report = prompts(html_exports=iter([export, tmp_path / "other.html"]), system_prompt="Supplied.")
    assert found == {"Live."} and report.unrecorded_prompts == 0
    assert prompts(html_exports=str(export))[0] == {"Live."}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompts(html_exports="~/s.html")[0] == {"Live."}
    export_html(export, "s1", "Edited.")
    assert prompts(html_exports="~/s.html")[0] == {"Edited."}
    with pytest.raises(OSError, match="nowhere"):
        prompts(html_exports=os.fspath(tmp_path / "nowhere"))

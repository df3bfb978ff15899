"""From session files to rows: forks, branches, reports, processes, the cache, and where files are found."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, load_from_disk

from dagpack_hf.conversations import FEATURES
from dagpack_hf.pi import (
    LoadReport,
    SessionError,
    default_session_dir,
    export_turns,
    iter_turns,
    load_sessions,
    session_files,
    sessions,
    turns,
)
from dagpack_hf.pi.report import Tally
from tests.pi_sessions import SessionBuilder, call, image, schema, text, thinking, tool


def tree_session(session_id: str = "s1") -> SessionBuilder:
    """A system prompt, an exploration, two branches, a failed turn."""
    session = SessionBuilder(session_id)
    session.system("Be brief.", toolsAdded=[tool("read")])
    session.user("Explore")
    session.assistant(thinking("Hm."), call("c1", "read", path="a"))
    session.result("c1", "text")
    found = session.assistant("Found.")
    session.user("A")
    session.assistant("a")
    session.user("B", parent=found)
    session.assistant("broken", stop="error")
    session.assistant("b")
    return session


def test_rows_of_a_tree(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    dataset, report = load_sessions(path, return_report=True)
    trunk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Explore"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "read", "arguments": {"path": "a"}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "text"},
        {"role": "assistant", "content": "Found."},
    ]
    assert dataset["messages"][:] == [
        [*trunk, {"role": "user", "content": "A"}, {"role": "assistant", "content": "a"}],
        [*trunk, {"role": "user", "content": "B"}, {"role": "assistant", "content": "b"}],
    ]
    assert dataset["trained"][:] == [
        [False, False, True, False, True, False, True],
        [False, False, False, False, False, False, True],
    ]
    assert dataset["tools"][:] == [[schema("read")]] * 2
    assert dataset["entry_ids"][:] == [
        ["e1", "e2", "e3", "e4", "e5", "e6", "e7"],
        ["e1", "e2", "e3", "e4", "e5", "e8", "e10"],
    ]
    assert dataset["models"][0] == [None, None, "tiny", None, "tiny", None, "tiny"]
    assert dataset["session"][:] == [str(path)] * 2
    assert dataset["session_id"][:] == ["s1"] * 2
    assert dataset["cwd"][:] == ["/home/user/project"] * 2
    assert dataset["timestamp"][:] == ["2026-01-01T00:00:07.000Z", "2026-01-01T00:00:10.000Z"]
    assert (report.files, report.entries, report.turns, report.targets) == (1, 10, 5, 4)
    assert report.untrained_turns == {"stop reason error": 1}
    assert report.complete


def test_a_turn_in_forked_files_is_one_target(tmp_path: Path) -> None:
    tree_session().write(tmp_path / "1.jsonl")
    fork = tree_session("s2")
    fork.user("C")
    fork.assistant("c")
    fork.write(tmp_path / "2.jsonl")
    dataset, report = load_sessions(tmp_path, return_report=True)
    assert [row[-1]["content"] for row in dataset["messages"]] == ["a", "c"]
    assert sum(map(sum, dataset["trained"])) == 5 == report.targets
    assert report.duplicate_turns == {"same entry id and content as an earlier turn": 4}
    rows = list(export_turns(tmp_path))
    assert len(rows) == report.turns == 11
    assert [row["trained"] for row in rows if row["session"].endswith("2.jsonl")] == [False] * 5 + [True]


def test_the_same_id_with_other_content_is_another_turn(tmp_path: Path) -> None:
    for name, answer in (("1", "a"), ("2", "b")):
        session = SessionBuilder(name)
        session.user("q")
        session.assistant(answer)
        session.write(tmp_path / f"{name}.jsonl")
    assert sum(map(sum, load_sessions(tmp_path)["trained"])) == 2


def test_sessions_that_say_the_same_are_one_row(tmp_path: Path) -> None:
    for name in ("1", "2"):
        session = SessionBuilder(name)
        session.entry("label", entry_id=f"other{name}")
        session.message("user", [text("q")])
        session.lines.append({**session.lines[-1], "id": name + "x"})
        session.entry(
            "message", entry_id=f"a{name}", message={"role": "assistant", "content": "a", "stopReason": "stop"}
        )
        session.write(tmp_path / f"{name}.jsonl")
    dataset, report = load_sessions(tmp_path, return_report=True)
    assert len(dataset) == 1
    assert report.targets == 1
    assert report.duplicate_turns == {"same messages and reply as an earlier turn": 1}


def test_export_is_the_chat_completions_request(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    row = list(export_turns(path))[1]
    assert row == {
        "session": str(path),
        "entry": "e5",
        "model": "tiny",
        "stop_reason": "stop",
        "trained": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Explore"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"type": "function", "id": "c1", "function": {"name": "read", "arguments": '{"path":"a"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "text"},
        ],
        "tools": [schema("read")],
    }


def test_files_are_found_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("b/c/2.jsonl", "b/1.jsonl", "a.jsonl"):
        tree_session().write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "dir.jsonl").mkdir()
    found = [os.path.relpath(file, tmp_path) for file in session_files(tmp_path)]
    assert found == ["a.jsonl", "b/1.jsonl", "b/c/2.jsonl"]
    again = session_files([tmp_path / "b", str(tmp_path), tmp_path / "a.jsonl"])
    assert [os.path.relpath(file, tmp_path) for file in again] == ["b/1.jsonl", "b/c/2.jsonl", "a.jsonl"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_sessions(tmp_path / "nowhere")


def test_pi_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PI_CODING_AGENT_SESSION_DIR", raising=False)
    monkeypatch.delenv("PI_CODING_AGENT_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_session_dir() == tmp_path / ".pi" / "agent" / "sessions"
    with pytest.raises(FileNotFoundError, match="PI_CODING_AGENT_SESSION_DIR"):
        load_sessions()
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "~/agent")
    assert default_session_dir() == tmp_path / "agent" / "sessions"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.setenv("PI_CODING_AGENT_SESSION_DIR", str(folder))
    tree_session().write(folder / "s.jsonl")
    assert len(load_sessions()) == 2


def test_what_is_left_out_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree_session().write(tmp_path / "good.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with caplog.at_level(logging.WARNING, logger="dagpack_hf.pi.sessions"):
        _, report = load_sessions(tmp_path, return_report=True)
    assert not report.complete
    assert sum(report.skipped_files.values()) == 1
    assert f"{tmp_path}/bad.jsonl)" in caplog.text


def test_loading_is_linear_in_a_long_session(tmp_path: Path) -> None:
    def seconds(turns: int) -> float:
        session = SessionBuilder()
        session.system("Be brief.")
        for turn in range(turns):
            session.user(f"question {turn}")
            session.assistant(f"answer {turn}")
        path = session.write(tmp_path / f"{turns}.jsonl")
        started = time.process_time()
        assert load_sessions(path)["trained"][0].count(True) == turns
        return time.process_time() - started

    seconds(100)
    assert seconds(8000) < 4 * 6 * seconds(2000)
    assert seconds(8000) < 5


def test_targets_without_a_recorded_prompt_are_counted_until_it_is_supplied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = SessionBuilder("old")
    session.user("Hi")
    session.assistant("Hello")
    session.system("Be brief.")
    session.user("More")
    session.assistant("Yes")
    path = session.write(tmp_path / "old.jsonl")
    _, report = load_sessions(path, return_report=True)
    assert (report.targets, report.unrecorded_prompts) == (2, 1)
    assert "1 targets without system prompt and tools" in str(report) and "system_prompt=" in caplog.text
    dataset, report = load_sessions(path, system_prompt="You are pi.", tools=[tool("read")], return_report=True)
    assert report.unrecorded_prompts == 0
    assert [row[0]["content"] for row in dataset["messages"]] == ["You are pi.", "Be brief."]
    assert dataset["tools"][:] == [[schema("read")], None]


def test_ten_copies_of_a_session_are_one_target_each(tmp_path: Path) -> None:
    for number in range(10):
        copy = tree_session(f"s{number}")
        copy.lines[0]["parentSession"] = f"/gone/{number - 1}.jsonl"
        copy.user(f"only in {number}")
        copy.assistant(f"ok {number}")
        copy.write(tmp_path / f"{number}.jsonl")
    dataset, report = load_sessions(tmp_path, return_report=True)
    assert report.complete
    assert report.files == 10
    assert sum(map(sum, dataset["trained"])) == report.targets == 4 + 10
    assert report.duplicate_turns == {"same entry id and content as an earlier turn": 9 * 4}
    assert [row[-1]["content"] for row in dataset["messages"]] == ["a", *(f"ok {number}" for number in range(10))]
    assert dataset["session_id"][:] == ["s0", *(f"s{number}" for number in range(10))]
    assert [sum(row) for row in dataset["trained"]] == [3, 2, *[1] * 9]
    tally = Tally()
    again = list(iter_turns(tmp_path, tally=tally))
    assert [turn.duplicate for turn in again].count(True) == 9 * 4
    assert sum(turn.trained for turn in again) == tally.targets == 14
    assert tally.report() == report


def test_forks_in_any_order_give_the_same_targets(tmp_path: Path) -> None:
    first = tree_session("s1").write(tmp_path / "1.jsonl")
    fork = tree_session("s2")
    fork.user("C")
    fork.assistant("c")
    second = fork.write(tmp_path / "2.jsonl")
    forwards, backwards = load_sessions([first, second]), load_sessions([second, first])
    assert set(backwards["session_id"]) == {"s2"}

    def targets(dataset: Dataset) -> set[str]:
        return {
            entry
            for row in dataset
            for entry, trained in zip(row["entry_ids"], row["trained"], strict=True)
            if trained
        }

    assert targets(forwards) == targets(backwards) == {"e3", "e5", "e7", "e10", "e12"}


# Files that cannot be read as they are


def test_no_files_give_no_rows(tmp_path: Path) -> None:
    for workers in (None, 2):
        dataset, report = load_sessions(tmp_path, num_proc=workers, return_report=True, load_from_cache_file=False)
        assert len(dataset) == 0
        assert dataset.features == FEATURES
        assert report == LoadReport()
    session = SessionBuilder()
    session.user("no answer")
    session.assistant("half", stop="aborted")
    dataset, report = load_sessions(session.write(tmp_path / "s.jsonl"), return_report=True)
    assert (len(dataset), report.files, report.turns, report.targets) == (0, 1, 1, 0)


def test_a_session_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    whole = load_sessions(path)
    with open(path, "ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:40])
    dataset, report = load_sessions(path, return_report=True)
    assert dataset.data.table.equals(whole.data.table)
    assert sum(report.skipped_lines.values()) == 1
    assert str(report).count(f"{path}:12") == 1


@pytest.mark.parametrize("workers", [None, 2])
def test_errors_of_files_and_lines_stop_the_load_on_demand(tmp_path: Path, workers: int | None) -> None:
    good = tree_session().write(tmp_path / "1.jsonl")
    bad = tree_session("s2").write(tmp_path / "2.jsonl")
    tree_session("s3").write(tmp_path / "3.jsonl")
    bad.write_bytes(bad.read_bytes().replace(b"\n", b"\n[]\n", 3))
    cache = tmp_path / "cache"
    with pytest.raises(SessionError) as caught:
        load_sessions(tmp_path, on_error="raise", num_proc=workers, cache_dir=cache)
    assert (caught.value.path, caught.value.line) == (str(bad), 2)
    assert str(caught.value) == f"{bad}:2: {caught.value.reason}"
    assert list(cache.iterdir()) == []
    (tmp_path / "2.jsonl").write_text("hello\n")
    with pytest.raises(SessionError) as caught:
        load_sessions(tmp_path, on_error="raise", num_proc=workers, cache_dir=cache)
    assert caught.value.path == str(bad)
    _, report = load_sessions(tmp_path, num_proc=workers, return_report=True)
    assert sum(report.skipped_files.values()) == 1
    assert list(report.examples.values()) == [[str(bad)]]
    load_sessions(good, on_error="raise", num_proc=workers)


def test_errors_travel_between_processes() -> None:
    for line in (3, None):
        error = SessionError("/a/s.jsonl", line, "torn")
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.path, copy.line, copy.reason, str(copy)) == (error.path, line, "torn", str(error))


def test_a_file_that_cannot_be_opened_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1", "2"):
        tree_session(name).write(tmp_path / f"{name}.jsonl")
    read = turns.read_session

    def denied(path: str, **options: Any) -> Any:
        if path.endswith("2.jsonl"):
            raise PermissionError(13, "Permission denied", path)
        return read(path, **options)

    monkeypatch.setattr(turns, "read_session", denied)
    dataset, report = load_sessions(tmp_path, return_report=True)
    assert set(dataset["session_id"]) == {"1"}
    assert report.skipped_files == {"cannot be read: Permission denied": 1}
    assert f"({tmp_path}/2.jsonl)" in str(report)
    with pytest.raises(PermissionError):
        load_sessions(tmp_path, on_error="raise")


def test_the_first_places_of_each_reason_are_named(tmp_path: Path) -> None:
    for number in range(6):
        path = tree_session(f"s{number}").write(tmp_path / f"{number}.jsonl")
        path.write_bytes(path.read_bytes() + b"[]\n" * (number % 2) + b'"x"\n' * 2 * (number % 2))
    _, report = load_sessions(tmp_path, return_report=True)
    _, same = load_sessions(tmp_path, return_report=True, num_proc=2, load_from_cache_file=False)
    assert report == same
    assert sum(report.skipped_lines.values()) == 9
    assert list(report.examples.values()) == [[f"{tmp_path}/1.jsonl:{line}" for line in (12, 13, 14)]]


def test_any_file_name_is_read(tmp_path: Path) -> None:
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        for name, answer in ((b"a\xff.jsonl", "a"), ("é \n.jsonl".encode(), "b")):
            session = SessionBuilder()
            session.user("q")
            session.assistant(answer)
            session.write(Path(os.path.join(str(folder), os.fsdecode(name))))
        with open(folder / "bad.jsonl", "w") as file:
            file.write("x\n")
        dataset, report = load_sessions(folder, num_proc=workers, return_report=True)
        assert dataset["session"][:] == [f"{folder}/a?.jsonl", f"{folder}/é \n.jsonl"]
        assert report == load_sessions(folder, return_report=True)[1]


def test_names_of_any_kind_are_read(tmp_path: Path) -> None:
    session = SessionBuilder("SURROGATE")
    session.user("q")
    session.entry("message", entry_id="SURROGATE", message={"role": "user", "content": "x"})
    session.assistant("a", model="SURROGATE")
    path = session.write(tmp_path / "s.jsonl")
    path.write_bytes(path.read_bytes().replace(b"SURROGATE", b"\\ud800"))
    (row,) = load_sessions(path)
    assert (row["session_id"], row["entry_ids"][1], row["models"][2]) == ("?", "?", "?")


# Processes


def varied_folder(folder: Path) -> Path:
    """Forks, branches, images, tools, damage: all that could depend on the order in which files are read."""
    folder.mkdir()
    for number in range(4):
        session = tree_session(f"s{number}")
        session.user([text(f"own {number}"), image(f"{number}AAA")])
        session.assistant(f"mine {number}")
        session.write(folder / f"{number}.jsonl")
    same = SessionBuilder("t")
    same.user("q" * 5000)
    same.assistant("a")
    same.write(folder / "4.jsonl")
    for line in same.lines[1:]:
        line["id"] = "other " + line["id"]
        line["parentId"] = line["parentId"] and "other " + line["parentId"]
    same.assistant("b", parent="other e2")
    same.write(folder / "5.jsonl")
    (folder / "6.jsonl").write_text("no session\n")
    torn = tree_session("s7").write(folder / "7.jsonl")
    torn.write_bytes(torn.read_bytes().replace(b"Found.", b"\xffound.")[:-30])
    (folder / "8.jsonl").write_text("")
    return folder


@pytest.mark.parametrize("options", [{}, {"images": "keep"}, {"images": "reference", "models": "ti*"}])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = varied_folder(tmp_path / "sessions")
    found = []
    for workers in (None, 1, 2, 3, 50):
        cache = tmp_path / f"cache {workers}"
        dataset, report = load_sessions(folder, num_proc=workers, cache_dir=cache, return_report=True, **options)
        (rows,) = cache.glob("*/rows.arrow")
        found.append((rows.read_bytes(), str(report), report, dataset.data.table.combine_chunks()))
    assert all(item == found[0] for item in found)
    assert [Path(path).name for path in dataset["session"]] == [
        *("0.jsonl", "0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl", "5.jsonl", "7.jsonl")
    ]
    assert report.files == 7
    assert report.duplicate_turns == {
        "same entry id and content as an earlier turn": 3 * 4 + 2,
        "same messages and reply as an earlier turn": 1,
    }


@pytest.mark.parametrize("workers", [0, -1])
def test_a_number_of_processes_below_one_is_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(ValueError, match=f"num_proc={workers} is no number of processes: use 1 or more, or None"):
        load_sessions(tmp_path, num_proc=workers)


def test_functions_of_the_session_run_in_other_processes(tmp_path: Path) -> None:
    folder = varied_folder(tmp_path / "sessions")
    word = "Hello"
    options = {"system_prompt": lambda session: f"{word} {session.session_id}.", "tools": lambda session: [tool("x")]}
    one, two = (
        load_sessions(folder, num_proc=workers, cache_dir=tmp_path / f"cache {workers}", **options)
        for workers in (1, 2)
    )
    assert one.data.table.equals(two.data.table)
    assert {row[0]["content"] for row in one["messages"]} == {"Hello t.", "Be brief."}
    assert one.data.table.num_rows == 7


def test_a_process_that_is_killed_is_an_error(tmp_path: Path) -> None:
    folder = varied_folder(tmp_path / "sessions")
    parent = os.getpid()

    def prompt(session: Any) -> None:
        if session.session_id == "s1" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        RuntimeError, match=r"one of 2 processes that read sessions was killed; .* use a lower num_proc"
    ):
        load_sessions(folder, num_proc=2, system_prompt=prompt, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_collector_is_left_as_it_was(tmp_path: Path) -> None:
    import gc

    path = tree_session().write(tmp_path / "s.jsonl")
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            load_sessions(path, load_from_cache_file=False)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


# Cache


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that have been read."""
    found: list[str] = []
    original = sessions.file_turns

    def noted(path: str, *args: Any) -> Iterator[Any]:
        found.append(Path(path).name)
        return original(path, *args)

    monkeypatch.setattr(sessions, "file_turns", noted)
    return found


def test_nothing_is_read_again_while_contents_and_options_are_the_same(tmp_path: Path, reads: list[str]) -> None:
    folder = varied_folder(tmp_path / "sessions")
    first = load_sessions(folder, return_report=True, models={"tiny", "big"}, since="2020-01-01")
    assert reads == [f"{number}.jsonl" for number in range(9)]
    for workers in (None, 2):
        again = load_sessions(folder, return_report=True, models={"big", "tiny"}, since="2020-01-01", num_proc=workers)
        assert again[0].data.table.equals(first[0].data.table)
        assert again[0]._fingerprint == first[0]._fingerprint
        assert again[1] == first[1]
    os.utime(folder / "0.jsonl", (1, 1))
    load_sessions(sorted(folder.iterdir()), models=["tiny", "big"])
    assert len(reads) == 18  # a list is not a set
    load_sessions(sorted(folder.iterdir()), models=["tiny", "big"])
    assert len(reads) == 18


def changed_byte(path: Path) -> None:
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"Found.", b"F0und."))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def appended_line(path: Path) -> None:
    with open(path, "a") as file:
        file.write("[]\n")


@pytest.mark.parametrize(
    "change",
    [
        changed_byte,
        appended_line,
        lambda path: path.rename(path.with_name("other.jsonl")),
        lambda path: path.unlink(),
        lambda path: tree_session("new").write(path.with_name("new.jsonl")),
    ],
)
def test_a_change_of_files_is_seen(tmp_path: Path, reads: list[str], change: Callable[[Path], None]) -> None:
    for name in ("1", "2"):
        tree_session(name).write(tmp_path / f"{name}.jsonl")
    load_sessions(tmp_path)
    del reads[:]
    change(tmp_path / "1.jsonl")
    dataset = load_sessions(tmp_path)
    assert len(reads) == len(list(tmp_path.glob("*.jsonl")))
    assert dataset.data.table.equals(load_sessions(tmp_path, load_from_cache_file=False).data.table)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"images": "reference"},
    {"images": "keep"},
    {"on_error": "raise"},
    {"text_only_models": ["x"]},
    {"system_update_models": ["x"]},
    {"pi_version": "0.74.2"},
    {"target_stop_reasons": ["stop"]},
    {"system_prompt": "x"},
    {"system_prompt": lambda session: "x"},
    {"system_prompt": lambda session: "y"},
    {"tools": [tool("x")]},
    {"tools": [tool("y")]},
    {"tools": lambda session: None},
    {"models": "*"},
    {"providers": "*"},
    {"since": "2020-01-01"},
    {"until": "2030-01-01"},
    {"cwd": "/"},
    {"names": "*"},
    {"labels": "*"},
]


def test_every_option_counts(tmp_path: Path, reads: list[str]) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    fingerprints = [load_sessions(path, **options)._fingerprint for options in OPTIONS]
    assert len(set(fingerprints)) == len(reads) == len(OPTIONS)
    assert [load_sessions(path, **options)._fingerprint for options in OPTIONS] == fingerprints
    assert len(reads) == len(OPTIONS)


def test_what_a_function_refers_to_counts(tmp_path: Path, reads: list[str]) -> None:
    path = SessionBuilder().write(tmp_path / "s.jsonl")
    for word in ("a", "b", "a"):
        load_sessions(path, system_prompt=lambda session, word=word: word)
    assert len(reads) == 2


def test_the_order_of_files_counts(tmp_path: Path) -> None:
    first, second = (tree_session(name).write(tmp_path / f"{name}.jsonl") for name in "12")
    assert load_sessions([first, second])["session_id"][0] == "1"
    assert load_sessions([second, first])["session_id"][0] == "2"


def test_reading_anew_on_demand(tmp_path: Path, reads: list[str]) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    first = load_sessions(path)
    again = load_sessions(path, load_from_cache_file=False)
    assert len(reads) == 2
    assert again.data.table.equals(first.data.table)
    assert len(first["messages"][:]) == 2  # also after its file has been replaced
    load_sessions(path)
    assert len(reads) == 2


def test_caching_can_be_disabled(tmp_path: Path, reads: list[str]) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    datasets.disable_caching()
    try:
        first, second = load_sessions(path), load_sessions(path)
        assert len(reads) == 2
        assert first.data.table.equals(second.data.table)
        assert first[0] == second[0]
        folder = Path(first.cache_files[0]["filename"]).parent
        assert Path(datasets.config.HF_DATASETS_CACHE) not in folder.parents
        load_sessions(path, load_from_cache_file=True)
        assert len(reads) == 2
    finally:
        datasets.enable_caching()
    load_sessions(path)
    assert len(reads) == 3


def test_the_cache_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    mask = os.umask(0)
    try:
        dataset = load_sessions(path, cache_dir=tmp_path / "new" / "cache")
        default = load_sessions(path)
    finally:
        os.umask(mask)
    for rows, parent in (
        (dataset, tmp_path / "new" / "cache"),
        (default, Path(datasets.config.HF_DATASETS_CACHE) / "dagpack_sessions"),
    ):
        folder = Path(rows.cache_files[0]["filename"]).parent
        assert folder == parent / rows._fingerprint
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(file.name for file in folder.iterdir()) == ["report.json", "rows.arrow"]
    assert [folder.name for folder in (tmp_path / "new" / "cache").iterdir()] == [dataset._fingerprint]


def test_a_cache_folder_that_is_damaged_is_written_anew(tmp_path: Path, reads: list[str]) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    whole = load_sessions(path, cache_dir=tmp_path / "cache")
    for name in ("report.json", "rows.arrow"):
        (tmp_path / "cache" / whole._fingerprint / name).unlink()
        assert load_sessions(path, cache_dir=tmp_path / "cache").data.table.equals(whole.data.table)
    assert len(reads) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("anew", [True, False])
def test_loads_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    folder = varied_folder(tmp_path / "sessions")
    barrier = threading.Barrier(3, timeout=30)
    read = sessions._read_into

    def together(*args: Any) -> Any:
        barrier.wait()
        report = read(*args)
        barrier.wait()
        return report

    monkeypatch.setattr(sessions, "_read_into", together)
    found: list[Dataset] = []

    def load() -> None:
        found.append(load_sessions(folder, cache_dir=tmp_path / "cache", load_from_cache_file=not anew))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(dataset.data.table.equals(found[0].data.table) for dataset in found)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found[0]._fingerprint]


def test_a_load_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    cache = tmp_path / "cache"

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "write_rows", full)
        with pytest.raises(OSError, match="No space left"):
            load_sessions(path, cache_dir=cache)
    assert list(cache.iterdir()) == []
    dataset = load_sessions(path, cache_dir=cache)
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "write_rows", full)
        with pytest.raises(OSError, match="No space left"):
            load_sessions(path, cache_dir=cache, load_from_cache_file=False)
    assert [folder.name for folder in cache.iterdir()] == [dataset._fingerprint]
    assert len(load_sessions(path, cache_dir=cache)) == 2


def test_another_process_finds_the_data_set(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    options = {"models": {"tiny", "big", "x"}, "system_prompt": "p", "tools": [tool("x")]}
    first = load_sessions(path, **options)
    code = f"""
import datasets
from dagpack_hf.pi import load_sessions, sessions
sessions.file_turns = None
print(datasets.config.HF_DATASETS_CACHE)
print(load_sessions({str(path)!r}, **{options!r})._fingerprint)
"""
    seed = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **seed}, check=True
    )
    assert result.stdout.splitlines() == [str(datasets.config.HF_DATASETS_CACHE), first._fingerprint]


def test_what_is_left_out_is_warned_about_from_the_cache_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    reports = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dagpack_hf.pi.sessions"):
            reports.append(load_sessions(tmp_path, return_report=True)[1])
        assert f"{tmp_path}/bad.jsonl" in caplog.text
    assert reports[0] == reports[1]


# The data set


def test_the_data_set_is_saved_and_loaded_and_mapped(tmp_path: Path) -> None:
    dataset = load_sessions(varied_folder(tmp_path / "sessions"), images="keep")
    rows = list(dataset)
    dataset.save_to_disk(tmp_path / "saved")
    assert list(load_from_disk(tmp_path / "saved")) == rows
    assert pickle.loads(pickle.dumps(dataset))[:] == dataset[:]
    lengths = dataset.map(lambda row: {"length": len(row["messages"])}, num_proc=2)
    assert lengths["length"][:] == [len(row["messages"]) for row in rows]
    assert lengths.remove_columns("length")[:] == dataset[:]
    assert dataset.select([2, 0])["messages"][:] == [rows[2]["messages"], rows[0]["messages"]]


def test_progress_is_shown_in_bytes_unless_it_is_disabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = varied_folder(tmp_path / "sessions")
    for workers in (1, 2):
        load_sessions(folder, num_proc=workers, load_from_cache_file=False)
        shown = capsys.readouterr().err
        assert "Reading sessions: 100%" in shown and "B/s" in shown
    datasets.disable_progress_bars()
    try:
        load_sessions(folder, load_from_cache_file=False)
        list(iter_turns(folder, progress=True))
    finally:
        datasets.enable_progress_bars()
    list(iter_turns(folder))
    assert "Reading" not in capsys.readouterr().err
    list(iter_turns(folder, progress=True))
    assert "Reading sessions: 100%" in capsys.readouterr().err

"""From session files to rows: forks, branches, reports and where files are found."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from dagpack_hf.pi import default_session_dir, export_turns, iter_turns, load_sessions, session_files
from tests.pi_sessions import SessionBuilder, call, schema, text, thinking, tool


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
    assert "bad.jsonl:1" in caplog.text


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    path = tree_session().write(tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="images='drop'"):
        next(iter_turns(path, images="drop"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_error='ignore'"):
        next(iter_turns(path, on_error="ignore"))  # type: ignore[arg-type]


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

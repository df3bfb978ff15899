"""Damaged files and a long old session, against what the real pi makes of them.

Where pi hangs, crashes, refuses or loses more than it must, the table `BETTER` says what is read instead.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dagpack_hf
from dagpack_hf.cli import main
from dagpack_hf.pi import SessionError, load_sessions
from dagpack_hf.pi.context import Context, ContextBuilder
from dagpack_hf.pi.reader import SessionFile, read_session
from dagpack_hf.pi.tree import EntryTree, build_tree
from tests.recorder.pi import installed

PI = Path(__file__).parents[1] / ".." / "shared" / "pi"
ODD = PI / "corpus" / "odd"
LARGE = PI / "public" / "pi-mono-large-session.jsonl"
# Nearly all damaged files were made from this one.
WHOLE = "0.74.2/b_tree/2026-11-30T03-14-46-391Z_01a22a72-a5f6-7c96-a3ea-c5673f9da179"

needs_corpus = pytest.mark.skipif(not ODD.exists(), reason="needs the pi corpus in ../shared/pi/corpus")
needs_session = pytest.mark.skipif(not LARGE.exists(), reason="needs the session in ../shared/pi/public")


class Reading(NamedTuple):
    """What a reader makes of a file: entries, last entry, roots, and the context with the last entry as leaf."""

    entries: int
    leaf: str | None
    roots: int
    messages: int
    first: str | None = None
    last: str | None = None


WHOLE_READING = Reading(37, "fbe8d57b", 1, 8, "user", "assistant")

BETTER = {
    # A title line before the header, as oh-my-pi writes: pi 0.74.2 starts an empty session, 1.6.0 refuses the file.
    "omp_title_first": WHOLE_READING,
    # A header that is not the first line, or not there: the same.
    "header_second": WHOLE_READING,
    "no_header": WHOLE_READING,
    # Lines that are no objects, and one without an id: pi takes each for a root; none has anything to read.
    "non_object_lines": WHOLE_READING,
    # An entry glued to a torn one: pi loses both.
    "torn_line_glued": Reading(36, "fbe8d57b", 2, 8, "user", "assistant"),
    # An id that two entries have: pi takes the last one, goes in circles, and hangs or runs out of memory. Here each
    # entry hangs below the nearest one before it, and the entry whose parent lost its id is a root.
    "duplicate_id": Reading(37, "fbe8d57b", 2, 8, "user", "assistant"),
    # An entry that is its own parent: pi hangs. Here it is a root.
    "self_parent": Reading(37, "fbe8d57b", 2, 6, "toolResult", "assistant"),
}

REFUSED = {
    # pi starts an empty session in both cases, or refuses the file too (1.6.0, version 4).
    "empty": "not a pi session: the file holds no JSON line",
    "version_4_header": "written by pi-agent-core's own harness (version 4), not by pi: another format, which is not "
    "read",
}

PROBLEMS = {
    "duplicate_id": [(15, "duplicate entry id"), (16, "parent is not in the file")],
    "header_second": [(2, "session header is not the first line")],
    "invalid_utf8": [(7, "invalid UTF-8, replaced by U+FFFD")],
    "no_header": [(1, "no session header; read as version 3, id from the file's name")],
    "non_object_lines": [*((line, "not a JSON object") for line in (2, 3, 4)), (5, "entry without a type")],
    "null_line": [(2, "not a JSON object")],
    "orphan_parent": [(13, "parent is not in the file")],
    "self_parent": [(6, "entry is its own ancestor")],
    "torn_line_glued": [(9, "torn entry; the rest of its line was read"), (9, "parent is not in the file")],
    "truncated_last_line": [(38, "torn last line")],
}

CHANGED_FROM = {
    # The entry below which, in the undamaged session, the context is another one.
    "duplicate_id": "9cfb4959",
    "orphan_parent": "2b719d58",
    "self_parent": "09289b03",
    "torn_line_glued": "9db49138",
}

KEYS: tuple[str, ...] = (
    "role",
    "toolCallId",
    "toolName",
    "isError",
    "api",
    "provider",
    "model",
    "stopReason",
    "sections",
)
KEYS += ("toolsAdded", "toolsRemoved")


def odd_files() -> list[str]:
    return sorted(path.stem for path in ODD.glob("*.jsonl")) if ODD.exists() else []


def behaviour(name: str) -> Reading | None:
    """Return what pi 1.6.0 makes of a file, else 0.74.2, or nothing if neither reads it."""
    made = json.loads((ODD / "pi_behaviour.json").read_text("utf-8"))[name]
    for version in ("1.6.0", "0.74.2"):
        if "entries" in made[version]:
            return Reading(**made[version])
    return None


def contexts(tree: EntryTree) -> list[list[str]]:
    """Return what the model is told with each entry as leaf, one text for each message."""
    builder = ContextBuilder(tree)
    texts: dict[Context, str] = {}
    told = []
    for index in range(len(tree.entries)):
        context = builder.at(index)
        items = [] if context is None else context.items()
        texts.update((item, text(item.message)) for item in items if item not in texts)
        told.append([texts[item] for item in items])
    return told


def text(message: Any) -> str:
    """Return all of a message that can reach a model, as text; pi keeps fields of its own beside it."""
    content = message.get("content")
    if isinstance(content, str) and message["role"] != "system":
        content = [{"type": "text", "text": content}]
    fields = {key: message[key] for key in KEYS if key in message}
    return json.dumps({**fields, "content": content}, sort_keys=True)


@needs_corpus
@pytest.mark.parametrize("name", odd_files())
def test_damaged_files_yield_what_pi_makes_of_them(name: str, tmp_path: Path) -> None:
    path = ODD / f"{name}.jsonl"
    started = time.perf_counter()
    _, report = load_sessions(path, return_report=True, cache_dir=tmp_path)
    assert time.perf_counter() - started < 1
    if name in REFUSED:
        assert report.skipped_files == {REFUSED[name]: 1}
        with pytest.raises(SessionError) as error:
            read_session(path)
        assert error.value.reason == REFUSED[name]
        return
    session = read_session(path)
    tree = build_tree(session)
    told = contexts(tree)
    roles = [json.loads(message)["role"] for message in told[-1]] if told else []
    reading = Reading(
        len(tree.entries),
        tree.entries[-1]["id"] if tree.entries else None,
        tree.parents.count(-1),
        len(roles),
        *((roles[0], roles[-1]) if roles else ()),
    )
    assert reading == BETTER.get(name, behaviour(name))
    problems = [*session.problems, *tree.problems]
    assert [(problem.line, problem.reason) for problem in problems] == PROBLEMS.get(name, [])
    assert sum(report.skipped_lines.values()) == sum(problem.skipped for problem in problems)
    assert sum(report.repaired_lines.values()) == sum(not problem.skipped for problem in problems)
    assert report.entries == reading.entries
    assert report.turns == sum(entry.get("message", {}).get("role") == "assistant" for entry in tree.entries)


@needs_corpus
@pytest.mark.parametrize("name", sorted(set(odd_files()) - {*REFUSED, "header_only"}))
def test_damage_changes_no_other_context(name: str) -> None:
    """Compares with the contexts of the undamaged session."""
    oracle = json.loads((PI / "corpus" / "oracle" / f"{WHOLE}.json").read_text("utf-8"))
    truth = oracle_contexts(oracle)
    tree = build_tree(read_session(ODD / f"{name}.jsonl"))
    ours: dict[str, list[str]] = {}
    for entry, told in zip(tree.entries, contexts(tree), strict=True):
        ours.setdefault(entry["id"], told)
    changed = {entry for entry in truth if entry in ours and ours[entry] != truth[entry]}
    below = {CHANGED_FROM.get(name)}
    for entry in oracle["order"]:
        below |= {entry} if oracle["entries"][entry]["parentId"] in below - {None} else set()
    assert changed == below & ours.keys()
    lost = len(truth.keys() - ours.keys())
    cut = {"compaction_bad_first_kept": 25, "truncated_last_line": 1, "torn_line_glued": 1, "duplicate_id": 1}
    assert len(truth) == 37 and lost == cut.get(name, 0)


@needs_corpus
def test_every_better_reading_is_one() -> None:
    """Each entry of the table is a file that pi refuses, hangs on, or reads less of."""
    for name, reading in BETTER.items():
        pi = behaviour(name)
        assert pi is None or pi.entries < reading.entries or pi.roots > reading.roots, name
    assert {*BETTER, *REFUSED, *PROBLEMS, *CHANGED_FROM} <= set(odd_files())


def oracle_contexts(truth: dict[str, Any]) -> dict[str, list[str]]:
    table = {key: text(message) for key, message in truth.get("table", {}).items()}
    return {
        entry: [table[each] if isinstance(each, str) else text(each) for each in context["messages"]]
        for entry, context in truth["entries"].items()
    }


@pytest.fixture(scope="module")
def large() -> SessionFile:
    return read_session(LARGE)


@needs_session
@pytest.mark.parametrize("version", ["0.74.2", "1.6.0"])
def test_every_context_of_a_long_session(version: str, large: SessionFile) -> None:
    pi = installed(version)
    command = [pi.node, str(PI / "oracle.mjs"), "--pi", str(pi.root), "--table", str(LARGE)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    truth = json.loads(done.stdout)
    assert (truth["pi_version"], truth["file_version"], len(truth["entries"])) == (version, 1, 1018)
    tree = build_tree(large)
    assert [entry["id"] for entry in tree.entries] == truth["order"]
    theirs = oracle_contexts(truth)
    for entry, ours in zip(tree.entries, contexts(tree), strict=True):
        assert ours == theirs[entry["id"]], entry["id"]


NOT_TRAINED = {"stop reason aborted": 21, "stop reason error": 1}


@needs_session
def test_the_counts_of_a_long_session(tmp_path: Path) -> None:
    dataset, report = load_sessions(LARGE, return_report=True, cache_dir=tmp_path)
    assert (report.files, report.entries, report.turns, report.targets) == (1, 1018, 453, 431)
    assert report.untrained_turns == NOT_TRAINED and report.complete and not report.duplicate_turns
    assert sum(sum(row["trained"]) for row in dataset) == 431


@needs_session
def test_the_counts_of_a_long_session_on_the_command_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shown(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Shown

    monkeypatch.setattr(dagpack_hf, "tokenize_conversations", stop)
    with pytest.raises(Shown):
        main(["stats", str(LARGE)])
    assert capfd.readouterr().out.splitlines()[:3] == [
        "1 session files, 1018 entries, 453 turns, 431 targets",
        "  turns not trained: 21 x stop reason aborted",
        "  turns not trained: 1 x stop reason error",
    ]

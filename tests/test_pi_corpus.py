"""Sessions of the real pi, against the requests it sent and against its own context code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dagpack_hf.cli import main
from dagpack_hf.pi import export_turns, iter_turns
from dagpack_hf.pi.context import ContextBuilder
from dagpack_hf.pi.reader import SessionFile, read_session
from dagpack_hf.pi.tree import build_tree

PI = Path(__file__).parents[1] / ".." / "shared" / "pi"
CORPUS = PI / "corpus"
# Part of this file was written by pi 0.74.2, which records no system prompt: 16 of its turns have theirs in no file.
UPGRADED = "2026-11-30T03-14-46-391Z_01a22a72-a5f6-7c96-a3ea-c5673f9da179-upgraded.jsonl"

pytestmark = pytest.mark.skipif(not CORPUS.exists(), reason="needs the pi corpus in ../shared/pi/corpus")


def compare(export: Path, *options: str) -> str:
    command = [sys.executable, str(PI / "compare.py"), str(CORPUS), str(export), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[-1]


def write(path: Path, version: str, **options: Any) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for turn in export_turns(CORPUS / "sessions" / version, **options):
            file.write(json.dumps(turn) + "\n")
    return path


def supplied(session: SessionFile) -> dict[str, Any]:
    """Return the prompt and tools that the old part of the upgraded session ran with: its user would supply them."""
    if Path(session.path).name != UPGRADED:
        return {}
    truth = json.loads((CORPUS / "ground_truth" / "0.74.2" / "b_tree.json").read_text("utf-8"))
    request = next(request for request in truth["requests"] if request["kind"] == "turn")
    return {
        "prompt": truth["messages"][request["messages"][0]]["content"],
        "tools": truth["tools"][request["tools"]],
    }


def test_every_request_of_1_6_0(tmp_path: Path) -> None:
    export = write(
        tmp_path / "export.jsonl",
        "1.6.0",
        system_prompt=lambda session: supplied(session).get("prompt"),
        tools=lambda session: supplied(session).get("tools"),
    )
    assert compare(export, "--version", "1.6.0") == "155 of 155 turns equal"


def test_every_request_of_1_6_0_from_the_files_alone(tmp_path: Path) -> None:
    export = write(tmp_path / "export.jsonl", "1.6.0")
    assert compare(export, "--version", "1.6.0", "--no-system") == "155 of 155 turns equal"
    assert compare(export, "--version", "1.6.0") == "139 of 155 turns equal"
    rows = [json.loads(line) for line in export.read_text("utf-8").splitlines()]
    without = [row for row in rows if not row["messages"] or row["messages"][0]["role"] != "system"]
    assert len(without) == 16
    assert {Path(row["session"]).name for row in without} == {UPGRADED}


def test_every_request_of_0_74_2_but_its_system_prompt(tmp_path: Path) -> None:
    export = write(tmp_path / "export.jsonl", "0.74.2")
    assert compare(export, "--version", "0.74.2") == "168 of 168 turns equal"


def test_the_export_has_one_object_for_each_assistant_entry() -> None:
    files = sorted((CORPUS / "sessions" / "1.6.0").rglob("*.jsonl"))
    rows = list(export_turns(files))
    assert len(rows) == 160
    assert {tuple(row) for row in rows} == {
        ("session", "entry", "model", "stop_reason", "trained", "messages", "tools")
    }
    assert {row["stop_reason"] for row in rows if row["trained"]} == {"stop", "toolUse"}
    assert sum(row["trained"] for row in rows) == 147


FIELDS = ("role", "toolCallId", "toolName", "isError", "stopReason", "provider", "api", "model", "responseId")
FIELDS += ("sections", "toolsAdded", "toolsRemoved")


def comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a message says: its content in blocks, whole, and everything a request is made from."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**{name: message.get(name) for name in FIELDS}, "content": blocks}


@pytest.mark.parametrize(("version", "files", "entries"), [("0.74.2", 33, 441), ("1.6.0", 25, 448)])
def test_the_context_of_every_entry_equals_that_of_pi(version: str, files: int, entries: int) -> None:
    truths = sorted((CORPUS / "oracle" / version).rglob("*.json"))
    sessions = sorted((CORPUS / "sessions" / version).rglob("*.jsonl"))
    assert len(truths) == len(sessions) == files
    checked = 0
    for truth_path, path in zip(truths, sessions, strict=True):
        truth = json.loads(truth_path.read_text("utf-8"))
        table = truth.get("table", {})
        tree = build_tree(read_session(path))
        builder = ContextBuilder(tree)
        assert [entry["id"] for entry in tree.entries] == truth["order"]
        for index, entry in enumerate(tree.entries):
            context = builder.at(index)
            ours = [] if context is None else [item.message for item in context.items()]
            theirs = [table[key] if isinstance(key, str) else key for key in truth["entries"][entry["id"]]["messages"]]
            assert list(map(comparable, ours)) == list(map(comparable, theirs)), f"{path.name} entry {entry['id']}"
            checked += 1
    assert checked == entries


def test_the_command_exports_every_request_of_both_versions(tmp_path: Path) -> None:
    """Turns whose prompt no file records get the one their user supplies, here that of the old part of one session."""
    (upgraded,) = (CORPUS / "sessions" / "1.6.0").rglob(UPGRADED)
    old = supplied(read_session(upgraded))
    (tmp_path / "prompt.txt").write_bytes(old["prompt"].encode())
    (tmp_path / "tools.json").write_text(json.dumps(old["tools"]), "utf-8")
    files = sorted(map(str, (CORPUS / "sessions").rglob("*.jsonl")))
    export = tmp_path / "export.jsonl"
    prompt = ["--system-prompt", str(tmp_path / "prompt.txt"), "--tools", str(tmp_path / "tools.json")]
    assert main(["export", "--format", "openai", *files, "--out", str(export), *prompt]) == 0
    assert compare(export, "--version", "1.6.0") == "155 of 155 turns equal"
    assert compare(export) == "323 of 323 turns equal"
    assert main(["export", "--format", "openai", *files, "--out", str(export)]) == 0
    assert compare(export) == "307 of 323 turns equal"
    assert compare(export, "--no-system") == "323 of 323 turns equal"


def test_recorded_prompts_are_those_of_the_requests() -> None:
    """One session of 0.74.2 was recorded: its turns have the system prompt and tools that were sent."""
    (path,) = (CORPUS / "sessions" / "0.74.2" / "j_prompt_change").glob("*01a22a74-7a30*")
    truth = json.loads((CORPUS / "ground_truth" / "0.74.2" / "j_prompt_change.json").read_text("utf-8"))
    requests = {request["responseId"]: request for request in truth["requests"]}
    entries = {entry["id"]: entry for entry in read_session(path).entries}
    turns = list(iter_turns(path))
    assert len(turns) == 3
    for turn in turns:
        request = requests[entries[turn.entry]["message"]["responseId"]]
        assert turn.messages[0] == truth["messages"][request["messages"][0]]
        sent = truth["tools"][request["tools"]]
        described = [{key: tool["function"][key] for key in ("name", "description", "parameters")} for tool in sent]
        assert [tool["function"] for tool in turn.tools or []] == described

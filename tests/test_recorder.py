"""The recorder extension in the real pi, old and new: what it records is what a model on this machine was sent.

Needs npm and the network the first time, or a folder with installations (`DAGPACK_TEST_PI`); after that, seconds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagpack_hf.cli import main
from dagpack_hf.cli.record import recorder_source
from dagpack_hf.pi import SessionError, export_turns
from dagpack_hf.pi.context import content_text
from dagpack_hf.pi.reader import read_session
from dagpack_hf.pi.recorded import RECORD_TYPE, html_prompts, recorded_prompt
from tests.recorder.model import ScriptedModel
from tests.recorder.pi import Desk, Installation, Pi, installed

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recording:
    """What a scripted session left behind.

    Attributes:
        pi: The version.
        desk: Where it ran.
        sessions: The session file, and the one forked from it.
        html: Export from the running session, at the end of the first process.
        last: Response id of the last turn before the export.
    """

    pi: Installation
    desk: Desk
    sessions: tuple[Path, Path]
    html: Path
    last: str

    def entries(self, session: int = 0) -> list[dict[str, Any]]:
        """Return the entries of a session."""
        return read_session(self.sessions[session]).entries

    def sent(self, entry: dict[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
        """Return system prompt and tools that the server got with the request of an assistant entry."""
        body = self.desk.model.requests[entry["message"]["responseId"]]
        system, *others = body["messages"]
        assert system["role"] == "system" and "system" not in {message["role"] for message in others}
        return content_text(system["content"]), named(body.get("tools"))


def named(tools: list[dict[str, Any]] | None) -> list[tuple[Any, ...]]:
    functions = [tool["function"] for tool in tools or []]
    return [(function["name"], function["description"], function["parameters"]) for function in functions]


def replies(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry.get("message", {}).get("role") == "assistant"]


def above(entry: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the entries from the parent to the root."""
    by_id = {entry["id"]: entry for entry in entries}
    while (parent := entry["parentId"]) is not None:
        entry = by_id[parent]
        yield entry


@pytest.fixture(scope="module", params=["0.74.2", "1.6.0"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    pi = installed(request.param)
    with ScriptedModel() as model:
        desk = Desk(tmp_path_factory.mktemp("home"), model)
        desk.prepare()
        assert main(["record", "--install", "--agent-dir", str(desk.agent_dir)]) == 0
        yield record(pi, desk)


def record(pi: Installation, desk: Desk) -> Recording:
    html, rules = desk.home / "export.html", desk.project / "AGENTS.md"

    rules.write_text("Rule one.")
    with Pi(pi, desk) as process:
        process.prompt("one", {"command": "echo hi"}, "reply-one")
        process.prompt("again", "reply-again")
        rules.write_text("Rule two.")
        process.command("/reread")
        process.prompt("two", "reply-two")
        process.command("/only bash,read")
        process.prompt("three", "reply-three")
        # The last prompt of the process, on a branch above which stands another one.
        process.command("/goto reply-again")
        process.prompt("four", "reply-four")
        process.prompt("four and a half", "reply-four-and-a-half")
        # Back to an earlier prompt, below entries that record later ones.
        rules.write_text("Rule one.")
        process.command("/reread")
        process.command("/only read,bash,edit,write")
        process.command("/goto reply-two summarize", "A summary of the branch.")
        process.prompt("five", {"command": "echo ho"}, "reply-five")
        process.compact("A summary of what was before.", "A summary of the turn.")
        process.prompt("six", "reply-six")
        # A prompt that pi itself never records.
        process.command("/add-to-prompt Be quick.")
        process.prompt("seven", "reply-seven")
        process.command("/add-to-prompt ")
        process.prompt("eight", "reply-eight")
        session = process.session_file
        process.call("export_html", outputPath=str(html))
        last = list(desk.model.requests)[-1]

    with Pi(pi, desk, "--session", str(session)) as process:
        process.prompt("resumed", "reply-resumed")
    rules.write_text("Rule three.")
    with Pi(pi, desk, "--session", str(session)) as process:
        process.prompt("resumed again", "reply-resumed-again")
        (five,) = [each for each in process.call("get_fork_messages")["messages"] if each["text"] == "five"]
        process.call("fork", entryId=five["entryId"])
        process.prompt("forked", "reply-forked")
        forked = process.session_file
    assert forked != session
    return Recording(pi, desk, (session, forked), html, last)


@pytest.mark.parametrize("session", [0, 1], ids=["session", "fork"])
def test_every_turn_has_the_prompt_and_tools_of_its_request(recording: Recording, session: int):
    sent = {entry["id"]: recording.sent(entry) for entry in replies(recording.entries(session))}
    turns = {turn["entry"]: turn for turn in export_turns(recording.sessions[session])}
    assert set(turns) == set(sent) and len(sent) == (14, 5)[session]
    assert len({prompt for prompt, _ in sent.values()}) >= (4, 3)[session]
    for entry, (prompt, tools) in sent.items():
        system, *others = turns[entry]["messages"]
        assert (system["role"], system["content"]) == ("system", prompt)
        assert "system" not in {message["role"] for message in others}
        assert named(turns[entry]["tools"]) == tools


@pytest.mark.parametrize("session", [0, 1], ids=["session", "fork"])
def test_the_nearest_record_above_a_reply_is_that_of_its_request(recording: Recording, session: int):
    entries = recording.entries(session)
    for reply in replies(entries):
        prompt = next(filter(None, map(recorded_prompt, above(reply, entries))))
        assert (prompt.text(), named(prompt.schemas())) == recording.sent(reply)


def test_nothing_is_recorded_twice(recording: Recording):
    """A record stands where the prompt differs from the one above, and where pi has recorded one itself."""
    entries = recording.entries()
    for reply in replies(entries):
        path = list(above(reply, entries))
        earlier = next((entry for entry in path if entry in replies(entries)), None)
        since = path[: path.index(earlier)] if earlier else path
        recorded = [entry for entry in since if recorded_prompt(entry)]
        by_pi = [entry for entry in since if entry.get("systemMessage") or is_system(entry)]
        changed = earlier is None or recording.sent(earlier) != recording.sent(reply)
        assert len(recorded) == int(changed or bool(by_pi)), reply["message"]["content"]
    assert bool(list(filter(is_system, entries))) == (recording.pi.version != "0.74.2")


def is_system(entry: dict[str, Any]) -> bool:
    return entry.get("message", {}).get("role") == "system"


def test_requests_for_summaries_are_not_recorded(recording: Recording):
    requests = recording.desk.model.requests
    turns = {reply["message"]["responseId"] for session in (0, 1) for reply in replies(recording.entries(session))}
    summaries = [requests[name]["messages"][0]["content"] for name in requests if name not in turns]
    assert len(summaries) == 3
    records = [entry["data"] for entry in recording.entries() if entry.get("customType") == RECORD_TYPE]
    assert records and not any(summary in json.dumps(records) for summary in map(json.dumps, summaries))


def test_the_export_of_a_running_session_has_its_prompt(recording: Recording):
    prompts = html_prompts(recording.html)
    assert list(prompts) == [read_session(recording.sessions[0]).session_id]
    last = next(entry for entry in replies(recording.entries()) if entry["message"]["responseId"] == recording.last)
    (prompt,) = prompts.values()
    assert (prompt.text(), named(prompt.schemas())) == recording.sent(last)


def test_the_export_of_a_file_has_none(recording: Recording, tmp_path: Path):
    out = tmp_path / "file.html"
    command = [*recording.pi.command, "--export", str(recording.sessions[0]), str(out)]
    subprocess.run(command, check=True, env=dict(recording.desk.environment), cwd=tmp_path, capture_output=True)
    with pytest.raises(SessionError, match=r"file\.html: the export holds no system prompt.*with /export or /share"):
        html_prompts([out])


@pytest.mark.parametrize("version", ["0.74.2", "1.6.0"])
def test_turns_without_a_record_take_the_export_of_their_session(version: str, tmp_path: Path):
    pi = installed(version)
    with ScriptedModel() as model:
        desk = Desk(tmp_path, model)
        desk.prepare()
        with Pi(pi, desk) as process:
            process.prompt("one", {"command": "echo hi"}, "reply-one")
            process.call("export_html", outputPath=str(tmp_path / "export.html"))
            session = process.session_file
    turns = list(export_turns(session, html_exports=[tmp_path / "export.html"]))
    assert len(turns) == 2
    for turn, body in zip(turns, model.requests.values(), strict=True):
        assert turn["messages"][0] == body["messages"][0]
        assert named(turn["tools"]) == named(body["tools"])


@pytest.fixture(scope="module")
def shapes(recording: Recording) -> dict[str, Any]:
    recorder = recording.desk.home / "recorder.ts"
    recorder.write_bytes(recorder_source())
    command = [recording.pi.node, str(HERE / "recorder" / "shapes.mjs"), str(recording.pi.root), str(recorder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_requests_of_every_api_are_read(shapes: dict[str, Any]):
    function = {
        "name": "look",
        "description": "Look at it.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    }
    apis = [name for name in shapes if "-" in name]
    assert len(apis) == 8
    for api in apis:
        (entry,) = shapes[api]["entries"]
        prompt = recorded_prompt({**entry, "id": "e1"})
        assert prompt is not None and prompt.text() == "Be brief.", api
        assert prompt.schemas() == [{"type": "function", "function": function}], api
        assert shapes[api]["untouched"] and not shapes[api]["warnings"]


def test_a_change_and_a_change_back_are_recorded(shapes: dict[str, Any]):
    tools = [len(entry["data"]["tools"]) for entry in shapes["changed"]["entries"]]
    assert tools == [1, 0, 1]
    (alone,) = shapes["system_only"]["entries"]
    assert content_text(alone["data"]["system"][0]["content"]) == "Be brief." and alone["data"]["tools"] == []


def test_what_it_does_not_know_is_said_once_and_harms_nothing(shapes: dict[str, Any]):
    assert shapes["unknown"] == {
        "entries": [],
        "warnings": [
            "dagpack-recorder: System prompt and tools are not recorded: Error: the request has an unknown form"
        ],
        "untouched": True,
    }


def test_a_model_that_takes_system_messages_in_mid_session(tmp_path: Path):
    """The record is what the request begins with, and pi's own entries below it are what follows in place."""
    pi = installed("1.6.0")
    with ScriptedModel() as model:
        desk = Desk(tmp_path, model)
        desk.prepare(supportsMidConvoSystemMessages=True)
        assert main(["record", "--install", "--agent-dir", str(desk.agent_dir)]) == 0
        (desk.project / "AGENTS.md").write_text("Rule one.")
        with Pi(pi, desk) as process:
            process.prompt("one", {"command": "echo hi"}, "reply-one")
            (desk.project / "AGENTS.md").write_text("Rule two.")
            process.command("/reread")
            process.prompt("two", "reply-two")
            process.command("/only bash,read")
            process.prompt("three", "reply-three")
            process.command("/goto reply-two")
            process.prompt("four", "reply-four")
            session = process.session_file
    names = {entry["id"]: entry["message"]["responseId"] for entry in replies(read_session(session).entries)}
    counts = []
    for turn in export_turns(session, system_update_models=["scripted"]):
        body = model.requests[names[turn["entry"]]]
        sent = [(message["role"], content_text(message["content"])) for message in body["messages"]]
        have = [(message["role"], content_text(message["content"])) for message in turn["messages"]]
        assert have == sent
        assert named(turn["tools"]) == named(body["tools"])
        counts.append([role for role, _ in sent].count("system"))
    assert counts == [1, 1, 2, 3, 2]

"""Recorded prompts and tools are read exactly, junk is refused, and `dagpack record` touches one file only."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf.cli import main
from dagpack_hf.cli.record import extension_path, recorder_source
from dagpack_hf.pi import SessionError, export_turns
from dagpack_hf.pi.reader import read_session
from dagpack_hf.pi.recorded import RECORD_TYPE, html_prompts, recorded_prompt
from tests.pi_sessions import SessionBuilder, schema, tool

CORPUS = Path(__file__).parents[1] / ".." / "shared" / "pi" / "corpus"
SKETCHED = "j_prompt_change/2026-11-30T03-16-46-256Z*.jsonl"


def record(system: Any = (), tools: Any = (), **data: Any) -> dict[str, Any]:
    given = {"version": 1, "sha256": "0", "model": "tiny", "system": system, "tools": tools, **data}
    return {"type": "custom", "id": "e1", "customType": RECORD_TYPE, "data": json.loads(json.dumps(given))}


def message(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


# Entries of the recorder


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ([], ""),
        ([message("Be brief.")], "Be brief."),
        ([{"role": "developer", "content": "Be brief."}], "Be brief."),
        ([message([{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])], "Be\nbrief."),
        ([message("Be brief."), message(""), message("Be kind.")], "Be brief.\n\nBe kind."),
    ],
)
def test_the_system_messages_of_a_record_are_its_prompt(system, text):
    prompt = recorded_prompt(record(system, [schema("read", "Read a file"), schema("bash")]))
    assert prompt is not None and prompt.text() == text
    assert prompt.schemas() == [schema("read", "Read a file"), schema("bash")]
    assert prompt.entries == ("e1",)


def test_of_a_record_without_version_the_first_message_counts():
    entry = record([message("Be brief."), message("Updated")], [schema("read")])
    del entry["data"]["version"]
    prompt = recorded_prompt(entry)
    assert prompt is not None and prompt.text() == "Be brief." and prompt.schemas() == [schema("read")]


def test_a_record_may_say_that_there_is_no_prompt_and_no_tool():
    prompt = recorded_prompt(record())
    assert prompt is not None and (prompt.text(), prompt.schemas(), prompt.entries) == ("", None, ("e1",))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {**record(), "type": "custom_message"},
        {**record(), "customType": "other"},
        {**record(), "customType": [RECORD_TYPE]},
        {**record(), "id": 7},
        {**record(), "data": None},
        {**record(), "data": [1]},
        record(version=2),
        record(version="1"),
        record(system="Be brief."),
        record(tools=None),
    ],
)
def test_other_entries_are_no_record(entry):
    assert recorded_prompt(entry) is None


def test_junk_in_a_record_is_left_out():
    tools = [None, 3, {"function": None}, {"function": {"name": 1}}, {"function": [1]}, tool("bare"), schema("read")]
    prompt = recorded_prompt(record([None, "x", {}, message(7), message([3, {"type": "text"}]), message("Hi")], tools))
    assert prompt is not None and prompt.text() == "Hi" and list(prompt.tools) == ["bare", "read"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "parameters", "version"]),
            values,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON, JSON, JSON)
def test_any_data_gives_a_prompt_or_none(system, tools, version):
    prompt = recorded_prompt({**record(), "data": {"version": version, "system": system, "tools": tools}})
    if prompt is not None:
        assert prompt.entries == ("e1",)
        json.dumps([prompt.text(), prompt.schemas()])


@pytest.mark.skipif(not CORPUS.exists(), reason="needs the pi corpus in ../shared/pi/corpus")
def test_records_in_the_corpus_are_what_was_sent():
    (path,) = (CORPUS / "sessions" / "0.74.2").glob(SKETCHED)
    truth = json.loads((CORPUS / "ground_truth" / "0.74.2" / "j_prompt_change.json").read_text("utf-8"))
    requests = {request["responseId"]: request for request in truth["requests"]}
    prompt, turns = None, 0
    for entry in read_session(path).entries:
        prompt = recorded_prompt(entry) or prompt
        if entry.get("message", {}).get("role") == "assistant":
            request = requests[entry["message"]["responseId"]]
            assert prompt is not None and prompt.text() == truth["messages"][request["messages"][0]]["content"]
            sent = [each["function"] for each in truth["tools"][request["tools"]]]
            assert [each["function"] for each in prompt.schemas() or ()] == [
                {key: function[key] for key in ("name", "description", "parameters")} for function in sent
            ]
            turns += 1
    assert turns == 3


def test_turns_take_the_nearest_record_above_them(tmp_path):
    def recorded(builder: SessionBuilder, name: str, **fields: Any) -> str:
        data = record([message(f"Prompt {name}.")], [schema(name)])["data"]
        return builder.entry("custom", customType=RECORD_TYPE, data=data, **fields)

    builder = SessionBuilder()
    user = builder.user("Hello")
    before = builder.assistant("before")
    recorded(builder, "one")
    one = builder.assistant("one")
    recorded(builder, "two")
    two = builder.assistant("two")
    recorded(builder, "three", parent=user)
    three = builder.assistant("three")
    again = builder.assistant("again", parent=one)
    junk = builder.entry("custom", customType=RECORD_TYPE, data={"version": 1}, parent=two)
    still = builder.assistant("still", parent=junk)
    turns = {turn["entry"]: turn for turn in export_turns(builder.write(tmp_path / "s.jsonl"))}
    assert turns[before]["messages"][0]["role"] == "user" and turns[before]["tools"] is None
    for entry, name in ((one, "one"), (two, "two"), (three, "three"), (again, "one"), (still, "two")):
        assert turns[entry]["messages"][0] == message(f"Prompt {name}."), entry
        assert turns[entry]["tools"] == [schema(name)]


# HTML exports


def html(folder: Path, name: str = "export.html", *, encoded: bytes | None = None, **data: Any) -> Path:
    if encoded is None:
        encoded = base64.b64encode(json.dumps(data).encode())
    page = (
        b"<!DOCTYPE html>\n<style>body { color: red }</style>\n"
        b'<script id="session-data" type="application/json">' + encoded + b"</script>\n"
        b"<script>const data = document.getElementById('session-data');</script>\n"
    )
    (folder / name).write_bytes(page)
    return folder / name


HEADER = {"type": "session", "version": 3, "id": "s1", "cwd": "/home/user/project"}


def test_an_export_has_prompt_and_tools_of_its_session(tmp_path):
    one = html(tmp_path, header=HEADER, entries=[], systemPrompt="Be brief: é 漢 <b>", tools=[tool("read", "Read")])
    two = html(tmp_path, "two.html", header={**HEADER, "id": "s2"}, systemPrompt="Be kind.", tools=None)
    prompts = html_prompts([one, str(two), one])
    assert list(prompts) == ["s1", "s2"]
    assert prompts["s1"].text() == "Be brief: é 漢 <b>" and prompts["s1"].schemas() == [schema("read", "Read")]
    assert prompts["s2"].text() == "Be kind." and prompts["s2"].schemas() is None
    assert prompts["s1"].entries == ()
    assert html_prompts(one)["s1"].text() == prompts["s1"].text()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"encoded": b"not base64!"}, "damaged HTML export"),
        ({"encoded": b"bm90IEpTT04="}, "damaged HTML export"),
        ({"encoded": b""}, "damaged HTML export"),
        ({"encoded": base64.b64encode(b"[" * 100_000)}, "damaged HTML export"),
        ({"encoded": b"WzFd"}, "no header with an id"),
        ({"header": None, "systemPrompt": "Be brief."}, "no header with an id"),
        ({"header": HEADER, "entries": []}, "holds no system prompt, like all that `pi --export` makes"),
        ({"header": HEADER, "systemPrompt": ""}, "with /export or /share"),
    ],
)
def test_a_bad_export_is_named_with_the_reason(tmp_path, data, said):
    path = html(tmp_path, **data)
    with pytest.raises(SessionError) as caught:
        html_prompts([path])
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


def test_other_files_are_no_export(tmp_path):
    path = SessionBuilder().write(tmp_path / "s.jsonl")
    with pytest.raises(SessionError, match=r"s\.jsonl: no HTML export of a pi session"):
        html_prompts(path)
    with pytest.raises(FileNotFoundError):
        html_prompts(tmp_path / "nowhere.html")


def test_exports_of_one_session_must_agree(tmp_path):
    one = html(tmp_path, "one.html", header=HEADER, systemPrompt="Be brief.", tools=[tool("read")])
    other = html(tmp_path, "other.html", header=HEADER, systemPrompt="Be brief.", tools=[tool("bash")])
    with pytest.raises(SessionError, match=r"other\.html: another export of session s1 has a different prompt"):
        html_prompts([one, other])


# dagpack record


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["record", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_install_status_and_uninstall(capsys, tmp_path):
    agent = ["--agent-dir", str(tmp_path / "agent")]
    path = tmp_path / "agent" / "extensions" / "dagpack-recorder.ts"
    status, out, _ = run(capsys, *agent)
    assert status == 1 and out.startswith(f"not installed: there is no {path}; install it with dagpack record")
    assert not list(tmp_path.iterdir())

    status, out, _ = run(capsys, "--install", *agent)
    assert status == 0 and out.startswith(f"installed {path}\n") and "/reload" in out and "--uninstall" in out
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert path.read_bytes() == recorder_source()
    assert run(capsys, "--status", *agent) == (0, f"installed and current: {path}\n", "")
    assert run(capsys, "--install", *agent) == (0, f"installed and current: {path}\n", "")

    path.write_bytes(b"// dagpack-recorder: an older one\n")
    status, out, _ = run(capsys, *agent)
    assert status == 1 and out.startswith(f"installed, but another version: {path}")
    status, out, _ = run(capsys, "--install", *agent)
    assert status == 0 and out.startswith(f"replaced {path}\n") and path.read_bytes() == recorder_source()

    status, out, _ = run(capsys, "--uninstall", *agent)
    assert status == 0 and out.startswith(f"removed {path}\n") and not path.exists()
    assert run(capsys, "--uninstall", *agent)[:2] == (0, f"not installed: there is no {path}\n")


@pytest.mark.parametrize("action", ["--install", "--uninstall"])
def test_a_file_of_somebody_else_stays(capsys, tmp_path, action):
    agent = ["--agent-dir", str(tmp_path)]
    path = tmp_path / "extensions" / "dagpack-recorder.ts"
    path.parent.mkdir()
    path.write_text("export default () => {};\n")
    status, out, err = run(capsys, action, *agent)
    assert (status, out) == (2, "") and f"{path}: is not of this package and stays as it is" in err
    assert path.read_text() == "export default () => {};\n"
    assert run(capsys, *agent)[:2] == (1, f"not installed: {path} is another file\n")
    assert run(capsys, action, "--force", *agent)[0] == 0
    assert path.exists() == (action == "--install") and (not path.exists() or path.read_bytes() == recorder_source())


def test_where_pi_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PI_CODING_AGENT_DIR", raising=False)
    assert extension_path() == tmp_path / ".pi" / "agent" / "extensions" / "dagpack-recorder.ts"
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "~/elsewhere")
    assert extension_path() == tmp_path / "elsewhere" / "extensions" / "dagpack-recorder.ts"
    assert extension_path("given") == Path("given/extensions/dagpack-recorder.ts")


def test_print_and_wrong_command_lines(capsys):
    status, out, _ = run(capsys, "--print")
    assert status == 0 and out == recorder_source().decode() and out.startswith("// dagpack-recorder")
    status, _, err = run(capsys, "--install", "--uninstall")
    assert status == 2 and "not allowed with argument" in err

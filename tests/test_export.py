"""The export: exact turns in each form, and the files that other trainers load them from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Json, List, Value, load_dataset

from dagpack_hf import load_sessions, pack_dataset, tokenize_conversations
from dagpack_hf.cli import export as files
from dagpack_hf.conversations import dumps
from dagpack_hf.pi.export import (
    conversation_to_sharegpt,
    export_conversations,
    export_features,
    export_turns,
    message_to_sharegpt,
)
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from tests.pi_sessions import SessionBuilder, call, image, schema, stamp, text, thinking, tool

SHORT = sorted(map(str, sample_sessions().glob("*.jsonl")))[9:12:2]
FORMS = [
    ("openai", "turns"),
    ("messages", "turns"),
    ("messages", "conversations"),
    ("sharegpt", "turns"),
    ("sharegpt", "conversations"),
]


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def session(tmp_path: Path) -> str:
    """A session with thinking, a call, its result, a failed turn, and its retry: targets e3 and e6."""
    builder = SessionBuilder()
    builder.system("You code.", toolsAdded=[tool("read", "Reads.")])
    builder.user("What is in a?")
    builder.assistant(thinking("Look."), "Let me see.", call("c1", "read", path="a", limit=None))
    result = builder.result("c1", "line 1\nline 2")
    builder.assistant("Oh", stop="error", errorMessage="gone")
    builder.assistant("Two lines.", parent=result)
    return str(builder.write(tmp_path / "s.jsonl"))


SYSTEM = {"role": "system", "content": "You code."}
QUESTION = {"role": "user", "content": "What is in a?"}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Look.",
    "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "read", "arguments": {"path": "a", "limit": None}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "line 1\nline 2"}
ANSWER = {"role": "assistant", "content": "Two lines."}
TOOLS = [schema("read", "Reads.")]
ITEMS = [
    {"from": "system", "value": "You code."},
    {"from": "human", "value": "What is in a?"},
    {
        "from": "gpt",
        "value": "<think>\nLook.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "read", "arguments": {"path": "a", "limit": null}}\n</tool_call>',
    },
    {"from": "tool", "value": "<tool_response>\nline 1\nline 2\n</tool_response>"},
    {"from": "gpt", "value": "Two lines."},
]


# Forms


def test_openai_has_every_request(session: str) -> None:
    called = json.loads(json.dumps(CALL))
    called["tool_calls"][0]["function"]["arguments"] = '{"path":"a","limit":null}'
    later = [SYSTEM, QUESTION, called, {"role": "tool", "tool_call_id": "c1", "content": "line 1\nline 2"}]
    expected = [
        ("e3", "toolUse", True, [SYSTEM, QUESTION]),
        ("e5", "error", False, later),
        ("e6", "stop", True, later),
    ]
    rows = list(export_turns(session))
    assert [dumps(row) for row in rows] == [
        dumps(
            {
                "session": session,
                "entry": entry,
                "model": "tiny",
                "stop_reason": stop,
                "trained": trained,
                "messages": messages,
                "tools": TOOLS,
            }
        )
        for entry, stop, trained, messages in expected
    ]


def test_messages_has_request_and_reply_of_targets(session: str) -> None:
    first, second = export_turns(session, format="messages")
    assert dumps(first) == dumps(
        {
            "messages": [SYSTEM, QUESTION, CALL],
            "tools": TOOLS,
            "trained": [False, False, True],
            "session": session,
            "entry": "e3",
            "model": "tiny",
            "timestamp": stamp(3),
        }
    )
    assert second["messages"] == [SYSTEM, QUESTION, CALL, RESULT, ANSWER]
    assert second["trained"] == [False, False, False, False, True]
    assert (second["entry"], second["timestamp"]) == ("e6", stamp(6))


def test_sharegpt_has_the_text_that_templates_print(session: str) -> None:
    first, second = export_turns(session, format="sharegpt")
    assert dumps(first) == dumps(
        {
            "conversations": ITEMS[:3],
            "tools": dumps(TOOLS),
            "trained": [False, False, True],
            "session": session,
            "entry": "e3",
            "model": "tiny",
            "timestamp": stamp(3),
        }
    )
    assert second["conversations"] == ITEMS and second["trained"] == [False] * 4 + [True]


def test_conversations_are_the_rows_of_load_sessions(session: str) -> None:
    expected = {
        "messages": [SYSTEM, QUESTION, CALL, RESULT, ANSWER],
        "tools": TOOLS,
        "trained": [False, False, True, False, True],
        "session": session,
        "session_id": "s1",
        "cwd": "/home/user/project",
        "timestamp": stamp(6),
        "entry_ids": ["e1", "e2", "e3", "e4", "e6"],
        "models": [None, None, "tiny", None, "tiny"],
    }
    rows = list(export_turns(session, format="messages", unit="conversations"))
    assert [dumps(row) for row in rows] == [dumps(expected)]
    del expected["messages"], expected["tools"]
    rows = list(export_turns(session, format="sharegpt", unit="conversations"))
    assert [dumps(row) for row in rows] == [dumps({"conversations": ITEMS, "tools": dumps(TOOLS), **expected})]


def test_a_turn_in_forked_files_is_exported_once(tmp_path: Path, session: str) -> None:
    fork = tmp_path / "fork.jsonl"
    fork.write_bytes(Path(session).read_bytes())
    rows = list(export_turns([session, fork], format="messages"))
    assert [(row["session"], row["entry"]) for row in rows] == [(session, "e3"), (session, "e6")]
    assert len(list(export_turns([session, fork]))) == 6


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "assistant", "content": " a \n", "reasoning_content": "b\n"}, "<think>\nb\n\n</think>\n\n a \n"),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "id": str(number), "function": {"name": "é", "arguments": {"n": number}}}
                    for number in (1, 2**70)
                ],
            },
            '<tool_call>\n{"name": "é", "arguments": {"n": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "é", "arguments": {"n": 1180591620717411303424}}\n</tool_call>',
        ),
        ({"role": "tool", "tool_call_id": "c", "content": ""}, "<tool_response>\n\n</tool_response>"),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:"}},
                    {"type": "text", "text": "b"},
                ],
            },
            "a\n(image omitted: model does not support images)\nb",
        ),
    ],
)
def test_sharegpt_values(message: dict[str, Any], value: str) -> None:
    assert message_to_sharegpt(message)["value"] == value


def test_images(tmp_path: Path) -> None:
    builder = SessionBuilder()
    builder.user([text("See"), image("aGk=")])
    builder.assistant("A dot.")
    path = builder.write(tmp_path / "s.jsonl")
    kept = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    omitted = "See\n(image omitted: model does not support images)"

    def content(**options: Any) -> Any:
        row = next(export_turns(path, **options))
        return row["conversations"][0]["value"] if "conversations" in row else row["messages"][0]["content"]

    assert content() == kept == content(format="messages", images="keep")
    assert content(format="messages", images="keep", unit="conversations") == kept
    assert content(images="placeholder") == content(format="messages") == omitted
    assert content(format="sharegpt") == content(format="sharegpt", unit="conversations") == omitted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "xml"}, "format='xml' is unknown: use 'openai', 'messages', 'sharegpt'"),
        ({"unit": "tokens"}, "unit='tokens' is unknown: use 'turns', 'conversations'"),
        ({"unit": "conversations"}, "use unit='turns', or format='messages'"),
        ({"format": "sharegpt", "images": "keep"}, "use images='placeholder', or format='messages'"),
        ({"format": "sharegpt", "images": "reference"}, "images='reference' asks for images"),
    ],
)
def test_forms_that_do_not_exist(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        export_turns("nowhere.jsonl", **options)


def test_all_forms_of_the_sample_agree() -> None:
    """What the turns train is what the conversations train."""
    turns = list(export_turns(sample_sessions(), format="messages"))
    conversations = load_sessions(sample_sessions())
    assert len(turns) == 125 and len(list(export_turns(sample_sessions()))) == 139
    flagged = [
        (row["entry_ids"][place], message)
        for row in conversations
        for place, message in enumerate(row["messages"])
        if row["trained"][place]
    ]
    by_entry = sorted(flagged, key=lambda pair: pair[0])
    assert by_entry == sorted(((turn["entry"], turn["messages"][-1]) for turn in turns), key=lambda pair: pair[0])
    sharegpt = list(export_turns(sample_sessions(), format="sharegpt"))
    assert sharegpt == [conversation_to_sharegpt(turn) for turn in turns]
    selected = conversations.select([2, 0])
    assert list(export_conversations(selected)) == [conversations[2], conversations[0]]
    assert [row["trained"] for row in export_conversations(selected, "sharegpt")] == selected["trained"][:]


# Files


def parquet(path: Path, rows: Any, form: tuple[str, str]) -> Path:
    with open(path, "wb") as file:
        files.write_parquet(file, rows, export_features(*form))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_parquet_and_json_come_back_equal(tmp_path: Path, form: tuple[str, str]) -> None:
    rows = list(export_turns(SHORT, format=form[0], unit=form[1]))
    features = export_features(*form)
    path = parquet(tmp_path / "rows.parquet", rows, form)
    for loaded in (
        load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")),
        Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache")),
    ):
        assert loaded.features == features and list(loaded.features) == list(rows[0])
        assert [dumps(row) for row in loaded] == [dumps(row) for row in rows]
    with open(tmp_path / "rows.jsonl", "wb") as file:
        files.write_json_lines(file, rows)
    assert (tmp_path / "rows.jsonl").read_bytes() == b"".join(dumps(row).encode() + b"\n" for row in rows)
    loaded = load_dataset(
        "json",
        data_files=str(tmp_path / "rows.jsonl"),
        split="train",
        features=features,
        cache_dir=str(tmp_path / "cache"),
    )
    assert list(loaded) == rows


def test_parquet_columns() -> None:
    """Chat messages and schemas are text; what always has the same keys is not."""
    items = List({"from": Value("string"), "value": Value("string")})
    assert export_features("messages")["messages"] == Json() == export_features("openai")["tools"]
    assert export_features("sharegpt")["conversations"] == items
    assert export_features("sharegpt", "conversations")["tools"] == Value("string")
    assert export_features("openai")["trained"] == Value("bool")
    assert export_features("messages", "conversations") == load_sessions(SHORT[0]).features
    for form in FORMS:
        rows = list(export_turns(SHORT[0], format=form[0], unit=form[1]))
        table = next(files._row_groups(rows, export_features(*form)))
        assert table.schema.metadata == export_features(*form).arrow_schema.metadata
        assert table.column_names == list(rows[0])


def test_parquet_text_is_exact(tmp_path: Path) -> None:
    """No key is filled in, no number rounded, and text that Arrow cannot hold does not stop the export."""
    builder = SessionBuilder()
    builder.system(
        "x", toolsAdded=[tool("f"), {**tool("g"), "parameters": {"type": "object", "enum": [1, "a", None]}}]
    )
    builder.user("hi")
    builder.assistant(call("c", "f", n=2**70, x=1.2345678901234567, z=-0.0, none=None), model="m\ud800")
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in builder.lines))
    rows = list(export_turns(path, format="messages"))
    arguments = rows[0]["messages"][-1]["tool_calls"][0]["function"]["arguments"]
    assert dumps(arguments) == '{"n":1180591620717411303424,"x":1.2345678901234567,"z":-0.0,"none":null}'
    table = pq.read_table(parquet(tmp_path / "rows.parquet", rows, ("messages", "turns")))
    assert table["messages"].to_pylist() == [dumps(rows[0]["messages"])]
    assert table["tools"].to_pylist() == [dumps(rows[0]["tools"])]
    assert "enum" not in rows[0]["tools"][0]["function"]["parameters"]
    assert table["model"].to_pylist() == ["m?"]


@pytest.mark.parametrize("form", FORMS)
def test_no_tools_are_null(tmp_path: Path, form: tuple[str, str]) -> None:
    builder = SessionBuilder()
    builder.user("hi")
    builder.assistant("ho")
    rows = list(export_turns(builder.write(tmp_path / "s.jsonl"), format=form[0], unit=form[1]))
    assert [row["tools"] for row in rows] == [None]
    assert pq.read_table(parquet(tmp_path / "rows.parquet", rows, form))["tools"].null_count == 1


def test_parquet_is_written_by_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(export_turns(SHORT, format="messages"))
    features = export_features("messages")
    sizes = [files._one_row(row, features).nbytes for row in rows]
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", sizes[0] + sizes[1])
    taken: list[int] = []

    def counted() -> Any:
        for row in rows:
            taken.append(len(taken))
            yield row

    for group in files._row_groups(counted(), features):
        assert len(group) >= 2 or len(taken) == len(rows)
        break
    assert len(taken) == 2, "a row group is written before the next row is read"
    out = io.BytesIO()
    files.write_parquet(out, rows, features)
    written = pq.ParquetFile(io.BytesIO(out.getvalue()))
    assert written.metadata.num_row_groups >= 2 and written.metadata.row_group(0).num_rows == 2
    assert [json.loads(value) for value in written.read()["messages"].to_pylist()] == [row["messages"] for row in rows]


def test_parquet_without_a_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [], ("messages", "turns"))
    assert pq.read_table(path).num_rows == 0
    stored = pq.read_schema(path)
    assert stored.names == list(export_features("messages"))
    assert json.loads(stored.metadata[b"huggingface"]) == {"info": {"features": export_features("messages").to_dict()}}


def test_json_with_types_loads_what_a_guess_cannot(tmp_path: Path) -> None:
    """Keys and images that come later than the part of the file from which `datasets` guesses."""
    plain = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y"}]
    rest = {"trained": [False, True], "session": "s", "entry": "e", "model": "m", "timestamp": stamp(1)}
    parts = {"role": "user", "content": [{"type": "text", "text": "z"}]}
    rows = [{"messages": plain, "tools": None, **rest}] * 20
    rows += [
        {"messages": [QUESTION, CALL], "tools": TOOLS, **rest},
        {"messages": [parts, ANSWER], "tools": None, **rest},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(dumps(row) + "\n" for row in rows))
    load = {"data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "cache"), "chunksize": 20_000}
    assert list(load_dataset("json", features=export_features("messages"), **load)) == rows
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        load_dataset("json", **load)


# Trainers


def test_a_chat_template_sees_no_difference(tmp_path: Path) -> None:
    tokenizer = sample_tokenizer()
    path = parquet(tmp_path / "r.parquet", export_turns(SHORT, format="messages"), ("messages", "turns"))
    loaded = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    turns = list(export_turns(SHORT, format="messages"))
    for row, turn in zip(loaded, turns, strict=True):
        ours = tokenizer.apply_chat_template(turn["messages"], tools=turn["tools"], tokenize=False)
        assert tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) == ours
    trees = [tokenize_conversations(conversations, tokenizer) for conversations in (loaded, load_sessions(SHORT))]
    (rows, of_turns), (_, of_conversations) = (pack_dataset(each, max_length=4096) for each in trees)
    assert len(rows) and of_turns == of_conversations, "turns and conversations are the same training"


def test_trl_learns_only_the_reply(tmp_path: Path) -> None:
    """The way from a turn to prompt and completion that the help shows."""
    from trl import SFTConfig, SFTTrainer

    from dagpack_hf.recipe import tiny_llama

    tokenizer = sample_tokenizer()
    turns = list(export_turns(SHORT[0], format="messages"))
    path = parquet(tmp_path / "r.parquet", turns, ("messages", "turns"))
    loaded = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    trainer = SFTTrainer(
        model=tiny_llama(tokenizer, seed=0),
        args=SFTConfig(output_dir=str(tmp_path / "out"), report_to="none", max_length=None, use_cpu=True),
        train_dataset=loaded.map(
            lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
            remove_columns=["messages", "trained"],
        ),
        processing_class=tokenizer,
    )
    assert len(trainer.train_dataset) == len(turns) == 3
    for row, turn in zip(trainer.train_dataset, turns, strict=True):
        learned = [label for label in row["labels"] if label != -100]
        prompt = tokenizer.apply_chat_template(
            turn["messages"][:-1], tools=turn["tools"], tokenize=False, add_generation_prompt=True
        )
        whole = tokenizer.apply_chat_template(turn["messages"], tools=turn["tools"], tokenize=False)
        assert tokenizer.decode(row["input_ids"]) == whole
        assert tokenizer.decode(learned) == whole[len(prompt) :]

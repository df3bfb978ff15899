"""What stands in a session file reaches the template byte for byte: load, conversation, Arrow, disk, render.

The reference is the parsed line of the file and the host's own rendering of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagpack_hf import load_sessions, tokenize_conversations
from tests.pi_sessions import SessionBuilder
from tests.toy import toy_tokenizer

ARGUMENTS = {
    "64 bits": '{"max": 9223372036854775807, "min": -9223372036854775808, "more": 9223372036854775808}',
    "beyond 64 bits": '{"unsigned": 18446744073709551616, "huge": 123456789012345678901234567890123456789, "n": -1}',
    "floats": '{"a": 0.1, "b": -0.0, "c": 1e-7, "d": 1e22, "e": 3.141592653589793, "f": 5e-324, "g": 1.0, "h": 2e300}',
    "nested nulls": '{"a": null, "b": {"c": null, "d": [null, {"e": null}, []]}, "f": {}}',
    "duplicate keys": '{"a": 1, "b": 2, "a": {"c": 3, "c": 4}}',
    "unicode": '{"é": "ü\\u2028\\u2029", "\\u0000": "\\ud83d\\ude00", "日本": "\\"quoted\\" \\\\ / \\n"}',
    "integer-like keys": '{"10": "ten", "2": "two", "b": 1, "1": "one", "-1": 0, "01": 0, "1.0": 0}',
    "booleans beside integers": '{"a": true, "b": 1, "c": 1.0, "d": false, "e": 0}',
    "text that looks like JSON": '{"a": "{\\"b\\": 1}", "c": "[1, 2]", "d": "null", "e": "12345678901234567890123"}',
}
SCHEMA = (
    '{"type": "object", "$defs": {"n": {"type": ["integer", "null"], "maximum": 18446744073709551616}}, '
    '"properties": {"10": {"$ref": "#/$defs/n"}, "2": {"const": null}, "x-y z": {"enum": [1, 1.0, null, "1", true]}, '
    '"": {"default": {"a": null}}, "type": {"type": "string"}}, "required": [], "additionalProperties": false, '
    '"x-é": -0.0}'
)


def session_file(path: Path, arguments: str) -> Path:
    """A session of one tool call, its arguments and the tool's schema put in as JSON text."""
    session = SessionBuilder()
    session.system("Be exact.", toolsAdded=[{"name": "run", "description": "Runs.", "parameters": "SCHEMA"}])
    session.user("Go")
    session.assistant({"type": "toolCall", "id": "c1", "name": "run", "arguments": "ARGUMENTS"})
    session.result("c1", "done", name="run")
    session.assistant("Done.")
    text = "".join(json.dumps(line) + "\n" for line in session.lines)
    path.write_text(text.replace('"ARGUMENTS"', arguments).replace('"SCHEMA"', SCHEMA), "utf-8")
    return path


def host_rendering(path: Path) -> list[str]:
    """Text of both turns in their contexts, from the parsed lines of the file and nothing of the package."""
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    prompt, _, reply, _, _ = (line["message"] for line in lines[1:])
    (declared,) = prompt["toolsAdded"]
    (block,) = reply["content"]
    call = {"type": "function", "function": {"name": "run", "arguments": block["arguments"]}}
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "Done."},
    ]
    tools = [{"type": "function", "function": declared}]
    tokenizer = toy_tokenizer()
    return [tokenizer.apply_chat_template(messages[:end], tools=tools, tokenize=False).rstrip("\n") for end in (3, 5)]


def rendering(dataset: Dataset) -> list[str]:
    """Text of every leaf of the token trees, the end of a longer one at its stop token."""
    tokenizer = toy_tokenizer()
    texts = []
    for tree in tokenize_conversations(dataset, tokenizer):
        assert len(tree["node_length"]) == 1, "the toy template keeps its prefixes"
        counts = tree["target_count"]
        stops = [i + 1 for i, token in enumerate(tree["input_ids"]) if counts[i] and token == tokenizer.eos_token_id]
        texts += [tokenizer.decode(tree["input_ids"][:stop]) for stop in stops]
    return texts


def stations(dataset: Dataset, folder: Path) -> dict[str, Dataset]:
    """The data set after what users do with data sets."""
    dataset.save_to_disk(folder / "saved")
    dataset.to_parquet(folder / "rows.parquet")
    return {
        "loaded": dataset,
        "saved": load_from_disk(folder / "saved"),
        "parquet": Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "cache")),
        "joined": concatenate_datasets([dataset, dataset]).select([1]),
        "filtered": dataset.filter(lambda row: len(row["trained"]) > 0),
        "with a new column": dataset.map(lambda row: {"turns": sum(row["trained"])}),
    }


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_and_schemas_arrive_byte_for_byte(tmp_path, name):
    path = session_file(tmp_path / "session.jsonl", ARGUMENTS[name])
    expected = host_rendering(path)
    written = json.dumps(json.loads(ARGUMENTS[name]), ensure_ascii=False)
    assert f"<call>run {written}</call>" in expected[0]
    assert json.dumps(json.loads(SCHEMA), ensure_ascii=False) in expected[0]
    for station, dataset in stations(load_sessions(path), tmp_path).items():
        assert rendering(dataset) == expected, station


def test_numbers_keep_their_kind_and_sign(tmp_path):
    path = session_file(tmp_path / "session.jsonl", '{"a": -0.0, "b": 1.0, "c": 1, "d": 18446744073709551616}')
    call = load_sessions(path)[0]["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert math.copysign(1, call["a"]) == -1 and [type(value) for value in call.values()] == [float, float, int, int]
    assert call["d"] == 2**64


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def without_surrogates(value: Any) -> bool:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") == json.dumps(
        value, ensure_ascii=False
    ).encode("utf-8", "surrogatepass")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), JSON_VALUES, max_size=4).filter(
        without_surrogates
    )
)
def test_any_arguments_arrive(tmp_path, arguments):
    path = session_file(tmp_path / "session.jsonl", json.dumps(arguments))
    assert rendering(load_sessions(path, load_from_cache_file=False)) == host_rendering(path)

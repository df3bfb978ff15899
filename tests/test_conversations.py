"""The conversational data set: message lists that share their beginnings, and JSON that survives everything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetInfo, concatenate_datasets, load_from_disk
from datasets.table import MemoryMappedTable
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import is_conversational

from dagpack_hf.conversations import FEATURES, JsonText, MessageTree, decode_column, dumps, loads
from dagpack_hf.maximal import Provenance, SourceWriter, merge, write_rows

HARD = {"role": "user", "content": "é🙈 ", "n": [2**70, -0.0, 0.1234567890123456, None], "k": {"b": 1, "a": None}}
TEXT = st.text(st.characters())  # lone surrogates included
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": 2**70, "x": None}}}]


def json_values(infinity: bool) -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=infinity)
    return st.recursive(
        st.none() | st.booleans() | numbers | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=12,
    )


def tree_of(*messages: dict[str, Any]) -> tuple[MessageTree, int]:
    """Return a tree that holds one list, and the list's last node."""
    tree = MessageTree()
    node = -1
    for message in messages:
        node = tree.append(node, tree.text(message))
    return tree, node


@pytest.fixture
def hard_dataset(tmp_path: Path) -> Dataset:
    """Two rows, the first with all that JSON and Arrow may spoil."""
    parts = []
    with open(tmp_path / "spill", "ab") as spill:
        for name, first, tools in (("a", HARD, TOOLS), ("b", {"role": "user", "content": "hi"}, None)):
            tree, node = tree_of(first, {"role": "assistant", "content": "ok"})
            writer = SourceWriter(tree, spill)
            writer.add(node, None if tools is None else dumps(tools), name)
            parts.append(writer.part(Provenance(f"{name}.jsonl", name, "/w")))
    write_rows(str(tmp_path / "rows.arrow"), merge(parts))
    return Dataset(MemoryMappedTable.from_file(str(tmp_path / "rows.arrow")), DatasetInfo(features=FEATURES.copy()))


def exact(dataset: Dataset) -> bool:
    """Compare by JSON text: == would take -0.0 for 0."""
    table = dataset.with_format("arrow")[:]
    messages = decode_column(table["messages"])[0]
    return [dumps(message) for message in messages[:1]] == [dumps(HARD)] and decode_column(table["tools"])[0] == TOOLS


def test_the_data_set_is_conversational_to_trl(hard_dataset: Dataset) -> None:
    row = hard_dataset[0]
    assert is_conversational(row)
    assert row["messages"][0]["role"] == "user"
    assert row["messages"][0]["n"][0] == 2**70
    assert row["tools"][0]["function"]["name"] == "f"


def test_values_survive_selection_and_maps_that_leave_them_alone(hard_dataset: Dataset) -> None:
    dataset = hard_dataset
    assert exact(dataset)
    assert exact(dataset.select([0]))
    assert exact(dataset.select([1, 0]).select([1]))
    assert exact(concatenate_datasets([dataset, dataset]))
    mapped = dataset.map(lambda session: {"length": len(session)}, input_columns="session")
    assert exact(mapped)
    assert isinstance(mapped.features["messages"], JsonText)
    assert exact(dataset.map(lambda session: {"length": len(session)}, input_columns="session", num_proc=2))


def test_a_map_sees_the_exact_values(hard_dataset: Dataset) -> None:
    dataset = hard_dataset

    def look(row: dict[str, Any]) -> dict[str, Any]:
        return {"seen": dumps(row["messages"][0]), "count": len(row["messages"])}

    mapped = dataset.map(look, remove_columns=dataset.column_names)
    assert mapped["seen"][0] == dumps(HARD)
    assert mapped["count"][:] == [2, 2]
    rewritten = dataset.map(lambda row: {"messages": row["messages"][:1]})
    assert [len(row) for row in rewritten["messages"]] == [1, 1]
    assert rewritten["messages"][0][0]["n"][0] == 2**70


def test_values_survive_saving(hard_dataset: Dataset, tmp_path: Path) -> None:
    dataset = hard_dataset
    dataset.save_to_disk(tmp_path / "saved")
    loaded = load_from_disk(tmp_path / "saved")
    assert exact(loaded)
    assert json.loads((tmp_path / "saved" / "dataset_info.json").read_text())["features"]["messages"] == {
        "_type": "Json"
    }
    assert loaded[1]["messages"][0] == {"role": "user", "content": "hi"}
    assert loaded.cast(FEATURES)[0]["messages"][0]["n"][0] == 2**70
    dataset.to_parquet(tmp_path / "saved.parquet")
    assert exact(Dataset.from_parquet(str(tmp_path / "saved.parquet"), cache_dir=str(tmp_path / "cache")))


def test_json_text_takes_objects_text_and_nothing() -> None:
    feature = JsonText()
    assert feature.encode_example(None) is None
    assert feature.encode_example([{"b": 1, "a": math.inf}]) == '[{"b":1,"a":Infinity}]'
    assert feature.encode_example('[{"a": 1}]') == '[{"a": 1}]'
    assert feature.encode_example("plain") == '"plain"'
    nested = pa.array([[{"role": "user", "content": "x"}], None])
    assert feature.cast_storage(nested).storage.to_pylist() == ['[{"role":"user","content":"x"}]', None]


@given(json_values(infinity=True))
@settings(max_examples=150, deadline=None)
def test_any_json_goes_through_arrow_unchanged(value: Any) -> None:
    column = pa.array([dumps([value])], pa.string())
    assert json.dumps(decode_column(column)[0]) == json.dumps([value])


def test_decode_column_drops_what_arrow_filled_in() -> None:
    rows = [
        [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": 1, "b": [None, 2]}}]}],
        [{"role": "user", "content": "x", "tool_calls": None}],
        None,
    ]
    column = pa.array([*rows, [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {"c": None}}]}]])
    assert decode_column(column) == [
        rows[0],
        [{"role": "user", "content": "x"}],
        None,
        [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {}}]}],
    ]
    assert decode_column(pa.chunked_array([column.slice(1, 1), column.slice(2, 1)])) == [
        [{"role": "user", "content": "x"}],
        None,
    ]


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string(), pa.string_view(), pa.json_()])
def test_decode_column_reads_text_of_every_kind(arrow_type: pa.DataType) -> None:
    storage = pa.array(['[{"a":null}]', None], pa.string())
    is_json = isinstance(arrow_type, pa.JsonType)
    column = pa.ExtensionArray.from_storage(arrow_type, storage) if is_json else storage.cast(arrow_type)
    assert decode_column(column) == [[{"a": None}], None]


def test_lone_surrogates_are_escaped_in_json_and_dropped_from_messages() -> None:
    assert dumps(["é\ud800"]) == '["é\\ud800"]'
    assert json.loads(dumps(["é\ud800"])) == ["é\ud800"]
    tree, node = tree_of({"role": "user", "content": "é\ud800🙈\udfff", "\udc00k": [{"x": "\ud83d"}, "\\ud800"]})
    assert tree.messages(node) == [{"role": "user", "content": "é🙈", "k": [{"x": ""}, "\\ud800"]}]


def test_text_that_was_encoded_twice_is_read() -> None:
    assert loads('[{"a":1}]') == loads(dumps('[{"a":1}]')) == [{"a": 1}]


def test_lists_that_begin_alike_share_their_nodes() -> None:
    tree = MessageTree()
    question = tree.text({"role": "user", "content": "q"}, entry="e1")
    answers = [tree.text({"role": "assistant", "content": name}, name, "tiny") for name in "ab"]
    root = tree.append(-1, question)
    left, right = (tree.append(root, answer) for answer in answers)
    assert (tree.append(-1, question), tree.append(root, answers[1])) == (root, right)
    again = tree.append(left, question)
    assert (tree.parents, tree.text_of) == ([-1, root, root, left], [0, 1, 2, 0])
    assert (tree.entries, tree.models) == (["e1", "a", "b"], [None, "tiny", "tiny"])
    assert tree.path(again) == [0, 1, 0]
    assert tree.path(-1) == tree.messages(-1) == []
    assert tree.json(-1) == b"[]"
    assert [message["content"] for message in tree.messages(again)] == ["q", "a", "q"]
    assert [message["content"] for message in tree.messages(right)] == ["q", "b"]


def test_equal_messages_are_two_texts() -> None:
    tree, node = tree_of({"role": "user", "content": "x"}, {"role": "user", "content": "x"})
    assert tree.path(node) == [0, 1]
    assert tree.append(-1, 1) != tree.append(-1, 0)


def test_messages_are_fresh_objects() -> None:
    tree, node = tree_of({"role": "user", "content": ["x"]})
    tree.messages(node)[0]["content"].append("y")
    assert tree.messages(node) == [{"role": "user", "content": ["x"]}]


def test_a_text_is_taken_once() -> None:
    tree, _ = tree_of({"role": "user", "content": "é"}, {"role": "assistant", "content": ""})
    assert tree.take(0) == '{"role":"user","content":"é"}'.encode()
    assert tree.texts == [b"", b'{"role":"assistant","content":""}']
    assert tree.take(0) == b""


def test_messages_are_exact() -> None:
    tree, node = tree_of(HARD, {"z": 10**400, "a": -(2**63) - 1, "f": [5e-324, 1.7976931348623157e308, 0.1 + 0.2]})
    assert json.dumps(tree.messages(node)) == json.dumps(
        [HARD, {"z": 10**400, "a": -(2**63) - 1, "f": [5e-324, 1.7976931348623157e308, 0.1 + 0.2]}]
    )
    tree, node = tree_of({"n": [math.inf, -math.inf, math.nan]})
    assert tree.messages(node) == [{"n": [None, None, None]}]


@given(st.lists(st.dictionaries(TEXT, json_values(infinity=False), max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_messages_come_back_as_they_were_without_lone_surrogates(messages: list[dict[str, Any]]) -> None:
    tree, node = tree_of(*messages)
    assert json.dumps(tree.messages(node)) == json.dumps([clean(message) for message in messages])
    tree.json(node).decode()


def clean(value: Any) -> Any:
    """Drop lone surrogates from all texts and keys; of keys that become equal the last one counts."""
    if isinstance(value, str):
        return value.encode("utf-8", "ignore").decode()
    if isinstance(value, list):
        return [clean(item) for item in value]
    return {clean(key): clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_infinity_becomes_null_beside_lone_surrogates_too() -> None:
    tree = MessageTree()
    for text in ("plain", "\ud800"):
        tree.text({"role": "user", "content": text, "n": float("inf")})
    assert tree.texts == [b'{"role":"user","content":"plain","n":null}', b'{"role":"user","content":"","n":null}']

"""The conversational data set: maximal rows, one flag for each target, and JSON that survives everything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import is_conversational

from dagpack_hf.conversations import FEATURES, ConversationRows, JsonText, Message, Provenance, decode_column, dumps

HARD = {"role": "user", "content": "é🙈 ", "n": [2**70, -0.0, 0.1234567890123456, None], "k": {"b": 1, "a": None}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": 2**70, "x": None}}}]


def provenance(name: str) -> Provenance:
    return Provenance(name + ".jsonl", name, "/w", "2026-01-01T00:00:00.000Z")


def chain(*contents: str | dict[str, Any]) -> Message:
    message: Message | None = None
    for place, content in enumerate(contents):
        role = "assistant" if place % 2 else "user"
        body = {"role": role, "content": content} if isinstance(content, str) else content
        message = Message(message, body, entry=f"e{place}", model="tiny" if place % 2 else None)
    assert message is not None
    return message


def hard_dataset() -> Dataset:
    rows = ConversationRows()
    rows.add(chain(HARD, "ok"), TOOLS, provenance("a"))
    rows.add(chain("hi", "ho"), None, provenance("b"))
    return rows.dataset()


def texts(dataset: Dataset) -> list[list[str]]:
    return [[message["content"] for message in row] for row in dataset["messages"]]


def exact(dataset: Dataset) -> bool:
    """Compare by JSON text: == would take -0.0 for 0."""
    table = dataset.with_format("arrow")[:]
    messages = decode_column(table["messages"])[0]
    return [dumps(message) for message in messages[:1]] == [dumps(HARD)] and decode_column(table["tools"])[0] == TOOLS


def test_a_prefix_of_another_list_is_no_row() -> None:
    rows = ConversationRows()
    short, long = chain("q", "a"), chain("q", "a", "r", "b")
    other = chain("q", "x")
    assert [rows.add(target, None, provenance(name)) for target, name in ((short, "1"), (other, "2"), (long, "3"))]
    dataset = rows.dataset()
    assert dataset.features == FEATURES
    assert texts(dataset) == [["q", "x"], ["q", "a", "r", "b"]]
    assert dataset["trained"][:] == [[False, True], [False, True, False, True]]
    assert dataset["session_id"][:] == ["2", "3"]
    assert dataset["entry_ids"][1] == ["e0", "e1", "e2", "e3"]
    assert dataset["models"][1] == [None, "tiny", None, "tiny"]
    assert dataset["tools"][:] == [None, None]


def test_a_target_is_flagged_in_its_first_row_only() -> None:
    rows = ConversationRows()
    for target in (chain("q", "a"), chain("q", "a", "r", "b"), chain("q", "a", "s", "c")):
        assert rows.add(target, None, provenance("1"))
    assert rows.dataset()["trained"][:] == [[False, True, False, True], [False, False, False, True]]


def test_other_tools_make_another_row() -> None:
    rows = ConversationRows()
    assert rows.add(chain("q", "a"), None, provenance("1"))
    assert rows.add(chain("q", "a"), TOOLS, provenance("2"))
    assert not rows.add(chain("q", "a"), TOOLS, provenance("3"))
    dataset = rows.dataset()
    assert texts(dataset) == [["q", "a"], ["q", "a"]]
    assert dataset["tools"][:] == [None, TOOLS]


@given(
    st.lists(
        st.tuples(st.sampled_from([None, 1]), st.lists(st.sampled_from("ab"), min_size=1, max_size=5)),
        max_size=12,
    ),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_rows_are_the_maximal_lists(lists: list[tuple[int | None, list[str]]], forget: bool) -> None:
    rows = ConversationRows()
    for tools, contents in lists:
        rows.add(chain(*contents), TOOLS if tools else None, provenance("x"))
        if forget:
            rows.forget_links()
    got = [(row["tools"], [m["content"] for m in json.loads(row["messages"])], row["trained"]) for row in rows.rows()]
    keys = {(dumps(TOOLS) if tools else None, tuple(contents)) for tools, contents in lists}
    maximal = {
        key
        for key in keys
        if not any(other != key and other[0] == key[0] and other[1][: len(key[1])] == key[1] for other in keys)
    }
    assert {(tools, tuple(contents)) for tools, contents, _ in got} == maximal
    assert len(got) == len(maximal)
    flagged = [
        (tools, tuple(contents[: place + 1]))
        for tools, contents, trained in got
        for place, flag in enumerate(trained)
        if flag
    ]
    assert sorted(flagged, key=repr) == sorted(keys, key=repr)


def test_the_data_set_is_conversational_to_trl() -> None:
    row = hard_dataset()[0]
    assert is_conversational(row)
    assert row["messages"][0]["role"] == "user"
    assert row["messages"][0]["n"][0] == 2**70
    assert row["tools"][0]["function"]["name"] == "f"


def test_values_survive_selection_and_maps_that_leave_them_alone() -> None:
    dataset = hard_dataset()
    assert exact(dataset)
    assert exact(dataset.select([0]))
    assert exact(dataset.select([1, 0]).select([1]))
    assert exact(concatenate_datasets([dataset, dataset]))
    mapped = dataset.map(lambda session: {"length": len(session)}, input_columns="session")
    assert exact(mapped)
    assert isinstance(mapped.features["messages"], JsonText)
    assert exact(dataset.map(lambda session: {"length": len(session)}, input_columns="session", num_proc=2))


def test_a_map_sees_the_exact_values() -> None:
    dataset = hard_dataset()

    def look(row: dict[str, Any]) -> dict[str, Any]:
        return {"seen": dumps(row["messages"][0]), "count": len(row["messages"])}

    mapped = dataset.map(look, remove_columns=dataset.column_names)
    assert mapped["seen"][0] == dumps(HARD)
    assert mapped["count"][:] == [2, 2]
    rewritten = dataset.map(lambda row: {"messages": row["messages"][:1]})
    assert [len(row) for row in rewritten["messages"]] == [1, 1]
    assert rewritten["messages"][0][0]["n"][0] == 2**70


def test_values_survive_saving(tmp_path: Path) -> None:
    dataset = hard_dataset()
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


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
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
    assert Message(None, {"role": "user", "content": "é\ud800🙈"}).content() == {"role": "user", "content": "é🙈"}


def test_an_empty_data_set_has_all_columns() -> None:
    dataset = ConversationRows().dataset()
    assert len(dataset) == 0
    assert dataset.features == FEATURES

"""Maximal message lists, against a search that compares every list with every other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf.conversations import FEATURES, MessageTree, decode_column, dumps
from dagpack_hf.maximal import (
    PartDetails,
    Provenance,
    Rows,
    SourcePart,
    SourceWriter,
    merge,
    row_tables,
    write_rows,
    writing,
)

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@dataclass(frozen=True)
class Given:
    """A turn: its tools, the contents of its list, its key, and whether it lacks a prompt.

    With `apart` its messages are new texts, as those of an edited or summarised context are.
    """

    contents: str
    tools: bool = False
    key: str | None = None
    unprompted: bool = False
    apart: bool = False


def write_part(
    name: str, turns: Sequence[Given], spill: Any, seed: int = 0, long: str = ""
) -> tuple[SourcePart, list[list[str]]]:
    """Return a source with these turns, and for each the entries of its messages."""
    tree = MessageTree()
    writer = SourceWriter(tree, spill, seed)
    texts: dict[tuple[int, str], int] = {}
    entries = []
    for number, turn in enumerate(turns):
        node = -1
        for place, letter in enumerate(turn.contents):
            shared = (place, letter)
            if shared not in texts or turn.apart:
                message = {"role": "user", "content": letter + long}
                entry = f"{name}.{len(tree.texts)}"
                texts[shared] = tree.text(message, entry, f"model of {entry}" if place % 2 else None)
            node = tree.append(node, texts[shared])
        key = f"{name} {number}" if turn.key is None else turn.key
        writer.add(node, dumps(TOOLS) if turn.tools else None, key, f"time of {name}.{number}", turn.unprompted)
        entries.append([tree.entries[text] or "" for text in tree.path(node)])
    return writer.part(Provenance(f"{name}.jsonl", name, None if name == "s1" else f"/{name}")), entries


def read(rows: Rows, **options: Any) -> list[dict[str, Any]]:
    """Return the rows as objects, messages as their contents."""
    table = pa.concat_tables(row_tables(rows, **options))
    assert table.schema == FEATURES.arrow_schema
    columns = {name: table[name].to_pylist() for name in table.column_names if name not in ("messages", "tools")}
    columns["messages"] = [
        [message["content"] for message in messages] for messages in decode_column(table["messages"])
    ]
    columns["tools"] = decode_column(table["tools"])
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def load(
    folder: Path, *sources: Sequence[Given], files: int = 1, **options: Any
) -> tuple[Rows, list[list[list[str]]]]:
    """Write each source, to one of several spill files, and merge them."""
    with ExitStack() as stack:
        spills = [stack.enter_context(open(folder / f"spill{number}", "ab")) for number in range(files)]
        written = [
            write_part(f"s{number}", turns, spills[number % files], **options) for number, turns in enumerate(sources)
        ]
    return merge([part for part, _ in written]), [entries for _, entries in written]


def expected(
    sources: Sequence[Sequence[Given]], entries: list[list[list[str]]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the rows and the counts, found the slow way."""
    counts = {"targets": 0, "repeated": 0, "equal": 0, "unprompted": 0}
    keys, lists, kept = set(), set(), []
    for number, turns in enumerate(sources):
        for place, turn in enumerate(turns):
            key = (turn.key if turn.key is not None else f"s{number} {place}", turn.contents[-1])
            if key in keys:
                counts["repeated"] += 1
                continue
            keys.add(key)
            if (turn.tools, turn.contents) in lists:
                counts["equal"] += 1
                continue
            lists.add((turn.tools, turn.contents))
            counts["targets"] += 1
            counts["unprompted"] += turn.unprompted
            kept.append((number, place, turn))
    rows, flagged = [], set()
    for number, place, turn in kept:
        if any(
            tools == turn.tools and contents != turn.contents and contents.startswith(turn.contents)
            for tools, contents in lists
        ):
            continue
        trained = []
        for end in range(1, len(turn.contents) + 1):
            prefix = (turn.tools, turn.contents[:end])
            trained.append(prefix in lists and prefix not in flagged)
            flagged.add(prefix)
        ids = entries[number][place]
        rows.append(
            {
                "trained": trained,
                "session": f"s{number}.jsonl",
                "session_id": f"s{number}",
                "cwd": None if number == 1 else f"/s{number}",
                "timestamp": f"time of s{number}.{place}",
                "entry_ids": ids,
                "models": [f"model of {entry}" if at % 2 else None for at, entry in enumerate(ids)],
                "messages": list(turn.contents),
                "tools": TOOLS if turn.tools else None,
            }
        )
    return rows, counts


TURN = st.builds(
    Given,
    st.text("ab", min_size=1, max_size=5),
    st.booleans(),
    st.none() | st.sampled_from("xyz"),
    st.booleans(),
    st.booleans(),
)


@given(
    st.lists(st.lists(TURN, max_size=8), max_size=5),
    st.integers(0, 2**64 - 1),
    st.integers(1, 3),
    st.sampled_from([0, 60, 4 * 1024 * 1024]),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_the_maximal_lists(sources: list[list[Given]], seed: int, files: int, chunk: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_CHUNK_BYTES", chunk)
        rows, entries = load(Path(folder), *sources, seed=seed, files=files)
        wanted, counts = expected(sources, entries)
        assert read(rows) == wanted
        assert {name: getattr(rows, name) for name in counts} == counts
        if chunk == 0:
            assert [len(table) for table in row_tables(rows)] == [1] * len(wanted) + [0]


def test_a_prefix_of_another_list_is_no_row(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("qa")], [Given("qx")], [Given("qarb")])
    got = read(rows)
    assert [row["messages"] for row in got] == [["q", "x"], ["q", "a", "r", "b"]]
    assert [row["trained"] for row in got] == [[False, True], [False, True, False, True]]
    assert [row["session_id"] for row in got] == ["s1", "s2"]
    assert got[1]["entry_ids"] == ["s2.0", "s2.1", "s2.2", "s2.3"]


def test_a_target_is_flagged_in_the_first_row_that_holds_it(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("qarb"), Given("qasc")], [Given("qa")])
    assert [row["trained"] for row in read(rows)] == [[False, True, False, True], [False, False, False, True]]
    assert (rows.targets, rows.equal, rows.repeated) == (3, 0, 0)


def test_other_tools_make_another_row(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("qa"), Given("qa", tools=True)], [Given("qa", tools=True)])
    assert [row["tools"] for row in read(rows)] == [None, TOOLS]
    assert (rows.targets, rows.equal) == (2, 1)


def test_a_repeated_turn_brings_no_row_even_with_another_context(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("qa", key="e1")], [Given("ra", key="e1"), Given("rb", key="e1")])
    assert [row["messages"] for row in read(rows)] == [["q", "a"], ["r", "b"]]
    assert (rows.targets, rows.repeated, rows.equal) == (2, 1, 0)


def test_a_list_that_only_a_repeated_turn_continues_stays_a_row(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("xb", key="e")], [Given("qa"), Given("qaqb", key="e")])
    assert [row["messages"] for row in read(rows)] == [["x", "b"], ["q", "a"]]


def test_only_targets_count_as_unprompted(tmp_path: Path) -> None:
    turns = [Given("qa", unprompted=True), Given("qa", unprompted=True), Given("qb")]
    rows, _ = load(tmp_path, turns, [Given("qc", unprompted=True)])
    assert (rows.targets, rows.unprompted) == (3, 2)


def test_nothing_gives_no_rows_with_all_columns(tmp_path: Path) -> None:
    for sources in ([], [[]], [[], []]):
        rows, _ = load(tmp_path, *sources)
        assert read(rows) == []
        write_rows(str(tmp_path / "rows.arrow"), rows)
        dataset = Dataset.from_file(str(tmp_path / "rows.arrow"))
        assert len(dataset) == 0
        assert dataset.features == FEATURES


def test_long_texts_are_read_from_the_spill_file_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [[Given("qarb"), Given("qasc"), Given("xarc", apart=True)], [], [Given("qasd", tools=True)]]
    rows, entries = load(tmp_path, *sources, files=2, long="é" * 999)
    wanted, _ = expected(sources, entries)
    monkeypatch.setattr(writing, "_CHUNK_BYTES", 5000)
    reads: list[int] = []
    pread = writing._Spill._pread
    monkeypatch.setattr(writing._Spill, "_pread", lambda spill, at, size: reads.append(size) or pread(spill, at, size))
    got = read(rows)
    assert [[text[0] for text in row["messages"]] for row in got] == [row["messages"] for row in wanted]
    assert {text[1:] for row in got for text in row["messages"]} == {"é" * 999}
    assert [row["entry_ids"] for row in got] == [row["entry_ids"] for row in wanted]
    one = len('{"role":"user","content":"q"}') + 2 * 999
    # q a r b lie side by side, and so do the other two whole lists; q a stands apart from s c.
    assert [size for size in reads if size > one] == [4 * one + 3, 2 * one + 1, 2 * one + 1, 4 * one + 3, 4 * one + 3]


def test_chunks_stay_small_and_so_does_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = load(tmp_path, [Given("ab"), Given("ac"), Given("ad")], long="x" * 400)
    monkeypatch.setattr(writing, "_CHUNK_BYTES", 1000)
    assert [len(table) for table in row_tables(rows)] == [2, 1]


def test_a_row_that_arrow_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = load(tmp_path, [Given("ab")], long="x" * 400)
    monkeypatch.setattr(writing, "_ROW_BYTES", 859)
    with pytest.raises(ValueError, match=r"s0\.jsonl: a message list of 861 bytes .* holds 859; leave images out"):
        list(row_tables(rows))


def test_a_spill_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("ab")])
    (tmp_path / "spill0").write_bytes(b"")
    with pytest.raises(OSError, match="spill0: is cut off; is there room"):
        list(row_tables(rows))


def test_restore_gets_each_list_and_its_part(tmp_path: Path) -> None:
    rows, _ = load(tmp_path, [Given("ab")], [Given("cd")])

    def restore(part: SourcePart, text: bytes) -> bytes:
        return text.replace(b'"c"', json.dumps(part.provenance.session).encode())

    assert [row["messages"] for row in read(rows, restore=restore)] == [["a", "b"], ["s1.jsonl", "d"]]


def test_lone_surrogates_in_names_become_question_marks(tmp_path: Path) -> None:
    tree = MessageTree()
    node = tree.append(-1, tree.text({"role": "user", "content": "x"}, "e\ud800", "m\udfff"))
    with open(tmp_path / "spill", "ab") as spill:
        writer = SourceWriter(tree, spill)
        writer.add(node, None, "key\ud800", "t\ud800")
        part = writer.part(Provenance("s\udc80.jsonl", "\ud800", "/\ud800"))
    (row,) = read(merge([part]))
    assert {name: row[name] for name in ("session", "session_id", "cwd", "timestamp", "entry_ids", "models")} == {
        "session": "s?.jsonl",
        "session_id": "?",
        "cwd": "/?",
        "timestamp": "t?",
        "entry_ids": ["e?"],
        "models": ["m?"],
    }


def test_texts_are_moved_out_of_the_tree_once(tmp_path: Path) -> None:
    tree = MessageTree()
    root = tree.append(-1, tree.text({"role": "user", "content": "x" * 1000}))
    left, right = (tree.append(root, tree.text({"role": "assistant", "content": name})) for name in "ab")
    with open(tmp_path / "spill", "ab") as spill:
        writer = SourceWriter(tree, spill)
        writer.add(left, None, "1")
        assert tree.texts[:2] == [b"", b""]
        writer.add(right, dumps(TOOLS), "2")
        part = writer.part(Provenance("s.jsonl", "s", None))
    assert (tmp_path / "spill").read_bytes().count(b"x" * 1000) == 1
    assert [row["messages"] for row in read(merge([part]))] == [["x" * 1000, "a"], ["x" * 1000, "b"]]


def test_digests_depend_on_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        load(tmp_path, [Given("ab"), Given("ac", tools=True)], seed=seed)[0].parts[0] for seed in (1, 1, 2)
    )
    assert first.digests.tolist() == again.digests.tolist()
    assert first.keys.tolist() == again.keys.tolist()
    assert not set(first.digests.ravel().tolist()) & set(other.digests.ravel().tolist())
    assert not set(first.keys.ravel().tolist()) & set(other.keys.ravel().tolist())


def test_details_survive_as_bytes() -> None:
    tables = PartDetails(
        pa.table({"offset": pa.array([], pa.int64())}),
        pa.table({"text": [1, 2]}),
        pa.table({"timestamp": ["t", None]}),
    )
    assert PartDetails.from_bytes(tables.to_bytes()) == tables

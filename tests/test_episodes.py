"""Reading episodes from files, sound and damaged."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf.graph import Episode, TransitionGraph, files, load_episodes, load_recordings


def entry(action=1, cell=0, frames=1, **data):
    """A line of a recording whose last grid has a given cell."""
    grids = [[[9, 9], [9, 9]]] * (frames - 1) + [[[cell, 0], [0, 15]]]
    given = {"id": action, "data": {"game_id": "toy"}, "reasoning": None}
    fields = {"game_id": "toy", "frame": grids, "state": "NOT_FINISHED", "score": 0, "action_input": given, **data}
    return {"timestamp": "2026-01-01T00:00:00+00:00", "data": fields}


def state(cell):
    return (f"{cell:x}0", "0f")


def write(path, lines):
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")  # noqa: SIM115
    with opened as file:
        file.write(text)
    return path


def read(path, lines, **options):
    return load_recordings(write(path, lines), progress=False, **options)


def test_a_recording(tmp_path):
    click = {"action_input": {"id": 6, "data": {"game_id": "toy", "x": 3, "y": 60}, "reasoning": {"why": "?"}}}
    scorecard = {"timestamp": "", "data": {"won": 0, "cards": {}}}
    lines = [entry(0), entry(1, 1), entry(2, 10, frames=3), entry(0, 0), entry(cell=4, **click), scorecard]
    episodes, report = read(tmp_path / "toy.random.80.guid.recording.jsonl", lines)
    assert episodes == [
        Episode([state(0), state(1), state(10)], [1, 2]),
        Episode([state(0), state(4)], [(6, 3, 60)]),
    ]
    path = str(tmp_path / "toy.random.80.guid.recording.jsonl")
    assert (report.files, report.lines, report.episodes, report.transitions) == (1, 6, 2, 3)
    assert report.origins == [(path, 1), (path, 4)]
    assert dict(report.skipped) == {"no frame, as in the scorecard at the end": 1}
    assert TransitionGraph.from_episodes(episodes).num_transitions == 3
    assert episodes[0].states[0] is episodes[1].states[0], "equal states are one object"


def test_what_is_observed(tmp_path):
    lines = [entry(0), entry(1, 1, levels_completed=1)]
    (episode,), _ = read(
        tmp_path / "a.recording.jsonl", lines, observe=lambda grid, data: (grid[0], data.get("levels_completed", 0))
    )
    assert episode.states == [("00", 0), ("10", 1)]


DAMAGED = [
    ('{"timestamp": "2026', "no JSON"),
    ("[1, 2]", "no JSON object"),
    ("\\xff\\xfe", "no JSON"),
    ("[" * 100_000, "no JSON"),
    ({"data": 3}, "no object data"),
    ({}, "no object data"),
    (entry(action_input=None), "no action_input"),
    (entry(action_input={"id": "1"}), "action_input without a number as id"),
    (entry(action_input={"id": True}), "action_input without a number as id"),
    (entry(action_input={"id": 6, "data": {"x": 1}}), "action with coordinates that are no numbers"),
    (entry(frame=None), "frame that is no list of grids"),
    (entry(frame=[]), "frame without a grid"),
    (entry(frame=[[]]), "grid that has not 1 to 64 rows"),
    (entry(frame=[[[0]] * 65]), "grid that has not 1 to 64 rows"),
    (entry(frame=[[[0], [0, 1]]]), "grid with rows of unequal length, or not 1 to 64 wide"),
    (entry(frame=[[[]]]), "grid with rows of unequal length, or not 1 to 64 wide"),
    (entry(frame=[[[16]]]), "grid with something else than colours 0 to 15"),
    (entry(frame=[[[-1]]]), "grid with something else than colours 0 to 15"),
    (entry(frame=[[[1.5]]]), "grid with something else than colours 0 to 15"),
]


@pytest.mark.parametrize(("line", "reason"), DAMAGED, ids=[str(index) for index in range(len(DAMAGED))])
def test_a_damaged_line_parts_the_episode(tmp_path, line, reason):
    path = tmp_path / "a.recording.jsonl"
    episodes, report = read(path, [entry(0), entry(1, 1), line, entry(2, 2), entry(3, 3)])
    assert episodes == [Episode([state(0), state(1)], [1]), Episode([state(2), state(3)], [3])]
    assert report.origins == [(str(path), 1), (str(path), 4)]
    assert dict(report.skipped) == {reason: 1, "action whose state before is not known": 1}
    assert (report.problems[0].line, report.problems[0].reason) == (3, reason)
    assert f"{path}:3: {reason}" in str(report)


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 400)
    long = entry(1, 1, extra="x" * 2000)
    episodes, report = read(tmp_path / "a.recording.jsonl", [entry(0), entry(1, 1), long, entry(2, 2), entry(3, 3)])
    assert len(episodes) == 2
    assert report.skipped["line longer than 400 bytes"] == 1


def test_a_recorder_that_keeps_no_actions(tmp_path):
    episodes, report = read(tmp_path / "a.recording.jsonl", [entry(0, cell) for cell in range(3)])
    assert episodes == []
    assert dict(report.skipped) == {"file without an action but RESET: its recorder kept none": 1}


def test_files_and_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    lines = [entry(0), entry(1, 1)]
    write(tmp_path / "deep" / "b.recording.jsonl.gz", lines)
    write(tmp_path / "a.recording.jsonl", lines)
    write(tmp_path / "notes.jsonl", ["no recording"])
    episodes, report = load_recordings(tmp_path, progress=False)
    assert len(episodes) == report.files == 2 and not report.skipped
    assert load_recordings([tmp_path, tmp_path / "a.recording.jsonl"], progress=False)[1].files == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no file \*.recording.jsonl"):
        load_recordings([tmp_path, tmp_path / "empty"], progress=False)
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        load_episodes(tmp_path / "none")


def test_an_episode_does_not_reach_into_the_next_file(tmp_path):
    write(tmp_path / "a.recording.jsonl", [entry(0), entry(1, 1)])
    write(tmp_path / "b.recording.jsonl", [entry(2, 2), entry(3, 3)])
    episodes, _ = load_recordings(tmp_path, progress=False)
    assert [each.actions for each in episodes] == [[1], [3]]


def test_plain_episodes(tmp_path):
    lines = [
        {"states": ["a", 1, [1, [2]]], "actions": [1, {"y": 2, "x": [1]}], "other": 1},
        "",
        {"states": ["a"], "actions": []},
        {"states": ["a"]},
        {"states": "ab", "actions": [1]},
        {"states": ["a", "b"], "actions": [1, 2]},
        "{",
    ]
    path = write(tmp_path / "a.jsonl", lines)
    episodes, report = load_episodes(path, progress=False)
    assert episodes == [(["a", 1, (1, (2,))], [1, (("x", (1,)), ("y", 2))]), (["a"], [])]
    assert dict(report.skipped) == {
        "no lists of states and actions": 2,
        "not one state more than actions": 1,
        "no JSON": 1,
    }
    assert [each.line for each in report.problems] == [4, 5, 6, 7]
    assert report.origins == [(str(path), 1), (str(path), 3)]
    assert "2 states, 2 actions" in str(report)


def test_nested_too_deep(tmp_path):
    deep = "[" * 900 + "]" * 900
    path = write(tmp_path / "a.jsonl", ['{"states": [' + deep + '], "actions": []}'])
    episodes, report = load_episodes(path, progress=False)
    assert len(episodes) + report.skipped.total() == 1


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_gzip(tmp_path, damage):
    lines = [{"states": [str(index), index], "actions": [hash(index) % 7]} for index in range(5000)]
    path = write(tmp_path / "a.jsonl.gz", lines)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    episodes, report = load_episodes(path, progress=False)
    assert [list(each) for each in episodes[:100]] == [[each["states"], each["actions"]] for each in lines[:100]]
    assert report.skipped["damaged gzip data, the rest of the file was not read"] == 1


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b'{"data": {"frame": ', b"\n", b"[[[1]]]", b"}}"])))
)
def test_no_bytes_stop_a_reader(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("fuzz") / "a.recording.jsonl"
    path.write_bytes(b"".join(pieces))
    load_recordings(path, progress=False)
    load_episodes(path, progress=False)

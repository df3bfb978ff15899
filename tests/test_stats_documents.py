"""Files of documents, and `dagpack stats` with its comparison of layouts."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dagpack_hf.cli import main
from dagpack_hf.sample import sample_sessions
from dagpack_hf.stats import layout_costs, lognormal_lengths, mean_costs, read_documents, sequence_costs

SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3, 4, 5, 6, 7]]


def run(capfd, *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    return status, *capfd.readouterr()


def write(path, *lines) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return str(path)


# Files


def test_lengths_are_read(tmp_path):
    path = write(tmp_path / "lengths.jsonl", 3, "", '{"length": 5, "name": "x"}', 0)
    documents = read_documents(path)
    assert documents.lengths.tolist() == [3, 5, 0] and documents.sequences is None and documents.forest is None


def test_token_ids_are_read_and_merged(tmp_path):
    lines = [
        json.dumps(SEQUENCES[0]),
        *(json.dumps({"input_ids": each, "length": 99}) for each in SEQUENCES[1:]),
        "[]",
    ]
    documents = read_documents(write(tmp_path / "ids.jsonl", *lines))
    assert documents.lengths.tolist() == [4, 3, 1, 7, 0]
    assert documents.forest.num_tokens == 9  # 1 to 7, 5 after 2, and 9


def test_an_empty_file_has_no_documents(tmp_path):
    assert read_documents(write(tmp_path / "empty.jsonl")).lengths.tolist() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("three", "line 2: is no JSON"),
        ("true", "line 2: is no document"),
        ('{"text": "abc"}', "line 2: is no document"),
        ("1.5", "line 2: is no document"),
        ("-1", r"line 2: a length of -1 is outside 0 \.\. 2147483647"),
        ("[1, 2]", "line 2: a file has either lengths or token ids"),
        ("[1.5]", "line 2: token ids must be whole numbers"),
        ("[true]", "line 2: token ids must be whole numbers"),
        ("[-7]", r"line 2: token id -7 at position 0 is outside 0 \.\. 2147483647"),
        ("[" + "9" * 30 + "]", "line 2: "),
        ("[" * 100_000, "line 2: is no JSON"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    path = write(tmp_path / "documents.jsonl", 3, line)
    with pytest.raises(ValueError, match=message) as error:
        read_documents(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


# The command


def test_the_command_gives_the_known_figures():
    command = [sys.executable, "-m", "dagpack_hf.stats", "--documents", "lognormal", "--median", "120"]
    done = subprocess.run([*command, "--window", "2048", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    mean = {each["layout"]: each["mean"] for each in figures["layouts"]}
    assert 0.90 <= mean["padded"]["waste"] <= 0.92
    assert 0 < mean["concatenated"]["waste"] < 0.012
    assert 0.79 <= mean["concatenated"]["cross_document_share"] <= 0.81
    assert figures["documents"] | {"tokens": 0} == {
        "distribution": "lognormal", "count": 1000, "median": 120.0, "sigma": 1.0, "draws": 20, "tokens": 0
    }  # fmt: skip
    assert "wasted: positions without a token of a document" in done.stderr


def test_draws_have_the_seeds_from_0_on(capfd):
    argv = ["--documents", "lognormal", "--count", "50", "--median", "20", "--sigma", "0.5", "--draws", "3"]
    status, out, _ = run(capfd, "stats", *argv, "--window", "128", "64", "64", "--separator-tokens", "0", "--json")
    draws = [lognormal_lengths(50, median=20, sigma=0.5, seed=seed) for seed in range(3)]
    expected = mean_costs(
        [[cost for window in (64, 128) for cost in layout_costs(each, window, separator_tokens=0)] for each in draws]
    )
    assert status == 0 and json.loads(out)["layouts"] == [cost.to_dict() for cost in expected]
    assert json.loads(out)["documents"]["tokens"] == pytest.approx(np.mean([each.sum() for each in draws]))


def test_the_default_window_of_draws_is_2048(capfd):
    status, out, _ = run(capfd, "stats", "--documents", "lognormal", "--count", "5", "--draws", "1")
    assert status == 0 and out.startswith("5 log-normal documents, median 120, sigma 1; ") and "window 2,048" in out


def test_a_file_of_token_ids_shows_what_is_shared(capfd, tmp_path):
    path = write(tmp_path / "ids.jsonl", *map(json.dumps, [*SEQUENCES, []]))
    status, out, err = run(capfd, "stats", "--documents", path, "--max-length", "8", "--pad-to", "longest", "--json")
    figures = json.loads(out)
    assert status == 0 and "5 documents, 15 tokens, 9 of them distinct; 1 empty ones are left out" in err
    assert figures["layouts"] == [cost.to_dict() for cost in sequence_costs(SEQUENCES, 8, pad_to="longest")]
    assert figures["documents"] == {"file": path, "count": 5, "tokens": 15, "unique_tokens": 9, "empty": 1}
    assert figures["layouts"][0]["width"] == 7


def test_a_file_of_lengths_has_windows_of_its_own(capfd, tmp_path):
    status, out, _ = run(capfd, "stats", "--documents", write(tmp_path / "lengths.jsonl", 100, 200))
    assert status == 0 and "what they share is not known from lengths" in out and "repeated  " not in out
    assert [line for line in out.splitlines() if line.startswith("window")] == [
        "window 256",
        "window 512",
        "window 896",
    ]


def test_sessions_are_compared_too(capfd):
    short = sorted(map(str, sample_sessions().glob("*.jsonl")))[9:12:2]
    status, out, err = run(capfd, "stats", *short, "--json", "--max-length", "4096", "2048")
    figures = json.loads(out)
    assert status == 0 and "layouts, every distinct path one document" in err
    by_window = {(each["max_length"], each["layout"]): each for each in figures["layouts"]}
    assert len(by_window) == 8
    for report in figures["packing"]:
        dag = by_window[report["max_length"], "dag"]
        assert (dag["rows"], dag["tokens"], dag["repeated_tokens"]) == tuple(
            report[name] for name in ("windows", "executed_tokens", "replay_tokens")
        )
        padded = by_window[report["max_length"], "padded"]
        assert padded["tokens"] + padded["cut_tokens"] == figures["tokens"]["per_leaf"]
    whole = by_window[4096, "padded"]
    assert whole["cut_tokens"] == 0 and whole["repeated_tokens"] == whole["tokens"] - figures["tokens"]["tree"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sample", "--documents", "lognormal"], "--documents takes the place of sessions"),
        (["--documents", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--documents", __file__], "line 1: is no JSON"),
        (["--documents", __file__, "--median", "3"], "--median: only for documents that are drawn"),
        (["--documents", "lognormal", "--median", "-3"], "median must be a number of tokens above 0"),
        (["--documents", "lognormal", "--separator-tokens", "-1"], "is not a whole number of at least 0"),
        (["sample", "--sigma", "2"], "--sigma: only for documents that are drawn"),
    ],
)
def test_options_that_do_not_go_together_are_named(capfd, argv, message):
    status, out, err = run(capfd, "stats", *argv)
    assert status in (1, 2) and message in err and out == ""

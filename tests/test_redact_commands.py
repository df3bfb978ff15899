"""Secrets on their way through the commands: export, packed rows, card, log, the Hub, training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from dagpack_hf import (
    TokenForest,
    load_sessions,
    pack_dataset,
    pack_forest,
    push_rows_to_hub,
    push_saved_rows,
    save_rows,
    tokenize_conversations,
    unpack,
)
from dagpack_hf.cli import main
from dagpack_hf.packing import iter_trees
from dagpack_hf.redact import Redactor, redact_conversations, scan_conversations
from dagpack_hf.redact.rows import row_paths, scan_rows
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from dagpack_hf.shards import saved_report
from tests.pi_sessions import SessionBuilder, call, image, text, thinking, tool
from tests.planted_secrets import OWNER, planted

ROOT = Path(__file__).parents[1]
DENIED = "Project " + "Heron"


def secret_parts() -> list[str]:
    """What must not be left anywhere: of each secret, or of one with line breaks, a part that is long enough."""
    parts = [next(line for line in each.secret.split("\n")[1:2] or [each.secret]) for each in planted()]
    return [*(part[-40:] if len(part) > 60 else part for part in parts), DENIED]


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Path:
    """A session with each of the forty in one of four places."""
    builder = SessionBuilder(cwd=f"/home/{OWNER}/shop")
    builder.system(f"You work for {OWNER} in /home/{OWNER}/shop.", toolsAdded=[tool("bash", "Runs.")])
    for index in range(0, 40, 4):
        said, argument, result, caption = (each.text for each in planted()[index : index + 4])
        builder.user([text(said), text(f"{DENIED}: the picture shows {caption}"), image()])
        builder.assistant(thinking(f"So {caption}"), "I look.", call(f"c{index}", "bash", command=argument))
        builder.result(f"c{index}", result, name="bash")
        builder.assistant(f"Done, {OWNER}.")
    return builder.write(tmp_path_factory.mktemp("sessions") / "s.jsonl")


@pytest.fixture
def deny(tmp_path) -> str:
    path = tmp_path / "deny.txt"
    path.write_text("# projects\nProject\\s\\w+\n")
    return str(path)


def run(capfd, *argv: str) -> tuple[int, str, str]:
    status = main([str(each) for each in argv])
    sys.stdout.flush()
    return status, *capfd.readouterr()


def left(*texts: str) -> list[str]:
    """Secrets that are in texts."""
    return [part for part in secret_parts() if any(part in text for text in texts)]


def strings(value) -> list[str]:
    """All strings of a value, keys too, and those of JSON text in it."""
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    if not isinstance(value, str):
        return []
    try:
        inner = json.loads(value)
    except ValueError:
        return [value]
    return [value, *strings(inner)] if isinstance(inner, dict | list) else [value]


def test_the_parts_are_in_the_session(session):
    found = strings([json.loads(line) for line in session.read_text("utf-8").splitlines()])
    assert len(secret_parts()) == 41 and len(left(*found)) == 41


# Export


@pytest.mark.parametrize(
    ("form", "unit"),
    [("openai", "turns"), ("messages", "turns"), ("sharegpt", "turns"), ("messages", "conversations")],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_export(capfd, tmp_path, session, deny, form, unit, suffix):
    argv = ["export", session, "--format", form, "--unit", unit, "--deny", deny]
    plain, clean = tmp_path / f"plain.{suffix}", tmp_path / f"clean.{suffix}"
    status, out, err = run(capfd, *argv, "--out", plain)
    rows = read_rows(plain)
    assert status == 0 and not left(out, err) and "--redact replaces them" in err
    # a part of the shape of a word may be replaced by what stands beside it, but all are counted
    seen = 41 if form != "openai" else len(left(*strings(rows)))
    assert len(left(*strings(rows))) == seen
    kinds = {line.split(" x ")[1].split()[0]: int(line.split()[0]) for line in err.splitlines() if " x " in line}
    assert sum(kinds.values()) >= seen and kinds["DENIED"] == 1 and kinds["EMAIL"] == 2 and kinds["PRIVATE_KEY"] == 3

    status, out, err = run(capfd, *argv, "--redact", "--out", clean)
    redacted = read_rows(clean)
    assert status == 0 and not left(out, err, *strings(redacted)) and "replaced by placeholders" in err
    assert "still there" not in err and len(redacted) == len(rows)
    assert [sorted(row) for row in redacted] == [sorted(row) for row in rows]
    assert any("<DENIED_1>: the picture shows" in each for each in strings(redacted))
    assert any("/home/<USER_1>/shop" in each for each in strings(redacted))


def read_rows(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_export_to_stdout_warns_on_stderr_only_where_something_is_found(capfd, session):
    status, _, err = run(capfd, "export", session)
    assert status == 0 and "secrets and personal data in" in err
    status, _, err = run(capfd, "export", sorted(sample_sessions().glob("*.jsonl"))[9])
    assert (status, err) == (0, "")


def test_a_bad_pattern_is_a_usage_error(capfd, tmp_path, session):
    bad = tmp_path / "deny.txt"
    bad.write_text("ok\n(\n")
    status, _, err = run(capfd, "export", session, "--deny", bad)
    assert status == 2 and "deny.txt:2: is no regular expression" in err


# The viewer


def test_the_page(capfd, tmp_path, session, deny):
    """Decoded: the data of the page are JSON in which `<` is escaped."""
    argv = ["show", session, "--full-text", "--deny", deny, "--html"]
    status, out, err = run(capfd, *argv, tmp_path / "plain.html")
    assert status == 0 and not left(out, err) and "--redact replaces them" in err
    assert len(left(*page_texts(tmp_path / "plain.html"))) >= 38  # shown are marks for control characters
    assert int(err.split(" secrets and personal data")[0].splitlines()[-1]) >= 41
    status, out, err = run(capfd, *argv, tmp_path / "clean.html", "--redact")
    texts = page_texts(tmp_path / "clean.html")
    assert status == 0 and not left(out, err, *texts) and "replaced by placeholders" in err
    assert "still there" not in err and OWNER not in "".join(texts)
    assert any("<DENIED_1>: the picture shows" in each for each in texts)


def page_texts(path: Path) -> list[str]:
    page = path.read_text("utf-8")
    data = page.split('type="application/json"', 1)[1].split(">", 1)[1].split("</script>", 1)[0]
    return [*strings(json.loads(data)), page.replace(data, "")]


def test_the_terminal_and_json(capfd, session, deny):
    for form in ([], ["--json"]):
        status, out, err = run(capfd, "show", session, "--deny", deny, "--redact", *form)
        assert status == 0 and not left(out, err)


# Packed rows


def pack(capfd, session, out, *argv) -> tuple[int, str, str]:
    return run(
        capfd, "pack", session, "--tokenizer", "sample", "--max-length", "16384", "--out", out, "--no-cache", *argv
    )


def decoded(folder: Path) -> list[str]:
    tokenizer = sample_tokenizer()
    return [
        tokenizer.decode(path)
        for row in load_dataset(str(folder), split="train").with_format("numpy")
        for path in row_paths(row["input_ids"], row["subtree_end"])
    ]


def other_files(folder: Path) -> list[str]:
    return [path.read_text("utf-8") for path in folder.rglob("*") if path.suffix in (".md", ".json")]


def test_packed_rows_card_and_log(capfd, tmp_path, session, deny):
    status, out, err = pack(capfd, session, tmp_path / "plain", "--deny", deny)
    assert status == 0 and not left(out, err, *other_files(tmp_path / "plain")) and "--redact replaces them" in out
    assert len(left(*decoded(tmp_path / "plain"))) == 41
    plain = saved_report(tmp_path / "plain")["redaction"]
    assert not plain["redacted"] and sum(plain["distinct"].values()) >= 41
    assert "left in them" in (tmp_path / "plain" / "README.md").read_text()

    status, out, err = pack(capfd, session, tmp_path / "clean", "--deny", deny, "--redact")
    texts = decoded(tmp_path / "clean")
    assert status == 0 and not left(out, err, *texts, *other_files(tmp_path / "clean"))
    assert any("<DENIED_1>" in each and "/home/<USER_1>/shop" in each for each in texts)
    clean = saved_report(tmp_path / "clean")["redaction"]
    assert clean == {**plain, "redacted": True} and "examples" not in clean
    assert "2 `EMAIL`" in (tmp_path / "clean" / "README.md").read_text()
    shards = sorted((tmp_path / "clean").rglob("*.parquet"))
    assert scan_rows(shards, sample_tokenizer(), deny=deny).found == 0
    shards = sorted((tmp_path / "plain").rglob("*.parquet"))
    assert scan_rows(shards, sample_tokenizer(), deny=deny, names=[OWNER]).found >= 40


def test_redaction_keeps_what_is_shared(tmp_path):
    for path in sample_sessions().glob("*.jsonl"):
        data = path.read_bytes().replace(b"/home/user", f"/home/{OWNER}".encode())
        (tmp_path / path.name).write_bytes(data.replace(b"README.md", planted()[34].secret.encode()))
    rows = load_sessions(tmp_path)
    redacted, report = redact_conversations(rows)
    assert report.safe and report.distinct == {"EMAIL": 1, "USER": 1} and report.places["USER"] > 100
    forests = [
        TokenForest.from_trees(
            iter_trees(tokenize_conversations(each, sample_tokenizer(), load_from_cache_file=False))
        )
        for each in (rows, redacted)
    ]
    assert len(forests[0].leaves) == len(forests[1].leaves)
    before, after = (pack_forest(forest, 8192)[1].reuse_ratio for forest in forests)
    assert before > 10 and abs(after / before - 1) < 0.01


def test_the_sample_holds_no_secret():
    report = scan_conversations(load_sessions(sample_sessions()))
    assert report.found == 0 and "no secrets or personal data found" in str(report)


def test_paths_of_a_row_are_those_that_unpacking_gives():
    draw = np.random.default_rng(3)
    sequences = [draw.integers(0, 3, draw.integers(1, 9)).tolist() for _ in range(40)]
    rows, _ = pack_forest(TokenForest.from_sequences(sequences), 24)
    paths = {tuple(path) for row in rows for path in row_paths(row["input_ids"], row["subtree_end"])}
    assert paths == {tuple(path) for path in unpack(rows)}
    roots = row_paths(np.array([1, 2, 3]), np.array([1, 3, 3]))
    assert [path.tolist() for path in roots] == [[1], [2, 3]]


# The Hub


@pytest.fixture
def commits(monkeypatch) -> list:
    """Commits that a Hub without network gets."""
    from huggingface_hub import HfApi

    asked: list = []
    answers = {
        "create_repo": SimpleNamespace(repo_id="me/rows"),
        "dataset_info": SimpleNamespace(private=True),
        "list_repo_files": [],
        "create_commit": SimpleNamespace(commit_url="https://hub/commit/1"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(
            HfApi, name, lambda self, *args, name=name, answer=answer, **options: asked.append(name) or answer
        )
    return asked


def test_what_is_pushed_is_redacted(capfd, tmp_path, session, deny, commits):
    status, out, err = pack(capfd, session, tmp_path / "rows", "--deny", deny, "--push-to-hub", "me/rows")
    assert status == 0 and commits[-1] == "create_commit" and "replaced by placeholders" in out
    assert not left(out, err, *decoded(tmp_path / "rows"), *other_files(tmp_path / "rows"))
    commits.clear()
    push_saved_rows(tmp_path / "rows", "me/rows")  # with the tokenizer that the report names
    assert commits[-1] == "create_commit"


def test_nothing_is_pushed_if_a_second_scan_finds_something(capfd, tmp_path, session, commits, monkeypatch):
    session = shutil.copy(session, tmp_path / "copy.jsonl")  # what a redaction without effect puts into the cache
    with monkeypatch.context() as broken:
        broken.setattr(Redactor, "redact", lambda self, value: value)
        status, out, err = pack(capfd, session, tmp_path / "rows", "--push-to-hub", "me/rows")
    assert status == 1 and "nothing is pushed: a scan of what was redacted still finds" in err and not left(out, err)
    assert not commits and not (tmp_path / "rows").exists()


def test_rows_are_read_once_more_before_they_are_pushed(tmp_path, session, commits):
    conversations = load_sessions(session)
    trees = tokenize_conversations(conversations, sample_tokenizer())
    rows, report = pack_dataset(trees, 16384, progress=False)
    _, redaction = redact_conversations(conversations)
    with pytest.raises(ValueError, match=r"do not say that their texts were redacted.*allow_unredacted=True"):
        push_rows_to_hub(rows, "me/rows", report, decoder=sample_tokenizer(), progress=False)
    lie = {"redaction": redaction.to_dict()}
    with pytest.raises(ValueError, match=r"still finds .* x GITHUB_PAT \(row 0\)") as error:
        push_rows_to_hub(rows, "me/rows", report, details=lie, decoder=sample_tokenizer(), progress=False)
    assert not left(str(error.value)) and not commits
    half = {"redaction": {**redaction.to_dict(), "remaining": {"EMAIL": 1}}}
    with pytest.raises(ValueError, match="do not say"):
        push_rows_to_hub(rows, "me/rows", report, details=half, decoder=sample_tokenizer(), progress=False)
    save_rows(rows, tmp_path / "rows", report, tokenizer=str(tmp_path / "gone"), details=lie, progress=False)
    with pytest.raises(ValueError, match=r"cannot be loaded.*decoder=tokenizer"):
        push_saved_rows(tmp_path / "rows", "me/rows")
    push_saved_rows(tmp_path / "rows", "me/rows", allow_unredacted=True)
    assert commits[-1] == "create_commit"


# Training


def test_training_data_are_redacted_on_request_and_for_a_model_that_is_pushed(tmp_path, session, deny):
    from dagpack_hf.recipe import SessionArguments, _training_data, make_parser

    def data(*argv: str):
        given = ["--sessions", str(session), "--deny", deny, "--output_dir", str(tmp_path), "--use_cpu", "true"]
        session_args, training_args, _ = make_parser().parse_args_and_config([*given, "--bf16", "false", *argv])
        return _training_data(session_args, training_args)

    rows, _, report = data()
    assert len(left(*strings(rows[0]))) == 41 and report.found >= 41 and not report.redacted
    for argv in (["--redact"], ["--push_to_hub", "true"]):
        rows, _, report = data(*argv)
        assert report.safe and not left(*strings(list(rows)))
    assert SessionArguments().redact is False


def test_a_model_is_not_pushed_that_is_trained_on_rows_that_are_not_redacted(capfd, tmp_path, session):
    from dagpack_hf.recipe import SessionArguments, _training_data

    pack(capfd, session, tmp_path / "rows")
    with pytest.raises(ValueError, match="are not redacted, and a model may repeat"):
        _training_data(SessionArguments(rows=str(tmp_path / "rows")), SimpleNamespace(push_to_hub=True))
    pack(capfd, session, tmp_path / "rows", "--redact", "--overwrite")
    rows, *_ = _training_data(SessionArguments(rows=str(tmp_path / "rows")), SimpleNamespace(push_to_hub=True))
    assert len(rows)


@pytest.mark.parametrize(("given", "off"), [(None, True), ("0", False)])
def test_training_sends_no_telemetry_unless_it_is_asked_to(given, off):
    code = (
        "import dagpack_hf.cli.train as train\n"
        "from unittest import mock\n"
        "import sys, types\n"
        "recipe = types.ModuleType('dagpack_hf.recipe'); recipe.run = lambda *a, **b: None\n"
        "sys.modules['dagpack_hf.recipe'] = recipe\n"
        "train.main(['--output_dir', 'x'])\n"
        "from huggingface_hub import constants\n"
        "print(constants.HF_HUB_DISABLE_TELEMETRY)"
    )
    names = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"HF_HUB_DISABLE_TELEMETRY": given} if given else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == str(off), done.stderr

"""The command line: what it prints where, its exit status, and what it leaves on disk."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset

from dagpack_hf import __version__
from dagpack_hf.cli import main
from dagpack_hf.cli.arguments import quiet_libraries
from dagpack_hf.cli.demo import demonstrate
from dagpack_hf.pi import export_turns
from dagpack_hf.sample import sample_sessions
from dagpack_hf.shards import saved_report
from tests.pi_sessions import SessionBuilder, image

PI = Path(__file__).parents[1] / ".." / "shared" / "pi"
CORPUS = PI / "corpus"
SHORT = sorted(map(str, sample_sessions().glob("*.jsonl")))[9:12:2]


def run(capfd, *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    sys.stdout.flush()
    return status, *capfd.readouterr()


def python(*argv: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, **options)


# Help and errors


@pytest.mark.parametrize("command", [[], ["demo"], ["stats"], ["show"], ["export"], ["pack"], ["train"]])
def test_help_has_examples_and_needs_no_heavy_import(command):
    code = (
        "import sys; from dagpack_hf.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy'} & set(sys.modules);"
        "print('loaded', sorted(heavy)); sys.exit(status)"
    )
    done = python("-c", code, *command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: dagpack" in done.stdout and "examples:" in done.stdout and done.stdout.endswith("loaded []\n")


def test_the_commands_are_listed_and_the_version_shown(capfd):
    status, out, _ = run(capfd, "--help")
    assert status == 0 and all(f"    {name} " in out for name in ("demo", "stats", "show", "export", "pack", "train"))
    assert run(capfd, "--version")[:2] == (0, f"dagpack {__version__}\n")


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ([], 2, "required: COMMAND"),
        (["bogus"], 2, "invalid choice: 'bogus'"),
        (["stats", "--max-length", "0"], 2, "'0' is not a positive whole number"),
        (["stats", "nowhere.jsonl"], 1, "dagpack stats: no such session file or folder: nowhere.jsonl"),
        (["stats", "sample", "--tokenizer", "./nowhere"], 2, "--tokenizer ./nowhere: cannot be loaded"),
        (["export", "sample", "--format", "xml"], 2, "invalid choice: 'xml'"),
        (["export", "sample", "--unit", "conversations"], 2, "Use --format messages (or sharegpt)"),
        (["export", "sample", "--format", "sharegpt", "--images", "keep"], 2, "Use --format messages to keep images"),
        (["export", "sample", "--tools", "nowhere.json"], 1, "dagpack export: nowhere.json: No such file"),
        (["export", "sample", "--tools", __file__], 2, "is not a JSON list of function schemas"),
        (["export", "sample", "--out", "nowhere/requests.jsonl"], 1, "No such file or directory"),
        (["export", "sample", "--out", "nowhere/requests.parquet"], 1, "No such file or directory"),
        (["pack", "sample"], 2, "--tokenizer, --max-length, --out"),
        (["train", "--output_dir", "x", "--bf16", "false"], 1, "--model_name_or_path NAME_OR_FOLDER"),
    ],
)
def test_errors_are_one_line_with_a_remedy(capfd, tmp_path, monkeypatch, argv, status, said):
    monkeypatch.chdir(tmp_path)
    got, out, err = run(capfd, *argv)
    assert (got, out) == (status, "") and said in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_pi_own_folder_is_the_default(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("PI_CODING_AGENT_SESSION_DIR", str(tmp_path / "none"))
    status, _, err = run(capfd, "stats")
    assert status == 1 and f"pi's session folder {tmp_path / 'none'} does not exist" in err
    monkeypatch.setenv("PI_CODING_AGENT_SESSION_DIR", str(sample_sessions()))
    status, out, _ = run(capfd, "export")
    assert status == 0 and out.count("\n") == 139


def test_console_and_module():
    done = python("-m", "dagpack_hf", "export", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(export_turns(SHORT))
    assert python("-m", "dagpack_hf", "export", "nowhere").returncode == 1


def test_a_closed_pipe_is_no_error():
    code = "import sys; from dagpack_hf.cli import main; sys.exit(main(['export', 'sample']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


# export


def test_export_to_a_file_is_complete_or_not_there(capfd, tmp_path):
    out = tmp_path / "requests.jsonl"
    out.write_text("old")
    status, _, err = run(capfd, "export", *SHORT, "--out", str(out))
    assert status == 0 and "2 session files" in err
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert rows == list(export_turns(SHORT))
    assert list(rows[0]) == ["session", "entry", "model", "stop_reason", "trained", "messages", "tools"]

    bad = tmp_path / "bad.jsonl"
    bad.write_text("no session\n")
    status, _, err = run(capfd, "export", *SHORT, str(bad), "--strict", "--out", str(out))
    assert status == 1 and f"{bad}" in err
    assert len(out.read_bytes().splitlines()) == len(rows), "what was there stays"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "requests.jsonl"]

    status, _, err = run(capfd, "export", str(out), "--out", str(out))
    assert status == 2 and "is one of the session files" in err and out.exists()


def test_export_counts_what_it_skips(capfd, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no session\n")
    status, out, err = run(capfd, "export", str(bad), SHORT[0])
    assert status == 0 and out.count("\n") == 3 and "files skipped: 1 x" in err and str(bad) in err
    status, out, err = run(capfd, "export", str(bad))
    assert (status, out) == (1, "") and "files skipped: 1 x" in err


def test_export_writes_utf8_whatever_the_terminal(tmp_path):
    builder = SessionBuilder()
    builder.user("é 漢 \u2028 HALF end")
    builder.assistant("ok")
    path = Path(builder.write(tmp_path / "s.jsonl"))
    path.write_bytes(path.read_bytes().replace(b"HALF", b"\\ud800"))
    done = subprocess.run(
        [sys.executable, "-m", "dagpack_hf", "export", str(path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1
    assert "é 漢 \u2028" in done.stdout.decode()
    assert json.loads(done.stdout)["messages"][0]["content"].startswith("é 漢 \u2028 ")


EXPORTS = [
    ("openai", "turns", 6),
    ("messages", "turns", 6),
    ("messages", "conversations", 2),
    ("sharegpt", "turns", 6),
    ("sharegpt", "conversations", 2),
]


@pytest.mark.parametrize(("form", "unit", "count"), EXPORTS)
def test_export_of_each_form(capfd, tmp_path, form, unit, count):
    argv = ["export", *SHORT, "--format", form, "--unit", unit]
    rows = list(export_turns(SHORT, format=form, unit=unit))
    assert len(rows) == count
    capfd.readouterr()
    status, out, err = run(capfd, *argv)
    assert (status, err) == (0, "") and [json.loads(line) for line in out.splitlines()] == rows
    status, out, err = run(capfd, *argv, "--out", str(tmp_path / "rows.PARQUET"))
    assert (status, out) == (0, "") and err.count("2 session files") == 1 and "%" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.PARQUET"]
    loaded = Dataset.from_parquet(str(tmp_path / "rows.PARQUET"), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == rows


def test_parquet_is_complete_or_not_there(capfd, tmp_path):
    out = tmp_path / "turns.parquet"
    argv = ["export", "--format", "messages", "--out", str(out), *SHORT]
    assert run(capfd, *argv)[0] == 0
    before = out.read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no session\n")
    for unit in ("turns", "conversations"):
        status, _, err = run(capfd, *argv, str(bad), "--strict", "--unit", unit)
        assert status == 1 and f"{bad}" in err
        assert out.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
        status, _, err = run(capfd, *argv, str(bad), "--unit", unit)
        assert status == 0 and err.count("files skipped: 1 x") == 1
        status, _, err = run(capfd, "export", str(bad), "--format", "messages", "--unit", unit)
        assert status == 1 and err.count("files skipped: 1 x") == 1
        run(capfd, *argv)


def test_export_keeps_images_where_it_is_asked_to(capfd, tmp_path):
    builder = SessionBuilder()
    builder.user([{"type": "text", "text": "See"}, image()])
    builder.assistant("A dot.")
    path = str(builder.write(tmp_path / "s.jsonl"))
    shown = {
        (*form, *images): "data:image/png;base64,aGk=" in run(capfd, "export", path, *form, *images)[1]
        for form in ([], ["--format", "messages"], ["--format", "messages", "--unit", "conversations"])
        for images in ([], ["--images", "keep"], ["--images", "placeholder"])
    }
    kept = [options for options, with_image in shown.items() if with_image]
    assert len(shown) == 9 and kept == [(), *(options for options in shown if options[-1:] == ("keep",))]


@pytest.mark.skipif(not CORPUS.exists(), reason="needs the pi corpus in ../shared/pi/corpus")
def test_every_recorded_request_of_the_corpus(capfd, tmp_path):
    """One session was begun by a version of pi that records no prompt; its user supplies it."""
    truth = json.loads((CORPUS / "ground_truth" / "0.74.2" / "b_tree.json").read_text("utf-8"))
    request = next(request for request in truth["requests"] if request["kind"] == "turn")
    (tmp_path / "prompt.txt").write_bytes(truth["messages"][request["messages"][0]]["content"].encode())
    (tmp_path / "tools.json").write_text(json.dumps(truth["tools"][request["tools"]]))
    files = sorted(map(str, (CORPUS / "sessions" / "1.6.0").rglob("*.jsonl")))
    supplied = ["--system-prompt", str(tmp_path / "prompt.txt"), "--tools", str(tmp_path / "tools.json")]
    out = tmp_path / "out.jsonl"
    assert run(capfd, "export", "--format", "openai", *files, *supplied, "--out", str(out))[0] == 0
    done = python(str(PI / "compare.py"), str(CORPUS), str(out), "--version", "1.6.0")
    assert done.stdout.splitlines()[-1] == "155 of 155 turns equal" and done.returncode == 0


# stats and pack


def test_stats_of_the_sample(capfd):
    status, out, err = run(capfd, "stats", "sample")
    assert status == 0 and err == ""
    for text in ("13 session files, 363 entries, 139 turns, 125 targets", "125 turns rendered", "an approximation"):
        assert text in out
    rows = [line.split() for line in out.splitlines() if line.lstrip()[:1].isdigit()]
    assert [row[0] for row in rows if len(row) == 7] == ["3,584", "7,168", "14,208"]


def test_stats_as_json(capfd):
    status, out, err = run(capfd, "stats", *SHORT, "--json", "--max-length", "4096", "1024")
    figures = json.loads(out)
    assert status == 0 and "turns rendered" in err
    assert figures["load"]["targets"] == figures["render"]["turns"] == 6 and figures["tokenizer"] == "sample"
    short, long = figures["packing"]
    assert (short["max_length"], long["max_length"]) == (1024, 4096)
    assert short["overflow"]["lost_targets"] > 0 and not long["overflow"]
    assert long["logical_tokens"] > 3 * long["unique_tokens"]


def test_stats_counts_tokens_by_turn_by_leaf_and_as_a_tree(capfd):
    status, out, _ = run(capfd, "stats", *SHORT, "--json")
    figures = json.loads(out)
    assert status == 0
    tokens, packing = figures["tokens"], figures["packing"][-1]
    assert (tokens["per_turn"], tokens["tree"]) == (packing["logical_tokens"], packing["unique_tokens"])
    assert tokens["tree"] <= tokens["per_leaf"] < tokens["per_turn"]
    status, out, _ = run(capfd, "stats", *SHORT)
    assert f"tokens {tokens['per_turn']:,} turn by turn, {tokens['per_leaf']:,} leaf by leaf" in out


def test_how_turns_are_rendered_can_be_chosen(capfd, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ mood }} {{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    argv = ["stats", *SHORT, "--json", "--template", str(template), "--chat-template-kwargs", '{"mood": "glad"}']
    status, out, err = run(capfd, *argv, "--date", "2001-02-03", "--control-tokens", "neutralize")
    figures = json.loads(out)
    assert status == 0 and figures["render"]["turns"] == 6, err
    (verdict,) = figures["render"]["templates"]
    assert verdict == "exact, except: no tools in contexts (the template does not write it)"
    assert figures["render"]["context_losses"] == {"tools": 6}
    longer = json.loads(run(capfd, *argv[:-1], json.dumps({"mood": "glad " * 50}))[1])
    assert longer["tokens"]["tree"] > figures["tokens"]["tree"]
    masked = json.loads(run(capfd, *argv, "--no-loss-on-thinking")[1])
    dropped = json.loads(run(capfd, *argv, "--thinking", "drop")[1])
    loss = [run_["packing"][-1]["loss_tokens"] for run_ in (figures, masked, dropped)]
    assert loss[0] >= loss[1] >= loss[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat-template-kwargs", "{mood"], "is no JSON"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--date", "yesterday"], "date must be an ISO 8601 date"),
        (["--template", "nowhere.jinja"], "neither 'original' nor 'training' nor a readable file"),
    ],
)
def test_options_of_rendering_that_are_wrong_are_named(capfd, options, message):
    status, _, err = run(capfd, "stats", *SHORT, *options)
    assert status in (1, 2) and message in err


def test_stats_without_a_turn(capfd, tmp_path):
    builder = SessionBuilder()
    builder.user("Hello?")
    builder.write(tmp_path / "s.jsonl")
    status, out, _ = run(capfd, "stats", str(tmp_path))
    assert status == 0 and "1 session files, 1 entries, 0 turns" in out and "nothing to pack" in out
    status, out, _ = run(capfd, "stats", str(tmp_path), "--json")
    assert status == 0 and json.loads(out)["packing"] == []
    argv = ["pack", str(tmp_path), "--tokenizer", "sample", "--max-length", "64", "--out", str(tmp_path / "rows")]
    status, _, err = run(capfd, *argv)
    assert status == 1 and "nothing to pack" in err and not (tmp_path / "rows").exists()


def test_pack_saves_rows_and_report(capfd, tmp_path):
    out = tmp_path / "rows"
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", str(out)]
    status, printed, _ = run(capfd, *argv, "--loss-weighting", "paths", "--seed", "3")
    assert status == 0 and "reuse ratio" in printed and f"rows in {out}" in printed
    rows = load_dataset(str(out), split="train")
    report = saved_report(out)
    figures = report["packing"]["train"]
    assert figures["windows"] == len(rows) and (report["seed"], report["tokenizer"]) == (3, "sample")
    assert sum(map(np.sum, rows["loss_weight"])) == figures["loss_weight"]
    assert figures["loss_weighting"] == "paths" and report["load"]["targets"] == 6
    assert f"| windows | {len(rows):,} |" in (out / "README.md").read_text()

    status, _, err = run(capfd, *argv)
    assert status == 2 and "--overwrite" in err
    argv[1 : 1 + len(SHORT)] = ["sample"]
    status, printed, err = run(capfd, *argv, "--max-shard-size", "10KB", "--overwrite", "--json")
    assert status == 0 and json.loads(printed)["packing"]["loss_weighting"] == "once" and "turns rendered" in err
    assert saved_report(out)["packing"]["train"]["loss_weighting"] == "once"
    assert len(list(out.glob("data-*/*.parquet"))) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows"], "nothing else is left behind"
    assert len(list(out.iterdir())) == 3


def test_packed_rows_are_trained_on(capfd, tmp_path):
    from dagpack_hf import DagSFTConfig, DagSFTTrainer
    from dagpack_hf.recipe import tiny_llama
    from dagpack_hf.sample import sample_tokenizer

    out = tmp_path / "rows"
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", str(out)]
    assert run(capfd, *argv)[0] == 0
    args = DagSFTConfig(
        output_dir=str(tmp_path / "out"), max_length=4096, max_steps=1, use_cpu=True, bf16=False, report_to="none"
    )
    tokenizer = sample_tokenizer()
    rows = load_dataset(str(out), split="train")
    trainer = DagSFTTrainer(tiny_llama(tokenizer), args=args, train_dataset=rows, processing_class=tokenizer)
    assert trainer._total_weight == saved_report(out)["packing"]["train"]["loss_weight"]
    assert np.isfinite(trainer.train().training_loss)


def test_the_saved_report_does_not_say_where_files_lie(capfd, tmp_path):
    from dagpack_hf.sample import sample_tokenizer

    sample_tokenizer().save_pretrained(tmp_path / "private" / "model")
    sessions = tmp_path / "private" / "s.jsonl"
    sessions.write_bytes(Path(SHORT[0]).read_bytes() + b"{broken\n")
    argv = ["pack", str(sessions), "--tokenizer", str(tmp_path / "private" / "model"), "--max-length", "4096"]
    status, printed, err = run(capfd, *argv, "--out", str(tmp_path / "rows"), "--json")
    assert status == 0 and "private" in json.loads(printed)["tokenizer"] and "s.jsonl" in err
    report = saved_report(tmp_path / "rows")
    assert report["tokenizer"] == "model" and sum(report["load"]["skipped_lines"].values()) == 1
    assert not any(b"private" in file.read_bytes() for file in (tmp_path / "rows").rglob("*") if file.is_file())


@pytest.mark.parametrize("public", [False, True])
def test_pack_pushes_only_when_it_is_asked_to(capfd, tmp_path, monkeypatch, public):
    from types import SimpleNamespace

    from dagpack_hf import hub

    pushed = []

    def push(path, repo_id, *, private, decoder, deny):
        pushed.append((path, repo_id, private, len(load_dataset(str(path), split="train"))))
        return SimpleNamespace(commit_url="https://hub/me/rows/commit/1")

    monkeypatch.setattr(hub, "push_saved_rows", push)
    out = str(tmp_path / "rows")
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", out, "--overwrite"]
    status, printed, _ = run(capfd, *argv)
    assert status == 0 and not pushed and "pushed" not in printed
    status, printed, _ = run(capfd, *argv, "--push-to-hub", "me/rows", *(["--public"] if public else []))
    assert status == 0 and "pushed them to https://hub/me/rows/commit/1" in printed
    assert pushed == [(out, "me/rows", not public, saved_report(out)["packing"]["train"]["windows"])]

    def fail(*args, **options):
        raise OSError("no route to the Hub.")

    monkeypatch.setattr(hub, "push_saved_rows", fail)
    status, _, err = run(capfd, *argv, "--push-to-hub", "me/rows")
    assert status == 1 and f"saved in {out}, but not pushed: no route to the Hub." in err
    assert f"push_saved_rows({out!r}, 'me/rows', private=True)" in err and saved_report(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-shard-size", "huge"], "'huge' is no size"),
        (["--max-shard-size", "0MB"], "'0MB' is no size"),
        (["--public"], "--public says how to push"),
        (["--push-to-hub", "a/b/c"], "--push-to-hub a/b/c"),
    ],
)
def test_options_of_saving_that_are_wrong_are_named(capfd, tmp_path, options, message):
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", str(tmp_path / "rows")]
    status, _, err = run(capfd, *argv, *options)
    assert status == 2 and message in err and not list(tmp_path.iterdir())


def test_pack_never_replaces_what_it_did_not_make(capfd, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", str(tmp_path / "mine")]
    status, _, err = run(capfd, *argv, "--overwrite")
    assert status == 2 and "holds no packed rows" in err and (tmp_path / "mine" / "thesis.tex").exists()


def test_a_failed_pack_leaves_nothing(capfd, tmp_path):
    argv = ["pack", *SHORT, "--tokenizer", "sample", "--max-length", "500", "--out", str(tmp_path / "rows")]
    status, _, err = run(capfd, *argv)
    assert status == 1 and "longer than max_length=500" in err and not list(tmp_path.iterdir())
    status, _, err = run(capfd, *argv, "--overflow", "truncate")
    assert status == 1 and "no target fits" in err and not list(tmp_path.iterdir())


# demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("demo")
    text = io.StringIO()
    with quiet_libraries(progress=False):
        figures = demonstrate(
            str(out), lambda line: text.write(f"{line}\n"), sessions=SHORT, epochs=2, rounds=2, parts=2
        )
    torch.set_num_threads(threads)
    return out, figures, text.getvalue()


def test_demo_figures(demo):
    out, figures, text = demo
    assert json.loads((out / "figures.json").read_text()) == json.loads(json.dumps(figures))
    training = figures["training"]
    assert training["loss_after"] < training["loss_epochs"][0] < training["loss_before"] * 1.01
    exact = figures["exactness"]
    assert 0 < exact["largest"] == max(exact["loss"], exact["gradient_norm"], exact["gradient_max"]) < 1e-5
    assert exact["parameters"] == 21 and exact["loss_unpacked"] == pytest.approx(training["loss_after"], rel=1e-4)
    speed = figures["speed"]
    assert speed["logical_tokens"] == figures["packing"][0]["logical_tokens"]
    assert speed["trl_windows_run"] == speed["trl_windows"] and len(speed["trl_seconds"]) == 2
    assert speed["ratio"] == pytest.approx(speed["trl_epoch"] / speed["dagpack_epoch"])
    for number in range(1, 7):
        assert f"\n{number}. " in f"\n{text}"
    assert "reuse ratio" in text and "lower bound" in text and "times faster" in text and "Equal to 1e-05" in text


def test_demo_files(demo):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, figures, text = demo
    for name in ("model", "session_tree.svg", "figures.json"):
        assert str(out / name) in text
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.num_parameters() == figures["training"]["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, ids.shape[1] + 2)
    svg = (out / "session_tree.svg").read_text("utf-8")
    assert svg.count('<g class="entry">') == 10 and svg.count('class="count"') > 5


def test_demo_notices_a_wrong_gradient(tmp_path, monkeypatch):
    """A sabotage that the comparison must catch: one window of the packed side counts double."""
    from dagpack_hf import load_sessions, tokenize_conversations
    from dagpack_hf.cli import exactness
    from dagpack_hf.recipe import tiny_llama
    from dagpack_hf.sample import sample_tokenizer

    def doubled(*args, **options):
        rows, report = pack_dataset(*args, **options)
        weights = [list(np.array(row) * (2 if index == 0 else 1)) for index, row in enumerate(rows["loss_weight"])]
        return rows.remove_columns("loss_weight").add_column("loss_weight", weights), report

    pack_dataset = exactness.pack_dataset
    monkeypatch.setattr(exactness, "pack_dataset", doubled)
    tokenizer = sample_tokenizer()
    with quiet_libraries(progress=False):
        conversations = load_sessions(SHORT)
        trees = tokenize_conversations(conversations, tokenizer)
        sequences = exactness.unpacked_sequences(conversations, tokenizer)
        length = -(-max(map(len, sequences.input_ids)) // 128) * 128
        model = tiny_llama(tokenizer, seed=0)
        exact = exactness.compare(model, trees, sequences, tokenizer, length, str(tmp_path))
    assert exact.gradient_norm > 1e-2


def test_demo_keeps_away_from_other_folders(capfd, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    status, _, err = run(capfd, "demo", "--out", str(tmp_path))
    assert status == 2 and "is not of an earlier demo" in err

"""`dagpack show` in the terminal, and its command line."""

from __future__ import annotations

import doctest
import io
import json
import os
import random
import subprocess
import sys
from argparse import ArgumentParser

import pytest
from rich.console import Console

from dagpack_hf.cli import show
from dagpack_hf.cli.arguments import UsageError
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from dagpack_hf.view import terminal
from dagpack_hf.view.lanes import tree_rows
from dagpack_hf.view.page import build_page
from dagpack_hf.view.terminal import graph_lines, print_page, windows_text
from tests.pi_sessions import SessionBuilder
from tests.viewer_sessions import hostile_session


@pytest.fixture(scope="module")
def sample():
    return build_page(sample_sessions(), sample_tokenizer(), max_length=4096).page


def printed(page, *, width: int = 120, **options) -> list[str]:
    out = io.StringIO()
    print_page(page, Console(file=out, width=width, color_system=None), **options)
    return out.getvalue().splitlines()


def run(*argv: str) -> int:
    parser = ArgumentParser()
    show.add_parser(parser.add_subparsers())
    options = parser.parse_args(["show", *argv])
    return options.run(options)


def test_every_entry_has_a_line(sample):
    lines = printed(sample, everything=True)
    body = [line for line in lines if line and line.lstrip("│├╰─ ")[:1] in set("●○▶▪▫■◆·")]
    body = [line for line in body if not line.startswith("● trained turn")]
    assert len(body) == len(sample.entries)
    assert sum("●" in line[:14] for line in body) == 125
    assert all(len(line) <= 120 for line in body)
    assert max(map(len, body)) == 120, "the width is used"
    turn = next(line for line in body if "I'll look at the files first." in line)
    assert turn.split()[1:3] == ["55", "54"] and turn.split()[4] == "assistant"


def test_settings_are_counted_and_lines_limited(sample):
    others = sum(entry.kind == "other" and not entry.label for entry in sample.entries)
    whole = printed(sample)
    assert f"{others} settings and notes are not shown (--all)" in whole
    short = printed(sample, limit=10)
    assert f"{len(sample.entries) - others - 10} more entries are not shown (--limit)" in short
    assert len(short) == 18, "head, ten lines, foot"
    for here, there in zip(short[:11], whole, strict=False):
        assert here.split()[:8] == there.split()[:8], "the first lines, in columns of their own"
    with pytest.raises(ValueError, match="limit=0"):
        printed(sample, limit=0)


def test_figures_are_those_of_the_page(sample):
    foot = " ".join(printed(sample)[-1:])
    for name in ("logical", "unique", "targets", "executed", "replay"):
        assert f"{sample.figures[name]:,}" in foot
    heads = [line for line in printed(sample) if "shared with other files" in line]
    assert len(heads) == 13 and heads[0].startswith(
        "explore, then four tasks  25 turns, 25 trained, 4,600 tokens, 28%"
    )


def test_windows_of_an_entry(sample):
    lines = printed(sample, width=200)
    system = next(line for line in lines if "■" in line)
    assert f"w1-{len(sample.windows)} " in system, "the prompt is in every window"
    for entry in sample.entries:
        if entry.targets:
            trained = {
                sample.blocks[block].window + 1
                for low, high in entry.blocks
                for block in range(low, high)
                if sample.blocks[block].target
            }
            assert any(f"w{windows_text(w - 1 for w in trained)} " in line for line in lines)


def test_lanes_are_the_tree():
    """Every line leads from an entry up to its parent."""
    for seed in range(40):
        draw = random.Random(seed)
        parents = [draw.randrange(-1 if draw.random() < 0.1 else max(n - 6, -1), n) if n else -1 for n in range(30)]
        rows = tree_rows(parents)
        lines = graph_lines(rows, ["*"] * len(rows))
        for at, row in enumerate(rows):
            assert lines[at][2 * row.lane] == "*"
            if row.parent < 0:
                continue
            column = 2 * rows[row.parent].lane
            if rows[row.parent].lane == row.lane:
                assert all(lines[each][column] in "│├" for each in range(row.parent + 1, at))
            else:
                assert lines[at][column] in "├╰" and set(lines[at][column + 1 : 2 * row.lane]) == {"─"}
                assert all(lines[each][column] in "│├" for each in range(row.parent + 1, at))


def test_escape_sequences_do_not_reach_the_terminal(tmp_path):
    page = build_page(hostile_session(tmp_path), sample_tokenizer()).page
    lines = printed(page, width=400)
    text = "\n".join(lines)
    assert not set("\x1b\x07\x00\x9b\u202e\u2066\u200b\u2028") & set(text)
    assert "⟨ESC⟩[31mred" in text and "⟨U+202E⟩evil" in text
    assert "</script><script>" in text


def test_markup_of_the_library_is_text(tmp_path):
    session = SessionBuilder()
    session.user("[bold red]not markup[/] :smile: \\[x]")
    session.assistant("[/]")
    text = "\n".join(printed(build_page(session.write(tmp_path / "s.jsonl"), sample_tokenizer()).page))
    assert "[bold red]not markup[/] :smile: \\[x]" in text and "assistant      [/]" in text


def test_a_terminal_without_unicode(tmp_path):
    session = SessionBuilder()
    session.user("größer 漢字")
    session.assistant("ok")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    page = build_page(session.write(tmp_path / "s.jsonl"), sample_tokenizer()).page
    print_page(page, Console(file=out, width=100, color_system=None))
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert "gr\\xf6\\xdfer" in text and "* " in text


def test_examples():
    result = doctest.testmod(terminal)
    assert result.failed == 0 and result.attempted > 0


# Command line


def test_prints_and_writes(capsys, tmp_path):
    assert run("sample") == 0
    out, err = capsys.readouterr()
    assert "explore, then four tasks" in out and "an approximation" in out
    assert "duplicate turns: 12 x" in err
    page = tmp_path / "page.html"
    assert run("sample", "--html", str(page), "--max-length", "4096") == 0
    out, err = capsys.readouterr()
    assert f"wrote {page} (0.3 MB, 363 entries)" in out and "13 session files" in out
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_json_is_the_data_of_the_page(capsys, sample):
    assert run("sample", "--json", "--max-length", "4096") == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    expected = json.loads(json.dumps(sample.to_json()))
    for page in (found, expected):
        del page["figures"]["tokenizer"], page["figures"]["approximate"]
    assert found == expected


def test_long_texts_are_counted_and_kept_when_asked_for(capsys, tmp_path):
    session = SessionBuilder()
    session.user("x" * 9000 + "the end")
    session.assistant("ok")
    path = str(session.write(tmp_path / "s.jsonl"))
    page = tmp_path / "page.html"
    assert run(path, "--html", str(page)) == 0
    assert "1 long texts are in it in part, 3,007 characters are left out" in capsys.readouterr().out
    assert "the end" not in page.read_text("utf-8")
    assert run(path, "--html", str(page), "--full-text") == 0
    assert "left out" not in capsys.readouterr().out and "the end" in page.read_text("utf-8")


def test_options_without_effect_are_refused(tmp_path):
    path = SessionBuilder().write(tmp_path / "s.jsonl")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="one of the session files"):
        run(str(path), "--html", str(path))
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="--limit"):
        run(str(path), "--html", str(tmp_path / "p.html"), "--limit", "3")
    with pytest.raises(UsageError, match="--full-text"):
        run(str(path), "--full-text")


def test_help_needs_no_heavy_import():
    code = (
        "import sys, argparse; from dagpack_hf.cli import show; p = argparse.ArgumentParser();"
        "show.add_parser(p.add_subparsers());"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules); print(sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert done.stdout == "[]\n", done.stderr

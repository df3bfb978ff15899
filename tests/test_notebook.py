"""The notebooks run from top to bottom, offline, and show what their text says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NOTEBOOK = NOTEBOOKS / "quickstart.ipynb"

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed, so the notebook cannot be run")
nbformat = pytest.importorskip("nbformat")


def execute(notebook, folder: Path) -> dict[str, str]:
    """What each cell printed, by cell id; figures by their media type."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    client.execute(env={**os.environ, "PYTHONPATH": path, **offline})
    return printed(notebook)


def printed(notebook) -> dict[str, str]:
    return {cell.id: "".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    return execute(nbformat.read(NOTEBOOK, as_version=4), tmp_path_factory.mktemp("notebook"))


def _text(output) -> str:
    assert output.output_type != "error", output
    return output.text if output.output_type == "stream" else "\n".join(sorted(output.data))


def number(pattern: str, text: str) -> float:
    return float(re.search(pattern, text)[1].replace(",", ""))


def test_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 8
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_no_warnings_are_shown(outputs):
    assert not [name for name, text in outputs.items() if "Warning" in text or "Traceback" in text]


def test_data(outputs):
    assert "13 session files" in outputs["load"] and "125 targets" in outputs["load"]
    assert "image/svg+xml" in outputs["picture"]
    trained = re.findall(r"^train (\w+)", outputs["conversation"], flags=re.MULTILINE)
    assert trained == ["assistant"] * 4
    targets = outputs["targets"].splitlines()
    assert len(targets) == len(trained) and targets[1].endswith("<|end|>'")
    assert number(r"([\d,]+) tokens as one sequence per turn", outputs["render"]) == 299_108


def test_packing(outputs):
    windows = number(r"windows +([\d,]+)", outputs["pack"])
    assert number(r"lower bound ([\d,]+)", outputs["pack"]) <= windows
    assert number(r"logical tokens +([\d,]+)", outputs["pack"]) == 299_108
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)x fewer", outputs["length"])]
    assert len(ratios) == 4 and ratios == sorted(ratios) and ratios[0] > 7


def test_loss_falls(outputs):
    losses = [float(loss) for loss in re.findall(r"\d+\.\d+", outputs["losses"])]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] > 0
    assert losses[2] < losses[0] - 0.5


def test_packed_training_equals_ordinary_training(outputs):
    computed = [number(r"([\d,]+) tokens computed", outputs[name]) for name in ("ordinary", "packed")]
    assert computed[0] > 5 * computed[1]
    assert number(r"of the loss: (\S+)", outputs["exact"]) < 1e-5
    assert number(r"gradient: (\S+)", outputs["exact"]) < 1e-5


FIGURES = {
    "game": ["chains", "prefix", "state", "window", "small"],
    "arithmetic": ["pairs", "waste", "cross"],
}
"""Cells that show a figure, of the notebooks that are stored with their outputs."""

TRAINED = {"losses", "held-out"}
"""Cells whose figures depend on the machine."""


def stored_and_run(name: str, tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    """What is stored of a notebook, and what it prints."""
    pytest.importorskip("matplotlib", reason="the figures need matplotlib, the extra `plot`")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return printed(notebook), execute(notebook, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def game(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    return stored_and_run("game", tmp_path_factory)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    return stored_and_run("arithmetic", tmp_path_factory)


@pytest.mark.parametrize("name", FIGURES)
def test_stored_outputs_are_what_the_cells_print(name, request):
    stored, now = request.getfixturevalue(name)
    assert {cell: text for cell, text in stored.items() if cell not in TRAINED} == {
        cell: text for cell, text in now.items() if cell not in TRAINED
    }
    assert [cell for cell, text in now.items() if "image/svg+xml" in text] == FIGURES[name]
    assert all(stored[cell] for cell in TRAINED & set(stored))


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_of_a_machine_is_stored(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    for part in ("/home/", "/root", "/tmp/", "/usr/", "site-packages", str(ROOT), "Warning", "it/s]", "Traceback"):
        assert part not in text, part
    assert all("execution" not in cell.metadata for cell in nbformat.reads(text, as_version=4).cells)


def test_the_story_of_the_game(game):
    _, printed = game
    assert "19 steps, 15 transitions by prefix, 10 by state" in printed["state"]
    assert printed["once"].startswith("10 distinct pairs") and "each {1} time" in printed["once"]
    assert "3 windows, 10 targets" in printed["small"]
    assert number(r"(\d+) pairs of state and action have several outcomes", printed["hidden"]) == 21
    assert "in episode 1 by action 7" in printed["hidden"]
    steps, with_counter, by_prefix = (
        number(pattern, printed["fallback"])
        for pattern in (r"with the counter: +(\d+) steps", r"with the counter: +\d+ steps, (\d+)", r"(\d+) by prefix")
    )
    assert (steps, with_counter, by_prefix) == (473, 143, 395)
    losses = [float(loss) for loss in re.findall(r"\d+\.\d+", printed["losses"])]
    assert len(losses) == 4 and losses[0] > losses[1] > losses[3] and losses[3] < 0.2
    assert number(r"(\d+)%", printed["held-out"]) >= 90


def test_the_arithmetic(arithmetic):
    _, printed = arithmetic
    short, long = printed["stated"].splitlines()
    assert 90 <= number(r"padding wastes ([\d.]+)%", short) <= 92
    assert number(r"concatenating ([\d.]+)%", short) < 1.2
    assert 79 <= number(r"([\d.]+)% of its causal pairs", short) <= 81
    assert 27 <= number(r"([\d.]+)% of its causal pairs", long) <= 29
    rows = {line.split("  ")[0]: line.split()[-2:] for line in printed["shared"].splitlines()[2:] if line.strip()}
    repeated = {layout: int(figures[0].replace(",", "")) for layout, figures in rows.items()}
    assert repeated["padded"] == 19 * 600 and repeated["dag"] < 19 * 600 / 4

"""The notebook runs from top to bottom, offline, and shows what its text says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed, so the notebook cannot be run")
nbformat = pytest.importorskip("nbformat")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """What each cell printed, by cell id; figures by their media type."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    client.execute(env={**os.environ, "PYTHONPATH": path, **offline})
    return {cell.id: "".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


def _text(output) -> str:
    assert output.output_type != "error", output
    return output.text if output.output_type == "stream" else "\n".join(output.data)


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

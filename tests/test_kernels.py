"""Compiled loops of other code are not used."""

import os
import subprocess
import sys
from pathlib import Path

import dagpack_hf
from dagpack_hf.kernels import drop_stale as drop_stale_once

drop_stale = drop_stale_once.__wrapped__


def test_compiled_loops_are_dropped_when_any_of_the_code_changes(tmp_path):
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    kept = tmp_path / "kept" / "here"
    drop_stale(kept, tmp_path)
    compiled = [kept / name for name in ("a.loop-1.py311.nbi", "a.loop-1.py311.1.nbc")]
    other = kept / "a.cpython-311.pyc"
    for path in (*compiled, other):
        path.write_bytes(b"x")
    drop_stale(kept, tmp_path)
    assert all(path.is_file() for path in compiled), "nothing has changed"
    (tmp_path / "b.py").write_text("three")
    drop_stale(kept, tmp_path)
    assert not any(path.exists() for path in compiled) and other.is_file()
    compiled[0].write_bytes(b"x")
    drop_stale(kept, tmp_path)
    assert compiled[0].is_file()


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "kept").write_text("no folder")
    drop_stale(tmp_path / "kept", tmp_path)
    assert (tmp_path / "kept").read_text() == "no folder"


def test_loops_are_dropped_wherever_numba_keeps_them(tmp_path):
    """In the folder that `NUMBA_CACHE_DIR` names as well as beside the code."""
    program = "from dagpack_hf.kernels.tally import places_of_ends as loop; print(loop.stats.cache_path)"
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(dagpack_hf.__file__).parents[1]),
    }

    def kept() -> Path:
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        return Path(done.stdout.decode().strip())

    folder = kept()
    assert tmp_path in folder.parents
    stale = folder / "tally.loop-1.py311.nbi"
    stale.write_bytes(b"x")
    kept()
    assert stale.is_file(), "nothing has changed"
    (folder / "kernels.digest").write_text("of other code")
    kept()
    assert not stale.exists()

"""Compiled loops are not older than the code they were made of."""

from dagpack_hf.kernels import drop_stale


def test_compiled_loops_are_dropped_when_any_of_the_code_changes(tmp_path):
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    drop_stale(tmp_path)
    compiled = [tmp_path / "__pycache__" / name for name in ("a.loop-1.py311.nbi", "a.loop-1.py311.1.nbc")]
    other = tmp_path / "__pycache__" / "a.cpython-311.pyc"
    for path in (*compiled, other):
        path.write_bytes(b"x")
    drop_stale(tmp_path)
    assert all(path.is_file() for path in compiled), "nothing has changed"
    (tmp_path / "b.py").write_text("three")
    drop_stale(tmp_path)
    assert not any(path.exists() for path in compiled) and other.is_file()
    compiled[0].write_bytes(b"x")
    drop_stale(tmp_path)
    assert compiled[0].is_file()


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "__pycache__").write_text("no folder")
    drop_stale(tmp_path)
    assert (tmp_path / "__pycache__").read_text() == "no folder"

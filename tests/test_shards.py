"""Packed rows on disk and on the Hub: what is written is what is read, whatever happens in between.

There is no network here: pushing is tested up to the commit that `HfApi` is asked for.
"""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset
from huggingface_hub import CommitOperationAdd, DatasetCard, HfApi

from dagpack_hf import PackReport, pack_dataset, push_rows_to_hub, push_saved_rows, save_rows, shards
from dagpack_hf.card import pointed_folder
from dagpack_hf.columns import ROW_FEATURES
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.shards import saved_report

ROOT = Path(__file__).parents[1]


def sequences(count: int, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 100_000, 20).tolist()
    return Dataset.from_dict(
        {"input_ids": [trunk + rng.integers(0, 100_000, rng.integers(1, 30)).tolist() for _ in range(count)]}
    )


def packed(count: int = 200, **options) -> tuple[Dataset, PackReport]:
    return pack_dataset(sequences(count), 128, progress=False, loss_weighting="paths", **options)


def save(rows, path, report, **options) -> None:
    save_rows(rows, path, report, progress=False, **options)


def data_files(path: Path) -> list[Path]:
    folder = pointed_folder(path / "README.md")
    assert folder is not None
    return sorted((path / folder).glob("*.parquet"))


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# Rows


@pytest.mark.parametrize("source", ["memory", "disk", "shuffled"])
def test_rows_come_back_as_they_were(tmp_path, source):
    rows, report = packed()
    if source == "disk":
        sequences(200).to_parquet(tmp_path / "in.parquet")
        on_disk = load_dataset("parquet", data_files=str(tmp_path / "in.parquet"), split="train")
        rows, report = pack_dataset(on_disk, 128, progress=False)
    if source == "shuffled":
        rows = rows.shuffle(seed=0).with_format("torch")
    save(rows, tmp_path / "rows", report)
    loaded = load_dataset(str(tmp_path / "rows"))
    assert list(loaded) == ["train"] and loaded["train"].features == ROW_FEATURES
    assert loaded["train"][:] == rows.with_format(None)[:]
    assert sum(map(np.sum, loaded["train"]["loss_weight"])) == report.loss_weight

    by_name = load_dataset("parquet", data_files=[str(file) for file in data_files(tmp_path / "rows")])
    assert by_name["train"].features == ROW_FEATURES and by_name["train"][:] == loaded["train"][:]
    plain = pq.read_table(data_files(tmp_path / "rows")[0]).replace_schema_metadata(None)
    inferred = Dataset(plain).features
    assert inferred == ROW_FEATURES, "the types are those of the columns, not of metadata beside them"
    assert next(iter(load_dataset(str(tmp_path / "rows"), streaming=True)["train"])) == loaded["train"][0]


@pytest.mark.parametrize("size", ["15KB", 5_000, 1])
def test_shards_are_no_larger_than_asked(tmp_path, size):
    rows, report = packed()
    save(rows, tmp_path, report, max_shard_size=size)
    paths = data_files(tmp_path)
    counts = [pq.read_metadata(path).num_rows for path in paths]
    assert sum(counts) == len(rows) and [path.name for path in paths] == [
        f"train-{i:05d}.parquet" for i in range(len(paths))
    ]
    if size == 1:
        assert counts == [1] * len(rows), "a row is never cut"
    else:
        limit = 15_000 if size == "15KB" else size
        without_footer = [path.stat().st_size - pq.read_metadata(path).serialized_size - 12 for path in paths]
        assert 1 < len(paths) < len(rows) and max(without_footer) <= limit
        assert np.mean(without_footer[:-1]) > 0.6 * limit, "and not much smaller either"
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:]


def test_rows_are_written_a_row_group_at_a_time(tmp_path, monkeypatch):
    rows, report = packed()
    monkeypatch.setattr(shards, "_ROW_GROUP", 10_000)
    save(rows, tmp_path, report)
    (path,) = data_files(tmp_path)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).num_rows * rows.data.nbytes / len(rows) for i in range(metadata.num_row_groups)]
    assert len(sizes) > 10 and max(sizes) <= 10_000
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:]


def test_rows_of_any_length(tmp_path):
    """Windows of padding and windows without positions."""
    columns = {name: [[], [7] * 5, [], [9]] for name in ROW_COLUMNS}
    rows = Dataset.from_dict(columns, features=ROW_FEATURES.copy())
    save(rows, tmp_path, replace(packed()[1], windows=4))
    loaded = load_dataset(str(tmp_path), split="train")
    assert loaded[:] == rows[:] and loaded.features == ROW_FEATURES


def test_columns_beside_those_of_rows_are_kept(tmp_path):
    rows, report = packed()
    rows = rows.add_column("source", [f"s{i}" for i in range(len(rows))])
    save(rows, tmp_path, report)
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:]


def test_splits(tmp_path):
    rows, reports = pack_dataset(
        DatasetDict({"train": sequences(50), "test.hard": sequences(20, seed=1)}), 128, progress=False
    )
    save(rows, tmp_path, reports, max_shard_size="20KB")
    loaded = load_dataset(str(tmp_path))
    assert {name: split[:] for name, split in loaded.items()} == {name: split[:] for name, split in rows.items()}
    figures = saved_report(tmp_path)["packing"]
    assert {name: PackReport.from_dict(figures[name]) for name in figures} == reports
    card = (tmp_path / "README.md").read_text()
    assert "|  | train | test.hard |" in card
    assert f"| windows | {reports['train'].windows:,} | {reports['test.hard'].windows:,} |" in card


def test_a_split_keeps_its_name(tmp_path):
    dataset = load_dataset("json", data_files={"validation": str(write_json(tmp_path))}, split="validation")
    rows, report = pack_dataset(dataset, 128, progress=False)
    save(rows, tmp_path / "rows", report)
    assert load_dataset(str(tmp_path / "rows"), split="validation")[:] == rows[:]
    part = load_dataset("json", data_files={"validation": str(write_json(tmp_path))}, split="validation[:50%]")
    rows, report = pack_dataset(part, 128, progress=False)
    save(rows, tmp_path / "part", report)
    assert list(load_dataset(str(tmp_path / "part"))) in (["train"], ["validation"])


def write_json(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sequences(10)))
    return path


def test_what_cannot_be_saved_is_refused(tmp_path):
    rows, report = packed()
    other = rows.cast(Features({**ROW_FEATURES, "input_ids": List(Value("int64"))}))
    for wrong, reports, message in (
        (rows.select([]), report, "has no rows"),
        (
            DatasetDict({"train": rows, "test": rows.select([])}),
            {"train": report, "test": report},
            "split test has no",
        ),
        (sequences(3), report, "Make rows with pack_dataset"),
        (rows, replace(report, windows=1), "is of 1 rows, but there are"),
        (rows, {"test": report}, "reports for test, and the splits train"),
        (DatasetDict({"train": rows, "test": rows}), report, "need a report each"),
        (DatasetDict(), {}, "no splits"),
        (DatasetDict({"a-b": rows}), {"a-b": report}, "cannot be the name of a split"),
        (DatasetDict({"a": rows, "b": other}), {"a": report, "b": report}, "other columns or types"),
    ):
        with pytest.raises(ValueError, match=message):
            save(wrong, tmp_path / "rows", reports)
    with pytest.raises(TypeError, match=r"Dataset\.from_generator"):
        save(rows.to_iterable_dataset(), tmp_path / "rows", report)
    for size in ("much", "0MB", 0):
        with pytest.raises(ValueError, match="size"):
            save(rows, tmp_path / "rows", report, max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_a_missing_shard_is_noticed(tmp_path):
    rows, report = packed()
    save(rows, tmp_path, report, max_shard_size="10KB")
    data_files(tmp_path)[1].unlink()
    with pytest.raises(Exception, match="expected"):
        load_dataset(str(tmp_path))
    save(rows, tmp_path, report, max_shard_size="10KB", overwrite=True)
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:], "the same rows once more mend it"


def test_the_docstring_example():
    result = doctest.testmod(shards)
    assert result.failed == 0 and result.attempted > 0


# The card and the report


def test_the_card_states_the_report(tmp_path):
    rows, report = packed(bucket_size=100)
    report = replace(report, overflow={"lost_targets": 12}, source_targets=400)
    save(rows, tmp_path, report, tokenizer="my|model", details={"seed": 3})
    text = (tmp_path / "README.md").read_text()
    for line in (
        f"| windows | {report.windows:,} |",
        f"| lower bound | {report.lower_bound:,} |",
        f"| gap to the lower bound | {report.gap:.1%} |",
        f"| logical tokens | {report.logical_tokens:,} |",
        f"| unique tokens | {report.unique_tokens:,} |",
        f"| executed tokens | {report.executed_tokens:,} |",
        f"| reuse ratio (logical to unique) | {report.reuse_ratio:.2f} |",
        "| labelled tokens lost to the window length | 3.00% |",
        "| overflow: lost targets | 12 |",
        "| loss weighting | `paths` |",
        "| window length (`max_length`) | 128 |",
        "| packed together | 100 examples |",
        "| strategy | `best` |",
        "| tokenizer | `mymodel` |",
        'DagSFTConfig(max_length=128, loss_weighting="paths"',
    ):
        assert line in text, line
    card = DatasetCard(text).data.to_dict()
    assert "dagpack-hf" in card["tags"] and card["dataset_info"]["splits"][0]["num_examples"] == len(rows)
    files = card["configs"][0]["data_files"]
    assert files == [{"split": "train", "path": f"{pointed_folder(tmp_path / 'README.md')}/train-*"}]
    saved = saved_report(tmp_path)
    assert (saved["tokenizer"], saved["seed"]) == ("my|model", 3)
    assert PackReport.from_dict(saved["packing"]["train"]) == report
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")


def test_only_a_card_of_ours_is_a_pointer(tmp_path):
    card = tmp_path / "README.md"
    ours = {"tags": ["dagpack-hf"], "configs": [{"data_files": [{"path": f"data-{'a' * 16}/train-*"}]}]}
    assert pointed_folder(card) is None
    for text, found in (
        (yaml.safe_dump(ours), f"data-{'a' * 16}"),
        (yaml.safe_dump({**ours, "tags": ["other"]}), None),
        (yaml.safe_dump({**ours, "configs": [{"data_files": [{"path": "../secrets/*"}]}]}), None),
        (yaml.safe_dump({**ours, "configs": [{"data_files": "data/*"}]}), None),
        (yaml.safe_dump({**ours, "configs": []}), None),
        ("a: [", None),
        ("- a", None),
    ):
        card.write_text(f"---\n{text}\n---\n# Rows\n")
        assert pointed_folder(card) == found, text
    card.write_text("no front matter")
    assert pointed_folder(card) is None
    card.write_bytes(b"\xff\xfe---\n")
    assert pointed_folder(card) is None
    with pytest.raises(FileNotFoundError, match="holds no packed rows"):
        saved_report(tmp_path)


# Over what is there


def test_overwriting_shows_the_new_rows(tmp_path):
    """Also where the cache of `datasets` holds the old ones, and there are as many of the new."""
    rows, report = packed()
    save(rows, tmp_path, report)
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(rows, tmp_path, report)
    (tmp_path / "notes.txt").write_text("mine")
    changed = rows.map(lambda row: {"input_ids": [token + 1 for token in row["input_ids"]]}, features=ROW_FEATURES)
    save(changed, tmp_path, report, overwrite=True)
    loaded = load_dataset(str(tmp_path), split="train")
    assert loaded[:] == changed[:] and loaded[0] != rows[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".lock", "README.md", "notes.txt", str(pointed_folder(tmp_path / "README.md"))]
    )


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows, report = packed()
    for name in ("one", "two"):
        save(rows, tmp_path / name, report, max_shard_size="10KB")
    first = files(tmp_path / "one")
    assert first == files(tmp_path / "two") and len(first) > 4
    save(rows, tmp_path / "one", report, max_shard_size="10KB", overwrite=True)
    assert files(tmp_path / "one") == first
    save(rows, tmp_path / "one", replace(report, effort=1.0), max_shard_size="10KB", overwrite=True)
    assert {*first} & {*files(tmp_path / "one")} == {".lock", "README.md"}, "the report is part of the content"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["folder", "card", "file", "link"])
def test_what_is_not_ours_is_never_touched(tmp_path, what, overwrite):
    rows, report = packed()
    path = tmp_path / "mine"
    if what in ("folder", "card"):
        path.mkdir()
        (path / ("README.md" if what == "card" else "thesis.tex")).write_text("---\ntags: [mine]\n---\nyears of work")
    elif what == "file":
        path.write_text("years of work")
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match="holds no packed rows"):
        save(rows, path, report, overwrite=overwrite)
    assert files(tmp_path) == before


def test_an_empty_folder_and_a_link_to_one_are_taken(tmp_path):
    rows, report = packed()
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    save(rows, tmp_path / "link", report)
    assert (tmp_path / "link").is_symlink() and load_dataset(str(tmp_path / "disk"), split="train")[:] == rows[:]


def test_an_error_leaves_the_old_rows(tmp_path, monkeypatch):
    rows, report = packed()
    save(rows, tmp_path, report)
    before = files(tmp_path)
    calls = []

    def full(*args, **options):
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        save(rows, tmp_path, report, overwrite=True)
    assert calls and files(tmp_path) == before


def test_two_runs_do_not_write_into_one_folder(tmp_path, monkeypatch):
    """The second one is refused, and leaves alone what the first has written so far."""
    rows, report = packed()
    write_split = shards._write_split

    def meanwhile(*args):
        result = write_split(*args)
        before = files(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(shards, "_write_split", write_split)
            with pytest.raises(BlockingIOError, match="another process is writing"):
                save(rows, tmp_path, report, overwrite=True)
        assert files(tmp_path) == before and ".partial/train-00000.parquet" in before
        return result

    monkeypatch.setattr(shards, "_write_split", meanwhile)
    save(rows, tmp_path, report)
    assert load_dataset(str(tmp_path), split="train")[:] == rows[:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs that are killed are forks")
@pytest.mark.parametrize(("mode", "least"), [("over", (10, 4)), ("fresh", (10, 2)), ("random", (3, 0))])
def test_killed_at_any_moment_it_leaves_the_old_rows_or_the_new(tmp_path, mode, least):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed_while_saving", str(tmp_path / "rows"), mode],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    old, new = map(int, done.stdout.split())
    assert old >= least[0] and new >= least[1]


# The Hub


@pytest.fixture
def hub(monkeypatch):
    """A Hub that records what it is asked for. `there` are the files of the repository, `private` what it is."""
    asked = SimpleNamespace(calls=[], there=[], private=True, files={})

    def record(name, answer):
        def method(self, *args, **options):
            asked.calls.append((name, args, {**options, "token": self.token}))
            return answer(*args, **options)

        monkeypatch.setattr(HfApi, name, method)

    def commit(repo_id, operations, **options):
        adds = [each for each in operations if isinstance(each, CommitOperationAdd)]
        asked.files = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in adds}
        asked.deleted = [each.path_in_repo for each in operations if each not in adds]
        return SimpleNamespace(commit_url="https://hub/commit/1")

    record("create_repo", lambda repo_id, **options: SimpleNamespace(repo_id=f"me/{repo_id.split('/')[-1]}"))
    record("dataset_info", lambda *args, **options: SimpleNamespace(private=asked.private))
    record("create_branch", lambda *args, **options: None)
    record("list_repo_files", lambda *args, **options: asked.there)
    record("create_commit", commit)
    return asked


def test_pushing_is_one_commit_of_the_saved_folder(tmp_path, hub):
    rows, report = packed()
    old = f"data-{'0' * 16}"
    hub.there = [".gitattributes", "README.md", f"{old}/train-00000.parquet", "data-mine/x.parquet", "notes.md"]
    options = {"max_shard_size": "10KB", "tokenizer": "m", "details": {"seed": 1}, "progress": False}
    done = push_rows_to_hub(
        rows, "rows", report, token="hf_x", commit_message="Pack", allow_unredacted=True, **options
    )
    assert done.commit_url == "https://hub/commit/1"
    assert [name for name, _, _ in hub.calls] == ["create_repo", "dataset_info", "list_repo_files", "create_commit"]
    assert hub.calls[0][1:] == (
        ("rows",),
        {"repo_type": "dataset", "private": True, "exist_ok": True, "token": "hf_x"},
    )
    _, (repo_id, _), asked = hub.calls[-1]
    assert repo_id == "me/rows" and asked["repo_type"] == "dataset" and asked["commit_message"] == "Pack"
    assert hub.deleted == [f"{old}/train-00000.parquet"]

    save_rows(rows, tmp_path / "rows", report, **options)
    local = files(tmp_path / "rows")
    del local[".lock"]
    assert hub.files == local and len(local) > 4
    first, hub.there = hub.files, [*hub.files]
    push_saved_rows(tmp_path / "rows", "rows", allow_unredacted=True)
    assert hub.files == first and hub.deleted == []


def test_pushing_keeps_private_what_is_private(tmp_path, hub):
    rows, report = packed()
    save(rows, tmp_path, report)
    hub.private = False
    with pytest.raises(ValueError, match="me/rows is public"):
        push_saved_rows(tmp_path, "rows", allow_unredacted=True)
    assert not hub.files and hub.calls[-1][0] == "dataset_info"
    push_saved_rows(tmp_path, "rows", private=False, allow_unredacted=True)
    assert hub.files and hub.calls[-3][2]["private"] is False


def test_pushing_to_a_branch(tmp_path, hub):
    rows, report = packed()
    save(rows, tmp_path, report)
    push_saved_rows(tmp_path, "rows", revision="v2", allow_unredacted=True)
    branch = next(options for name, _, options in hub.calls if name == "create_branch")
    assert (branch["branch"], branch["repo_type"], branch["exist_ok"]) == ("v2", "dataset", True)
    assert [options["revision"] for _, _, options in hub.calls[-2:]] == ["v2", "v2"]
    hub.calls.clear()
    push_saved_rows(tmp_path, "rows", revision="refs/pr/1", allow_unredacted=True)
    assert "create_branch" not in [name for name, _, _ in hub.calls]


def test_only_saved_rows_are_pushed(tmp_path, hub):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileNotFoundError, match="holds no packed rows"):
        push_saved_rows(tmp_path, "rows")
    assert not hub.calls

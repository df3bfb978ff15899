"""Packed rows as a folder: Parquet shards with the report beside them, and a card that points to them.

The rows of a data set lie in a subfolder that is named after their content. The card, `README.md`, names this
subfolder in its front matter, which is where `datasets.load_dataset` looks for the files of a folder. So the card is a
pointer, and to replace it is the one step that makes the new rows the data set:

1. shards and report are written into `.partial`, which nothing reads, and forced to disk;
2. `.partial` is renamed to `data-<digest>`, beside the rows that are there so far;
3. the card is replaced, in one step of the file system;
4. the old subfolder is deleted.

A process that is killed leaves the old data set before step 3 and the new one after it, and what else it leaves is
deleted by the next run. Where there is no data set yet the card comes before the rows, since without a card
`load_dataset` takes any files it finds. A lock keeps two runs from writing into one folder.

Cost: 12 to 25 M positions a second and 2 bytes for each (20 in memory); in memory one row group, about 16 MB.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from datasets import Dataset, DatasetDict, SplitInfo
from datasets.utils.py_utils import convert_file_size_to_int
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from dagpack_hf.card import DATA_FOLDER, Saved, dataset_card, pointed_folder
from dagpack_hf.columns import is_row_dataset
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.pack_report import PackReport

CARD, REPORT = "README.md", "report.json"
MAX_SHARD_SIZE = "500MB"

_LOCK, _PARTIAL, _NEW_CARD = ".lock", ".partial", ".README.md"

_ROW_GROUP = 16 * 1024 * 1024
"""Bytes of the rows that are in memory at a time."""

_ENCODING = {
    "compression": "zstd",
    "use_dictionary": ["loss_weight.list.element"],
    "column_encoding": {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ("position_ids", "subtree_end")},
    "write_statistics": False,
}
"""Half the size of the defaults, and 2.5 times their speed: positions count up, and a weight is one of few."""


def save_rows(
    rows: Dataset | DatasetDict,
    path: str | os.PathLike[str],
    report: PackReport | Mapping[str, PackReport],
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    tokenizer: str | None = None,
    details: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> None:
    """Save packed rows as Parquet shards, in a folder that `load_dataset(path)` reads.

    A process that is killed while it writes leaves the data set that was there, or the new one, and running it again
    finishes. A program that is just reading the old shards may have to be started again.

    Args:
        rows: what `pack_dataset` returned. A single data set is saved as its split, by default `"train"`.
        path: the folder. Its `README.md` is written anew; other files that do not belong to the data set stay.
        report: the report, or one for each split.
        max_shard_size: largest size of a file, its footer not counted, in bytes or as `"500MB"`. A row is never cut.
        overwrite: whether rows that are there may be replaced.
        tokenizer: name of the tokenizer, for the card.
        details: what else `report.json` shall hold, for JSON. What `redaction` says, the `to_dict()` of a
            `RedactionReport`, is in the card too; without it rows are not pushed.
        progress: show a progress bar.

    Raises:
        FileExistsError: the folder holds rows and `overwrite` is not set, or it holds something else.
        BlockingIOError: another process is writing into the folder.
        TypeError: not a data set.
        ValueError: the data set is empty or has other columns than rows, reports and splits do not fit together, or a
            size or the name of a split is wrong.

    Example:
        >>> import tempfile
        >>> from datasets import load_dataset
        >>> from dagpack_hf import pack_dataset
        >>> dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
        >>> rows, report = pack_dataset(dataset, max_length=8, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_rows(rows, folder, report, progress=False)
        ...     load_dataset(folder, split="train", keep_in_memory=True)[0]["input_ids"]
        [1, 2, 3, 2, 4]
    """
    splits = _splits(rows)
    reports = _reports(report, splits)
    max_bytes = _size(max_shard_size)
    facts = {**({"tokenizer": tokenizer} if tokenizer else {}), **(details or {})}
    facts["packing"] = {name: each.to_dict() for name, each in reports.items()}
    report_text = json.dumps(facts, indent=2)
    check_destination(path, overwrite)
    folder = Path(path).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with _only_writer(folder):
        check_destination(folder, overwrite)
        _remove_leftovers(folder)
        try:
            saved = _write(splits, folder / _PARTIAL, report_text, max_bytes, progress)
            card = dataset_card(saved, reports, tokenizer, facts.get("redaction"))
            _publish(folder / _PARTIAL, folder / saved.folder, card)
        finally:
            _remove_leftovers(folder)


def check_destination(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse to write rows where they would destroy something.

    Raises:
        FileExistsError: the path holds rows and `overwrite` is not set, or it holds something else.
    """
    if not os.path.lexists(path):
        return
    folder = Path(path)
    names = set(os.listdir(folder)) if folder.is_dir() else {folder.name}
    current = pointed_folder(folder / CARD)
    data = {name for name in names if DATA_FOLDER.fullmatch(name)}
    ours = current is not None if CARD in names else names <= {_LOCK, _PARTIAL, _NEW_CARD, *data}
    if not folder.is_dir() or not ours:
        raise FileExistsError(f"{path} is there already and holds no packed rows; choose another folder")
    if not overwrite and (current in data if CARD in names else data):
        raise FileExistsError(
            f"{path} holds packed rows already; choose another folder, or replace them (overwrite=True, --overwrite)"
        )


def saved_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `report.json` of a saved data set holds: `packing` with the report of each split, and what was added.

    Raises:
        FileNotFoundError: there are no saved rows.
    """
    folder = pointed_folder(Path(path) / CARD)
    if folder is None:
        raise FileNotFoundError(f"{path} holds no packed rows; save some with save_rows(rows, path, report)")
    return cast(dict[str, Any], json.loads((Path(path) / folder / REPORT).read_text("utf-8")))


# What is written


def _splits(rows: Any) -> dict[str, Dataset]:
    """The data sets by the names of their splits, checked."""
    if isinstance(rows, Dataset):
        name = str(rows.split)
        splits = {name if rows.split and _SPLIT_NAME.fullmatch(name) else "train": rows}
    elif isinstance(rows, DatasetDict):
        splits = {str(name): split for name, split in rows.items()}
    else:
        raise TypeError(
            f"Rows are saved from a Dataset or a DatasetDict, got {type(rows).__name__}. Of a stream make a data set "
            "first, with Dataset.from_generator."
        )
    if not splits:
        raise ValueError("The dictionary has no splits, so there is nothing to save.")
    first = next(iter(splits.values()))
    for name, split in splits.items():
        if not _SPLIT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a split: use letters, digits, underscores and dots.")
        if not len(split):
            raise ValueError(f"The split {name} has no rows, and `datasets` loads no empty splits. Leave it out.")
        if not is_row_dataset(split.column_names):
            raise ValueError(
                f"The split {name} has no packed rows: their columns are {', '.join(ROW_COLUMNS)}, these are "
                f"{', '.join(split.column_names) or 'none'}. Make rows with pack_dataset."
            )
        if split.features != first.features:
            raise ValueError(f"The split {name} has other columns or types than the first one; make them equal.")
    return splits


_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")


def _reports(report: PackReport | Mapping[str, PackReport], splits: Mapping[str, Dataset]) -> dict[str, PackReport]:
    """The report of each split."""
    if isinstance(report, PackReport):
        if len(splits) > 1:
            raise ValueError(f"The splits {', '.join(splits)} need a report each, in a dictionary; this is one.")
        reports = dict.fromkeys(splits, report)
    else:
        reports = dict(report)
    if reports.keys() != splits.keys():
        raise ValueError(f"There are reports for {', '.join(reports)}, and the splits {', '.join(splits)}.")
    for name, rows in splits.items():
        if reports[name].windows != len(rows):
            raise ValueError(
                f"The report of {name} is of {reports[name].windows:,} rows, but there are {len(rows):,}. Save rows "
                "with the report that came with them."
            )
    return {name: reports[name] for name in splits}


def _size(max_shard_size: int | str) -> int:
    """A size in bytes.

    Raises:
        ValueError: it is no size.
    """
    size = convert_file_size_to_int(max_shard_size)
    if size < 1:
        raise ValueError(f"max_shard_size must be at least one byte, got {max_shard_size!r}.")
    return size


def _write(splits: Mapping[str, Dataset], partial: Path, report: str, max_bytes: int, progress: bool) -> Saved:
    """Write shards and report into a new folder."""
    partial.mkdir()
    total = sum(map(len, splits.values()))
    with tqdm(total=total, desc="Saving rows", unit=" rows", disable=not progress) as bar:
        infos = [_write_split(name, rows, partial, max_bytes, bar) for name, rows in splits.items()]
    size = sum(file.stat().st_size for file in partial.iterdir())
    with _synced(partial / REPORT) as file:
        file.write(report.encode())
    _sync_folder(partial)
    return Saved(f"data-{_digest(partial)}", next(iter(splits.values())).features, infos, size)


def _write_split(name: str, rows: Dataset, folder: Path, max_bytes: int, bar: tqdm) -> SplitInfo:
    """Write the shards of a split; a new one begins where a row group, uncompressed, exceeds the room in the last."""
    shards, num_bytes, room = 0, 0, -1
    with ExitStack() as shard:
        for table in _row_groups(rows, min(max_bytes // 8, _ROW_GROUP)):
            if table.nbytes > room:
                shard.close()
                file = shard.enter_context(_synced(folder / f"{name}-{shards:05d}.parquet"))
                writer = shard.enter_context(pq.ParquetWriter(file, rows.features.arrow_schema, **_ENCODING))
                shards += 1
            writer.write_table(table, row_group_size=len(table))
            room = max_bytes - file.tell()
            num_bytes += table.nbytes
            bar.update(len(table))
    return SplitInfo(name, num_bytes, len(rows))


def _row_groups(rows: Dataset, max_bytes: int) -> Iterator[pa.Table]:
    """The rows in tables of about so many bytes, or of one row if that has more."""
    row_bytes = rows.data.nbytes / rows.data.num_rows
    yield from rows.with_format("arrow").iter(batch_size=max(1, int(max_bytes / max(row_bytes, 1))))


def _digest(folder: Path) -> str:
    """Hash of all files in a folder."""
    digest = xxhash.xxh3_64()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1024 * 1024):
                digest.update(block)
    return digest.hexdigest()


# How it appears


def _publish(partial: Path, data: Path, card: str) -> None:
    """Make complete rows the data set of a folder."""
    folder = data.parent
    new_card = folder / _NEW_CARD
    with _synced(new_card) as file:
        file.write(card.encode())

    def move_rows() -> None:
        if data.is_dir():  # the same rows to the byte; but a file of them may have been lost since
            for path in partial.iterdir():
                os.replace(path, data / path.name)
            _sync_folder(data)
        else:
            os.rename(partial, data)
        _sync_folder(folder)

    def move_card() -> None:
        os.replace(new_card, folder / CARD)
        _sync_folder(folder)

    steps = [move_rows, move_card]
    for step in steps if (folder / CARD).exists() else reversed(steps):
        step()


def _remove_leftovers(folder: Path) -> None:
    """Delete what neither is the data set of a folder nor the user's."""
    (folder / _NEW_CARD).unlink(missing_ok=True)
    current = pointed_folder(folder / CARD)
    for name in os.listdir(folder):
        if name == _PARTIAL or (DATA_FOLDER.fullmatch(name) and name != current):
            shutil.rmtree(folder / name)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / _LOCK, timeout=0):
            yield
    except Timeout as error:
        raise BlockingIOError(f"{folder}: another process is writing rows into it; wait until it is done") from error


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on disk when it is closed."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Force the names of a folder to disk; where folders cannot be opened, the file system sees to that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

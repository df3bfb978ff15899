"""Rows on disk: where they are kept, how they are found again, and how they are written.

Like other transforms of `datasets`, packing leaves its result beside the data set's own cache files, in a file named
after a fingerprint of the data, the options and the code. The rows are one Arrow file; the report is a JSON file
beside it, which is there before the rows are. Both are written under another name and renamed when they are complete.
A lock keeps several processes (the ranks of a training run) from packing the same data at the same time, and who has
it may write over what a process that was killed has left.

Cost: one portion of rows in memory while they are written, none afterwards.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features
from datasets.fingerprint import Hasher, get_temporary_cache_files_directory
from datasets.table import InMemoryTable, MemoryMappedTable
from filelock import FileLock

from dagpack_hf.code_digest import TRIE, code_digest
from dagpack_hf.pack_report import PackReport

logger = logging.getLogger(__name__)

WriteRows = Callable[[Callable[[pa.Table], None]], PackReport]
"""Makes rows, gives them portion by portion to the function it gets, and returns the report."""


@dataclass(frozen=True)
class RowFile:
    """The place of a packed data set on disk.

    Args:
        path: the Arrow file.
        lasting: whether it may be found again.
    """

    path: Path
    lasting: bool

    @classmethod
    def beside(cls, dataset: Dataset, fingerprint: str) -> RowFile | None:
        """The file for what is made from a data set; `None` if that is in memory, where the result is then kept too.

        Where caching is switched off, or the folder cannot be written, it is in the temporary folder of `datasets`.
        """
        if not dataset.cache_files:
            return None
        folder = Path(dataset.cache_files[0]["filename"]).parent
        lasting = datasets.is_caching_enabled() and os.access(folder, os.W_OK)
        if not lasting:
            folder = Path(get_temporary_cache_files_directory())
        return cls(folder / f"cache-{fingerprint}.arrow", lasting)

    def read(self) -> tuple[MemoryMappedTable, PackReport] | None:
        """Rows and report of an earlier run, if both are there."""
        try:
            report = PackReport.from_dict(json.loads(self._report.read_text("utf-8")))
            return MemoryMappedTable.from_file(str(self.path)), report
        except FileNotFoundError:
            return None

    def write(self, rows: WriteRows, schema: pa.Schema) -> tuple[MemoryMappedTable, PackReport]:
        """Write rows and report; both appear under their names when they are complete."""
        new_rows, new_report = (path.with_name(f"tmp-{path.name}") for path in (self.path, self._report))
        try:
            with (
                pa.OSFile(str(new_rows), "wb") as file,
                pa.ipc.new_stream(file, schema) as stream,
            ):
                report = rows(stream.write_table)
            new_report.write_text(json.dumps(report.to_dict()), "utf-8")
            os.replace(new_report, self._report)
            os.replace(new_rows, self.path)
        finally:
            for path in (new_rows, new_report):
                path.unlink(missing_ok=True)
        return MemoryMappedTable.from_file(str(self.path)), report

    def lock(self) -> FileLock:
        """A lock that one process at a time can have."""
        return FileLock(f"{self.path}.lock")

    @property
    def _report(self) -> Path:
        return self.path.with_suffix(".json")


def cached_rows(
    dataset: Dataset, options: Any, rows: WriteRows, features: Features, load_from_cache_file: bool | None = None
) -> tuple[Dataset, PackReport]:
    """Rows that were made from a data set with some options, or that are made now.

    Args:
        dataset: the source.
        options: all that the rows depend on besides.
        rows: makes them.
        features: of the rows.
        load_from_cache_file: whether to take those of an earlier run; by default as `datasets` does.
    """
    fingerprint = Hasher.hash([code_digest(*_SOURCES), dataset._fingerprint, options])
    file = RowFile.beside(dataset, fingerprint)
    table: InMemoryTable | MemoryMappedTable
    if file is None:
        portions: list[pa.Table] = [features.arrow_schema.empty_table()]
        report = rows(portions.append)
        table = InMemoryTable(pa.concat_tables(portions[1:] or portions))
    else:
        use_cache = datasets.is_caching_enabled() if load_from_cache_file is None else load_from_cache_file
        with file.lock():
            found = file.read() if use_cache and file.lasting else None
            if found is not None:
                logger.info("Taking packed rows from %s", file.path)
            table, report = file.write(rows, features.arrow_schema) if found is None else found
    info = DatasetInfo(features=features)
    return Dataset(table, info=info, split=dataset.split, fingerprint=fingerprint), report


_SOURCES = (
    *TRIE,
    "advice",
    "batch_packing",
    "buckets",
    "code_digest",
    "columns",
    "external",
    "forest_packing",
    "layout",
    "merging",
    "overflow",
    "pack",
    "pack_options",
    "pack_report",
    "packing",
    "row_cache",
    "segments",
    "sequence_counts",
    "stretches",
)

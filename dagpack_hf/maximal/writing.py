"""Rows -> an Arrow file in the form `datasets` maps into memory, a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from dagpack_hf.conversations import FEATURES
from dagpack_hf.maximal.merging import Rows
from dagpack_hf.maximal.source import PartDetails, Provenance, SourcePart, arrow_strings

# Arrow strings have 32-bit offsets, and what is written at once is held in memory.
_CHUNK_BYTES = 4 * 1024 * 1024
_ROW_BYTES = 2**31 - 1


def write_rows(path: str, rows: Rows, restore: Callable[[SourcePart, bytes], bytes] | None = None) -> None:
    """Write the rows to an Arrow file, a chunk at a time.

    Args:
        path: The file, in the form `datasets` maps into memory, with the columns of `FEATURES`.
        rows: Which rows.
        restore: Called for the JSON text of each row's messages, with the row's part; returns the text to write.
    """
    with ArrowWriter(path=path, features=FEATURES) as writer:
        with ThreadPoolExecutor(1) as thread:
            written = None
            for table in row_tables(rows, restore):
                if written is not None:
                    written.result()
                written = thread.submit(writer.write_table, table)
            if written is not None:
                written.result()
        writer.finalize()


def row_tables(rows: Rows, restore: Callable[[SourcePart, bytes], bytes] | None = None) -> Iterator[pa.Table]:
    """Yield the rows as tables of a few megabytes; at least one, which may be empty."""
    flagged = np.zeros(len(rows.group), bool)
    chunk = _Chunk()
    spills: dict[str, int] = {}
    try:
        for number, group in groupby(zip(rows.end_part.tolist(), rows.end.tolist(), strict=True), itemgetter(0)):
            part = rows.parts[number]
            if part.spill not in spills:
                spills[part.spill] = os.open(part.spill, os.O_RDONLY)
            spill = _Spill(spills[part.spill], part)
            node_texts = spill.details.nodes["text"].to_numpy()
            lists = rows.group[rows.first_node[number] : rows.first_node[number + 1]]
            parents = part.parents.tolist()
            for _, turn in group:
                path = _path(parents, int(part.ends[turn]))
                trained = rows.is_target[lists[path]] & ~flagged[lists[path]]
                flagged[lists[path[trained]]] = True
                texts = node_texts[path]
                messages = spill.list(texts)
                if restore is not None:
                    messages = restore(part, messages)
                chunk.add(part.provenance, spill.details, turn, messages, spill.tools(turn), trained, texts)
                if chunk.size >= _CHUNK_BYTES:
                    yield chunk.table()
                    chunk = _Chunk()
    finally:
        for file in spills.values():
            os.close(file)
    yield chunk.table()


def _path(parents: list[int], node: int) -> np.ndarray:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return np.array(path[::-1])


class _Spill:
    """The texts of one part; read at once if they are few, since many small reads take their time."""

    def __init__(self, file: int, part: SourcePart) -> None:
        self._file = file
        self._path = part.spill
        offset, length = part.details
        self.details = details = PartDetails.from_bytes(self._pread(offset, length))
        self._starts = details.texts["offset"].to_numpy()
        self._ends = self._starts + details.texts["length"].to_numpy()
        self._tools: dict[int, bytes] = {}
        self._start = int(self._starts.min())
        size = int(self._ends.max()) - self._start
        self._data = self._pread(self._start, size) if size <= _CHUNK_BYTES else None

    def tools(self, turn: int) -> bytes | None:
        """Return the JSON text of a turn's tools."""
        offset, length = (self.details.turns[name][turn].as_py() for name in ("offset", "length"))
        if length and offset not in self._tools:
            self._tools[offset] = self._pread(offset, length)
        return self._tools.get(offset)

    def list(self, texts: np.ndarray) -> bytes:
        """Return texts as a JSON list; those that lie side by side in the file are read together."""
        starts, ends = self._starts[texts], self._ends[texts]
        apart = np.flatnonzero(starts[1:] != ends[:-1] + 1)
        runs = zip(starts[[0, *(apart + 1)]].tolist(), ends[[*apart, -1]].tolist(), strict=True)
        return b"[" + b",".join([self._read(start, end) for start, end in runs]) + b"]"

    def _read(self, start: int, end: int) -> bytes:
        if self._data is None:
            return self._pread(start, end - start)
        return self._data[start - self._start : end - self._start]

    def _pread(self, offset: int, length: int) -> bytes:
        """Read exactly so many bytes; one call of the system reads at most 2 GB."""
        data = b""
        while len(data) < length:
            read = os.pread(self._file, length - len(data), offset + len(data))
            if not read:
                raise OSError(f"{self._path}: is cut off; is there room for temporary files?")
            data = data + read if data else read
        return data


class _Chunk:
    """Rows that are written together."""

    def __init__(self) -> None:
        self.size = 0
        self._messages: list[bytes] = []
        self._tools: list[bytes | None] = []
        self._sources: list[tuple[str | None, ...]] = []
        self._trained: list[np.ndarray] = []
        self._entries: list[pa.StringArray] = []
        self._models: list[pa.StringArray] = []

    def add(
        self,
        source: Provenance,
        details: PartDetails,
        turn: int,
        messages: bytes,
        tools: bytes | None,
        trained: np.ndarray,
        texts: np.ndarray,
    ) -> None:
        """Add one row."""
        self.size += len(messages) + len(tools or b"")
        if self.size > _ROW_BYTES:
            raise ValueError(
                f"{source.session}: a message list of {len(messages)} bytes does not fit into a row, which holds "
                f"{_ROW_BYTES}; leave images out, or keep references to them"
            )
        self._messages.append(messages)
        self._tools.append(tools)
        timestamp = details.turns["timestamp"][turn].as_py()
        self._sources.append((source.session, source.session_id, source.cwd, timestamp))
        self._trained.append(trained)
        origins = details.texts.select(["entry", "model"]).take(pa.array(texts))
        self._entries += origins["entry"].chunks
        self._models += origins["model"].chunks

    def table(self) -> pa.Table:
        """Return the rows as a table with the columns of `FEATURES`."""
        schema = FEATURES.arrow_schema
        ends = np.cumsum([0, *map(len, self._trained)], dtype=np.int32)
        trained = pa.array(np.concatenate(self._trained)) if self._trained else pa.array([], pa.bool_())
        sessions, ids, cwds, timestamps = zip(*self._sources, strict=True) if self._sources else ((),) * 4
        columns = {
            "messages": _json(self._messages),
            "tools": _json(self._tools),
            "trained": _lists(ends, [trained], pa.bool_()),
            "session": arrow_strings(sessions),
            "session_id": arrow_strings(ids),
            "cwd": arrow_strings(cwds),
            "timestamp": arrow_strings(timestamps),
            "entry_ids": _lists(ends, self._entries, pa.string()),
            "models": _lists(ends, self._models, pa.string()),
        }
        return pa.table(columns, schema=schema)


def _json(texts: list[bytes] | list[bytes | None]) -> pa.Array:
    """Return JSON texts, known to be UTF-8, as the column of a JSON feature."""
    ends = np.cumsum([0, *(len(text or b"") for text in texts)], dtype=np.int32)
    known = np.array([text is not None for text in texts], bool)
    valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
    data = b"".join([text or b"" for text in texts])
    strings = pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends.tobytes()), pa.py_buffer(data), valid)
    return pa.ExtensionArray.from_storage(pa.json_(), strings)


def _lists(ends: np.ndarray, values: list[pa.Array], kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(ends), pa.concat_arrays(values) if values else pa.array([], kind))

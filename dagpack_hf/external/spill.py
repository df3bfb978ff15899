"""Pieces on disk: appended as they come, read back partition by partition, and gone with the process.

One file without a name holds the record batches of all partitions (Arrow IPC messages), and an index in memory says
where those of each are. As the file has no name, nothing is left of it however the process ends. Read back, the pieces
are mapped, not copied.

Cost: on disk 4 bytes per token, 8 with labels or counts, 12 with weights; in memory two numbers for each table.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from types import TracebackType

import pyarrow as pa


class Spill:
    """A file of pieces.

    Args:
        folder: where it is, a disk that has room for the corpus; by default the temporary folder of the system.
        schema: of the pieces.
        partitions: number of partitions.
    """

    def __init__(self, folder: Path | None, schema: pa.Schema, partitions: int) -> None:
        self._schema = schema
        self._file = tempfile.TemporaryFile(dir=folder, prefix="dagpack-")  # noqa: SIM115 - closed by __exit__
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(partitions)]
        self._size = 0
        self._map: pa.Buffer | None = None

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map = None
        self._file.close()

    def append(self, pieces: dict[int, pa.Table]) -> None:
        """Add tables of pieces to their partitions."""
        for partition, table in pieces.items():
            for batch in table.to_batches():
                written = self._file.write(batch.serialize())
                self._places[partition].append((self._size, written))
                self._size += written

    def read(self, partition: int) -> pa.Table:
        """The pieces of a partition. Nothing can be added afterwards."""
        if self._map is None:
            self._file.flush()
            if self._size:
                self._map = pa.py_buffer(mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ))
        batches = [
            pa.ipc.read_record_batch(self._map.slice(at, size), self._schema)  # type: ignore[union-attr]
            for at, size in self._places[partition]
        ]
        return pa.Table.from_batches(batches, self._schema)

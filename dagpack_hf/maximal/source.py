"""The message lists of one source: flat arrays of their nodes, and a spill file with their texts."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from dagpack_hf.conversations import MessageTree

_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Provenance:
    """Where a source comes from; the fields are columns of the data set."""

    session: str
    session_id: str
    cwd: str | None


@dataclass(frozen=True)
class SourcePart:
    """The message lists of one source.

    Attributes:
        provenance: Where they come from.
        spill: Path of the file that holds the texts.
        parents: int32 [N], for each node the node before it, -1 for none; parents come first.
        digests: uint64 [N, 2], digest of the list that ends with the node.
        ends: int32 [E], the last node of each turn's list.
        keys: uint64 [E, 2], digest of what makes two turns the same turn.
        unprompted: bool [E], whether neither system prompt nor tools of the turn are known.
        details: Where the `PartDetails` are in the spill file, and their length.
        context: Anything that `write_rows` hands to its `restore`.
    """

    provenance: Provenance
    spill: str
    parents: np.ndarray
    digests: np.ndarray
    ends: np.ndarray
    keys: np.ndarray
    unprompted: np.ndarray
    details: tuple[int, int]
    context: Any = None


@dataclass(frozen=True)
class PartDetails:
    """What is needed of a source's message lists only to write rows.

    Attributes:
        texts: For each text `offset` and `length` in the spill file, where it is followed by a comma, and the `entry`
            and `model` it comes from.
        nodes: For each node its `text`.
        turns: For each turn the `offset` and `length` of its tools in the spill file (0 if there are none) and its
            `timestamp`.
    """

    texts: pa.Table
    nodes: pa.Table
    turns: pa.Table

    def to_bytes(self) -> bytes:
        """Return the tables as one Arrow stream after the other."""
        sink = pa.BufferOutputStream()
        for table in (self.texts, self.nodes, self.turns):
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @staticmethod
    def from_bytes(data: bytes) -> PartDetails:
        """Read the tables back."""
        source = pa.BufferReader(data)
        texts, nodes, turns = (pa.ipc.open_stream(source).read_all().combine_chunks() for _ in range(3))
        return PartDetails(texts, nodes, turns)


class SourceWriter:
    """Collects the trained turns of one source.

    Args:
        tree: The source's message lists; their texts are moved to the spill file.
        spill: File for their texts.
        seed: 64 bits, the same for all sources that are merged.
    """

    def __init__(self, tree: MessageTree, spill: BackgroundFile | IO[bytes], seed: int = 0) -> None:
        self._tree = tree
        self._spill = spill
        self._seed = seed
        self._size = spill.tell()
        self._block: list[bytes] = []
        self._block_start = self._size
        self._roots: dict[str | None, int] = {}
        self._root_digests: list[bytes] = []
        self._tool_places: list[tuple[int, int]] = []
        self._placed: list[list[int]] = []
        self._records: list[int] = []
        self._recorded: list[int] = []
        self._text_digests: list[bytes] = []
        self._offsets = array("q")
        self._lengths = array("i")
        self._parents = array("i")
        self._texts = array("i")
        self._digests: list[bytes] = []
        self._ends = array("i")
        self._keys: list[bytes] = []
        self._tools = array("i")
        self._timestamps: list[str | None] = []
        self._unprompted: list[bool] = []

    def add(
        self, target: int, tools: str | None, key: str, timestamp: str | None = None, unprompted: bool = False
    ) -> None:
        """Add the list of one trained turn.

        Args:
            target: Its last node.
            tools: JSON text of the tools offered with the request, or `None`.
            key: What, together with the text of the last message, makes two turns the same.
            timestamp: When it was written.
            unprompted: Whether neither its system prompt nor its tools are known.
        """
        root = self._root(tools)
        self._ends.append(self._place(root, target))
        reply = self._text_digests[self._records[self._tree.text_of[target]]]
        self._keys.append(xxh3_128_digest(key.encode("utf-8", "surrogatepass") + reply, self._seed))
        self._tools.append(root)
        self._timestamps.append(timestamp)
        self._unprompted.append(unprompted)

    def part(self, provenance: Provenance, context: Any = None) -> SourcePart:
        """Return what was added; the spill file must be flushed before it is read."""
        places = [self._tool_places[tools] for tools in self._tools]
        details = PartDetails(
            pa.table(
                {
                    "offset": pa.array(self._offsets, pa.int64()),
                    "length": pa.array(self._lengths, pa.int32()),
                    "entry": arrow_strings([self._tree.entries[text] for text in self._recorded]),
                    "model": arrow_strings([self._tree.models[text] for text in self._recorded]),
                }
            ),
            pa.table({"text": pa.array(self._texts, pa.int32())}),
            pa.table(
                {
                    "offset": pa.array([offset for offset, _ in places], pa.int64()),
                    "length": pa.array([length for _, length in places], pa.int32()),
                    "timestamp": arrow_strings(self._timestamps),
                }
            ),
        ).to_bytes()
        self._flush()
        place = self._size, len(details)
        self._spill.write(details)
        return SourcePart(
            provenance,
            self._spill.name,
            np.array(self._parents, np.int32),
            _pairs(self._digests),
            np.array(self._ends, np.int32),
            _pairs(self._keys),
            np.array(self._unprompted, bool),
            place,
            context,
        )

    def _root(self, tools: str | None) -> int:
        root = self._roots.get(tools)
        if root is None:
            root = self._roots[tools] = len(self._placed)
            data = (tools or "").encode()
            self._placed.append([])
            self._root_digests.append(xxh3_128_digest(data, self._seed))
            self._tool_places.append((self._size, len(data)))
            self._append(data)
        return root

    def _place(self, root: int, target: int) -> int:
        """Return the part's node of a list; walks back only to the last node placed before."""
        placed, records, digests, seed = self._placed[root], self._records, self._digests, self._seed
        parents, text_of = self._tree.parents, self._tree.text_of
        placed += [-1] * (len(parents) - len(placed))
        records += [-1] * (len(self._tree.texts) - len(records))
        pending = []
        step = target
        while step >= 0 and placed[step] < 0:
            pending.append(step)
            step = parents[step]
        node = placed[step] if step >= 0 else -1
        digest = self._root_digests[root] if node < 0 else digests[node]
        for step in reversed(pending):
            text = text_of[step]
            record = records[text]
            if record < 0:
                record = self._record(text)
            digest = xxh3_128_digest(digest + self._text_digests[record], seed)
            self._parents.append(node)
            self._texts.append(record)
            node = placed[step] = len(digests)
            digests.append(digest)
        return node

    def _record(self, text: int) -> int:
        """Spill a text, and let go of it."""
        data = self._tree.take(text)
        record = self._records[text] = len(self._recorded)
        self._recorded.append(text)
        self._text_digests.append(xxh3_128_digest(data, self._seed))
        self._offsets.append(self._size)
        self._lengths.append(len(data))
        self._append(data)
        return record

    def _append(self, data: bytes) -> None:
        """Put a text, and a comma after it, at the end of the spill file."""
        self._block.append(data)
        self._size += len(data) + 1
        if self._size - self._block_start >= _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._block:
            self._spill.write(b",".join(self._block) + b",")
            self._block, self._block_start = [], self._size


class BackgroundFile:
    """A file that is appended to from a thread of its own, so that what writes need not wait for the system.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self._size = os.path.getsize(path) if os.path.exists(path) else 0
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def tell(self) -> int:
        """Return the size of the file, what is still to be written included."""
        return self._size

    def write(self, data: bytes) -> int:
        """Append a block, once the one before it is written; return its length."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(self._append, data)
        self._size += len(data)
        return len(data)

    def _append(self, data: bytes) -> None:
        with open(self.name, "ab", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def __enter__(self) -> BackgroundFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if self._last is not None:
            self._last.result()


def _pairs(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def arrow_strings(values: Sequence[str | None]) -> pa.StringArray:
    """Return an Arrow array; lone surrogates (in a file name, say), which it cannot hold, become `?`."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array(
            [value if value is None else value.encode("utf-8", "replace") for value in values], pa.string()
        )

"""Message lists of trained turns -> the rows of the conversational data set: the maximal lists.

Each source (a session file) is read on its own, in any process, into a `SourcePart`: the nodes of the message lists of
its turns in flat arrays, and their texts in a spill file. `merge` then finds, over all parts in order, which turns
repeat an earlier one, which lists are a prefix of another with the same tools, and in which row each target is
flagged: the first that holds it. `write_rows` streams the rows to an Arrow file. So the rows do not depend on how many
processes read, and memory does not depend on how long the texts are.

Two lists are equal if their digests are: 128 bits of XXH3 over tools and messages, with a seed that is drawn anew for
each load, so that no file can be made to look like another.

Cost: 20 bytes for each message of a list and about 40 for each turn in memory, texts once for each source on disk.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from xxhash import xxh3_128_digest

from dagpack_hf.conversations import FEATURES, MessageTree

# Arrow strings have 32-bit offsets, and what is written at once is held in memory.
_CHUNK_BYTES = 4 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024
_ROW_BYTES = 2**31 - 1


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
                    "entry": _strings([self._tree.entries[text] for text in self._recorded]),
                    "model": _strings([self._tree.models[text] for text in self._recorded]),
                }
            ),
            pa.table({"text": pa.array(self._texts, pa.int32())}),
            pa.table(
                {
                    "offset": pa.array([offset for offset, _ in places], pa.int64()),
                    "length": pa.array([length for _, length in places], pa.int32()),
                    "timestamp": _strings(self._timestamps),
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


def _strings(values: Sequence[str | None]) -> pa.StringArray:
    """Return an Arrow array; lone surrogates (in a file name, say), which it cannot hold, become `?`."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array(
            [value if value is None else value.encode("utf-8", "replace") for value in values], pa.string()
        )


@dataclass(frozen=True)
class Rows:
    """Which lists become rows.

    Attributes:
        parts: The parts, in order.
        first_node: int32 [P + 1], where each part's nodes begin in the arrays over all parts.
        end_part: int32 [R], for each row its part.
        end: int32 [R], for each row its turn in the part.
        group: int32 [N], for each node the first node with the same list.
        is_target: bool [N], whether the list of a *first* node ends with a target.
        targets: Number of targets.
        unprompted: Number of targets whose prompt is not known.
        repeated: Turns that are no targets because an earlier one has the same key.
        equal: Turns that are no targets because an earlier one has the same list and tools.
    """

    parts: Sequence[SourcePart]
    first_node: np.ndarray
    end_part: np.ndarray
    end: np.ndarray
    group: np.ndarray
    is_target: np.ndarray
    targets: int = 0
    unprompted: int = 0
    repeated: int = 0
    equal: int = 0


def merge(parts: Sequence[SourcePart]) -> Rows:
    """Find the maximal lists of all parts.

    Args:
        parts: In the order in which turns and rows count as first.

    Returns:
        The rows, in the order of their last turns.
    """
    first_node = np.cumsum([0, *(len(part.parents) for part in parts)], dtype=np.int32)
    turns = np.array([len(part.ends) for part in parts], np.int64)
    shift = first_node[:-1]
    part_of_turn = np.repeat(np.arange(len(parts)), turns)
    turn_of_part = np.concatenate([np.arange(count) for count in turns]) if len(parts) else np.zeros(0, np.int64)
    ends = _concatenate([part.ends + start for part, start in zip(parts, shift, strict=True)])
    keys = _concatenate([part.keys for part in parts], (0, 2), np.uint64)
    parents = _concatenate(
        [np.where(part.parents < 0, -1, part.parents + start) for part, start in zip(parts, shift, strict=True)]
    )
    every = np.arange(len(keys), dtype=np.int32)
    kept = every[_first_of_equal(keys, every) == every]
    used = _used(first_node, parents, part_of_turn, ends, kept)
    group = np.full(len(parents), -1, np.int32)
    nodes = np.flatnonzero(used).astype(np.int32)
    group[nodes] = nodes[_first_of_equal(_concatenate([part.digests for part in parts], (0, 2), np.uint64), nodes)]
    inner = np.zeros(len(parents), bool)
    below = nodes[parents[nodes] >= 0]
    inner[group[parents[below]]] = True
    _, first = np.unique(group[ends[kept]], return_index=True)
    targets = kept[np.sort(first)]
    is_target = np.zeros(len(parents), bool)
    is_target[group[ends[targets]]] = True
    rows = targets[~inner[group[ends[targets]]]]
    unprompted = _concatenate([part.unprompted for part in parts], 0, bool)
    return Rows(
        parts,
        first_node,
        part_of_turn[rows].astype(np.int32),
        turn_of_part[rows].astype(np.int32),
        group,
        is_target,
        targets=len(targets),
        unprompted=int(unprompted[targets].sum()),
        repeated=len(keys) - len(kept),
        equal=len(kept) - len(targets),
    )


def _concatenate(arrays: list[np.ndarray], shape: Any = 0, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(shape, dtype)


def _first_of_equal(pairs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return for each chosen pair the place among the chosen ones of the first that is equal to it.

    Pairs are digests, so their first bits deal them evenly into buckets, which are sorted one by one to save memory.

    Args:
        pairs: uint64 [N, 2].
        chosen: int32 [M], indices of pairs.

    Returns:
        int32 [M].
    """
    first = np.empty(len(chosen), np.int32)
    buckets = (pairs[:, 0] >> np.uint64(60)).astype(np.uint8)[chosen]
    for bucket in range(16):
        places = np.flatnonzero(buckets == bucket).astype(np.int32)
        own = pairs[chosen[places]]
        order = np.lexsort((own[:, 1], own[:, 0]))  # stable: equal pairs stay in their order
        own = own[order]
        starts = np.ones(len(own), bool)
        starts[1:] = (own[1:] != own[:-1]).any(1)
        first[places[order]] = places[order[starts][np.cumsum(starts) - 1]]
    return first


def _used(
    first_node: np.ndarray, parents: np.ndarray, part_of_turn: np.ndarray, ends: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """Mark the nodes on the lists of kept turns; where all turns of a part are kept, these are all of its nodes."""
    lost = np.ones(len(ends), bool)
    lost[kept] = False
    used = np.ones(len(parents), bool)
    some_lost = np.zeros(len(first_node) - 1, bool)
    some_lost[part_of_turn[lost]] = True
    for part in np.flatnonzero(some_lost):
        used[first_node[part] : first_node[part + 1]] = False
    return used | _ancestors(parents, ends[kept[some_lost[part_of_turn[kept]]]])


def _ancestors(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Mark nodes and all that comes before them in their lists."""
    used = np.zeros(len(parents), bool)
    front = np.unique(nodes)
    while len(front):
        used[front] = True
        front = parents[front]
        front = np.unique(front[front >= 0])
        front = front[~used[front]]
    return used


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
            "session": _strings(sessions),
            "session_id": _strings(ids),
            "cwd": _strings(cwds),
            "timestamp": _strings(timestamps),
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

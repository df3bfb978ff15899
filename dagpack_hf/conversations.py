"""The conversational data set: what pi sessions, or any other source of chats, become before they are rendered.

One row is one message list in the form chat templates take, with the tools that were offered, a `trained` flag for
each message and where it all comes from. The columns follow TRL's conversational form, so that `SFTTrainer` reads the
data set as it is.

Design:
    * A message list is a chain of `Message` links, each with its JSON text, which the lists of later turns share.
    * `ConversationRows` merges the chains of all trained turns in a prefix trie keyed by message digest, one root for
      each set of tools. Its leaves are the rows: a list that is a prefix of another row's with the same tools is not
      repeated, and each target is flagged in exactly one row, the first.
    * `messages` and `tools` are JSON *text* in Arrow. Nested Arrow structs fill in every key any row has with null,
      which changes what chat templates print, and the encoder behind `datasets.Json` rounds floats to ten decimals and
      cannot read integers above 64 bits.

Cost: one dictionary entry for each distinct message of each list, and one walk from leaf to root for each row. A
message is encoded once, not once for each turn that sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, Json, List, Value

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Arrow strings have 32-bit offsets: a chunk of a text column stays well below 2 GiB.
_CHUNK_BYTES = 256 * 1024 * 1024


def dumps(value: Any) -> str:
    r"""Write JSON text exactly: compact, keys in their order, any integer, -0.0 and NaN, and valid UTF-8.

    Lone surrogates, which UTF-8 cannot hold, are written as `\udXXX` escapes and read back as they were.

    Args:
        value: Anything `json.dumps` takes.

    Returns:
        The JSON text, without a space between tokens.

    Example:
    >>> dumps({"n": 2**70, "text": "é"})
    '{"n":1180591620717411303424,"text":"é"}'
    """
    text = _unicode_dumps(value)
    return text if text.isascii() else _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _unicode_dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """Read JSON text, also where `datasets` has encoded it twice.

    `datasets.map` encodes a column that holds an integer above 64 bits a second time, as a JSON string.

    Args:
        text: JSON text of a list or an object.

    Returns:
        The list or object.
    """
    value = json.loads(text)
    return json.loads(value) if isinstance(value, str) else value


@dataclass(eq=False)
class JsonText(Json):
    """A JSON column that is read and written exactly.

    Stored as `datasets.Json` is (Arrow's `arrow.json` text, `_type` "Json"), so that a saved data set loads wherever
    `datasets` is installed, but encoded and decoded with the standard `json` module: integers of any size, -0.0, NaN
    and all digits of floats survive. `datasets.map` keeps the text of columns that the function does not look at; a
    function that *returns* the column has it encoded by `datasets` itself, with the limits of `datasets.Json`.
    """

    def encode_example(self, example_data: Any) -> str | None:
        """Encode one value; a `str` that is JSON text already is taken as it is."""
        if example_data is None:
            return None
        if isinstance(example_data, str):
            try:
                json.loads(example_data)
            except ValueError:
                return dumps(example_data)
            return example_data
        return dumps(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: dict[str, Any] | None = None) -> Any:
        """Decode one value."""
        return None if example_data is None else loads(example_data)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """Cast an Arrow array to JSON text: text is taken as it is, nested values are encoded."""
        if isinstance(storage, pa.JsonArray):
            return storage
        if not _is_text(storage.type):
            values = storage.to_pylist()
            storage = pa.array([None if value is None else dumps(value) for value in values], pa.string())
        return pa.ExtensionArray.from_storage(self.pa_type, storage.cast(pa.string()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Json) and self.decode == other.decode


FEATURES = Features(
    {
        "messages": JsonText(),
        "tools": JsonText(),
        "trained": List(Value("bool")),
        "session": Value("string"),
        "session_id": Value("string"),
        "cwd": Value("string"),
        "timestamp": Value("string"),
        "entry_ids": List(Value("string")),
        "models": List(Value("string")),
    }
)


class Message:
    """One message of a list, linked to the list before it.

    Args:
        parent: The message before, `None` for the first one.
        content: The message as a chat template takes it. Lone surrogates are dropped: no tokenizer takes them.
        entry: Id of the session entry it comes from, `None` where it comes from no single one.
        model: Name of the model that wrote it, `None` for a message that no model wrote.

    Attributes:
        text: JSON text of the message.
        digest: 16 bytes that stand for `text`.
        depth: Number of messages up to and with this one.
    """

    __slots__ = ("depth", "digest", "entry", "model", "parent", "text")

    def __init__(
        self,
        parent: Message | None,
        content: Mapping[str, Any],
        *,
        entry: str | None = None,
        model: str | None = None,
    ) -> None:
        self.parent = parent
        text = _unicode_dumps(content)
        self.text = text if text.isascii() else _LONE_SURROGATE.sub("", text)
        self.digest = blake2b(self.text.encode(), digest_size=16).digest()
        self.entry = entry
        self.model = model
        self.depth: int = 1 if parent is None else parent.depth + 1

    def chain(self) -> list[Message]:
        """Return the links from the first message to this one."""
        links: list[Message] = []
        link: Message | None = self
        while link is not None:
            links.append(link)
            link = link.parent
        links.reverse()
        return links

    def content(self) -> dict[str, Any]:
        """Return a fresh copy of the message."""
        return json.loads(self.text)


@dataclass(frozen=True)
class Provenance:
    """Where the turn that ends a row comes from; the fields are columns of the data set."""

    session: str
    session_id: str
    cwd: str | None
    timestamp: str | None


class ConversationRows:
    """Collects the message lists of trained turns and keeps the maximal ones.

    Example:
    >>> rows = ConversationRows()
    >>> question = Message(None, {"role": "user", "content": "Hi"})
    >>> reply = Message(question, {"role": "assistant", "content": "Hello"}, model="tiny")
    >>> rows.add(reply, None, Provenance("a.jsonl", "a", None, None))
    True
    >>> rows.dataset()["trained"][0]
    [False, True]
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._children: dict[tuple[int, bytes], int] = {}
        self._roots: dict[str | None, int] = {}
        self._tools: list[str | None] = []
        self._inner: set[int] = set()
        self._ends: dict[int, tuple[Message, Provenance, int]] = {}
        self._placed: dict[tuple[int, Message], int] = {}

    def add(self, target: Message, tools: Sequence[Mapping[str, Any]] | None, provenance: Provenance) -> bool:
        """Add the list that ends with a trained message.

        Args:
            target: The trained message, linked to its context.
            tools: Tool schemas offered with the request, or `None`.
            provenance: Where the turn comes from.

        Returns:
            `False` if the same list with the same tools is there already: then nothing is added.
        """
        end = self._place(self._root(tools), target)
        if end in self._ends:
            return False
        self._ends[end] = (target, provenance, self._root(tools))
        return True

    def forget_links(self) -> None:
        """Drop the memory of which links are placed where, once a source is read to its end."""
        self._placed.clear()

    def _root(self, tools: Sequence[Mapping[str, Any]] | None) -> int:
        text = dumps(tools) if tools else None
        if text not in self._roots:
            self._roots[text] = len(self._tools)
            self._tools.append(text)
        return self._roots[text]

    def _place(self, root: int, message: Message) -> int:
        """Return the trie node of a list; walks back only to the last link placed before."""
        pending: list[Message] = []
        link: Message | None = message
        while link is not None and (root, link) not in self._placed:
            pending.append(link)
            link = link.parent
        node = -1 - root if link is None else self._placed[root, link]
        for step in reversed(pending):
            child = self._children.get((node, step.digest))
            if child is None:
                child = self._children[node, step.digest] = len(self._parents)
                self._parents.append(node)
                self._inner.add(node)
            node = self._placed[root, step] = child
        return node

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, in the order their last turns were added; `messages` and `tools` as JSON text."""
        flagged: set[int] = set()
        for end, (target, provenance, root) in self._ends.items():
            if end in self._inner:
                continue
            trained = []
            node = end
            while node >= 0:
                trained.append(node in self._ends and node not in flagged)
                flagged.add(node)
                node = self._parents[node]
            links = target.chain()
            yield {
                "messages": "[" + ",".join(link.text for link in links) + "]",
                "tools": self._tools[root],
                "trained": trained[::-1],
                "session": _utf8(provenance.session),
                "session_id": _utf8(provenance.session_id),
                "cwd": _utf8(provenance.cwd),
                "timestamp": _utf8(provenance.timestamp),
                "entry_ids": [_utf8(link.entry) for link in links],
                "models": [_utf8(link.model) for link in links],
            }

    def dataset(self) -> Dataset:
        """Return the rows as a data set with the columns of `FEATURES`."""
        batches: list[pa.Table] = []
        rows: list[dict[str, Any]] = []
        size = 0
        for row in self.rows():
            rows.append(row)
            size += len(row["messages"]) + len(row["tools"] or "")
            if size >= _CHUNK_BYTES:
                batches.append(_table(rows))
                rows, size = [], 0
        if rows or not batches:
            batches.append(_table(rows))
        return Dataset(pa.concat_tables(batches), info=DatasetInfo(features=FEATURES.copy()))


def decode_column(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Turn the raw Arrow column of messages or tools back into Python objects.

    JSON text is read exactly. Nested columns of other data sets come back without what Arrow filled in: a key of a
    struct whose value is null is left out, at every depth, since Arrow gives each struct all keys of all rows. A
    genuine null under such a key, in a tool call's arguments say, cannot be told from a filler and is left out too;
    nulls that are items of a list are kept, for Arrow fills in none there.

    Args:
        column: JSON text (plain strings or the `arrow.json` extension type) or nested lists and structs.

    Returns:
        One object for each row, `None` for null.

    Example:
    >>> decode_column(pa.array([[{"role": "user", "name": None}], None]))
    [[{'role': 'user'}], None]
    """
    if _is_text(column.type):
        return [None if text is None else loads(text) for text in column.to_pylist()]
    return [_without_fillers(value, column.type) for value in column.to_pylist()]


def _without_fillers(value: Any, arrow_type: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(arrow_type, pa.JsonType):
        return loads(value)
    if pa.types.is_struct(arrow_type):
        fields = ((field.name, field.type) for field in arrow_type)
        return {name: _without_fillers(value[name], kind) for name, kind in fields if value[name] is not None}
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        return [_without_fillers(item, arrow_type.value_type) for item in value]
    if pa.types.is_map(arrow_type):
        return {key: _without_fillers(item, arrow_type.item_type) for key, item in value}
    return value


def _is_text(arrow_type: pa.DataType) -> bool:
    return (
        isinstance(arrow_type, pa.JsonType)
        or pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )


def _utf8(text: str | None) -> str | None:
    """Replace lone surrogates (in a file name, say), which an Arrow string cannot hold, by `?`."""
    return text if text is None or text.isascii() else text.encode("utf-8", "replace").decode()


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {}
    for name, arrow_type in zip(FEATURES.arrow_schema.names, FEATURES.arrow_schema.types, strict=True):
        values = [row[name] for row in rows]
        if isinstance(arrow_type, pa.JsonType):
            columns[name] = pa.ExtensionArray.from_storage(arrow_type, pa.array(values, pa.string()))
        else:
            columns[name] = pa.array(values, arrow_type)
    return pa.table(columns)

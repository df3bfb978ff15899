"""The conversational data set: what pi sessions, or any other source of chats, become before they are rendered.

One row is one message list in the form chat templates take, with the tools that were offered, a `trained` flag for
each message and where it all comes from. The columns follow TRL's conversational form, so that `SFTTrainer` reads the
data set as it is.

Design:
    * The message lists of one source are a `MessageTree`: the lists of later turns share what earlier ones hold.
    * `messages` and `tools` are JSON *text* in Arrow. Nested Arrow structs fill in every key any row has with null,
      which changes what chat templates print, and the encoder behind `datasets.Json` rounds floats to ten decimals and
      cannot read integers above 64 bits.

Cost: a message is encoded once, not once for each turn that sees it; a node of the tree is two integers and a
dictionary entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from datasets import Features, Json, List, Value

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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


_unicode_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


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


# Infinity, which JSON can state only as a number beyond the range of floats, becomes null as in JavaScript's JSON.
_fast_encode = msgspec.json.Encoder().encode


class MessageTree:
    """The message lists of one source; lists that begin alike share their beginnings.

    A list is named by its last node, the empty list by -1. Each message has its JSON text once, however many lists it
    is in and whatever stands before it. Lone surrogates are dropped from texts: no tokenizer takes them.

    Attributes:
        texts: JSON text of each distinct message, in UTF-8.
        entries: For each text the id of the source's entry it comes from, `None` if it comes from no single one.
        models: For each text the name of the model that wrote it, `None` for a message that no model wrote.
        text_of: For each node the index of its text.
        parents: For each node the node before it, -1 for none.

    Example:
    >>> tree = MessageTree()
    >>> question = tree.append(-1, tree.text({"role": "user", "content": "Hi"}))
    >>> answer = tree.append(question, tree.text({"role": "assistant", "content": "Hello"}, model="tiny"))
    >>> [message["content"] for message in tree.messages(answer)]
    ['Hi', 'Hello']
    """

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.entries: list[str | None] = []
        self.models: list[str | None] = []
        self.text_of: list[int] = []
        self.parents: list[int] = []
        self._children: dict[int, int] = {}

    def text(self, message: Mapping[str, Any], entry: str | None = None, model: str | None = None) -> int:
        """Add a message.

        Args:
            message: The message as a chat template takes it.
            entry: Id of the source's entry it comes from.
            model: Name of the model that wrote it.

        Returns:
            The index of its text.
        """
        try:
            data = _fast_encode(message)
        except UnicodeEncodeError:
            data = _fast_encode(json.loads(_LONE_SURROGATE.sub("", _unicode_dumps(message))))
        self.texts.append(data)
        self.entries.append(entry)
        self.models.append(model)
        return len(self.texts) - 1

    def append(self, parent: int, text: int) -> int:
        """Return the node of a list that is one message longer."""
        edge = parent + 1 << 32 | text
        node = self._children.get(edge)
        if node is None:
            node = self._children[edge] = len(self.parents)
            self.parents.append(parent)
            self.text_of.append(text)
        return node

    def take(self, text: int) -> bytes:
        """Remove and return a text whose last use this is; lists that hold it can no longer be written out."""
        data = self.texts[text]
        self.texts[text] = b""
        return data

    def path(self, node: int) -> list[int]:
        """Return the texts of a list, from the first message to the last."""
        texts = []
        while node >= 0:
            texts.append(self.text_of[node])
            node = self.parents[node]
        texts.reverse()
        return texts

    def json(self, node: int) -> bytes:
        """Return a list as JSON text."""
        return b"[" + b",".join([self.texts[text] for text in self.path(node)]) + b"]"

    def messages(self, node: int) -> list[dict[str, Any]]:
        """Return a list as fresh objects."""
        return json.loads(self.json(node))


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

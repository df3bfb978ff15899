"""Conversations in whatever columns a data set has them.

Messages come as `messages`, as `conversations` (with `role` and `content` or with `from` and `value`), or as `prompt`
and `completion`; each as JSON text or as nested values, from Arrow tables or as Python objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from dagpack_hf.conversations import decode_column, loads
from dagpack_hf.render.template import Message

COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "tools",
    "trained",
    "weights",
    "chat_template_kwargs",
    "timestamp",
)
"""Columns that rendering reads, where a data set has them."""

_PLAIN = ("trained", "weights", "timestamp")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def conversation_columns(dataset: Dataset | IterableDataset) -> list[str]:
    """Columns of a data set that make up conversations; none if it holds no conversations that are still to render."""
    names = dataset.column_names or list(next(iter(dataset), ()))
    found = [name for name in COLUMNS if name in names]
    if "input_ids" in names:
        return []
    if {"messages", "conversations"} & set(found):
        return found
    if not {"prompt", "completion"} <= set(found):
        return []
    # JSON text is left to this package: what decodes it in `datasets` cannot read every integer.
    row = next(iter(dataset.select_columns(["prompt", "completion"]).with_format("arrow")), None)
    if row is None or None in [_json_list(row[name][0].as_py()) for name in ("prompt", "completion")]:
        return []
    return found


def conversation_rows(batch: pa.Table | Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a batch, JSON text and what Arrow fills in decoded."""
    if isinstance(batch, pa.Table):
        batch = {
            name: batch[name].to_pylist() if name in _PLAIN else decode_column(batch[name])
            for name in batch.column_names
            if name in COLUMNS
        }
    names = [name for name in COLUMNS if name in batch]
    for values in zip(*(batch[name] for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def messages_of(row: dict[str, Any]) -> tuple[list[Message], list[bool] | None]:
    """Messages of a row in whatever columns they are, and which of them are trained."""
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = _json_list(row["prompt"]), _json_list(row["completion"])
        if prompt is not None and completion is not None:
            return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)
    if row.get("messages") is not None:
        return from_json(row["messages"]), row.get("trained")
    return [_chat_message(message) for message in from_json(row.get("conversations")) or []], row.get("trained")


def weights_of(row: dict[str, Any], size: int, place: str) -> list[float]:
    """Weight of each message; a row without weights weighs 1 throughout.

    Raises:
        ValueError: the weights are not aligned with the messages, or one is none.
    """
    weights = row.get("weights")
    if weights is None:
        return [1.0] * size
    if len(weights) != size:
        raise ValueError(f"{place}{size} messages but {len(weights)} values in `weights`; they must be aligned.")
    for index, weight in enumerate(weights):
        if weight is None or not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"{place}message {index}: its weight is {weight}. A weight must be a finite number of at least 0; "
                "give 0 to a turn that should not count."
            )
    return weights


def _chat_message(message: dict[str, Any]) -> Message:
    """A message of the form `{"from": ..., "value": ...}` in the form of chat templates."""
    if "from" not in message:
        return message
    role = _SHAREGPT_ROLES.get(message["from"], message["from"])
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **rest}


def from_json(value: Any) -> Any:
    """Return a value, or what its JSON text holds."""
    return loads(value) if isinstance(value, str) else value


def _json_list(value: Any) -> list[Any] | None:
    """A list, or the JSON text of one; `None` for everything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None

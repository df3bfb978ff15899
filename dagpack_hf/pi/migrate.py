"""Entries of versions 1 and 2 -> entries of version 3, in place, as pi does when it opens such a file.

Version 1 is a list without ids: every entry hangs below the one before it. pi draws random ids at each load; here they
count up (`v1-00000`), so that equal files give equal ids. Version 2 called extension messages `hookMessage`.
"""

from __future__ import annotations

from typing import Any

CURRENT_VERSION = 3


def version_number(header: dict[str, Any]) -> float | None:
    """Return the version that a header states, 1 if it states none, `None` for what is no number."""
    version = header.get("version")
    if version is None:
        return 1
    try:
        return float(version)
    except (TypeError, ValueError, OverflowError):
        return None


def migrate(values: list[Any], version: float) -> None:
    """Bring entries to version 3.

    Args:
        values: The file's JSON values in order, headers included.
        version: The version of the file.
    """
    if version < 2:
        _link(values)
    if version < CURRENT_VERSION:
        for value in _entries(values):
            message = value.get("message")
            if value.get("type") == "message" and isinstance(message, dict) and message.get("role") == "hookMessage":
                message["role"] = "custom"


def _link(values: list[Any]) -> None:
    """Give ids and parents in file order, and turn indices of kept entries into ids."""
    previous = None
    for count, value in enumerate(_entries(values)):
        value["id"], value["parentId"] = f"v1-{count:05d}", previous
        previous = value["id"]
    # pi counts the values that it keeps: JSON's null, 0, false and "" are not among them.
    kept = [value for value in values if value or isinstance(value, list | dict)]
    for place, compaction in enumerate(kept):
        if isinstance(compaction, dict) and compaction.get("type") == "compaction":
            index = compaction.pop("firstKeptEntryIndex", None)
            if type(index) is int and 0 <= index <= place:
                first = kept[index]
                if isinstance(first, dict) and first.get("type") != "session":
                    compaction["firstKeptEntryId"] = first["id"]


def _entries(values: list[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict) and value.get("type") != "session"]

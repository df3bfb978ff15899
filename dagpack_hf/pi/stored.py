"""Contents of messages that were read, used and let go of: read again from the session file in the rare case.

A message is written out once for all requests that have it in the same form. What it says is then no longer needed in
memory, unless a model of another kind follows in the same session.

Cost: one small object for each message, and one line read and decoded for each further form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagpack_hf.pi.images import refer_to_images
from dagpack_hf.pi.lines import line_values

OFFSET = "\0offset"
"""Key of a message under which the reader notes the byte offset of its line; no key of JSON that pi writes."""


@dataclass(frozen=True)
class Source:
    """A session file that contents are read from again.

    Attributes:
        path: The file.
        images: How the reader keeps images.
    """

    path: str
    images: str


class StoredContent:
    """The content of one message, in its file.

    Args:
        source: The file.
        offset: First byte of its line.
    """

    __slots__ = ("_offset", "_source")

    def __init__(self, source: Source, offset: int) -> None:
        self._source = source
        self._offset = offset

    def read(self) -> Any:
        """Return the content.

        Raises:
            ValueError: If the file has changed since it was read.
        """
        with open(self._source.path, "rb") as file:
            file.seek(self._offset)
            values, _ = line_values(file.readline(), 0)
        message = values[0].get("message") if values and type(values[0]) is dict else None
        if type(message) is not dict:
            raise ValueError(f"{self._source.path}: has changed since it was read; load it again")
        if self._source.images != "inline":
            refer_to_images(values[0], self._offset, {})
        return message.get("content")

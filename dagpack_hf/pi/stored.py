"""Contents of messages in large files: let go of once they are used, and read again from the file in the rare case.

A message is written out once for all requests that have it in the same form. What it says is then no longer needed in
memory, unless a model of another kind follows in the same session.

Cost: one small object for each message, and one line read and decoded for each further form.
"""

from __future__ import annotations

import weakref
from typing import IO, Any

from dagpack_hf.pi.images import refer_to_images
from dagpack_hf.pi.lines import line_values

OFFSET = "\0offset"
"""Key of a message under which the reader notes the byte offset of its line; no key of JSON that pi writes."""


class Source:
    """A session file that contents are read from again.

    Args:
        path: The file.
        images: How the reader keeps images.
    """

    def __init__(self, path: str, images: str) -> None:
        self.path = path
        self.images = images
        self._file: IO[bytes] | None = None

    def line(self, offset: int) -> bytes:
        """Return the line that begins at a byte; the file stays open until nobody reads from it any more."""
        if self._file is None:
            self._file = open(self.path, "rb")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._file.seek(offset)
        return self._file.readline()


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
        values, _ = line_values(self._source.line(self._offset), 0)
        message = values[0].get("message") if values and type(values[0]) is dict else None
        if type(message) is not dict:
            raise ValueError(f"{self._source.path}: has changed since it was read; load it again")
        if self._source.images != "inline":
            refer_to_images(values[0], self._offset, {})
        return message.get("content")

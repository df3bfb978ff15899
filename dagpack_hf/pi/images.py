"""Images of sessions, kept by reference: an image is megabytes of text, and a session can hold hundreds.

A reference is `pi-image:` and a digest of the image's data URL, so that the same image in a forked file has the same
reference and shared prefixes stay shared. `ImageStore` puts data back, from the session file, when it is asked for.

Cost: one digest and a byte offset for each image; an `ImageStore` holds at most 64 MB of images.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from dagpack_hf.conversations import dumps
from dagpack_hf.pi.lines import line_values

Places = dict[str, int]
"""Reference -> byte offset of the line that holds the image."""

_PREFIX = "pi-image:"
_MARK = b'"url":"pi-image:'
_REFERENCE = re.compile(rb'"url":"(pi-image:[0-9a-f]{32})"')
_CACHE_BYTES = 64 * 1024 * 1024


def drop_images(entry: dict[str, Any]) -> int:
    """Remove the data of an entry's images, and return how many there are; that there are images stays known."""
    found = _image_blocks(entry)
    for block in found:
        block.pop("data", None)
    return len(found)


def refer_to_images(entry: dict[str, Any], offset: int, places: Places) -> int:
    """Put a reference in place of the data of an entry's images.

    Args:
        entry: The entry; changed in place: `data` of an image block becomes `url`.
        offset: First byte of the entry's line.
        places: Gets the place of each image that is not in it.

    Returns:
        The number of images.
    """
    found = _image_blocks(entry)
    for block in found:
        block["url"] = _reference(block)
        block.pop("data", None)
        places.setdefault(block["url"], offset)
    return len(found)


def data_url(block: Mapping[str, Any]) -> str:
    """Return the data URL of an image block as stored by pi, without lone surrogates."""
    url = f"data:{block.get('mimeType')};base64,{block.get('data')}"
    return url if url.isascii() else url.encode("utf-8", "ignore").decode()


def spell_out(text: bytes) -> bytes:
    """Return JSON text of the same value in which nothing is taken for a reference: for arguments of tool calls."""
    return text.replace(_MARK, _MARK.replace(b"-", rb"\u002d")) if _MARK in text else text


def _reference(block: Mapping[str, Any]) -> str:
    return _PREFIX + blake2b(data_url(block).encode(), digest_size=16).hexdigest()


def _image_blocks(entry: dict[str, Any]) -> Sequence[dict[str, Any]]:
    holder = entry.get("message") or entry.get("replacement") or entry
    content = holder.get("content") if type(holder) is dict else None
    if type(content) is not list:
        return ()
    return [block for block in content if type(block) is dict and block.get("type") == "image"]


class ImageStore:
    """The images of one session file.

    Args:
        path: The session file.
        places: Where its images are.
    """

    def __init__(self, path: str | os.PathLike[str], places: Places) -> None:
        self._path = path
        self._places = places
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._size = 0

    def restore(self, text: bytes) -> bytes:
        """Put data URLs in place of the references in JSON text.

        Args:
            text: JSON text of chat-form messages, as `wire` writes it.

        Returns:
            The text with all images of this file.

        Raises:
            ValueError: If the file has changed since it was read.
        """
        return _REFERENCE.sub(self._json_url, text) if _MARK in text else text

    def resolved(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat-form message with data URLs in place of references.

        Raises:
            ValueError: If the file has changed since it was read, or does not hold an image.
        """
        content = message["content"]
        return {**message, "content": list(map(self._resolved, content))} if type(content) is list else {**message}

    def _resolved(self, part: dict[str, Any]) -> dict[str, Any]:
        url = part["image_url"]["url"] if part["type"] == "image_url" else ""
        if not url.startswith(_PREFIX):
            return part
        if url not in self._places:
            raise ValueError(f"{self._path}: holds no image {url}; is it the row's session?")
        return {**part, "image_url": {"url": self._url(url)}}

    def _json_url(self, match: re.Match[bytes]) -> bytes:
        reference = match[1].decode()
        if reference not in self._places:
            return match[0]
        return b'"url":' + dumps(self._url(reference)).encode()

    def _url(self, reference: str) -> str:
        if reference not in self._urls:
            self._read(self._places[reference])
        if reference not in self._urls:
            raise ValueError(f"{self._path}: has changed since it was read; load it again")
        self._urls.move_to_end(reference)
        url = self._urls[reference]
        while self._size > _CACHE_BYTES and len(self._urls) > 1:
            self._size -= len(self._urls.popitem(last=False)[1])
        return url

    def _read(self, offset: int) -> None:
        """Read the images of one line."""
        with open(self._path, "rb") as file:
            file.seek(offset)
            raw = file.readline()
        for value in line_values(raw, 0)[0]:
            for block in _image_blocks(value) if type(value) is dict else ():
                reference = _reference(block)
                if reference not in self._urls:
                    self._urls[reference] = url = data_url(block)
                    self._size += len(url)

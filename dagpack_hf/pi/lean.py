"""The parts of session entries that reach a model: what is decoded of a line when sessions are loaded.

Costs, times, ids of requests and what tools keep for themselves are much of a session file. The decoder skips what is
not declared here without making objects of it. A line whose message is no object is left to the general decoder.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec


class Details(TypedDict, total=False):
    """What counts of a tool's details: the mark of an image that the model could not take."""

    imageUnsupportedByModel: Any


class LeanMessage(TypedDict, total=False):
    """A message of any role."""

    role: Any
    content: Any
    api: Any
    provider: Any
    model: Any
    stopReason: Any
    durationMs: Any
    toolCallId: Any
    toolName: Any
    details: Details | None
    summary: Any
    sections: Any
    toolsAdded: Any
    toolsRemoved: Any
    command: Any
    output: Any
    exitCode: Any
    cancelled: Any
    truncated: Any
    fullOutputPath: Any
    excludeFromContext: Any


class LeanEntry(TypedDict, total=False):
    """An entry of any type, or a header."""

    type: Any
    id: Any
    parentId: Any
    timestamp: Any
    message: LeanMessage | None
    content: Any
    summary: Any
    firstKeptEntryId: Any
    firstKeptEntryIndex: Any
    systemMessage: Any
    targetId: Any
    replacement: Any
    label: Any
    name: Any
    customType: Any
    data: Any
    kind: Any
    version: Any
    cwd: Any
    title: Any


decode_lean = msgspec.json.Decoder(LeanEntry).decode
"""Decode a line to plain dictionaries with the keys above, or raise `msgspec.MsgspecError`."""

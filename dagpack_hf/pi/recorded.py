"""System prompt and tools of sessions in which pi itself has not stored them.

Before 0.86 pi keeps neither in the session file, and later versions miss what extensions change. Two artefacts have
them: entries that the recorder extension (`recorder.ts`, put in place by `dagpack record`) adds to the session file,
one for each change, and the HTML export of a running session, one state for the whole session.

Both are untrusted: what is no prompt is refused or left out, and nothing in them is executed.

Cost: a record is one entry. An HTML export is read as a whole, with its images.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any

from dagpack_hf.pi.context import SystemPrompt, content_text, mapping
from dagpack_hf.pi.reader import SessionError

PathLike = str | os.PathLike[str]
RECORD_TYPE = "dagpack.request"
RECORD_VERSION = 1
_SCRIPT = b'<script id="session-data"'


def recorded_prompt(entry: Mapping[str, Any]) -> SystemPrompt | None:
    """Read an entry of the recorder extension.

    The data is `{"version": 1, "sha256", "model", "system": messages, "tools": function schemas}`, where `system` is
    what the request begins with. Data without a version lists all system messages of the request, so the first counts.

    Args:
        entry: Any session entry.

    Returns:
        The prompt and tools of the requests below the entry, `None` if it is no such entry or holds something else.
    """
    if entry.get("type") != "custom" or entry.get("customType") != RECORD_TYPE or not isinstance(entry.get("id"), str):
        return None
    data = mapping(entry.get("data"))
    system, tools = data.get("system"), data.get("tools")
    if not isinstance(system, list) or not isinstance(tools, list) or data.get("version", 1) != RECORD_VERSION:
        return None
    messages = [message for message in system if isinstance(message, Mapping)]
    texts = [content_text(message.get("content")) for message in (messages if "version" in data else messages[:1])]
    return SystemPrompt(tuple(filter(None, texts)), tools=_tools_by_name(tools), entries=(entry["id"],))


def html_prompts(paths: PathLike | Iterable[PathLike]) -> dict[str, SystemPrompt]:
    """Read prompt and tools from HTML exports.

    An export has the prompt and the tools at the time it was made, if it was made in a running session: by `/export`,
    by `/share`, or by the RPC command `export_html`.

    Args:
        paths: One HTML file, or several.

    Returns:
        Prompt and tools by session id.

    Raises:
        SessionError: If a file is no export, holds no prompt, or contradicts another export of the same session.
        OSError: If a file cannot be read.
    """
    prompts: dict[str, SystemPrompt] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = os.path.expanduser(os.fspath(path))
        session, prompt = _html_prompt(path)
        known = prompts.setdefault(session, prompt)
        if (known.texts, known.tools) != (prompt.texts, prompt.tools):
            raise SessionError(
                path, None, f"another export of session {session} has a different prompt or tools; give one of the two"
            )
    return prompts


def _html_prompt(path: str) -> tuple[str, SystemPrompt]:
    """Return session id and prompt of one export."""
    data = _session_data(path)
    session = mapping(data.get("header")).get("id")
    if not isinstance(session, str):
        raise SessionError(path, None, "no HTML export of a pi session: its data has no header with an id")
    text, tools = data.get("systemPrompt"), data.get("tools")
    if not isinstance(text, str) or not text:
        raise SessionError(
            path,
            None,
            "the export holds no system prompt, like all that `pi --export` makes; make one in the running session, "
            "with /export or /share",
        )
    return session, SystemPrompt((text,), tools=_tools_by_name(tools if isinstance(tools, list) else []))


def _session_data(path: str) -> Mapping[str, Any]:
    with open(path, "rb") as file:
        _, script, rest = file.read().partition(_SCRIPT)
    if not script:
        raise SessionError(path, None, 'no HTML export of a pi session: it has no <script id="session-data">')
    encoded, _, _ = rest.partition(b">")[2].partition(b"<")
    try:
        return mapping(json.loads(b64decode(encoded.strip(), validate=True)))
    except (ValueError, RecursionError) as error:
        raise SessionError(path, None, "damaged HTML export: its session data is not base64 of JSON") from error


def _tools_by_name(tools: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return declarations by name, from function schemas or bare functions; what has no name is left out."""
    declared: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = mapping(mapping(tool).get("function", tool))
        if isinstance(name := function.get("name"), str):
            declared[name] = {key: function.get(key) for key in ("name", "description", "parameters")}
    return declared

"""Whether all of a turn arrives in its rendering, and what of a context does not.

A template may leave out thinking, calls or text without a word. In a turn that would be trained, so every string of
the turn is looked for in its rendering; in a context it is what a server makes of it, so it is only counted.

Cost. One search for each string of a turn, in the turn's own text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dagpack_hf.render.probe import TemplateFacts
from dagpack_hf.render.template import Message, RenderError, Tools, calls_of, text_of, thought_of


def turn_parts(message: Message) -> set[str]:
    """What a turn consists of, by the names of `TemplateFacts.turn_losses`."""
    text, thinking = bool(text_of(message).strip()), bool(thought_of(message).strip())
    calls = len(calls_of(message))
    parts = {
        "text": text,
        "thinking": thinking,
        "call": calls > 0,
        "text beside a call": text and calls > 0,
        "thinking beside a call": thinking and calls > 0,
        "text and thinking beside a call": text and thinking and calls > 0,
        "parallel calls": calls > 1,
    }
    return {part for part, present in parts.items() if present}


def context_parts(messages: Sequence[Message], tools: Tools, facts: TemplateFacts) -> list[set[str]]:
    """For each message the parts of its context that the template leaves out.

    Returns:
        One set for each message, of names as in `TemplateFacts.context_losses`, and `"images"`.
    """
    present: set[str] = {"tools"} if tools else set()
    found = []
    for message in messages:
        found.append({part for part in present if part in facts.context_losses or part == "images"})
        role = message.get("role")
        if role == "system":
            present.add("system prompt")
        elif role == "tool":
            present.add("tool result")
        if calls := calls_of(message):
            present |= {"call"} if len(calls) == 1 else {"call", "parallel calls"}
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, dict) and "text" not in part for part in content):
            present.add("images")
    return found


def lost_part(part: str, why: str) -> RenderError:
    """The error for a part of a turn that the template does not write."""
    remedy = '; leave it out with thinking="drop"' if part == "thinking" else ""
    return RenderError(f"the chat template does not write the {part} of the turn", (why or "it is not there") + remedy)


def check_arrival(text: str, message: Message) -> None:
    """Check that text, thinking and calls of a turn are all in its rendering.

    Raises:
        RenderError: a part is missing.
    """
    if text_of(message).strip() not in text:
        raise lost_part("text", f"looked for {text_of(message).strip()[:60]!r}")
    if thought_of(message).strip() not in text:
        raise lost_part("thinking", f"looked for {thought_of(message).strip()[:60]!r}")
    names: Counter[str] = Counter()
    for call in calls_of(message):
        names[str(call.get("name"))] += 1
        missing = next((value for value in _strings(call.get("arguments")) if not _written(value, text)), None)
        if missing is not None:
            raise lost_part("call", f"looked for the argument {missing[:60]!r}")
    for name, times in names.items():
        if text.count(name) < times:
            raise lost_part("call", f"looked for {name!r}, {times} times")


def _strings(value: Any) -> list[str]:
    """All strings in arguments: keys and values."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (str(key), *_strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []


def _written(value: str, text: str) -> bool:
    """Whether a string is in a text: as it is, as in JSON, or as in Python."""
    forms = (str.strip, lambda text: json.dumps(text, ensure_ascii=False)[1:-1], lambda text: json.dumps(text)[1:-1])
    return any(form(value) in text for form in forms) or repr(value)[1:-1] in text


def thought_end(text: str, message: Message) -> int:
    """Characters of a turn up to the end of its thinking."""
    thought = thought_of(message).strip()
    return text.find(thought) + len(thought) if thought else 0

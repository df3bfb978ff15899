"""One message of pi in the form of a request: content parts, placeholders, calls, texts that pi writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagpack_hf.pi.context import block_text, blocks, content_text, mapping
from dagpack_hf.pi.images import data_url

USER_IMAGE = "(image omitted: model does not support images)"
TOOL_IMAGE = "(tool image omitted: model does not support images)"
TOOL_IMAGES_FOLLOW = "Attached image(s) from tool result:"
ONLY_IMAGE = "(see attached image)"
NO_OUTPUT = "(no tool output)"
NO_RESULT = "No result provided"
# JavaScript's trim(), which differs from str.strip() in U+001C..U+001F, U+0085 and U+FEFF.
_JS_SPACE = "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_JS_SPACE += "\u2028\u2029\u202f\u205f\u3000\ufeff"


def content_parts(content: Sequence[Mapping[str, Any]], *, keep_empty: bool) -> list[dict[str, Any]]:
    """Turn pi's blocks into request parts; pi 1.x leaves empty texts out."""
    parts: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") == "image":
            parts.append(image_part(block))
        elif block.get("type") == "text" and (block_text(block) or keep_empty):
            parts.append({"type": "text", "text": block_text(block)})
    return parts


def image_part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image as a part of content: its reference, or its data URL."""
    url = block.get("url")
    return {"type": "image_url", "image_url": {"url": url if isinstance(url, str) else data_url(block)}}


def without_images(content: Sequence[Mapping[str, Any]], placeholder: str) -> list[Mapping[str, Any]]:
    """Put one placeholder for each run of images."""
    result: list[Mapping[str, Any]] = []
    in_run = False
    for block in content:
        if block.get("type") == "image":
            if not in_run:
                result.append({"type": "text", "text": placeholder})
            in_run = True
        else:
            result.append(block)
            in_run = block.get("text") == placeholder
    return result


def tool_message(call: str, name: str, text: str) -> dict[str, Any]:
    """Return a tool result in chat form."""
    if not name:
        return {"role": "tool", "tool_call_id": call, "content": text}
    return {"role": "tool", "tool_call_id": call, "name": name, "content": text}


def assistant_message(content: str, thinking: str, calls: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return a reply in chat form; each call is an id, a tool name and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": call, "function": {"name": name, "arguments": arguments}}
            for call, name, arguments in calls
        ]
    return message


def read_reply(message: Mapping[str, Any], *, aloud: bool = False) -> tuple[str, str, str, list[tuple[str, str, Any]]]:
    """Read the blocks of an assistant message.

    Args:
        message: The stored message.
        aloud: Take thinking for text.

    Returns:
        Its text, the thinking that is there to read, the signature of its first thought, and its calls (id, name of
        the tool, arguments). Blank texts and thoughts are left out.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    signature: str | None = None
    calls: list[tuple[str, str, Any]] = []
    for block in blocks(message.get("content")):
        kind = block.get("type")
        if kind == "text":
            text = block_text(block)
            if not is_blank(text):
                texts.append(text)
        elif kind == "thinking":
            text = block_text(block, "thinking")
            if is_blank(text):
                continue
            if signature is None:
                signature = block_text(block, "thinkingSignature")
            if not block.get("redacted"):
                (texts if aloud else thoughts).append(text)
        elif kind == "toolCall":
            calls.append((block_text(block, "id"), block_text(block, "name"), block.get("arguments", {})))
    return "".join(texts), "\n".join(thoughts), signature or "", calls


def is_blank(text: str) -> bool:
    """Say whether a text is empty after JavaScript's trim()."""
    return not text or (text[0] in _JS_SPACE and not text.strip(_JS_SPACE))


def update_text(message: Mapping[str, Any]) -> str:
    """Return what a system message in mid-session says to a model that takes such messages."""
    parts = [content_text(message.get("content"))]
    for name, text in mapping(message.get("sections")).items():
        if text is None:
            parts.append(f'Removed system prompt section "{name}".')
        elif isinstance(text, str):
            parts.append(f'Updated system prompt section "{name}":\n\n{text}')
    return "\n\n".join(part for part in parts if part)

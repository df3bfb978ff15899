"""Tool-call ids, rewritten as pi does when a chat-completions request replays another model's calls.

Ids of the Responses API are `call|item` and can be hundreds of characters long; chat-completions servers take 40.
"""

from __future__ import annotations

import re

_LIMIT = 40
_NOT_ALLOWED = re.compile("[^a-zA-Z0-9_-]")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def chat_call_id(call: str, provider: str, *, legacy: bool = False) -> str:
    """Return the id a chat-completions request carries for another model's call.

    Args:
        call: The id as stored.
        provider: Provider of the request's model; only `openai` has plain ids cut to the limit.
        legacy: Follow pi before 1.x, which cuts off the item.

    Returns:
        The id.
    """
    if "|" not in call:
        return call[:_LIMIT] if provider == "openai" else call
    first, _, item = call.partition("|")
    first, item = _NOT_ALLOWED.sub("_", first), _NOT_ALLOWED.sub("_", item)
    if legacy:
        return first[:_LIMIT]
    combined = f"{first}_{item}" if item else first
    if len(combined) <= _LIMIT:
        return combined
    digest = _short_hash(call)[:8]
    return f"{first[: max(1, _LIMIT - len(digest) - 1)]}_{digest}"


def _short_hash(text: str) -> str:
    """Two 32-bit multiplicative hashes over UTF-16 units, in base 36: the digest pi puts in shortened ids."""
    units = text.encode("utf-16-le", "surrogatepass")
    low, high = 0xDEADBEEF, 0x41C6CE57
    for start in range(0, len(units), 2):
        unit = int.from_bytes(units[start : start + 2], "little")
        low = _mul(low ^ unit, 2654435761)
        high = _mul(high ^ unit, 1597334677)
    low = _mul(low ^ (low >> 16), 2246822507) ^ _mul(high ^ (high >> 13), 3266489909)
    high = _mul(high ^ (high >> 16), 2246822507) ^ _mul(low ^ (low >> 13), 3266489909)
    return _base36(high) + _base36(low)


def _mul(left: int, right: int) -> int:
    return left * right & 0xFFFFFFFF


def _base36(value: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"

"""Messages of the package, from its source: what is raised and warned, with `…` for what differs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dagpack_hf

PACKAGE = Path(dagpack_hf.__file__).parent
WARNINGS = {"warn", "warning", "info"}
INTERNAL = {"AssertionError", "AttributeError", "_Wrong"}
"""Errors that no user meets: faults of the package, names that are not there, what a caller counts."""

LEAST = 12
"""Letters that tell a message from others; a template with fewer is filled in by somebody else's words."""


def text_of(node: ast.expr) -> str | None:
    """The text of a string expression with `…` for its fields, or None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d+)?[sdrg]%?", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return "".join(part or "" for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "…") + (text_of(node.right) or "…")
    return None


def letters(text: str) -> int:
    """How many letters of a message are its own."""
    return len(re.findall(r"\w", text))


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


@cache
def all_texts() -> tuple[str, ...]:
    """Every string of the package's code but docstrings."""
    found = []
    for _, tree in _sources():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.expr) and id(node) not in docstrings and (text := text_of(node)):
                found.append(" ".join(text.split()))
    return tuple(dict.fromkeys(found))


@cache
def messages() -> dict[str, str]:
    """Message to the place where it is raised or warned."""
    found: dict[str, str] = {}
    for name, tree in _sources():
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function in INTERNAL or not (isinstance(node, ast.Raise) or function in WARNINGS):
                continue
            text = " ".join(" | ".join(text_of(argument) or "…" for argument in call.args).split())
            if letters(text) >= LEAST:
                found.setdefault(text, f"{name}:{call.lineno}")
    return found


def pattern(documented: str) -> re.Pattern[str]:
    """What a documented message matches; its `…` stands for anything."""
    return re.compile(".*?".join(map(re.escape, documented.strip("… ").split("…"))))

"""Docstrings in the manner of transformers, as the reference reads them: Google's, with types from the signature."""

from __future__ import annotations

import re
import textwrap

import griffe

FENCE = re.compile(r"^( *)```python\n(\1>>>.*?)\n+\1```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^Example:\n((?:\S.*\n?|\n(?=>>>))+)", re.MULTILINE)
PARAMETER = re.compile(r"^( +\w+) \((`.*)\):\n( +)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rename `Example:`, and let the signature say what it says as well."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called once for each object, before its docstring is parsed."""
        if obj.docstring:
            text = FENCE.sub(r"\2", obj.docstring.value)
            text = EXAMPLE.sub(lambda found: f"Example:\n{textwrap.indent(found[1], '    ')}", text)
            text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = PARAMETER.sub(_without_type, text)


def _without_type(found: re.Match[str]) -> str:
    name, kind, indent = found.groups()
    return f"{name}:\n{indent}{kind}. " if "shape" in kind else f"{name}:\n{indent}"

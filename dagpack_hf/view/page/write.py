"""A `Page` as one HTML file that needs nothing else: no network, no other file, no build step.

The data are a block of JSON that no browser runs, style and scripts are the files in `assets`, joined. A content
security policy allows exactly this style and this script, by their hashes, and nothing else: no connection, image,
font, frame or form. It demands Trusted Types and allows none, so no script can turn text into markup either; all text
goes in by `textContent`.

Cost: the JSON, and 66 kB.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from functools import cache
from html import escape
from importlib.resources import files

from dagpack_hf.view.page.model import Page

STYLE = "style.css"
SCRIPTS = (
    "data.js",
    "dom.js",
    "state.js",
    "rows.js",
    "list.js",
    "tree.js",
    "colors.js",
    "icicle.js",
    "windows.js",
    "detail.js",
    "search.js",
    "keyboard.js",
    "main.js",
)
"""Scripts in the order in which they are joined."""

_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(page: Page) -> str:
    """Return a page as an HTML document."""
    style, script = _asset(STYLE), _script()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    pieces = {
        "policy": escape(policy),
        "title": escape(page.title),
        "style": style,
        "data": json_block(page),
        "script": script,
    }
    html = _asset("page.html")
    for name, piece in pieces.items():
        before, mark, after = html.rpartition(f"<!--{name}-->")
        assert mark, name
        html = before + piece + after
    return html


def json_block(page: Page) -> str:
    r"""Return the data as JSON in which nothing ends or opens markup: `<` is `\u003c`."""
    text = json.dumps(page.to_json(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def write_page(page: Page, path: str | os.PathLike[str]) -> int:
    """Write a page to a file, which is there when it is complete.

    Args:
        page: The page.
        path: The file; an older one is replaced.

    Returns:
        Bytes of the file.

    Raises:
        OSError: The file cannot be written.
    """
    data = page_html(page).encode()
    folder, name = os.path.split(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
        try:
            file.write(data)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)
    return len(data)


def _script() -> str:
    return "".join(['"use strict";\n(() => {\n', *map(_asset, SCRIPTS), "})();\n"])


@cache
def _asset(name: str) -> str:
    return (files("dagpack_hf.view.page") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

"""The picture of a session's entry tree, as SVG text.

One row for each entry, branches as lanes (see `lanes`), a shape for each kind of entry; turns that are trained are
filled, the others are hollow. The text is written in a font of fixed width and cut by columns, so nothing needs to be
measured. Light and dark follow the reader's setting. The same file gives the same bytes.

Session files are untrusted: every text passes `clean` and `xml`, and the figure holds no script, link or reference.

Cost: about 350 bytes for each entry; linear in entries, no recursion.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath

from dagpack_hf.pi.options import TARGET_STOP_REASONS
from dagpack_hf.pi.reader import SessionFile, read_session
from dagpack_hf.pi.tree import EntryTree, build_tree
from dagpack_hf.view.entries import KINDS, Caption, caption
from dagpack_hf.view.lanes import Row, tree_rows
from dagpack_hf.view.text import cells, clean, cut, xml

_ROW = 19
_LANE = 18
_MARGIN = 18
_CELL = 7.25
_NAME_CELLS = 14

_STYLE = """\
text { font: 12px "DejaVu Sans Mono", ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
.paper { fill: #ffffff; stroke: #d0d7de; }
.title { font-weight: bold; font-size: 14px; }
.name { font-weight: bold; }
.quiet, .count { fill: #59636e; }
.edge { fill: none; stroke: #afb8c1; stroke-width: 1.5; }
.tag { fill: #fff8c5; stroke: #d4a72c; }
.trained { fill: #1a7f37; stroke: #1a7f37; stroke-width: 2; }
.untrained { fill: #ffffff; stroke: #1a7f37; stroke-width: 2; }
.user { fill: #0969da; }
.tool { fill: #bc4c00; }
.shell { fill: #ffffff; stroke: #bc4c00; stroke-width: 2; }
.system { fill: #1f2328; }
.summary { fill: #8250df; }
.other { fill: #afb8c1; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.paper { fill: #0d1117; stroke: #3d444d; }
.quiet, .count { fill: #9198a1; }
.edge { stroke: #656c76; }
.tag { fill: #341a00; stroke: #9e6a03; }
.trained { fill: #3fb950; stroke: #3fb950; }
.untrained { fill: #0d1117; stroke: #3fb950; }
.user { fill: #4493f8; }
.tool { fill: #f0883e; }
.shell { fill: #0d1117; stroke: #f0883e; }
.system { fill: #f0f6fc; }
.summary { fill: #ab7df8; }
.other { fill: #656c76; }
}"""


def session_svg(
    session: str | os.PathLike[str] | SessionFile,
    *,
    tokens: Mapping[str, int] | None = None,
    trained: Collection[str] | None = None,
    width: int = 900,
    max_entries: int = 2000,
) -> str:
    """Draw the entry tree of a session file.

    Args:
        session: The file, or what `read_session` returned for it.
        tokens: Tokens of entries by entry id, shown at the right where given.
        trained: Ids of the assistant entries that are trained; by default those that ended by themselves.
        width: Width of the figure in pixels, at least 400.
        max_entries: Entries that are drawn; the figure says how many more there are.

    Returns:
        The SVG document, without characters that UTF-8 cannot hold.

    Raises:
        SessionError: If the file is no session that can be read.
        OSError: If the file cannot be read.
        ValueError: If `width` or `max_entries` is too small.
    """
    if width < 400:
        raise ValueError(f"width={width} pixels is too narrow for the text: use 400 or more")
    if max_entries < 1:
        raise ValueError(f"max_entries={max_entries} leaves nothing to draw: use 1 or more")
    file = session if isinstance(session, SessionFile) else read_session(os.fspath(session))
    tree = build_tree(file)
    trained_ids = _ended(tree) if trained is None else set(trained)
    rows = tree_rows(tree.parents)
    drawn = rows[:max_entries]
    captions = [caption(tree.entries[row.entry], tree.entries[row.entry]["id"] in trained_ids) for row in rows]
    legend, top = _legend(captions[: len(drawn)], width, 68)
    lines = [*_edges(drawn, top), *_entries(drawn, captions, tree, tokens or {}, width, top)]
    height = top + _ROW * len(drawn) + 10
    if len(rows) > len(drawn):
        more = f"… and {len(rows) - len(drawn):,} more entries that are not drawn"
        lines.append(_text(_MARGIN, height + 4, more, "quiet"))
        height += _ROW
    name = cut(clean(PurePath(file.path).name) or "session", _columns(width - 2 * _MARGIN) * 12 // 14)
    head = [_text(_MARGIN, 28, name, "title"), _text(_MARGIN, 48, _summary(tree, captions), "quiet")]
    if tokens:
        head.append(_text(width - _MARGIN, 48, "tokens", "count", end=True))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>Session tree of {xml(name)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
            *head,
            *legend,
            *lines,
            "</svg>\n",
        ]
    )


def _ended(tree: EntryTree) -> set[str]:
    """Ids of the assistant entries that ended by themselves."""
    return {
        entry["id"]
        for entry in tree.entries
        if entry["type"] == "message"
        and entry["message"]["role"] == "assistant"
        and entry["message"].get("stopReason") in TARGET_STOP_REASONS
    }


def _summary(tree: EntryTree, captions: list[Caption]) -> str:
    kinds = [each.kind for each in captions]
    turns = kinds.count("trained") + kinds.count("untrained")
    leaves = len(tree.leaves())
    branches = "1 branch" if leaves == 1 else f"{leaves:,} branches"
    return f"{len(kinds):,} entries, {branches}, {turns:,} turns, {kinds.count('trained'):,} of them trained"


def _legend(captions: list[Caption], width: int, y: int) -> tuple[list[str], int]:
    """Shape and name of each kind that is drawn, and where the rows begin."""
    lines = []
    x = _MARGIN
    for kind in KINDS:
        if all(each.kind != kind for each in captions):
            continue
        step = round(20 + _CELL * cells(KINDS[kind]) + 14)
        if x > _MARGIN and x + step > width:
            x, y = _MARGIN, y + 18
        lines += [_shape(kind, x + 5, y), _text(x + 16, y + 4, KINDS[kind], "quiet")]
        x += step
    return lines, y + 20


def _edges(rows: list[Row], top: int) -> Iterator[str]:
    """A line from each entry's parent; into another lane it bends."""
    for at, row in enumerate(rows):
        if row.parent < 0:
            continue
        x, y = _place(row.parent, rows[row.parent].lane, top)
        to_x, to_y = _place(at, row.lane, top)
        bend = "" if x == to_x else f"V{to_y - 8}Q{x} {to_y} {x + 8} {to_y}H{to_x}"
        yield f'<path class="edge" d="M{x} {y}{bend or f"V{to_y}"}"/>'


def _entries(
    rows: list[Row], captions: list[Caption], tree: EntryTree, tokens: Mapping[str, int], width: int, top: int
) -> Iterator[str]:
    labels = _labels(tree)
    text_x = _MARGIN + _LANE * (1 + max((row.lane for row in rows), default=0))
    count_width = round(_CELL * max((len(f"{count:,}") for count in tokens.values()), default=0))
    for at, row in enumerate(rows):
        entry = tree.entries[row.entry]
        x, y = _place(at, row.lane, top)
        shown = captions[at]
        parts = [_shape(shown.kind, x, y)]
        left: float = text_x
        parts.append(_text(left, y + 4, cut(clean(shown.name), _NAME_CELLS), "name"))
        left += _CELL * (_NAME_CELLS + 1)
        right = width - _MARGIN - (count_width + 12 if tokens else 0)
        if label := labels.get(entry["id"]):
            label = cut(label, 24)
            tag_width = _CELL * cells(label) + 10
            parts.append(f'<rect class="tag" x="{left:.0f}" y="{y - 8}" width="{tag_width:.0f}" height="16" rx="8"/>')
            parts.append(_text(left + 5, y + 4, label, "label"))
            left += tag_width + 8
        parts.append(_text(left, y + 4, cut(clean(shown.text), _columns(right - left)), "said"))
        if entry["id"] in tokens:
            parts.append(_text(width - _MARGIN, y + 4, f"{tokens[entry['id']]:,}", "count", end=True))
        yield f'<g class="entry">{"".join(parts)}</g>'


def _labels(tree: EntryTree) -> dict[str, str]:
    """The label each entry has in the end, by id."""
    labels: dict[str, str] = {}
    for entry in tree.entries:
        target, label = entry.get("targetId"), entry.get("label")
        if entry["type"] == "label" and isinstance(target, str):
            labels[target] = clean(label) if isinstance(label, str) else ""
    return labels


def _place(row: int, lane: int, top: int) -> tuple[int, int]:
    return _MARGIN + _LANE * lane + 5, top + _ROW * row + _ROW // 2


def _columns(pixels: float) -> int:
    return max(int(pixels / _CELL), 0)


def _shape(kind: str, x: int, y: int) -> str:
    if kind in ("trained", "untrained"):
        return f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"/>'
    if kind == "user":
        return f'<path class="user" d="M{x - 5} {y - 5}L{x + 6} {y}L{x - 5} {y + 5}Z"/>'
    if kind == "summary":
        return f'<path class="summary" d="M{x} {y - 7}L{x + 7} {y}L{x} {y + 7}L{x - 7} {y}Z"/>'
    if kind == "other":
        return f'<circle class="other" cx="{x}" cy="{y}" r="2.5"/>'
    half = {"tool": 3, "shell": 4, "system": 5}[kind]
    return f'<rect class="{kind}" x="{x - half}" y="{y - half}" width="{2 * half}" height="{2 * half}"/>'


def _text(x: float, y: float, text: str, kind: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}"{anchor}>{xml(text)}</text>' if text else ""

"""Sessions and their tokens in a terminal: one line for each entry, branches as lanes.

The same `Page` that the HTML viewer shows, drawn with rich: the graph as in a version-control log (see `lanes`), then
tokens, windows, name and text. Texts have passed `Texts`, so no escape sequence of a session reaches the terminal, and
they are given to rich as text, not as its markup. Width, colours and `NO_COLOR` are rich's.

Cost: about 0.3 ms for each line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from dagpack_hf.view.lanes import Row, tree_rows
from dagpack_hf.view.page.model import Entry, File, Page
from dagpack_hf.view.text import cells as cells_of
from dagpack_hf.view.text import cut

_GLYPHS = {
    "trained": "●",
    "untrained": "○",
    "user": "▶",
    "tool": "▪",
    "shell": "▫",
    "system": "■",
    "summary": "◆",
    "other": "·",
}
_PLAIN = str.maketrans("●○▶▪▫■◆·│├╰─…≈×⟨⟩", "*o>.:#+-||`-~~x<>")
_STYLES = {
    "trained": "blue",
    "untrained": "blue",
    "user": "yellow",
    "tool": "red",
    "shell": "red",
    "system": "bold",
    "summary": "magenta",
    "other": "dim",
}
_NAME = 14
"""Columns of the name of an entry."""

_NARROWEST = 60
"""Columns of a line at least, however narrow the terminal is."""

_LEGEND = "● trained turn  ○ turn that is not trained  ▶ user  ▪ tool result  ▫ shell command  ■ system  ◆ summary"


def print_page(page: Page, console: Console, *, everything: bool = False, limit: int | None = None) -> None:
    """Print the session trees of a page with their tokens.

    Args:
        page: What to print.
        console: Where.
        everything: Print settings and notes too.
        limit: Lines of entries that are printed; what is left out is said.

    Raises:
        ValueError: If `limit` leaves nothing to print.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves nothing to print: use 1 or more, or None")
    plain = not (console.encoding or "").lower().replace("-", "").startswith("utf")
    left = len(page.entries) if limit is None else limit
    hidden = unprinted = 0
    for number, file in enumerate(page.files):
        rows, skipped = _file_rows(page, file, everything)
        hidden += skipped
        unprinted += max(len(rows) - left, 0)
        if left > 0:
            console.print(_wrap(_file_head(file, len(page.files) > 1), plain), soft_wrap=True)
            for line in _lines(page, rows[:left], max(console.width, _NARROWEST), plain) if rows else ():
                console.print(line, soft_wrap=True)
            if number + 1 < len(page.files):
                console.print()
        left = max(left - len(rows), 0)
    for note in _foot(page, hidden, unprinted):
        console.print(_wrap(Text(note, style="dim"), plain), soft_wrap=True)


def windows_text(numbers: Iterable[int]) -> str:
    """Return window numbers, counted from 1, in few characters.

    Example:
    >>> windows_text([0, 1, 2, 5])
    '1-3,6'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low + 1}" if low == high else f"{low + 1}-{high + 1}" for low, high in runs)


def graph_lines(rows: Sequence[Row], glyphs: Sequence[str]) -> list[str]:
    """Draw the lanes of rows.

    Args:
        rows: Rows of `tree_rows`.
        glyphs: The sign of each row.

    Returns:
        One text for each row, two columns for each lane.

    Example:
    >>> graph_lines(tree_rows([-1, 0, 0, 1]), "abcd")
    ['a', '├─b', 'c', 'd']
    """
    last_child = [-1] * len(rows)
    for at, row in enumerate(rows):
        if row.parent >= 0:
            last_child[row.parent] = at
    until: list[int] = []  # of each lane the row that its line goes on to
    lines = []
    for at, row in enumerate(rows):
        until += [-1] * (row.lane + 1 - len(until))
        cells = ["│ " if end > at else "  " for end in until[: row.lane]]
        above = rows[row.parent].lane if row.parent >= 0 else row.lane
        if above < row.lane:
            cells[above] = "├─" if until[above] > at else "╰─"
            cells[above + 1 :] = ["──"] * (row.lane - above - 1)
        beyond = ["│ " if end > at else "  " for end in until[row.lane + 1 :]]
        lines.append(("".join(cells) + glyphs[at] + " " + "".join(beyond)).rstrip())
        until[row.lane] = last_child[at]
    return lines


def _file_rows(page: Page, file: File, everything: bool) -> tuple[list[Row], int]:
    """Rows of a file by the numbers of entries, and how many entries have none."""
    shown: list[int] = []
    above: dict[int, int] = {}  # of each entry the row that what hangs from it hangs from
    place: dict[int, int] = {}
    parents: list[int] = []
    for number in _preorder(page, file):
        entry = page.entries[number]
        parent = above.get(entry.parent, -1)
        if everything or entry.kind != "other" or entry.label:
            place[number] = len(shown)
            shown.append(number)
            parents.append(parent)
            parent = place[number]
        above[number] = parent
    rows = [Row(shown[row.entry], row.lane, row.parent) for row in tree_rows(parents)]
    return rows, file.count - len(rows)


def _preorder(page: Page, file: File) -> Iterator[int]:
    """Entries of a file, parents before children and else in file order."""
    children: dict[int, list[int]] = {}
    for number in range(file.first, file.first + file.count):
        children.setdefault(page.entries[number].parent, []).append(number)
    order = list(children.get(-1, ()))
    for number in order:
        order += children.get(number, ())
    return iter(order)


def _lines(page: Page, rows: Sequence[Row], width: int, plain: bool) -> Iterator[Text]:
    """One line for each row: graph, tokens, targets, windows, name, text."""
    entries = [page.entries[row.entry] for row in rows]
    graphs = graph_lines(rows, [_GLYPHS[entry.kind] for entry in entries])
    cells = [
        (
            f"{entry.tokens:,}" if entry.tokens else "",
            f"{entry.targets:,}" if entry.targets else "",
            f"w{windows_text(_windows(page, entry))}" if entry.tokens else "",
        )
        for entry in entries
    ]
    widest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    trunk = max(map(len, graphs))
    for entry, graph, (tokens, targets, windows) in zip(entries, graphs, cells, strict=True):
        line = _graph(graph, entry).append(" " * (trunk - len(graph) + 1))
        line.append(f"{tokens:>{widest[0]}} ", style="" if entry.targets else "dim")
        line.append(f"{targets:>{widest[1]}} ", style="blue").append(f"{windows:<{widest[2]}} ", style="dim")
        name = cut(entry.name, _NAME)
        line.append(name, style=_STYLES[entry.kind]).append(" " * (_NAME + 1 - cells_of(name)))
        _append_text(line, entry, width - line.cell_len)
        yield _wrap(line, plain)


def _graph(line: str, entry: Entry) -> Text:
    text = Text()
    text.append(line, style="dim")
    at = line.index(_GLYPHS[entry.kind])
    text.stylize(f"not dim {_STYLES[entry.kind]}", at, at + 1)
    return text


def _append_text(line: Text, entry: Entry, width: int) -> None:
    """What an entry says, in the columns that are left."""
    pieces = [(f"[{entry.label}] ", "not dim bold yellow")] if entry.label else []
    if entry.status not in ("", "trained"):
        pieces.append((f"({entry.status}) ", "dim"))
    for text, style in [*pieces, (" ".join(entry.caption.split()), "not dim")]:
        text = cut(text, max(width, 0))
        line.append(text, style=style)
        width -= cells_of(text)


def _windows(page: Page, entry: Entry) -> set[int]:
    """The windows that train an entry, or where it is no target those that hold the longest piece of it.

    Its first token, a control token, is often shared by more.
    """
    own = [page.blocks[block] for low, high in entry.blocks for block in range(low, high)]
    if entry.targets:
        return {block.window for block in own if block.target}
    return set(page.window_sets[max(own, key=lambda block: block.length).windows])


def _file_head(file: File, several: bool) -> Text:
    text = Text(file.title or file.name, style="bold")
    facts = f"  {file.turns:,} turns, {file.trained:,} trained, {file.tokens:,} tokens"
    if several and file.tokens:
        facts += f", {file.shared / file.tokens:.0%} shared with other files"
    return text.append(facts, style="not bold dim")


def _foot(page: Page, hidden: int, unprinted: int) -> list[str]:
    figures = page.figures
    about = "≈ " if figures["approximate"] else ""
    lines = ["", _LEGEND, "columns: tokens, targets among them, windows (w) that train or hold them"]
    if hidden:
        lines.append(f"{hidden:,} settings and notes are not shown (--all)")
    if unprinted:
        lines.append(f"{unprinted:,} more entries are not shown (--limit)")
    lines.append(
        f"{about}{figures['logical']:,} logical tokens, {figures['unique']:,} unique (reuse {figures['reuse']:.1f}×), "
        f"{figures['targets']:,} targets; windows of {figures['maxLength']:,}: "
        f"{figures['windows']:,}, at least {figures['bound']:,}; they execute {figures['executed']:,} tokens, of them "
        f"{figures['replay']:,} replay"
    )
    return lines


def _wrap(text: Text, plain: bool) -> Text:
    """The text for a terminal without Unicode, where it is one."""
    if plain:
        text.plain = text.plain.translate(_PLAIN).encode("ascii", "backslashreplace").decode()
    return text

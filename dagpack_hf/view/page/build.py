"""Session files to a `Page`: read, rendered, packed, and put together.

Cost: on one core 0.5 s for the bundled sample (125 turns), 1.4 s for a session of 453 turns and 5 s for one of 2,030,
of which rendering is most; the pages have 0.3, 1.0 and 2.8 MB. In memory the distinct text of all sessions twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dagpack_hf.pi import LoadReport, load_sessions
from dagpack_hf.pi.options import PathLike
from dagpack_hf.render import RenderReport
from dagpack_hf.view.page.blocks import Blocks, cut_blocks
from dagpack_hf.view.page.locate import locate
from dagpack_hf.view.page.model import Entry, File, Page, Window
from dagpack_hf.view.page.plan import Plan, default_length, plan_windows
from dagpack_hf.view.page.render import Conversation, render_conversations
from dagpack_hf.view.page.sessions import Sessions, read_sessions
from dagpack_hf.view.page.texts import DEFAULT_LIMIT, Texts
from dagpack_hf.view.page.walk import Range

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Built:
    """A page, and what happened on the way to it.

    Args:
        page: The page.
        loaded: What was read.
        rendered: What was rendered.
        cut_texts: Texts that are shown in part.
        cut_characters: What of them is not shown.
    """

    page: Page
    loaded: LoadReport
    rendered: RenderReport
    cut_texts: int
    cut_characters: int


def build_page(
    paths: PathLike | Iterable[PathLike] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenizer_name: str = "",
    approximate: bool = False,
    max_length: int | None = None,
    limit: int | None = DEFAULT_LIMIT,
    redact: Callable[[str], str] | None = None,
    prepare: Callable[[Dataset], Dataset] | None = None,
    reading: Mapping[str, Any] | None = None,
    rendering: Mapping[str, Any] | None = None,
) -> Built:
    """Make the data of a page.

    Args:
        paths: Session files and folders, as for `load_sessions`.
        tokenizer: A tokenizer with a chat template.
        tokenizer_name: What the page calls it.
        approximate: Whether it is not the model's own, so that counts are near the truth only.
        max_length: Window length in tokens; by default twice the longest path.
        limit: Characters of a text that are shown; `None` for all.
        redact: Replaces what is private in a text; every text of the page passes it.
        prepare: Changes the conversations before they are rendered, to redact them say; messages stay aligned.
        reading: Options of `load_sessions`.
        rendering: Options of `tokenize_conversations`.

    Raises:
        FileNotFoundError: A path is not there.
        ValueError: An option has an unknown value.
        RenderError: A turn cannot be rendered, and `on_error` is `"raise"`.
    """
    reading = dict(reading or {})
    texts = Texts(redact, limit)
    dataset, loaded = load_sessions(paths, return_report=True, **reading)
    rendered = render_conversations(dataset if prepare is None else prepare(dataset), tokenizer, rendering)
    plan = plan_windows(rendered.forest, max_length or default_length(rendered.forest))
    targets = [key for each in rendered.conversations for key in _targets(each)]
    done = [(each.session, entry) for each in rendered.conversations for entry in each.rendered_turns() if entry]
    sessions = read_sessions(paths, texts, targets, done, reading)
    blocks = _blocks(plan, rendered.conversations, sessions)
    page = Page(
        title=texts.line(_title(sessions.files, paths), 120),
        figures={
            **_figures(plan, sessions, loaded),
            "tokenizer": texts.line(tokenizer_name),
            "approximate": approximate,
        },
        notes=_notes(loaded, str(rendered.report), plan, texts),
        files=_with_tokens(sessions.files, blocks),
        entries=tuple(_placed(entry, number, blocks) for number, entry in enumerate(sessions.entries)),
        nodes=blocks.nodes,
        blocks=blocks.blocks,
        windows=_windows(plan, blocks),
        window_sets=blocks.window_sets,
        file_sets=blocks.file_sets,
    )
    return Built(page, loaded, rendered.report, texts.cut_texts, texts.cut_characters)


def _targets(conversation: Conversation) -> list[tuple[str, str]]:
    pairs = zip(conversation.entries, conversation.trained, strict=True)
    return [(conversation.session, entry) for entry, trained in pairs if trained and entry is not None]


def _blocks(plan: Plan, conversations: Iterable[Conversation], sessions: Sessions) -> Blocks:
    located = locate(plan.forest, conversations)
    entries = {sessions.index[key]: found for key, found in located.entries.items() if key in sessions.index}
    files = {sessions.numbers[path]: found for path, found in located.files.items() if path in sessions.numbers}
    return cut_blocks(plan, entries, files)


def _members(ranges: Iterable[Range]) -> list[int]:
    return [block for low, high in ranges for block in range(low, high)]


def _placed(entry: Entry, number: int, blocks: Blocks) -> Entry:
    """An entry with its tokens."""
    ranges = blocks.of_entry.get(number, ())
    own = [blocks.blocks[block] for block in _members(ranges)]
    return replace(
        entry,
        blocks=ranges,
        tokens=sum(block.length for block in own),
        targets=sum(block.length for block in own if block.target),
        position=min((block.position for block in own), default=-1),
    )


def _with_tokens(files: Iterable[File], blocks: Blocks) -> tuple[File, ...]:
    found = []
    for number, file in enumerate(files):
        own = [blocks.blocks[block] for block in _members(blocks.of_file.get(number, ()))]
        shared = sum(block.length for block in own if len(blocks.file_sets[block.files]) > 1)
        found.append(replace(file, tokens=sum(block.length for block in own), shared=shared))
    return tuple(found)


def _windows(plan: Plan, blocks: Blocks) -> tuple[Window, ...]:
    first = [0] * len(plan.size)
    for block in blocks.blocks:
        if block.window >= 0:
            first[block.window] += block.length
    sizes = zip(plan.size.tolist(), plan.trained.tolist(), first, strict=True)
    return tuple(Window(size, trained, size - computed) for size, trained, computed in sizes)


def _title(files: tuple[File, ...], paths: PathLike | Iterable[PathLike] | None) -> str:
    if len(files) == 1:
        return files[0].title or files[0].name
    folders = {PurePath(file.cwd).name for file in files if file.cwd}
    where = f" in {folders.pop()}" if len(folders) == 1 else ""
    return f"{len(files):,} sessions{where}"


def _figures(plan: Plan, sessions: Sessions, loaded: LoadReport) -> dict[str, int | float | str | bool]:
    report = plan.report
    return {
        "files": len(sessions.files),
        "entries": len(sessions.entries),
        "turns": loaded.turns,
        "trained": sum(file.trained for file in sessions.files),
        "logical": report.logical_tokens,
        "unique": report.unique_tokens,
        "targets": report.loss_tokens,
        "executed": report.executed_tokens,
        "replay": report.replay_tokens,
        "reuse": round(report.reuse_ratio, 4),
        "speedup": round(report.speedup_bound, 4),
        "windows": report.windows,
        "bound": report.lower_bound,
        "maxLength": report.max_length,
        "longest": report.longest_path,
        "lost": report.overflow.get("lost_targets", 0),
    }


def _notes(loaded: LoadReport, rendered: str, plan: Plan, texts: Texts) -> tuple[str, ...]:
    """What was left out, in lines."""
    lines = [*str(loaded).splitlines(), *rendered.splitlines()]
    if plan.report.overflow:
        lost = plan.report.overflow.get("lost_targets", 0)
        lines.append(f"{lost:,} labelled tokens lie beyond the window of {plan.report.max_length:,} and are not shown")
    if texts.cut_texts:
        lines.append(
            f"{texts.cut_texts:,} long texts are shown in part, {texts.cut_characters:,} characters are left out"
        )
    return tuple(texts.line(line.strip(), 400) for line in lines)

"""What the pages hold: code blocks with the notes on them, headings, links.

A note is an HTML comment before a block, which readers do not see:

    <!-- setup                        Python that runs before the block: the names that a reader has already
    dataset = ...
    -->
    <!-- not run: it needs a GPU -->  the block is only compiled, or its command lines parsed

Everything else of the test's world is in `tests/doc_world.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]

SETUP = re.compile(r"<!--\s*setup\s*\n(.*?)-->", re.DOTALL)
NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->", re.DOTALL)
HTML_LINK = re.compile(r"\b(?:href|src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        line: Line of its first line of code, counted from 1.
        language: What stands behind the fence; an indented block is a shell's.
        setup: Python to run before it.
        not_run: Why it is not run, or None.
    """

    line: int
    language: str
    code: str
    setup: str = ""
    not_run: str | None = None


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path
    blocks: tuple[Block, ...]
    links: tuple[tuple[int, str], ...]
    anchors: frozenset[str]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else self.path.name


def page_paths() -> list[Path]:
    """All pages of the project, but those that belong to the bundled sessions."""
    folders = ("docs", "recipes", "notebooks", "benchmarks")
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path for path in found if "make_sample" not in path.parts)


@cache
def read_page(path: Path) -> Page:
    """Parse a page once."""
    return parse_page(path, path.read_text(encoding="utf-8"))


def parse_page(path: Path, text: str) -> Page:
    """Find code blocks, links and headings of a page."""
    blocks: list[Block] = []
    links: list[tuple[int, str]] = []
    headings: list[str] = []
    setup, not_run = "", None
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            setup += "".join(SETUP.findall(token.content))
            not_run = next(iter(NOT_RUN.findall(token.content)), not_run)
            links += [(line, link.split()[0]) for link in HTML_LINK.findall(token.content)]
        elif token.type in ("fence", "code_block"):
            fenced = token.type == "fence"
            language = token.info.strip() if fenced else "bash"
            blocks.append(Block(line + fenced, language, token.content, setup, not_run))
            setup, not_run = "", None
        elif token.type == "inline":
            if before is not None and before.type == "heading_open":
                headings.append(_plain(token))
            links += [(line, link) for link in _links(token)]
    if setup or not_run:
        raise ValueError(f"{path}: a note has no block behind it")
    return Page(path, tuple(blocks), tuple(links), frozenset(_anchors(headings)))


def _plain(inline) -> str:
    return "".join(child.content for child in inline.children if child.type in ("text", "code_inline"))


def _links(inline) -> list[str]:
    found = [str(child.attrs[name]) for child in inline.children for name in ("href", "src") if name in child.attrs]
    return found + [link.split()[0] for child in inline.children for link in HTML_LINK.findall(child.content)]


def _anchors(headings: list[str]) -> list[str]:
    """Anchors as hosts make them: lower case, without punctuation, numbered where they repeat."""
    anchors: list[str] = []
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeats = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", other) is not None for other in anchors)
        anchors.append(f"{anchor}-{repeats}" if repeats else anchor)
    return anchors


def broken_links(page: Page) -> list[str]:
    """Links of a page that lead to no file, or to no heading of a page; links to other sites are not looked at."""
    broken = []
    for line, link in page.links:
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve()
        if re.match(r"[a-z]+:", link):
            continue
        if target and not path.exists():
            broken.append(f"{page.name}:{line}: {link}: there is no such file")
        elif anchor and (path.suffix == ".md" or not target):
            there = read_page(path) if target else page
            if anchor not in there.anchors:
                broken.append(f"{page.name}:{line}: {link}: there is no such heading")
    return broken

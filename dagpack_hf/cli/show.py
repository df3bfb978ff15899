"""`dagpack show`: the tree of a session beside the token tree it becomes, in the terminal or as a page."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli import figures
from dagpack_hf.cli.arguments import (
    SAMPLE,
    HelpFormatter,
    Printer,
    UsageError,
    add_json,
    add_sessions,
    add_tokenizer,
    load_tokenizer,
    positive,
    quiet_libraries,
    session_paths,
    show_progress,
)
from dagpack_hf.cli.reading import add_reading, loading_options
from dagpack_hf.cli.redaction import add_redaction, read_deny, session_owners
from dagpack_hf.cli.rendering import add_rendering, rendering_options
from dagpack_hf.cli.stats import tokenizer_name

if TYPE_CHECKING:
    from datasets import Dataset

    from dagpack_hf.redact import RedactionReport
    from dagpack_hf.view.page import Built

_DESCRIPTION = """\
Show sessions as pi's users know them (turns, tools, branches, compactions, labels) beside the
token tree they become: what is a target and what context, which window each part lands in, what
is replayed, and what several files share. With --html as one page for any browser, which loads
nothing and sends nothing; without, as lines in the terminal.
"""

_EPILOG = """\
examples:
  dagpack show sample
  dagpack show session.jsonl --html session.html
  dagpack show ~/.pi/agent/sessions/project --html project.html --tokenizer Qwen/Qwen3-0.6B
  dagpack show session.jsonl --html session.html --redact
  dagpack show session.jsonl --max-length 32768 | less -R
  dagpack show session.jsonl --figure window --out window.svg
  dagpack show --figure graph --episodes episodes.jsonl --out graph.svg

The page holds the text of the sessions, whatever the agent has seen: look at it before you pass
it on.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "show",
        help="see a session's tree and the token tree it becomes",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_sessions(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page; one that is there is replaced")
    add_tokenizer(parser)
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="window length in tokens (default: twice the longest path, rounded up to a multiple of 128)",
    )
    parser.add_argument(
        "--full-text",
        action="store_true",
        help="whole texts in the page (default: the first 6,000 characters of each; how many are left out is shown)",
    )
    parser.add_argument("--all", action="store_true", help="in the terminal: settings and notes too")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="in the terminal: at most so many lines of entries"
    )
    figures.add_arguments(parser, without={"--max-length"})
    add_rendering(parser, on_error="skip")
    add_reading(parser)
    add_redaction(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the trees, write the page, or draw a figure."""
    if figures.is_asked_for(options):
        return figures.draw(options)
    _check(options)
    say = Printer(options.json)
    is_kept = options.json or options.html is not None
    built, private = _build_private(options) if is_kept or options.redact else (_build(options), None)
    if private is not None and (private.found or options.redact):
        print(private, file=sys.stderr)
    if options.json:
        say.result(built.page.to_json())
    if options.html is not None:
        _write(built, options, say)
    elif not options.json:
        _print(built, options)
    return 0 if built.page.files or not built.loaded.skipped_files else 1


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would be without effect, and a page in place of a session.

    Raises:
        UsageError: There is one.
    """
    if options.html is None:
        if options.full_text and not options.json:
            raise UsageError("--full-text: only for a page or JSON; add --html FILE or --json")
        return
    for name in ("all", "limit"):
        if getattr(options, name):
            raise UsageError(f"--{name}: only for the terminal; a page has all entries. Leave out --html or --{name}")
    from dagpack_hf.pi import session_files

    files = {os.path.realpath(file) for file in session_files(session_paths(options.sessions))}
    if os.path.realpath(options.html) in files:
        raise UsageError(f"--html {options.html}: is one of the session files that are read; choose another name")


def _build_private(options: argparse.Namespace) -> tuple[Built, RedactionReport]:
    """Make the page, with the secrets in it counted, or replaced if that is asked for.

    What is to be replaced is known when everything was read, so for that the page is made twice.
    """
    from dagpack_hf.pi import session_files
    from dagpack_hf.redact import Redactor, SecretScanner, machine_names, redact_conversations

    deny = read_deny(options)
    owners = session_owners(map(str, session_files(session_paths(options.sessions))))
    scanner = SecretScanner(deny, [*machine_names(), *owners])
    found, left = Redactor(scanner), Redactor(scanner)

    def note(text: str) -> str:
        found.scan(text, f"text {found.rows}")
        return text

    def note_rows(conversations: Dataset) -> Dataset:
        for index, row in enumerate(conversations):
            found.scan(row, f"row {index}")
        return conversations

    built = _build(options, redact=note, prepare=note_rows)
    if not options.redact:
        return built, found.report()

    def replaced(text: str) -> str:
        new = found.redact(text)
        left.scan(new, f"text {left.rows}")
        return new

    built = _build(options, redact=replaced, prepare=lambda rows: redact_conversations(rows, deny=deny)[0])
    return built, found.report(True, left.found)


def _build(options: argparse.Namespace, **private: Any) -> Built:
    from dagpack_hf.view.page import DEFAULT_LIMIT, build_page

    with quiet_libraries(progress=show_progress()):
        return build_page(
            session_paths(options.sessions),
            load_tokenizer(options.tokenizer, needs_template=options.template is None),
            tokenizer_name=tokenizer_name(options.tokenizer),
            approximate=options.tokenizer == SAMPLE,
            max_length=options.max_length,
            limit=None if options.full_text else DEFAULT_LIMIT,
            reading=loading_options(options),
            rendering=rendering_options(options),
            **private,
        )


def _write(built: Built, options: argparse.Namespace, say: Printer) -> None:
    from dagpack_hf.view.page import write_page

    size = write_page(built.page, options.html)
    say(f"{built.loaded}\n{built.rendered}\ntokenizer {tokenizer_name(options.tokenizer)}")
    say(f"wrote {options.html} ({size / 1e6:.1f} MB, {len(built.page.entries):,} entries)")
    if built.cut_texts:
        say(
            f"  {built.cut_texts:,} long texts are in it in part, {built.cut_characters:,} characters are left out; "
            "--full-text keeps them"
        )


def _print(built: Built, options: argparse.Namespace) -> None:
    from rich.console import Console

    from dagpack_hf.view.terminal import print_page

    print_page(built.page, Console(file=sys.stdout, highlight=False), everything=options.all, limit=options.limit)
    print(f"tokenizer {tokenizer_name(options.tokenizer)}", flush=True)
    losses = [*str(built.loaded).splitlines()[1:], *str(built.rendered).splitlines()[1:]]
    for line in losses:
        print(line.rstrip(), file=sys.stderr)

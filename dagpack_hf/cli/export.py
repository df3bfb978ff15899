"""`dagpack export`: the request behind every assistant entry, as JSON lines."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from dagpack_hf.cli.arguments import HelpFormatter, UsageError, add_prompt, add_sessions, read_prompt, session_paths

_DESCRIPTION = """\
Write, for every assistant entry of pi session files, the request that produced it: one JSON
object on each line,

  {"session", "entry", "model", "stop_reason", "trained", "messages", "tools"}

with messages and tools as chat-completions servers take them. Session files hold whatever the
agent has seen, and so does the export.
"""

_EPILOG = """\
examples:
  dagpack export --format openai session.jsonl > requests.jsonl
  dagpack export ~/sessions --out requests.jsonl
  dagpack export sample | jq -r .model | sort | uniq -c

What cannot be read is left out, counted on stderr, and does not change the exit status unless
nothing could be read at all (1); --strict stops at the first such place instead.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "export",
        help="the request behind every assistant entry, as JSON lines",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_sessions(parser)
    parser.add_argument(
        "--format", choices=["openai"], default="openai", help="form of messages and tools (default: openai)"
    )
    parser.add_argument("--out", metavar="FILE", help="file to write, replaced if it is there (default: stdout)")
    parser.add_argument("--strict", action="store_true", help="stop at the first file or line that cannot be used")
    add_prompt(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the JSON lines."""
    from dagpack_hf.conversations import dumps
    from dagpack_hf.pi import export_turns, session_files
    from dagpack_hf.pi.report import Tally

    files = session_files(session_paths(options.sessions))
    if options.out and os.path.realpath(options.out) in {os.path.realpath(file) for file in files}:
        raise UsageError(f"--out {options.out}: is one of the session files that are read; choose another name")
    prompt = read_prompt(options.system_prompt, options.tools)
    tally = Tally()
    with _output(options.out) as out:
        for turn in export_turns(files, on_error="raise" if options.strict else "skip", tally=tally, **prompt):
            out.write(dumps(turn).encode() + b"\n")
        out.flush()
    report = tally.report()
    if options.out or not report.complete:
        print(report, file=sys.stderr)
    return 1 if files and not report.files else 0


@contextmanager
def _output(path: str | None) -> Iterator[BinaryIO]:
    """Stdout, a device, or a file that appears under its name when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        return
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as device:
            yield device
        return
    folder, name = os.path.split(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
        try:
            yield file  # type: ignore[misc]
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)

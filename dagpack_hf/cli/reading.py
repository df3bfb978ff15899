"""Options of the commands that read sessions: which turns are targets, what is not recorded, and how to read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dagpack_hf.cli.arguments import UsageError, positive

_LISTS = ("models", "providers", "cwd", "names", "labels", "html_exports", "target_stop_reasons")
_REPEATED = "; may be given several times"


def add_reading(parser: argparse.ArgumentParser, *, load: bool = True) -> None:
    """Add the options.

    Args:
        parser: The command's parser.
        load: Add those of `load_sessions` too: processes and cache.
    """
    group = parser.add_argument_group(
        "which turns are targets", "What is not selected stays in the context of what is. PATTERN is as in a shell."
    )
    for flag, name, value, text in (
        ("--model", "models", "PATTERN", "only turns of these models: model, or provider/model"),
        ("--provider", "providers", "PATTERN", "only turns of these providers"),
        ("--cwd", "cwd", "DIR", "only sessions in this working directory or below it"),
        ("--session-name", "names", "PATTERN", "only sessions with such a name"),
        ("--label", "labels", "PATTERN", "only branches through an entry with such a label"),
    ):
        group.add_argument(flag, dest=name, action="append", metavar=value, help=text + _REPEATED)
    group.add_argument("--since", metavar="TIME", help="only turns from this time on, such as 2026-01-31 (UTC)")
    group.add_argument("--until", metavar="TIME", help="only turns before this time")
    group.add_argument(
        "--stop-reason",
        dest="target_stop_reasons",
        action="append",
        metavar="REASON",
        help="stop reasons of targets (default: stop and toolUse; length is the one that may be added)" + _REPEATED,
    )
    group = parser.add_argument_group(
        "what sessions do not record",
        "pi before 0.86 stores neither system prompt nor tools. 'dagpack record' makes it do so from now on.",
    )
    group.add_argument(
        "--system-prompt", metavar="FILE", help="text file with the system prompt of turns for which none is recorded"
    )
    group.add_argument("--tools", metavar="FILE", help="JSON file with the list of their tools' function schemas")
    group.add_argument(
        "--html-export",
        dest="html_exports",
        action="append",
        metavar="FILE",
        help="HTML file that pi exported from a running session (/export), for prompt and tools of that session"
        + _REPEATED,
    )
    group.add_argument(
        "--pi-version",
        metavar="VERSION",
        help="version of pi whose rules requests follow where they differ (default: what each file shows)",
    )
    if load:
        group = parser.add_argument_group("how files are read")
        group.add_argument("--num-proc", type=positive, metavar="N", help="processes (default: one)")
        group.add_argument("--no-cache", action="store_true", help="read again what has been read before")


def reading_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `ReadOptions` that were given.

    Raises:
        UsageError: If a file or a value is not what it should be.
        OSError: If a file cannot be read.
    """
    from dagpack_hf.pi.options import ReadOptions

    given = {name: getattr(options, name) for name in (*_LISTS, "since", "until", "pi_version")}
    reading = {name: value for name, value in given.items() if value is not None}
    reading.update(read_prompt(options.system_prompt, options.tools))
    try:
        ReadOptions(**reading)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return reading


def loading_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `load_sessions`."""
    cache = {"load_from_cache_file": False} if options.no_cache else {}
    return {**reading_options(options), "num_proc": options.num_proc, **cache}


def read_prompt(system_prompt: str | None, tools: str | None) -> dict[str, Any]:
    """Read the files with system prompt and tools, as options of `load_sessions`.

    Args:
        system_prompt: Text file.
        tools: JSON file.

    Raises:
        UsageError: If a file does not hold what it should.
        OSError: If a file cannot be read.
    """
    options: dict[str, Any] = {}
    try:
        if system_prompt:
            path, what = system_prompt, "UTF-8 text"
            with open(path, encoding="utf-8", newline="") as file:
                options["system_prompt"] = file.read()
        if tools:
            path, what = tools, "a JSON list of function schemas"
            with open(path, encoding="utf-8") as file:
                options["tools"] = json.load(file)
            if not all(isinstance(tool.get("function", tool)["name"], str) for tool in options["tools"]):
                raise ValueError("a tool without a name")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: is not {what} ({error})") from error
    return options

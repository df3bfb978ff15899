"""`dagpack record`: have pi keep the system prompt and the tools in its session files."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dagpack_hf.cli.arguments import HelpFormatter, UsageError

FILE_NAME = "dagpack-recorder.ts"
_MARK = b"// dagpack-recorder"

_DESCRIPTION = """\
Put a small extension into pi that stores in each session file the system prompt and the tools as
they are sent, once for each change. Without it pi keeps neither before 0.86, and later versions
miss what extensions change. It sends nothing anywhere and leaves the requests as they are.
"""

_EPILOG = """\
examples:
  dagpack record                    is it installed, and current?
  dagpack record --install
  dagpack record --uninstall
  dagpack record --print > recorder.ts

It takes effect when pi starts, or with /reload. Sessions that were recorded before stay as they
are; give their prompt with --system-prompt and --tools. The exit status of --status is 0 if the
extension is installed and current, else 1.
"""

State = Literal["absent", "current", "outdated", "foreign"]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "record",
        help="have pi keep system prompt and tools in its session files",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    actions = parser.add_mutually_exclusive_group()
    for action, text in (
        ("status", "say whether the extension is installed and current (default)"),
        ("install", "install it, or replace an older one"),
        ("uninstall", "remove it"),
        ("print", "write its source to stdout"),
    ):
        actions.add_argument(f"--{action}", dest="action", action="store_const", const=action, help=text)
    parser.add_argument(
        "--agent-dir",
        metavar="DIR",
        help="pi's folder (default: what PI_CODING_AGENT_DIR says, else ~/.pi/agent)",
    )
    parser.add_argument("--force", action="store_true", help=f"replace or remove a {FILE_NAME} that is something else")
    parser.set_defaults(run=run, action="status")


def run(options: argparse.Namespace) -> int:
    """Do what is asked; the status is 1 if the extension is asked for and not there, or not current."""
    if options.action == "print":
        sys.stdout.write(recorder_source().decode())
        return 0
    path = extension_path(options.agent_dir)
    state = extension_state(path)
    if options.action == "status":
        print(_say(path, state))
        return int(state != "current")
    if state == "foreign" and not options.force:
        raise UsageError(f"{path}: is not of this package and stays as it is; rename it, or use --force")
    if options.action == "install":
        _install(path, state)
    else:
        _uninstall(path, state)
    return 0


def recorder_source() -> bytes:
    """Return the source of the extension."""
    return (files("dagpack_hf") / "pi" / "recorder.ts").read_bytes()


def extension_path(agent_dir: str | None = None) -> Path:
    """Return where the extension belongs: pi loads every `.ts` file in the folder `extensions` of its own folder.

    Args:
        agent_dir: pi's folder; by default `PI_CODING_AGENT_DIR`, else `~/.pi/agent`.
    """
    folder = agent_dir or os.environ.get("PI_CODING_AGENT_DIR") or "~/.pi/agent"
    return Path(folder).expanduser() / "extensions" / FILE_NAME


def extension_state(path: Path) -> State:
    """Say what is at a path: nothing, this extension, another version of it, or another file."""
    if not os.path.lexists(path):
        return "absent"
    source = path.read_bytes() if path.is_file() else b""
    if source == recorder_source():
        return "current"
    return "outdated" if source.startswith(_MARK) else "foreign"


def _say(path: Path, state: State) -> str:
    return {
        "absent": f"not installed: there is no {path}; install it with dagpack record --install",
        "current": f"installed and current: {path}",
        "outdated": f"installed, but another version: {path}; replace it with dagpack record --install",
        "foreign": f"not installed: {path} is another file",
    }[state]


def _install(path: Path, state: State) -> None:
    if state == "current":
        print(_say(path, state))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(recorder_source())
    print(
        f"{'installed' if state == 'absent' else 'replaced'} {path}\n"
        "pi loads it at its next start, or with /reload; session files then hold system prompt and tools, and\n"
        "dagpack finds them there. Remove it with dagpack record --uninstall"
    )


def _uninstall(path: Path, state: State) -> None:
    if state == "absent":
        print(f"not installed: there is no {path}")
        return
    path.unlink()
    print(f"removed {path}\npi goes on without it at its next start, or with /reload; session files stay as they are.")

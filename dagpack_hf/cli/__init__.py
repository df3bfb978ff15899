"""The command `dagpack`: what the package does, from a shell.

One module for each subcommand, with `add_parser` and `run`. They import what they need when they run, so that help
comes at once and `export` never loads torch. Errors that a user can mend are one line on stderr; the exit status is
0 for success, 1 for a failure, 2 for a command line that is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dagpack_hf import __version__
from dagpack_hf.cli import demo, export, pack, record, show, stats, train
from dagpack_hf.cli.arguments import HelpFormatter, UsageError

__all__ = ["main"]

_EPILOG = """\
examples:
  dagpack demo                                     everything at once, on the bundled sample
  dagpack stats                                    what sharing saves on your own pi sessions
  dagpack stats ~/sessions --tokenizer Qwen/Qwen3-0.6B
  dagpack show session.jsonl --html session.html   a session beside the token tree it becomes
  dagpack export --format openai session.jsonl > requests.jsonl
  dagpack record --install                         make pi store system prompts and tools
  dagpack pack --tokenizer Qwen/Qwen3-0.6B --max-length 32768 --out rows
  dagpack train --model_name_or_path Qwen/Qwen3-0.6B --max_length 32768 --output_dir out

Each command has a help of its own: dagpack COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name, `sys.argv[1:]` by default.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else None
    try:
        if command == "train":
            return train.main(arguments[1:])
        options = _parser().parse_args(arguments)
        return options.run(options)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _complain(command, "interrupted", 130)
    except UsageError as error:
        return _complain(command, str(error), 2)
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _complain(command, named, 1)
    except ValueError as error:
        return _complain(command, str(error), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dagpack",
        description="Fine-tune on agent sessions with every shared prefix computed once.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dagpack {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (demo, stats, show, export, pack, train, record):
        module.add_parser(commands)
    return parser


def _complain(command: str | None, message: str, status: int) -> int:
    print(f"dagpack{f' {command}' if command else ''}: {' '.join(message.split())}", file=sys.stderr)
    return status

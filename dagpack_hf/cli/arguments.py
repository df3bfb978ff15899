"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = "sample"
"""Stands for the bundled sessions, or the bundled tokenizer."""


class UsageError(ValueError):
    """A command line that cannot be carried out as it is written."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def add_sessions(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument for session files."""
    parser.add_argument(
        "sessions",
        nargs="*",
        metavar="FILE|FOLDER",
        help="session files, or folders that are searched at any depth for *.jsonl; the word 'sample' stands for the "
        "bundled sessions (default: pi's own folder, ~/.pi/agent/sessions or what PI_CODING_AGENT_SESSION_DIR or "
        "PI_CODING_AGENT_DIR say)",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the option for the tokenizer of a command that shows and counts, which does without the model's own."""
    parser.add_argument(
        "--tokenizer",
        default=SAMPLE,
        metavar="NAME|FOLDER",
        help="tokenizer with a chat template, as the model has it (default: the small one bundled with the package, "
        "whose counts are an approximation)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout; text for people goes to stderr"
    )


def positive(text: str) -> int:
    """Parse a positive number of tokens."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def session_paths(given: Iterable[str] | None) -> list[str] | None:
    """Return the paths to read, `None` for pi's own folder."""
    from dagpack_hf.sample import sample_sessions

    paths = [str(sample_sessions()) if path == SAMPLE else path for path in given or ()]
    return paths or None


def load_tokenizer(name: str, *, needs_template: bool = True) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a chat template: `sample`, a folder, or a name on the Hub.

    Args:
        name: The tokenizer.
        needs_template: Whether it must have a chat template.

    Raises:
        UsageError: If it cannot be loaded or has no chat template.
    """
    from dagpack_hf.sample import sample_tokenizer

    if name == SAMPLE:
        return sample_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--tokenizer {name}: cannot be loaded ({_first_line(error)}). Give a folder that holds a tokenizer, a "
            "model name on the Hub that this machine can reach, or 'sample'"
        ) from error
    if needs_template and not tokenizer.chat_template:
        raise UsageError(
            f"--tokenizer {name}: has no chat template, which sessions need. Use that of a chat model, or give "
            "--template FILE"
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Printer:
    """Text for people on stdout, or on stderr when stdout is for a program.

    Args:
        json_output: Whether stdout is for a JSON object.
    """

    def __init__(self, json_output: bool) -> None:
        self._json_output = json_output

    def __call__(self, text: str = "") -> None:
        """Print text for people; what the stream's encoding does not have is escaped."""
        stream = sys.stderr if self._json_output else sys.stdout
        encoding = stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)

    def result(self, value: dict[str, Any]) -> None:
        """Print the JSON object, if stdout is for it."""
        if self._json_output:
            print(json.dumps(value), flush=True)


@contextmanager
def quiet_libraries(*, progress: bool) -> Iterator[None]:
    """Keep the libraries' warnings from the user, and their progress bars unless `progress` is set.

    What the package itself warns about is in the reports that the commands print.
    """
    import datasets
    from transformers.utils import logging as transformers_logging

    names = ("dagpack_hf", "transformers", "trl", "datasets", "accelerate", "torch")
    levels = {name: logging.getLogger(name).level for name in names}
    had_bars = not datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    if not progress:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if had_bars[0]:
            datasets.enable_progress_bars()
        if had_bars[1]:
            transformers_logging.enable_progress_bar()


def show_progress() -> bool:
    """Whether somebody is there to see a progress bar."""
    return sys.stderr.isatty()

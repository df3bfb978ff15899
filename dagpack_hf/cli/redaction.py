"""Options of the commands that write or train: secrets are looked for and counted, and replaced if that is asked for.

A report goes to people; what was found goes nowhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import UsageError

if TYPE_CHECKING:
    import re

    from datasets import Dataset

    from dagpack_hf.redact import RedactionReport

Row = dict[str, Any]


def add_redaction(parser: argparse.ArgumentParser, *, pushes: bool = False) -> None:
    """Add the options.

    Args:
        parser: The command's parser.
        pushes: Whether the command can push, which always redacts.
    """
    group = parser.add_argument_group(
        "secrets and personal data",
        "They are always looked for and counted, and only replaced if that is asked for"
        + (", or if the rows are pushed." if pushes else "."),
    )
    group.add_argument(
        "--redact",
        action="store_true",
        help="replace keys, tokens, passwords, e-mail addresses and user names by placeholders such as <EMAIL_1>, "
        "equal text by an equal one",
    )
    group.add_argument(
        "--deny",
        metavar="FILE",
        help="also look for what the regular expressions in this file match, one on each line",
    )


def read_deny(options: argparse.Namespace) -> Sequence[re.Pattern[str]]:
    """Return the patterns of `--deny`.

    Raises:
        UsageError: If a line is no pattern.
        OSError: If the file cannot be read.
    """
    from dagpack_hf.redact import deny_patterns

    try:
        return deny_patterns(options.deny)
    except ValueError as error:
        raise UsageError(f"--deny {error}") from error


def redact_or_scan(
    conversations: Dataset,
    redact: bool,
    deny: Sequence[re.Pattern[str]] | str | None,
    num_proc: int | None = None,
    push: bool = False,
    use_cache: bool = True,
) -> tuple[Dataset, RedactionReport]:
    """Redact conversations, or only count what they hold.

    Args:
        conversations: The data set.
        redact: Whether to replace what is found.
        deny: Patterns of the user.
        num_proc: Processes.
        push: Whether the result will be pushed: then it is redacted in any case.
        use_cache: Whether redacted rows of an earlier run may be taken.

    Raises:
        ValueError: It is to be pushed, and a second scan still finds something.
    """
    from dagpack_hf.redact import redact_conversations, scan_conversations

    if not redact and not push:
        return conversations, scan_conversations(conversations, deny=deny, num_proc=num_proc)
    redacted, report = redact_conversations(
        conversations, deny=deny, num_proc=num_proc, load_from_cache_file=None if use_cache else False
    )
    if push and not report.safe:
        raise ValueError(f"nothing is pushed: {report.still_there}")
    return redacted, report


class RedactedTurns:
    """Rows of turns on their way to a file, redacted or only counted.

    Args:
        rows: The rows.
        before: The same rows, to find what is to be replaced before the first one is written; `None` to replace
            nothing.
        files: The session files, whose owners' names are looked for.
        deny: Patterns of the user.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        before: Iterable[Row] | None,
        files: Iterable[str],
        deny: Sequence[re.Pattern[str]],
    ) -> None:
        from dagpack_hf.redact import Redactor, SecretScanner, machine_names

        scanner = SecretScanner(deny, [*machine_names(), *session_owners(files)])
        self._rows, self._before = rows, before
        self._found, self._left = Redactor(scanner), Redactor(scanner)

    def __iter__(self) -> Iterator[Row]:
        for index, row in enumerate(self._before or ()):
            self._found.scan(row, f"row {index}")
        for index, row in enumerate(self._rows):
            if self._before is None:
                self._found.scan(row, f"row {index}")
            else:
                row = self._found.redact(row)
                self._left.scan(row, f"row {index}")
            yield row

    def report(self) -> RedactionReport:
        """Return the numbers, after the last row."""
        redacted = self._before is not None
        return self._found.report(redacted, self._left.found if redacted else None)


def session_owners(files: Iterable[str]) -> list[str]:
    """Return the names of those in whose home directories sessions lie or were run."""
    from dagpack_hf.redact import home_owner

    names = []
    for path in files:
        places = [path]
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                header = json.loads(file.readline(65536))
            places.append(header.get("cwd") or "")
        except (OSError, ValueError, AttributeError):  # reading the session says what is wrong with it
            pass
        names += [name for place in places if isinstance(place, str) and (name := home_owner(place))]
    return sorted(set(names))

"""Two passes over values of any shape: find, then replace.

The first pass knows no placeholder yet, and a value that only its place shows to be a secret may stand elsewhere
before it, so nothing can be replaced before everything was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from dagpack_hf.redact.deny import Deny
from dagpack_hf.redact.findings import merge, without_placeholders
from dagpack_hf.redact.json_text import map_json_strings
from dagpack_hf.redact.people import machine_names
from dagpack_hf.redact.placeholders import Hoard, Placeholders
from dagpack_hf.redact.report import RedactionReport
from dagpack_hf.redact.scanner import SecretScanner

T = TypeVar("T")

Change = Callable[[str, str], str]
"""Gets a text and the key whose value it is, and returns what stands in its place."""


class Redactor:
    """Finds and replaces in the strings of values as JSON has them, however deep.

    Args:
        scanner: What is looked for.

    Example:
    >>> redactor = Redactor(SecretScanner(names=["mira.k"]))
    >>> redactor.scan({"text": "mail mira@kroll.io"}, "row 0")
    >>> redactor.redact(["of mira@kroll.io", 1])
    ['of <EMAIL_1>', 1]
    """

    def __init__(self, scanner: SecretScanner) -> None:
        self._scanner = scanner
        self.found = Hoard()
        self.rows = 0
        self._place = ""
        self._placeholders: Placeholders | None = None

    def scan(self, value: Any, place: str) -> None:
        """Read a value.

        Args:
            value: Text, JSON text, or lists and dictionaries with these.
            place: Where it stands, for people.
        """
        before = self.found.total
        self._place = place
        map_strings(value, self._note)
        self.rows += 1
        self.found.rows_with += self.found.total > before
        self._placeholders = None

    def redact(self, value: T) -> T:
        """Return a value with placeholders; the same object where there is nothing to replace."""
        return map_strings(value, self._replace)

    def placeholders(self) -> Placeholders:
        """Return the placeholder of everything that was found so far."""
        if self._placeholders is None:
            self._placeholders = self.found.placeholders()
        return self._placeholders

    def join(self, later: Redactor) -> None:
        """Add what another redactor found in values that come after these."""
        self.found.join(later.found)
        self.rows += later.rows
        self._placeholders = None

    def report(self, redacted: bool = False, remaining: Hoard | None = None) -> RedactionReport:
        """Return the numbers of what was found so far."""
        return RedactionReport.of(self.found, self.rows, redacted, remaining)

    def _note(self, text: str, name: str) -> str:
        findings = self._scanner.find(text, name)
        if not findings:
            return text
        self.found.add(text, findings, self._place)
        return Placeholders.hide(text, findings)

    def _replace(self, text: str, name: str) -> str:
        placeholders = self.placeholders()
        findings = self._scanner.find(text, name)
        if known := without_placeholders(text, placeholders.known(text)):
            findings = tuple(merge([*findings, *known]))
        return placeholders.put(text, findings) if findings else text


def redact_objects(
    values: Iterable[T], *, deny: Deny | None = None, names: Iterable[str] = ()
) -> tuple[list[T], RedactionReport]:
    """Replace secrets and personal data in values of any shape: texts, messages, entries of a session.

    Args:
        values: Texts, or lists and dictionaries with texts; JSON text stays valid JSON.
        deny: Patterns of the user, as for `deny_patterns`.
        names: User names to look for, besides those of this machine.

    Returns:
        New values, equal placeholders for equal text in all of them, and what was found. A second scan of the new
        values is in the report.

    Example:
    >>> texts, report = redact_objects(["export API_TOKEN=k3yQ8xv0Zr71mWp2", "curl -H 'X: k3yQ8xv0Zr71mWp2'"])
    >>> texts, report.distinct
    (['export API_TOKEN=<SECRET_1>', "curl -H 'X: <SECRET_1>'"], {'SECRET': 1})
    """
    scanner = SecretScanner(deny, [*machine_names(), *names])
    redactor, again = Redactor(scanner), Redactor(scanner)
    kept = list(values)
    for index, value in enumerate(kept):
        redactor.scan(value, f"row {index}")
    new = [redactor.redact(value) for value in kept]
    for index, value in enumerate(new):
        again.scan(value, f"row {index}")
    return new, redactor.report(redacted=True, remaining=again.found)


def scan_objects(values: Iterable[Any], *, deny: Deny | None = None, names: Iterable[str] = ()) -> RedactionReport:
    """Count secrets and personal data in values of any shape; arguments as in `redact_objects`."""
    redactor = Redactor(SecretScanner(deny, [*machine_names(), *names]))
    for index, value in enumerate(values):
        redactor.scan(value, f"row {index}")
    return redactor.report()


def map_strings(value: Any, change: Change, name: str = "") -> Any:
    """Return a value with its texts changed, keys too; the same object where nothing is changed.

    A text that is JSON itself is changed string by string, and then as a text.
    """
    if isinstance(value, str):
        if _is_json(value):
            value = map_json_strings(value, lambda text, key: map_strings(text, change, key))
        return change(value, name)
    if isinstance(value, dict):
        items = [(map_strings(key, change), map_strings(item, change, str(key))) for key, item in value.items()]
        same = all(key is old and value[old] is item for old, (key, item) in zip(value, items, strict=True))
        return value if same else dict(items)
    if isinstance(value, list | tuple):
        new = [map_strings(item, change) for item in value]
        return value if all(map(lambda old, item: old is item, value, new)) else type(value)(new)
    return value


def _is_json(text: str) -> bool:
    """Whether a text is a JSON object or list, or one that was encoded a second time."""
    if (text[:1], text[-1:]) not in (("{", "}"), ("[", "]")) and text[:2] not in ('"{', '"['):
        return False
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return _is_loose_json(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_loose_json(text: str) -> bool:
    """Whether Python reads a text as JSON: with `NaN`, say."""
    if "NaN" not in text and "Infinity" not in text:
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

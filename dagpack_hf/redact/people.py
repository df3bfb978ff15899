"""Home directories and user names: of this machine, and of whoever ran the sessions.

A home directory is replaced by its name only, `/home/<USER_1>/project`, so that paths stay paths. A name alone is
replaced as a word where it cannot be another word: five letters or more and no name of a service. Shorter ones are
replaced where they stand for a person: in a path, before `@host`, after `user=` and `~`, as the owner in a listing.

Cost: one search for `/home/`, `/Users/` and each name; 160 to 260 MB/s for Python code.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dagpack_hf.redact.findings import Finding

RANK = 9
KIND = "USER"

_NOBODY = re.compile(
    r"root|user|users|username|you|me|someone|nobody|admin|administrator|guest|default|public|shared|all"
    r"|home|name|ubuntu|debian|fedora|centos|arch|alpine|ec2-user|azureuser|gcp|vagrant|docker|node|runner"
    r"|runneradmin|vscode|codespace|gitpod|jovyan|app|apps|web|www|www-data|daemon|service|deploy|dev"
    r"|developer|build|builder|ci|test|tester|tests|linuxbrew|git|postgres|mysql|redis|nginx|jenkins"
    r"|circleci|travis|sandbox|agent|assistant|claude|foo|bar|demo|example|sample|opc|pi|project|projects"
    r"|workspace|workspaces|local|system|python|code|data",
    re.IGNORECASE,
)
"""Accounts that stand for no person."""

_NAME = r"(?P<name>[A-Za-z0-9_][\w.+-]{0,63})"
_HOMES = tuple(
    (root, re.compile(pattern))
    for root, pattern in (
        ("/home/", rf"(?<![\w.-])/(?i:home)/{_NAME}"),
        ("/users/", rf"(?<![\w.-])/(?:Users|users|USERS)/{_NAME}"),
        ("users\\", rf"(?:(?<=:\\)|(?<=:\\\\)|(?<=:\\\\\\\\))(?i:users)\\{{1,4}}{_NAME}"),
        ("--home-", rf"--home-{_NAME}"),
        ("--users-", rf"--Users-{_NAME}"),
    )
)
"""Home directories, and how pi writes them as one name, with hyphens for slashes."""

_ENCODED = "--"
_BEFORE_PERSON = re.compile(r"(?:(?i:user|username|login|logname|owner)[\"']?\s?[=:]\s?[\"']?|(?<![\w~])~)$")
_HOST = re.compile(r"@\w")
_GROUP = re.compile(r"\s+(?:staff|users|wheel|[\w-]+)\s+\d+\s+(?:[A-Z][a-z]{2}|\d+)\s")
"""Group, size and date in a listing, behind the owner."""

_WORD = 5
"""Letters of a name from which on it is taken for one wherever it stands."""


def home_owner(path: str) -> str | None:
    r"""Name of the person in whose home directory a path lies, `None` for nobody's.

    Example:
    >>> home_owner("/home/mira/code"), home_owner(r"C:\Users\Mira"), home_owner("/home/ubuntu")
    ('mira', 'Mira', None)
    """
    match = next(_home_directories(path, path.lower()), None)
    return match["name"] if match and match.start() < 4 and _is_person(match["name"]) else None


def machine_names() -> list[str]:
    """Names of who runs this process: of the account, and of its home directory."""
    names = [Path.home().name]
    with suppress(KeyError, OSError):  # no account of this number
        names.append(getpass.getuser())
    return [name for name in dict.fromkeys(names) if _is_person(name)]


class People:
    """Finds home directories, and some people by name.

    Args:
        names: User names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted({name for name in names if _is_person(name)}))

    def find(self, text: str, lower: str) -> Iterator[Finding]:
        """Yield the names in a text.

        Args:
            text: The text.
            lower: The same in lower case, character for character.
        """
        for match in _home_directories(text, lower):
            if finding := self._in_path(match):
                yield finding
        for name in self.names:
            start = text.find(name)
            while start >= 0:
                end = start + len(name)
                if _is_word(text, start, end) and (len(name) >= _WORD or _is_named_person(text, start, end)):
                    yield Finding(start, end, KIND, RANK)
                start = text.find(name, end)

    def _in_path(self, match: re.Match[str]) -> Finding | None:
        name = match["name"]
        if match[0].startswith(_ENCODED):
            known = next((each for each in self.names if name.startswith(each)), None)
            name = known or name.partition("-")[0]
        name = name.rstrip(".")
        start = match.start("name")
        return Finding(start, start + len(name), KIND, RANK) if _is_person(name) else None


def _home_directories(text: str, lower: str) -> Iterator[re.Match[str]]:
    for root, pattern in _HOMES:
        start = lower.find(root)
        while start >= 0:
            if match := pattern.match(text, start):
                yield match
            start = lower.find(root, start + 1)


def _is_word(text: str, start: int, end: int) -> bool:
    around = text[max(0, start - 1) : start] + text[end : end + 1]
    return not any(each == "_" or (each.isascii() and each.isalnum()) for each in around)


def _is_named_person(text: str, start: int, end: int) -> bool:
    """Whether what stands around a short name says that it is one."""
    if _BEFORE_PERSON.search(text[max(0, start - 16) : start]):
        return True
    before = text[max(0, start - 1) : start]
    at_host = (not before or before.isspace() or before in "([\"'") and _HOST.match(text, end) is not None
    return at_host or (before.isspace() and _GROUP.match(text, end, end + 80) is not None)


def _is_person(name: str) -> bool:
    return len(name) > 1 and _NOBODY.fullmatch(name) is None and not name.isdigit()

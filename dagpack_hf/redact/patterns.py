"""What has a form of its own and no token rule finds, or finds only in part.

Passwords in URLs of any scheme, `Authorization` headers, `curl -u`, `.netrc`; private keys, also cut short or with
line breaks written as two characters; JSON Web Tokens; access key ids of AWS, which Kingfisher shows only beside their
secret; e-mail addresses.

A pattern is tried only where a word stands without which it cannot match.

Cost: 60 to 100 MB/s for Python code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dagpack_hf.redact.findings import Finding, found
from dagpack_hf.redact.values import Strength, is_no_value, looks_random, password_strength

_KEY_RANK, _TOKEN_RANK, _PASSWORD_RANK, _EMAIL_RANK = 1, 2, 6, 8


def find_patterns(text: str, lower: str) -> Iterator[Finding]:
    """Yield what a text holds.

    Args:
        text: The text.
        lower: The same in lower case, character for character.
    """
    for rule in _RULES:
        for root in rule.roots:
            start = lower.find(root)
            while start >= 0:
                match = rule.pattern.match(text, start)
                if match and (strength := rule.strength(match["secret"])):
                    yield found(*match.span("secret"), rule.kind, rule.rank, strength is Strength.STRONG)
                start = lower.find(root, max(start + len(root), match.end() if match else 0))
    yield from _addresses(text)


def _any(secret: str) -> Strength:
    return Strength.WEAK


def _random(secret: str) -> Strength:
    return Strength.STRONG if looks_random(secret) else Strength.NO


def _password(secret: str) -> Strength:
    """Any that is none of the words of documentation."""
    if is_no_value(secret) or secret.lower() in {"pass", "pw", "user"}:
        return Strength.NO
    return Strength.STRONG if password_strength(secret, True) is Strength.STRONG else Strength.WEAK


class _Rule(NamedTuple):
    """One pattern, matched where one of its roots stands in lower case; `secret` is what is to be hidden."""

    kind: str
    rank: int
    roots: tuple[str, ...]
    pattern: re.Pattern[str]
    strength: Callable[[str], Strength] = _any


_RULES = (
    _Rule(
        "PRIVATE_KEY",
        _KEY_RANK,
        ("-----begin ",),
        re.compile(
            r"(?P<secret>-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:\s|\\{1,4}[nr])*"
            r"(?=[A-Za-z0-9+/=]{16}|Proc-Type|Version|Comment)(?:[A-Za-z0-9+/=:,.\s-]|\\{1,4}[nrt])*?"
            r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"|(?=\s*(?:[^A-Za-z0-9+/=:,.\s\\-]|\\{1,4}[^nrt\\]|\Z))))"
        ),
    ),
    _Rule("JWT", _TOKEN_RANK, ("eyj",), re.compile(r"(?<![\w-])(?P<secret>eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})")),
    _Rule(
        "AWS_ACCESS_TOKEN",
        _TOKEN_RANK,
        ("akia", "asia", "abia", "acca"),
        re.compile(r"\b(?P<secret>(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})\b"),
    ),
    _Rule(
        "TELEGRAM_BOT_TOKEN",
        _TOKEN_RANK,
        (":aa",),
        re.compile(r"(?<=\d{8}):(?P<secret>AA[\w-]{33})(?![\w-])"),
    ),
    _Rule(
        "URL_PASSWORD",
        _PASSWORD_RANK,
        ("://",),
        re.compile(r"""://[^\s:/@"'`<>\\]{0,128}:(?P<secret>[^\s/@"'`<>\\]{2,256})@(?=[\w-]+[.:]|\[|localhost)"""),
        _password,
    ),
    _Rule(
        "AUTHORIZATION",
        _PASSWORD_RANK,
        ("bearer ", "basic ", "token ", "authorization", "x-api-key", "private-token"),
        re.compile(
            r"""(?i)(?:[a-z-]{4,14}\\{0,3}["']?[:=]\s?\\{0,3}["']?|(?:bearer|basic|token)\s{1,3})"""
            r"(?:(?:bearer|basic|token)\s{1,3})?(?P<secret>[A-Za-z0-9._~+/-]{12,4096}={0,2})"
        ),
        _random,
    ),
    _Rule(
        "PASSWORD",
        _PASSWORD_RANK,
        (" -u", " --user"),
        re.compile(r"""\s(?:-u|--user)[ =]?["']?[\w.@+-]{1,64}:(?P<secret>[^\s"'\\]{3,256})"""),
        _password,
    ),
    _Rule(
        "PASSWORD",
        _PASSWORD_RANK,
        ("sshpass ",),
        re.compile(r"""sshpass\s+-p\s*["']?(?P<secret>[^\s"'\\]{3,256})"""),
        _password,
    ),
    _Rule(
        "PASSWORD",
        _PASSWORD_RANK,
        ("machine ",),
        re.compile(r"machine\s+\S+\s+login\s+\S+\s+password\s+(?P<secret>\S{3,256})"),
        _password,
    ),
)

_LOCAL_PART = re.compile(r"(?<![\w.+%/@-])[A-Za-z0-9][\w.%+-]{0,63}$", re.ASCII)
_DOMAIN = re.compile(r"@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.)+[A-Za-z]{2,24}(?![\w(\[-]|\.\w)", re.ASCII)
_IN_URL = re.compile(r"://[^\s/@]*:$")
_NO_PEOPLE = re.compile(
    r"""(?ix) (?:git|no-?reply|do-?not-?reply|bounces?)@.*
    | .*[@.]example\.(?:com|org|net|edu)(?:\.\w+)? | .*[@.](?:example|test|invalid|localhost|local)
    | .*\.(?:png|jpe?g|gif|svg|webp|ico|css|js|mjs|cjs|ts|tsx|jsx|json|html?|map|scss|less|woff2?|txt|yaml|yml|lock|zip
    |service|timer|socket|target|mount|slice|scope|device|path)"""
)
"""Addresses of services and of documentation (RFC 2606), file names like `logo@2x.png`, and units of systemd."""


def _addresses(text: str) -> Iterator[Finding]:
    place = text.find("@")
    while place >= 0:
        domain = _DOMAIN.match(text, place)
        local = _LOCAL_PART.search(text[max(0, place - 65) : place]) if domain else None
        if domain and local and not _NO_PEOPLE.fullmatch(local[0] + domain[0]):
            start = place - len(local[0])
            if not _IN_URL.search(text[max(0, start - 160) : start]):
                yield Finding(start, domain.end(), "EMAIL", _EMAIL_RANK)
        place = text.find("@", place + 1)

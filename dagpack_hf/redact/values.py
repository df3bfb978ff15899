"""Whether what stands behind a name like `password` is one, or a word, a path, a call or a number in code.

Shannon entropy alone tells little for texts of ten characters, so what counts is which kinds of characters are mixed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from enum import IntEnum

_CLASSES = tuple(map(re.compile, ("[a-z]", "[A-Z]", "[0-9]", r"[^A-Za-z0-9\s]")))
_NO_VALUE = re.compile(
    r"""(?ix) <.*> | \$\w+ | \$[({].* | %\w+% | %[({].* | .*\{\{?.*\}.* | [*.x\-_=#•]+ | (?:[*x•]{4,}.*) | .*\.\.\.
    | (?:your|my|some|insert|replace|enter)[\s_.-].*
    | .*(?:example|placeholder|redacted|changeme|change[_-]me|goes[_-]?here).*
    | password | passwd | passphrase | pwd | secret | token | string | none | null | nil | true | false | undefined
    | required | optional | default | hidden | masked | filtered | disabled | enabled | unknown | invalid | missing
    | test | tests | testing | dummy | sample | value"""
)
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.@+/ -]*|[A-Za-z]:\\.*|[a-z][a-z0-9+.-]*://.*|(?:[\w.-]+/)+[\w.-]+\.\w{1,5}")
_CODE = re.compile(r"[A-Za-z_$][\w$]*(?:(?:\.|->|::)[A-Za-z_$][\w$]*)*[?!]?(?:[(\[].*)?|.*\w\(.*|[-+]?[\d_.,]+\w{0,2}")
_WORDS = re.compile(r"[a-z]+(?:[-_. /:][a-z]+)*|[A-Z]+(?:[-_. ][A-Z]+)*|[A-Z]?[a-z]+(?:[A-Z][a-z]+)*", re.ASCII)
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")


class Strength(IntEnum):
    """How much a value looks like a secret."""

    NO = 0
    WEAK = 1
    """A value that only its place makes a secret: replaced there."""
    STRONG = 2
    """One that nobody writes for another reason: replaced wherever it stands."""


def is_no_value(text: str) -> bool:
    """Whether a text only stands for a value, as in documentation and templates."""
    return len(set(text)) < 3 or _NO_VALUE.fullmatch(text) is not None


def mixture(text: str) -> int:
    """Of lower case, upper case, digits and other characters, how many are there."""
    return sum(each.search(text) is not None for each in _CLASSES)


def entropy(text: str) -> float:
    """Shannon entropy in bits for each character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def looks_random(text: str) -> bool:
    """Whether a text is such as generators of keys make: long, mixed, and no words or path."""
    if len(text) < 12 or " " in text or is_no_value(text) or _PATH.fullmatch(text) or _WORDS.fullmatch(text):
        return False
    if not re.search("[0-9]", text):
        return len(text) >= 20 and mixture(text) >= 2 and entropy(text) >= 4.0 and "_" not in text
    return entropy(text) >= (2.8 if _HEX.fullmatch(text) else 3.0) and mixture(text) >= 2


def is_scattered(text: str) -> bool:
    """Whether upper case, lower case and digits alternate, as in passwords and hardly in names of variables."""
    return len(text) >= 8 and mixture(text) >= 3 and len(re.findall("[0-9]+", text)) >= 2


def password_strength(text: str, quoted: bool) -> Strength:
    """Say how much the value of a name like `password` looks like one.

    Args:
        text: The value.
        quoted: Whether it stands in quotes, or in a dump of an environment; else it may be code.
    """
    if len(text) < 5 or len(text) > 512 or is_no_value(text) or _PATH.fullmatch(text):
        return Strength.NO
    if not quoted and (_CODE.fullmatch(text) or len(text) < 6 or mixture(text) < 2):
        name = _CODE.fullmatch(text) and not re.fullmatch(r"\w+", text)
        sure = len(text) >= 16 and looks_random(text)
        return Strength.STRONG if sure or (is_scattered(text) and not name) else Strength.NO
    if quoted and (_WORDS.fullmatch(text) or text.count(" ") > 1 or mixture(text) < 2):
        return Strength.NO
    return Strength.STRONG if len(text) >= 8 and mixture(text) >= 3 and " " not in text else Strength.WEAK


def key_strength(text: str) -> Strength:
    """Say how much the value of a name like `api_key` looks like one."""
    return Strength.STRONG if len(text) <= 4096 and looks_random(text) else Strength.NO

"""Values behind names like `password`, `api_key` and `client_secret`.

In code, JSON, YAML and INI files (`name: value`, `name = "value"`, `"name" => 'value'`), on command lines
(`--password value`), and in dumps of an environment (`NAME=value`, one on each line). What a value may look like
depends on how it stands there: unquoted it may be code, in a dump it cannot.

Cost: 25 to 35 MB/s for Python code, most of it where the words of such names stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dagpack_hf.redact.findings import Finding, found
from dagpack_hf.redact.values import Strength, is_no_value, key_strength, password_strength

RANK = 7
KIND = "SECRET"

_PASSWORD_NAME = re.compile(
    r"(?i)pass(?:word|wd|phrase|code|wort)|contrase[ñn]a|pwd|secret|(?:^|[a-z0-9]_|[_.-]|(?<=[a-z])(?=P))pass(?=$|[_.-])"
)
_KEY_NAME = re.compile(
    r"(?i)token|credential|bearer|connection[_-]?string|(?:api|app|access|account|auth|client|consumer|crypt|db|deploy|"
    r"encryption|hmac|jwt|license|master|priv|private|service|session|shared|sign|signing|storage|subscription|"
    r"webhook)[_-]?key"
)
_HARMLESS_NAME = re.compile(
    r"(?i)(?:tokens|tokeni[sz]\w*|token[_-]?(?:ids?|types?|counts?|names?|urls?|len\w*|limit\w*|index|budget\w*)|"
    r"(?<![A-Za-z])(?:(?:max|num|n|min|per|total|eos|bos|pad|unk|sep|cls|mask|special|next|page|new|input|output|cached?|prompt|"
    r"stop)[_-]?token(?:[_-]\w+)?)|(?:name|path|file|dir|url|uri|field|label|hint|prompt|length|policy|input|regex|"
    r"pattern|error|ref|arn|key_?id|version|type|id))$"
)

_ROOTS = ("pass", "contrase", "pwd", "secret", "token", "credential", "key", "connection", "bearer")
"""In lower case one of these is in every name that counts."""

_NAME_BEFORE = re.compile(r"[\w.-]{0,48}$")
_ASSIGNED = re.compile(
    r"""(?P<rest>[\w.-]{0,40})\\{0,3}["'`]?\]?\s{0,2}(?::=|=>|={1,3}|:)\s{0,2}(?:"""
    r"""(?:[a-zA-Z]{1,8}\s{0,2}=\s{0,2})?[a-zA-Z@]{0,2}\\{0,3}(?P<quote>["'`])(?P<quoted>[^"'`\\\n]{5,4096})\\{0,3}(?P=quote)"""
    r"""|(?P<bare>[^\s"'`\\<>,;&(){}\[\]]{6,4096})(?![(\[{]))"""
)
_VARIABLE = re.compile(
    r"""(?m)^[ \t]*(?:(?:export|set|ENV|ARG|-e|declare -x)[ \t]+)?(?P<name>[A-Z][A-Z0-9_]*)="""
    r"""(?P<quote>["']?)(?P<value>(?:(?<=["'])[^"'\\\n]|[^\s"'\\]){5,4096})(?=(?P=quote)(?:\s|$))"""
)
_VARIABLE_KEY = re.compile(r"(?:^|_)(?:KEY|AUTH|PAT|DSN)$")
_ELEMENT = re.compile(r"<(?P<name>[\w.-]{3,48})>(?P<value>[^<>\s]{5,512})</")
_OPTION = re.compile(
    r"""(?i)(?<!\S)--(?P<name>[a-z-]{0,24}(?:password|passwd|passphrase|token|secret|api-?key|access-?key))"""
    r"""[= ]["']?(?P<value>[^\s"'`\\-][^\s"'`\\]{4,512})"""
)


def secret_name(name: str) -> str | None:
    """Say whether a name announces a secret: `"password"`, `"key"`, or `None`.

    Example:
    >>> secret_name("DB_PASSWORD"), secret_name("apiKey"), secret_name("max_tokens"), secret_name("keyboard")
    ('password', 'key', None, None)
    """
    if len(name) > 128 or _HARMLESS_NAME.search(name):
        return None
    return "password" if _PASSWORD_NAME.search(name) else "key" if _KEY_NAME.search(name) else None


def named_strength(name: str, value: str, *, quoted: bool) -> Strength:
    """Say how much a value looks like a secret, given its name.

    Args:
        name: The name.
        value: The value.
        quoted: Whether it stands in quotes, or in a dump of an environment; else it may be code.
    """
    sort = secret_name(name)
    if sort is None:
        return Strength.NO
    return password_strength(value, quoted) if sort == "password" else key_strength(value)


def find_named(text: str, lower: str) -> Iterator[Finding]:
    """Yield the values behind such names.

    Args:
        text: The text.
        lower: The same in lower case, character for character.
    """
    roots = [root for root in _ROOTS if root in lower]
    if ":" in text or "=" in text:
        for root in roots:
            yield from _assigned(text, lower, root)
    if "=" in text:
        for match in _VARIABLE.finditer(text):
            if strength := _variable_strength(match["name"], match["value"]):
                yield _finding(match.span("value"), strength)
    if "</" in text and roots:
        for match in _ELEMENT.finditer(text):
            if strength := named_strength(match["name"], match["value"], quoted=True):
                yield _finding(match.span("value"), strength)
    if "--" in text and roots:
        for match in _OPTION.finditer(text):
            if strength := named_strength(match["name"], match["value"], quoted=True):
                yield _finding(match.span("value"), strength)


def _assigned(text: str, lower: str, root: str) -> Iterator[Finding]:
    start = lower.find(root)
    while start >= 0:
        end = start + len(root)
        if match := _ASSIGNED.match(text, end):
            before = _NAME_BEFORE.search(text[max(0, start - 48) : start])
            name = f"{before[0] if before else ''}{text[start:end]}{match['rest']}"
            group = "bare" if match["quoted"] is None else "quoted"
            value = match[group].rstrip(".") if group == "bare" else match[group]
            if strength := _assigned_strength(name, value, match, group == "quoted"):
                yield _finding((match.start(group), match.start(group) + len(value)), strength)
        start = lower.find(root, end)


def _assigned_strength(name: str, value: str, match: re.Match[str], quoted: bool) -> Strength:
    """Say how much a value looks like a secret; `NAME=value` is for a shell, which has no code there either."""
    for_shell = name.isupper() and match.string[match.end("rest")] == "=" and not re.search(r"[.(\[]", value)
    return named_strength(name, value, quoted=quoted or for_shell)


def _variable_strength(name: str, value: str) -> Strength:
    """Say how much a line of a dump holds a secret: there is no code there, so weak passwords count."""
    sort = secret_name(name)
    if sort == "password":
        word = is_no_value(value) or "/" in value[:2] or value.isdigit()
        return max(password_strength(value, True), Strength.NO if word else Strength.WEAK)
    return key_strength(value) if sort == "key" or _VARIABLE_KEY.search(name) else Strength.NO


def _finding(span: tuple[int, int], strength: Strength) -> Finding:
    return found(*span, KIND, RANK, strength is Strength.STRONG)

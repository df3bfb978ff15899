"""Forty things that should not leave a machine, each in a text as sessions have it.

Everything is put together from parts when it is asked for, so that no file of the repository holds what a scanner of
repositories would take for a secret.
"""

from __future__ import annotations

import base64
import json
import random
import string
from dataclasses import dataclass

LETTERS = string.ascii_letters
MIXED = LETTERS + string.digits
UPPER = string.ascii_uppercase + "234567"
HEX = "0123456789abcdef"

OWNER = "mirkovich"
"""Whoever ran the sessions."""


@dataclass(frozen=True)
class Planted:
    """A text with a secret in it.

    Attributes:
        name: What it is.
        secret: What must be gone.
        text: The text, with the secret in it.
        kind: What the report should call it, `None` for whatever the rules of the library say.
    """

    name: str
    secret: str
    text: str
    kind: str | None = None


def planted(seed: int = 7) -> list[Planted]:
    """Return the forty."""
    draw = random.Random(seed)

    def some(count: int, alphabet: str = MIXED) -> str:
        return "".join(draw.choice(alphabet) for _ in range(count - 3)) + draw.choice("kwz") + "7" + draw.choice("QRT")

    def upper(count: int) -> str:
        return "".join(draw.choice(UPPER) for _ in range(count))

    return [*_tokens(some, upper, draw), *_keys(some), *_named(some), *_people(some)]


def _tokens(some, upper, draw) -> list[Planted]:
    digits = "".join(draw.choice(string.digits) for _ in range(12))
    part = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode()).decode().rstrip("=")
    claims = base64.urlsafe_b64encode(json.dumps({"sub": some(12), "admin": True}).encode()).decode().rstrip("=")
    tokens = {
        "github classic": "gh" + "p_" + some(36),
        "github fine-grained": "github" + "_pat_" + some(22) + "_" + some(59),
        "hugging face": "h" + "f_" + "".join(draw.choice(LETTERS) for _ in range(34)),
        "openai project": "sk-" + "proj-" + some(74) + "T3Blbk" + "FJ" + some(74),
        "openai old": "sk-" + some(20) + "T3Blbk" + "FJ" + some(20),
        "anthropic": "sk-" + "ant-api03-" + some(93) + "AA",
        "npm": "np" + "m_" + some(36),
        "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + some(80),
        "slack": "xo" + "xb-" + digits + "-" + digits[::-1] + "-" + some(24),
        "slack webhook": "https://hooks.slack" + ".com/services/T" + upper(8) + "/B" + upper(8) + "/" + some(24),
        "stripe": "sk" + "_live_" + some(24),
        "aws id": "AK" + "IA" + upper(16),
        "google": "AI" + "za" + some(35),
        "gitlab": "gl" + "pat-" + some(20),
        "sendgrid": "S" + "G." + some(22) + "." + some(43),
        "jwt": f"{part}.{claims}.{some(43)}",
    }
    places = (
        "Use {} for that.",
        "remote: token {}\nremote: done",
        "const token = '{}';",
        "I set it to `{}`, see above",
    )
    return [
        Planted(name, token, places[index % len(places)].format(token))
        for index, (name, token) in enumerate(tokens.items())
    ]


def _keys(some) -> list[Planted]:
    def block(sort: str, lines: int, line_break: str = "\n") -> str:
        body = line_break.join(some(64) for _ in range(lines))
        return (
            f"-----BEGIN {sort}PRIVATE "
            + f"KEY-----{line_break}{body}{line_break}-----END {sort}PRIVATE "
            + "KEY-----"
        )

    whole, cut, account = block("RSA ", 12), block("OPENSSH ", 9), block("", 8, "\\n")
    cut = cut[: cut.index("-----END")]
    return [
        Planted("private key", whole, f"$ cat id_rsa\n{whole}\n$", "PRIVATE_KEY"),
        Planted("private key, cut short", cut.rstrip(), f"{cut}[output truncated, 12 lines more]", "PRIVATE_KEY"),
        Planted(
            "private key of a service account",
            account,
            '{\n  "type": "service_account",\n  "private_key": "' + account + '\\n",\n  "universe": "x"\n}',
            "PRIVATE_KEY",
        ),
    ]


def _named(some) -> list[Planted]:
    basic = base64.b64encode(f"svc:{some(18)}".encode()).decode()
    values = [
        ("postgres url", some(14), "DATABASE_URL=postgres://app:{}@db.internal:5432/prod"),
        ("basic auth url", some(12), "git clone https://bot:{}@git.corp.net/x.git"),
        ("weak password in a url", "hunter" + "2", "redis://default:{}@cache:6379/0 answers"),
        ("weak password in an environment", "tr0ub" + "4dor", "HOME=/srv\nDB_PASSWORD={}\nSHELL=/bin/sh"),
        ("secret key", some(50, MIXED + "!@#%^&*-_"), "DJANGO_SECRET_KEY={}\nDEBUG=0"),
        ("exported key", some(32), "export SERVICE_API_KEY='{}'"),
        ("aws secret", some(40), "[default]\naws_secret_access_key = {}\nregion = eu-west-1"),
        ("password in yaml", "Gr33n-" + some(9), "database:\n  user: app\n  password: {}\n  port: 5432"),
        ("client secret in json", some(32), '{{"client_id": "web", "client_secret": "{}"}}'),
        ("key in code", some(28), 'client = Client(api_key="{}", timeout=3)'),
        ("bearer header", some(40), "curl -H 'Authorization: Bearer {}' https://api.corp.net/v1"),
        ("basic header", basic, "> Authorization: Basic {}\n> Accept: */*"),
        ("curl user", "S3cr" + some(8), "curl -s -u deploy:{} https://ci.corp.net/job"),
        ("netrc", "n3t" + some(8), "machine git.corp.net login bot password {}"),
        ("option", "0pt" + some(9), "mysql --host db --password={} -e 'select 1'"),
    ]
    return [Planted(name, value, text.format(value)) for name, value, text in values]


def _people(some) -> list[Planted]:
    user, list_address = "tes" + "sa.lind", "ops+" + "night@sub.kroll.co.uk"
    return [
        Planted("e-mail", f"{user}@kroll" + ".io", f"Author: Tessa Lind <{user}@kroll" + ".io>", "EMAIL"),
        Planted("e-mail in a list", list_address, f"cc: {list_address}, root", "EMAIL"),
        Planted("home", OWNER, f"cd /home/{OWNER}/code && ls", "USER"),
        Planted("home on macOS", "jo" + "nas.b", 'File "/Users/jo' + 'nas.b/x.py", line 3', "USER"),
        Planted("home on Windows", "Hei" + "di", "C:\\Users\\Hei" + "di\\notes.txt was saved", "USER"),
        Planted("session folder", "an" + "nika", "~/.pi/agent/sessions/--home-an" + "nika-shop--/s.jsonl", "USER"),
    ]

"""Secrets and personal data: found in texts, replaced by placeholders, and shown nowhere."""

from __future__ import annotations

import doctest
import importlib
import json
import pickle
import re
import sysconfig
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, Features, Value
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagpack_hf.conversations import JsonText, dumps
from dagpack_hf.redact import (
    Redactor,
    SecretScanner,
    deny_patterns,
    home_owner,
    redact_conversations,
    redact_objects,
    scan_conversations,
    scan_objects,
)
from dagpack_hf.redact.escapes import escape_views
from dagpack_hf.redact.json_text import json_strings, map_json_strings
from tests.planted_secrets import OWNER, planted

ROOT = Path(__file__).parents[1]
TOKEN = "gh" + "p_" + "aZ3bY9cX8dW7eV6fU5gT4hS3iR2jQ1kP0lO9"
OTHER = "gh" + "p_" + "Qq1Ww2Ee3Rr4Tt5Yy6Uu7Ii8Oo9Pp0Aa1Ss2"
MAIL = "nora@kroll" + ".io"


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def found(text: str, name: str = "", **options) -> list[tuple[str, str]]:
    scanner = SecretScanner(**options)
    return [(text[each.start : each.end], each.kind) for each in scanner.find(text, name)]


@pytest.mark.parametrize(
    "name", ["dataset", "escapes", "findings", "json_text", "named", "people", "redactor", "rows"]
)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"dagpack_hf.redact.{name}"))
    assert result.failed == 0 and result.attempted > 0


# What is found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("index", range(40))
def test_each_planted_secret_is_replaced_and_nothing_else_of_its_text(index, seed):
    each = planted(seed)[index]
    [text], report = redact_objects([each.text], names=[OWNER])
    assert each.secret not in text and report.safe and report.found == 1
    [kind] = report.distinct
    assert each.kind in (None, kind)
    shown = text.replace(f"<{kind}_1>", each.secret)
    assert shown == each.text or kind in ("CURL_AUTH_USER", "GENERIC_CREDENTIAL_URI")


def test_there_are_forty():
    assert len({each.secret for each in planted()}) == len(planted()) == 40


@pytest.mark.parametrize(
    "text",
    [
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "id = 'd703a1a9-1b7b-4fb1-b512-c9738b1fe617'",
        '"integrity": "sha512-v2kDEe57lecTulaDIuNTPy3Ry4gLGJ6Z1O3vE1krgXZNrsQ+LFTGHVxVjcXPs17LhbZVGedAJv8XZ1tvj5"',
        "tokens = tokenizer(text); max_tokens = 4096; eos_token='<|end|>'",
        "password = getpass.getpass(); token: str = self.next_token",
        "def login(user, password=None, api_key: str | None = None):",
        "secret = os.environ['SECRET_KEY']; key = config.api_key",
        "API_KEY=your-api-key-here\nDB_PASSWORD=<password>\nSECRET=${SECRET}\nPWD=/srv/app",
        "mail someone@example.com, git@github.com:a/b.git, x@y.test and logo@2x.png",
        "https://user:password@host/x and https://host:8080/a@b",
        "cd /home/user/project; ls /home/ubuntu /Users/Shared /root",
        "The password must have 8 characters, a token is kept for 30 days.",
        "data:image/png;base64," + "iVBORw0KGgo" * 20,
        "@dataclass\nclass A: ...  # see a@b.shape[0] and getty@tty1.service",
        "if token == previous_token: key_id = 'AKIDEXAMPLE'",
        "cache_key: v2-deps-linux-x64, token_type_ids=[0, 1], pad_token_id: 151643",
    ],
)
def test_ordinary_text_is_left(text):
    assert found(text) == []


def test_less_than_one_in_two_hundred_lines_of_code_and_prose_change():
    library = Path(sysconfig.get_paths()["stdlib"])
    code = sorted(library.glob("[a-h]*.py"))
    prose = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
    scanner = SecretScanner(names=[OWNER])
    for files, least in ((code, 20_000), (prose, 500)):
        lines = changed = 0
        for path in files:
            text = path.read_text("utf-8")
            lines += text.count("\n") + 1
            places = [(text.count("\n", 0, each[0]), text.count("\n", 0, each[1])) for each in scanner.find(text)]
            changed += len({line for first, last in places for line in range(first, last + 1)})
        assert lines > least and changed < lines / 200


def test_a_name_says_that_its_value_is_a_secret():
    value = "x9Kd83jsLq02"
    assert found(value) == []
    assert found(value, "DB_PASSWORD") == [(value, "SECRET")] == found(value, "apiKey")
    assert found(value, "max_tokens") == [] == found(value, "title")
    scanner = SecretScanner()
    assert [len(scanner.find(value, name)) for name in ("", "DB_PASSWORD", "title")] == [0, 1, 0]


def test_a_variable_of_an_environment_may_be_a_weak_password_but_no_path_or_number():
    text = "DB_PASS=swordfish\nOLD_PASSWORD=12345678\nTLS_API_KEY=/etc/tls/a1B2c3D4e5f6g7.pem\nPWD_FILE=/run/x1Y2\n"
    assert found(text) == [("swordfish", "SECRET")]


def test_the_name_before_a_value_counts_in_other_words_of_the_object_only():
    rows = [{"password": "x9Kd83jsLq02", "list": ["q8Wm41zzTr77"]}, '{"a":"secret_key","b":"Zr71mWp2k3yQ8xv0"}']
    assert redact_objects(rows)[0] == [{"password": "<SECRET_1>", "list": ["q8Wm41zzTr77"]}, rows[1]]


def test_what_overlaps_is_one_finding_of_the_surer_kind():
    assert found(f'GITHUB_TOKEN="{TOKEN}"') == [(TOKEN, "GITHUB_PAT")]
    assert found(f"x{TOKEN}y {TOKEN}", deny=[r"x\S+"]) == [(f"x{TOKEN}y", "DENIED"), (TOKEN, "GITHUB_PAT")]


def test_places_are_right_behind_letters_of_several_bytes():
    assert found(f"für 🙂 {TOKEN} 東京 {MAIL}") == [(TOKEN, "GITHUB_PAT"), (MAIL, "EMAIL")]
    assert found(f"\ud800 {TOKEN}") == [(TOKEN, "GITHUB_PAT")]
    assert found(f"{'İ' * 30} password: '{TOKEN[:14]}'") == [(TOKEN[:14], "SECRET")]


# People


def test_home_directories():
    assert home_owner("/home/nora/x") == "nora" and home_owner("/Users/N.K/x") == "N.K"
    assert home_owner("C:\\Users\\nora") == "nora" and home_owner("/srv/home/nora") is None
    assert [home_owner(path) for path in ("/home/user/x", "/root", "/Users/Shared", "relative")] == [None] * 4
    assert found(r"C:\\Users\\nora\\x and D:\Users\nora") == [("nora", "USER")] * 2
    assert found("/var/home/nora/x xhome/nora") == []


def test_a_long_name_is_replaced_as_a_word_and_a_short_one_where_it_is_a_person():
    assert found("by mirkovich, mirkovich2 and @mirkovich", names=[OWNER]) == [(OWNER, "USER")] * 2
    short = "will you, User: will, ~will/x, will@mac:~$ and -rw-r--r-- 1 will staff 12 Jan 3 a"
    places = [each.start for each in SecretScanner(names=["will"]).find(short)]
    assert places == [match.start() for match in re.finditer("(?<!^)will", short)]
    assert found("the root user is root", names=["root", "user"]) == []


# Patterns of the user


def test_patterns_of_the_user(tmp_path):
    path = tmp_path / "deny.txt"
    path.write_text("# customers\n\nacme\\w*\nid=(?P<secret>\\d+)\n")
    text = "acme_corp has id=123 and id=x"
    assert found(text, deny=path) == [("acme_corp", "DENIED"), ("123", "DENIED")]
    assert found(text, deny=[re.compile("ACME_CORP", re.I)]) == [("acme_corp", "DENIED")]
    assert deny_patterns(None) == ()


def test_a_pattern_that_is_none_is_refused_without_being_shown(tmp_path):
    path = tmp_path / "deny.txt"
    path.write_text(f"fine\n{TOKEN}(\n")
    with pytest.raises(ValueError, match=r"deny.txt:2: is no regular expression .* at character") as error:
        deny_patterns(path)
    assert TOKEN not in str(error.value)
    with pytest.raises(ValueError, match=r"deny\[1\]: matches the empty text"):
        deny_patterns(["a", "b*"])


# JSON text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def reference(value, change, name=""):
    if isinstance(value, str):
        return change(value, name)
    if isinstance(value, list):
        return [reference(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key, ""): reference(item, change, key) for key, item in value.items()}
    return value


@settings(max_examples=300, deadline=None)
@given(JSON, st.sampled_from([None, 1]), st.booleans())
@example({'a"b\\': ["\\", '"', {"k": "v"}]}, 1, True)
def test_json_strings_are_those_that_json_reads(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert map_json_strings(text, lambda string, name: string) is text
    seen = []
    reference(value, lambda string, name: seen.append((string, name)) or string)
    assert sorted((each.text, each.name) for each in json_strings(text)) == sorted(seen)
    changed = map_json_strings(text, lambda string, name: f"{name}:{string}\n")
    assert json.loads(changed) == reference(value, lambda string, name: f"{name}:{string}\n")


def test_what_is_not_changed_stays_to_the_byte():
    text = '{ "a" : 1.50, "b":[ "\\u00e9\\/" , "' + MAIL + '"],"n":123456789012345678901234567890,"z":-0.0 }'
    [new], _ = redact_objects([text])
    assert new == text.replace(MAIL, "<EMAIL_1>")


def test_keys_are_texts_too_and_values_know_their_key():
    rows = [{TOKEN: 1, "env": {"SERVICE_KEY": "x9Kd83jsLq02", "HOME": "/srv"}}]
    [new], report = redact_objects(rows)
    assert new == [{"<GITHUB_PAT_1>": 1, "env": {"SERVICE_KEY": "<SECRET_1>", "HOME": "/srv"}}][0]
    assert report.distinct == {"GITHUB_PAT": 1, "SECRET": 1}


def test_escaped_texts_are_read_and_stay_valid():
    inner = dumps({"command": f"export A=1\n{TOKEN}\tB\n{MAIL}\nexport DB_PASSWORD=tr0ub4dor"})
    log = f"line one\n{inner}\nline {dumps(inner)}"
    new, report = redact_objects([inner, log, dumps([inner])])
    assert not any(secret in text for text in new for secret in (TOKEN, MAIL, "tr0ub4dor"))
    assert report.distinct == {"GITHUB_PAT": 1, "EMAIL": 1, "SECRET": 1} and report.safe
    wanted = "export A=1\n<GITHUB_PAT_1>\tB\n<EMAIL_1>\nexport DB_PASSWORD=<SECRET_1>"
    assert json.loads(new[0]) == {"command": wanted} == json.loads(json.loads(new[2])[0])
    assert json.loads(new[1].splitlines()[1]) == {"command": wanted}
    assert json.loads(json.loads(new[1].splitlines()[2][5:])) == {"command": wanted}


def test_an_escape_is_never_cut():
    text = r'{"text":"a\nnora@kroll' + r'.io"} and \nnora@kroll' + ".io"
    assert found(text) == [(MAIL, "EMAIL")] * 2
    assert [len(view) for _, view in escape_views(text)] == [len(text)]


# Placeholders


def test_equal_texts_are_equal_placeholders_numbered_by_appearance():
    rows = [f"a {OTHER}", {"x": [f"{TOKEN} {OTHER}", f"{MAIL}"]}, f"{TOKEN}"]
    new, report = redact_objects(rows)
    assert new == ["a <GITHUB_PAT_1>", {"x": ["<GITHUB_PAT_2> <GITHUB_PAT_1>", "<EMAIL_1>"]}, "<GITHUB_PAT_2>"]
    assert report.distinct == {"EMAIL": 1, "GITHUB_PAT": 2} and report.places == {"EMAIL": 1, "GITHUB_PAT": 4}
    assert (report.rows, report.rows_with_findings, report.found) == (3, 3, 3)


def test_a_password_is_replaced_where_nothing_shows_that_it_is_one():
    strong, weak = "Kx82-" + "mLqp9", "hunter" + "2"
    rows = [f"tried {strong} and {weak}", f"DB_PASSWORD={strong}\nMAIL_PASSWORD={weak}\n", f"{strong}x {strong}."]
    new, _ = redact_objects(rows)
    secret = "<SECRET_1>"
    assert new == [
        f"tried {secret} and {weak}",
        f"DB_PASSWORD={secret}\nMAIL_PASSWORD=<SECRET_2>\n",
        f"{strong}x {secret}.",
    ]


def test_the_same_objects_come_back_where_nothing_is_found():
    rows = ["text", {"a": ["b", 1, None]}, [1.5]]
    new, report = redact_objects(rows)
    assert all(old is each for old, each in zip(rows, new, strict=True))
    assert (report.found, report.safe, report.rows) == (0, True, 3)
    assert not scan_objects(rows).redacted
    mixed = scan_objects([*rows, MAIL])
    assert (mixed.rows, mixed.rows_with_findings, mixed.examples) == (4, 1, {"EMAIL": ["row 3"]})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([each.text for each in planted(1)] + ["\n", " and ", '"', "\\n", "x"]), max_size=6))
def test_redacted_text_is_not_changed_again(parts):
    new, report = redact_objects(["".join(parts)], names=[OWNER])
    again, second = redact_objects(new, names=[OWNER])
    assert again == new and not report.remaining and not second.found


# Data sets

ROWS = Features(
    {"messages": JsonText(), "trained": datasets.List(Value("bool")), "cwd": Value("string"), "n": Value("int64")}
)


def conversations(count: int = 40) -> Dataset:
    secrets = [TOKEN, OTHER, MAIL]
    replies = [secrets[index % 3] if index % 2 else f"ok by {OWNER}" for index in range(count)]
    messages = [
        [{"role": "user", "content": f"hello {index % 7}", "n": 0.1}, {"role": "assistant", "content": reply}]
        for index, reply in enumerate(replies)
    ]
    columns = {
        "messages": [dumps(each) for each in messages],
        "trained": [[False, True]] * count,
        "cwd": [f"/home/{OWNER}/p{index % 3}" if index % 4 else None for index in range(count)],
        "n": list(range(count)),
    }
    return Dataset.from_dict(columns, features=ROWS)


LAST = {
    "messages": ["[]"],
    "trained": [[]],
    "cwd": [next(each.text for each in planted() if each.name == "jwt")],
    "n": [0],
}


def raw(dataset: Dataset) -> list:
    return [column.to_pylist() for column in dataset.with_format("arrow")[:].columns]


def test_a_data_set_keeps_its_columns_and_all_that_is_no_secret():
    rows = conversations()
    new, report = redact_conversations(rows)
    assert new.features == rows.features and new["n"][:] == rows["n"][:] and new["trained"][:] == rows["trained"][:]
    names = {TOKEN: "<GITHUB_PAT_1>", OTHER: "<GITHUB_PAT_2>", MAIL: "<EMAIL_1>", OWNER: "<USER_1>"}
    # by appearance: row 1 has OTHER, row 3 has TOKEN
    names[OTHER], names[TOKEN] = names[TOKEN], names[OTHER]
    expected = []
    for column in raw(rows):
        for secret, name in names.items():
            column = [each.replace(secret, name) if isinstance(each, str) else each for each in column]
        expected.append(column)
    assert raw(new) == expected
    assert report.distinct == {"EMAIL": 1, "GITHUB_PAT": 2, "USER": 1} and report.safe
    assert report.places == {"EMAIL": 6, "GITHUB_PAT": 14, "USER": 30 + 20}
    assert scan_conversations(rows).distinct == report.distinct and scan_conversations(new).found == 0


def test_any_number_of_processes_gives_the_same():
    rows = datasets.concatenate_datasets([conversations(), Dataset.from_dict(LAST, features=ROWS)])
    one, first = redact_conversations(rows, load_from_cache_file=False)
    two, second = redact_conversations(rows, num_proc=3, load_from_cache_file=False)
    assert raw(one) == raw(two) and first == second and first.examples["JWT"] == ["row 40"]
    assert scan_conversations(rows, num_proc=2) == scan_conversations(rows)


def test_nested_columns_and_json_that_datasets_wrote_twice():
    nested = Dataset.from_list(
        [{"conversations": [{"from": "human", "value": f"I am {MAIL}"}]}, {"conversations": []}]
    )
    new, _ = redact_conversations(nested)
    assert new[0] == {"conversations": [{"from": "human", "value": "I am <EMAIL_1>"}]} and new[1] == nested[1]
    text = dumps(dumps([{"content": f"{TOKEN}\n", "password": "tr0ub4dor", "big": 2**70}]))
    twice = Dataset.from_dict({"messages": [text]}, features=Features({"messages": JsonText()}))
    new, _ = redact_conversations(twice)
    assert new[0]["messages"] == [{"content": "<GITHUB_PAT_1>\n", "password": "<SECRET_1>", "big": 2**70}]


def test_what_was_found_is_in_no_text_about_it_and_in_no_file(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    plain = conversations()
    plain.save_to_disk(tmp_path / "plain")
    before = set(tmp_path.rglob("*"))
    rows = datasets.load_from_disk(str(tmp_path / "plain"))
    _, report = redact_conversations(rows, num_proc=2, deny=["hello 3"])
    redactor = Redactor(SecretScanner())
    redactor.scan([TOKEN, MAIL, "DB_PASSWORD=hunter" + "2"], "row 0")
    shown = [str(report), repr(report), json.dumps(report.to_dict(examples=True)), caplog.text, *capfd.readouterr()]
    shown += [repr(redactor.found), repr(redactor.placeholders()), repr(redactor), repr(redactor.report())]
    for secret in (TOKEN, OTHER, MAIL, OWNER, "hello 3", "hunter" + "2"):
        assert not any(secret in text for text in shown)
        new = [path for path in tmp_path.rglob("*") if path.is_file() and path not in before]
        assert new and not any(secret.encode() in path.read_bytes() for path in new)
    assert "row 1" in str(report) and "examples" not in report.to_dict()


def test_a_second_scan_says_what_is_left(monkeypatch):
    monkeypatch.setattr(Redactor, "redact", lambda self, value: value)
    _, report = redact_conversations(conversations(), load_from_cache_file=False)
    assert not report.safe and report.remaining == {"EMAIL": 6, "GITHUB_PAT": 14, "USER": 50}
    assert "6 x EMAIL" in report.still_there and "--deny" in report.still_there


def test_a_scanner_is_sent_without_the_texts_it_knows():
    scanner = SecretScanner(names=[OWNER])
    scanner.find(f"x {TOKEN}")
    data = pickle.dumps(scanner)
    assert TOKEN.encode() not in data and pickle.loads(data).find(MAIL)


def test_texts_are_scanned_once(monkeypatch):
    seen = []
    look = SecretScanner._look
    monkeypatch.setattr(SecretScanner, "_look", lambda self, text: seen.append(text) or look(self, text))
    scan_conversations(conversations())
    assert len(seen) == len(set(seen)) and TOKEN in seen

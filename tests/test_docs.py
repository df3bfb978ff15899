"""The pages and docstrings do what they say: every code block runs, every link leads somewhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest
import yaml

import dagpack_hf
from tests import doc_world
from tests.doc_pages import ROOT, broken_links, page_paths, parse_page, read_page
from tests.package_messages import all_texts, messages, pattern

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dagpack_hf.__path__, "dagpack_hf.")
    if not module.name.endswith("__main__")
)
PAGES = {str(path.relative_to(ROOT)): path for path in page_paths()}
WITH_CODE = [name for name, path in PAGES.items() if read_page(path).blocks]


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    doc_world.build(home)
    return home


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name, home, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    models = set(doc_world.MODEL.findall(inspect.getsource(module)))
    doc_world.enter(home, tmp_path, models, monkeypatch)
    doc_world.run_docstrings(module, any_output=bool(models))


@pytest.mark.checkout
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_pages(name, home, tmp_path, monkeypatch):
    page = read_page(PAGES[name])
    models = set(doc_world.MODEL.findall(page.path.read_text(encoding="utf-8")))
    doc_world.enter(home, tmp_path, models, monkeypatch)
    names = {"__name__": "page"}
    for block in page.blocks:
        doc_world.run_block(page, block, names)


@pytest.mark.checkout
def test_links_of_pages():
    assert [broken for path in PAGES.values() for broken in broken_links(read_page(path))] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx = 1\n1 / 0\n```", "page.md:3: ZeroDivisionError"),
        ("```python\n>>> 1 + 1\n3\n\n```", "1 of 1 examples failed"),
        ("<!-- setup\nx = 1 / 0\n-->\n```python\nx\n```", "ZeroDivisionError"),
        ("<!-- not run: a reason -->\n```python\nx = (\n```", "was never closed"),
        ("<!-- not run: a reason -->\n```bash\ndagpack pack --no-such-option\n```", "no command line of dagpack"),
        ("<!-- not run: a reason -->\n```bash\ndagpack train --no_such_option 1\n```", "has no --no_such_option"),
        ("```bash\ndagpack stats nowhere.jsonl\n```", "page.md:2: dagpack stats nowhere.jsonl"),
        ("```bash\npip install 'dagpack-hf[none]'\n```", "no extra none"),
        ("```bash\npytest tests/test_none.py\n```", "there is no tests/test_none.py"),
        ("```bash\naccelerate launch recipes/sft_pi.py --none 1\n```", "has no --none"),
        ("```bash\ncurl example\n```", "does not know"),
        ("    dagpack stats nowhere.jsonl", "page.md:1: dagpack stats nowhere.jsonl"),
        ("```yaml\na: [1\n```", "expected ',' or ']'"),
        ("```\nplain\n```", "no language"),
    ],
)
@pytest.mark.checkout
def test_faults_of_blocks_are_seen(home, tmp_path, monkeypatch, text, said):
    doc_world.enter(home, tmp_path, set(), monkeypatch)
    page = parse_page(tmp_path / "page.md", text)
    with pytest.raises((AssertionError, SyntaxError, yaml.YAMLError), match=re.escape(said)):
        for block in page.blocks:
            doc_world.run_block(page, block, {})


def test_faults_of_links_and_notes_are_seen(tmp_path):
    (tmp_path / "other.md").write_text("# Some `code`, twice\n\n# Some code, twice\n")
    good = "[a](other.md) [b](other.md#some-code-twice) [c](other.md#some-code-twice-1) [d](https://a.b/c) [e](#here)"
    bad = '[f](none.md) [g](other.md#none) ![h](none.svg)\n\n<img src="gone.svg">'
    page = parse_page(tmp_path / "page.md", f"# Here\n\n{good}\n\n{bad}\n")
    assert [text.split(":")[2].strip() for text in broken_links(page)] == [
        *("none.md", "other.md#none", "none.svg", "gone.svg")
    ]
    with pytest.raises(ValueError, match="no block behind it"):
        parse_page(tmp_path / "page.md", "```bash\nls\n```\n\n<!-- not run: a reason -->\n")


@pytest.mark.checkout
def test_readme_commands_are_those_that_ci_runs():
    given = [block.code.strip() for block in read_page(ROOT / "README.md").blocks if block.not_run]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert given == ["pip install . && dagpack demo", 'pip install -e ".[test]" && pytest -n auto']
    assert all(f"step '{command}'" in ci or f'step "{command}"' in ci for command in given)


@pytest.mark.checkout
def test_reference_has_all_that_the_package_exports():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    for name in set(dagpack_hf.__all__) - {"__version__"}:
        exported = getattr(dagpack_hf, name)
        assert any(each == f"{exported.__module__}.{name}" or each in exported.__module__ for each in shown), name


def documented_messages():
    """The messages of the tables of the page: code spans of the first column, where the head says so."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    first = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [message for cell in first for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.checkout
def test_every_documented_message_is_in_the_code():
    found = documented_messages()
    assert len(found) > 200
    assert [text for text in found if not any(pattern(text).search(known) for known in all_texts())] == []


@pytest.mark.checkout
def test_every_message_of_the_code_is_documented():
    known = [pattern(text) for text in documented_messages()]
    missing = {text: place for text, place in messages().items() if not any(each.search(text) for each in known)}
    assert missing == {}, "add them, with a remedy, to docs/troubleshooting.md"

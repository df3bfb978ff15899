"""Examples in docstrings and in the README do what they say."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["trie", "layout", "packing", "batch_packing", "collator", "conversations"])
def test_docstring_examples(name):
    module = importlib.import_module(f"dagpack_hf.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_readme_examples(capsys):
    """Blocks that need the Hub are compiled, the others run."""
    blocks = python_blocks(README)
    run = 0
    for block in blocks:
        code = compile(block, "README.md", "exec")
        if "Qwen/" not in block:
            exec(code, {"__name__": "readme"})
            run += 1
    assert len(blocks) == 2 and run == 1
    assert "reuse ratio 17.16" in capsys.readouterr().out


def test_links_of_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

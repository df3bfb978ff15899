"""The world in which the pages' examples run: a home with sessions, and a hub with one tiny model under every name.

So examples run as they stand, without a network, a GPU or the user's files:

* `~/.pi/agent/sessions`, which `load_sessions()` reads by default, `~/sessions` and `session.jsonl` are of the sample;
* every model that a page names (`Qwen/...`) is in the cache of the Hub: a tiny Llama and the bundled tokenizer;
* every data set of the Hub that is loaded is four short conversations;
* training is in float32 unless an example says otherwise, and stops after one step.

`dagpack` command lines run through the command's own `main`. Others (`pip`, `pytest`, `accelerate`, scripts) are not
run here: `.ci/run` runs those of the README, and here their files, extras and options are checked to be there.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import itertools
import re
import shlex
import shutil
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dagpack_hf import cli
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from tests.doc_pages import ROOT, Block, Page

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

MODEL = re.compile(r"\b(?:Qwen|LiquidAI)/[\w.-]+")
RECIPES = {"recipes/sft_pi.py"}
SESSIONS = slice(8, 11)
REVISION = "0" * 40
CONVERSATIONS = [
    [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": " ".join(map(str, range(n + 1)))}]
    for n in (3, 5, 7, 9)
]


def build(home: Path) -> None:
    """Make the home: sessions, and the model that stands for all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = sorted(sample_sessions().glob("*.jsonl"))[SESSIONS]
    for folder in (home / ".pi" / "agent" / "sessions" / "project", home / "sessions"):
        folder.mkdir(parents=True)
        for file in files:
            shutil.copy(file, folder)
    tokenizer = sample_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=65536,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(home / "model")
    LlamaForCausalLM(config).save_pretrained(home / "model")


def enter(home: Path, folder: Path, models: set[str], patch: pytest.MonkeyPatch) -> None:
    """Make a page's examples see the home, the hub and an empty working directory."""
    import datasets
    import transformers
    import trl
    from huggingface_hub import constants

    hub = folder / "hub"
    for model in models:
        repository = hub / f"models--{model.replace('/', '--')}"
        for each in ("snapshots", "refs"):
            (repository / each).mkdir(parents=True)
        (repository / "snapshots" / REVISION).symlink_to(home / "model")
        (repository / "refs" / "main").write_text(REVISION)
    work = folder / "work"
    work.mkdir()
    shutil.copy(min((home / "sessions").iterdir()), work / "session.jsonl")
    patch.chdir(work)
    patch.setenv("HOME", str(home))
    for name in ("PI_CODING_AGENT_DIR", "PI_CODING_AGENT_SESSION_DIR"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "HF_HUB_CACHE", str(hub))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    patch.setattr(trl.SFTConfig, "__post_init__", _float32(trl.SFTConfig.__post_init__))
    patch.setattr(datasets, "load_dataset", _load_dataset(datasets.load_dataset))
    patch.setattr(transformers.Trainer, "train", _one_step(transformers.Trainer.train))


def _load_dataset(load: Any) -> Any:
    def load_dataset(name: str, *args: Any, **options: Any) -> Any:
        from datasets import Dataset

        of_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists()
        return Dataset.from_dict({"messages": CONVERSATIONS}) if of_the_hub else load(name, *args, **options)

    return load_dataset


def _float32(post_init: Any) -> Any:
    def with_float32(config: Any) -> None:
        config.bf16 = bool(config.bf16)
        post_init(config)

    return with_float32


def _one_step(train: Any) -> Any:
    def train_one_step(trainer: Any, *args: Any, **options: Any) -> Any:
        trainer.args.max_steps = 1
        return train(trainer, *args, **options)

    return train_one_step


def run_block(page: Page, block: Block, names: dict) -> None:
    """Run a block, or check it if it is not to be run."""
    place = f"{page.name}:{block.line}"
    if block.setup:
        _execute(block.setup, f"{place} (setup)", 0, names)
    if block.language == "python":
        if ">>>" in block.code:
            _run_doctest(block, place, names)
        elif block.not_run is None:
            _execute(block.code, page.name, block.line - 1, names)
        else:
            ast.parse(textwrap.dedent(block.code), place)
    elif block.language == "bash":
        for line in command_lines(block.code):
            run_command(line, run=block.not_run is None, place=place)
    elif block.language in ("yaml", "json"):
        yaml.safe_load(block.code)
    else:
        assert block.language == "text", f"{place}: a block of {block.language or 'no language'} is not checked"


def _execute(code: str, place: str, lines_before: int, names: dict) -> None:
    compiled = compile("\n" * lines_before + textwrap.dedent(code), place, "exec")
    try:
        exec(compiled, names)
    except Exception as error:
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place][-1]
        raise AssertionError(f"{place}:{line}: {type(error).__name__}: {error}") from error


def _run_doctest(block: Block, place: str, names: dict) -> None:
    example = doctest.DocTestParser().get_doctest(block.code, names, place, place, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
    names.update(example.globs)
    assert result.attempted and not result.failed, f"{place}: {result.failed} of {result.attempted} examples failed"


class _AnyOutput(doctest.OutputChecker):
    """What an example says nothing about may be anything: a trainer prints figures that differ."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want.strip() in ("", "```") or super().check_output(want, got, optionflags)


def run_docstrings(module: ModuleType, *, any_output: bool) -> int:
    """Run the examples of a module's docstrings; returns how many there are."""
    checker = _AnyOutput() if any_output else doctest.OutputChecker()
    runner = doctest.DocTestRunner(checker, optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(module):
        runner.run(example)
    assert runner.failures == 0, f"{module.__name__}: {runner.failures} of {runner.tries} examples failed"
    return runner.tries


def command_lines(code: str) -> list[list[str]]:
    """The commands of a shell block as lists of words, without comments and variables set before them."""
    commands = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command = words[:end]
            while command and re.fullmatch(r"\w+=.*", command[0]):
                command = command[1:]
            if command and command[0] != "export":
                commands.append(command)
            words = words[end + 1 :]
    return commands


def run_command(words: list[str], *, run: bool, place: str) -> None:
    """Run a `dagpack` command; check any other command line."""
    program, *arguments = words
    where = f"{place}: {shlex.join(words)}"
    if program == "dagpack" or words[:3] == ["python", "-m", "dagpack_hf.stats"]:
        arguments = ["stats", *words[3:]] if program == "python" else arguments
        arguments = list(itertools.takewhile(lambda word: word not in (">", "|"), arguments))
        if run:
            assert _main(arguments) == 0, where
        else:
            _parse(arguments, where)
    else:
        CHECKS.get(program, _unknown)(arguments, where)


def _main(arguments: list[str]) -> int:
    arguments = [str(Path(word).expanduser()) if word.startswith("~") else word for word in arguments]
    if arguments[:1] == ["train"]:
        arguments += ["--report_to", "none", "--per_device_train_batch_size", "1"]
    return cli.main(arguments)


def _parse(arguments: list[str], where: str) -> None:
    if arguments[:1] == ["train"]:
        _parse_recipe(arguments[1:], where)
    elif "--help" not in arguments:
        try:
            cli._parser().parse_args(arguments)
        except SystemExit as stop:
            raise AssertionError(f"{where}: is no command line of dagpack") from stop


def _parse_recipe(arguments: list[str], where: str) -> None:
    from dagpack_hf.recipe import make_parser

    known = {name for action in make_parser()._actions for name in action.option_strings} | {"--config", "--help-all"}
    given = {word.split("=")[0] for word in arguments if word.startswith("--")}
    assert given <= known, f"{where}: has no {', '.join(sorted(given - known))}"


def _check_pip(arguments: list[str], where: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments[:1] == ["install"], where
    for word in arguments[1:]:
        match = re.fullmatch(r"(\.|dagpack-hf|[\w-]+)(?:\[([\w,]+)\])?", word)
        assert word.startswith("-") or match, f"{where}: {word}"
        if match and match[1] in (".", "dagpack-hf") and match[2]:
            assert set(match[2].split(",")) <= set(project["optional-dependencies"]), f"{where}: no extra {match[2]}"


def _check_files(arguments: list[str], where: str) -> None:
    files = [word for word in arguments if re.fullmatch(r"(?!-)[\w./-]+\.(?:py|ya?ml|ipynb)", word)]
    for file in files:
        assert (ROOT / file).is_file(), f"{where}: there is no {file}"
        if file in RECIPES:
            _parse_recipe(arguments[arguments.index(file) + 1 :], where)


def _check_pytest(arguments: list[str], where: str) -> None:
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-n")
    parser.add_argument("-m", choices=[mark.split(":")[0] for mark in marks])
    parser.add_argument("--ignore", action="append", default=[])
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    for file in (*options.ignore, *options.files):
        assert (ROOT / file).exists(), f"{where}: there is no {file}"


def _nothing(arguments: list[str], where: str) -> None:
    """A command of another program, without anything of this project."""


def _unknown(arguments: list[str], where: str) -> None:
    raise AssertionError(f"{where}: is a command that the test does not know")


CHECKS = {
    "pip": _check_pip,
    "pytest": _check_pytest,
    "python": _check_files,
    "accelerate": _check_files,
    "torchrun": _check_files,
    "ray": _nothing,
    "source": _nothing,
    "pre-commit": _nothing,
    "mkdocs": _nothing,
    "cat": _nothing,
} | {f".ci/{path.name}": _nothing for path in (ROOT / ".ci").glob("*")}

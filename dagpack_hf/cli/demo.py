"""`dagpack demo`: everything at once, on the bundled sample and a tiny model, on any CPU."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import (
    HelpFormatter,
    Printer,
    UsageError,
    add_json,
    quiet_libraries,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_DESCRIPTION = """\
Show what the package does, in about a minute on two CPU cores, without a download:

  1  read the bundled pi sessions
  2  render them and pack them by shared prefixes: the token table
  3  train a tiny Llama on the packed rows
  4  compare loss and gradients with ordinary, unpacked training
  5  measure the time of an epoch against TRL's packing
  6  save the model, a picture of a session tree and the figures
"""

_EPILOG = """\
examples:
  dagpack demo
  dagpack demo --out /tmp/demo --json | jq .speed.ratio

files in DIR: model/ (for transformers' from_pretrained), session_tree.svg, figures.json
"""

# Set before the libraries are imported. Nothing is sent or looked up; and threads that wait for each other sleep:
# on a machine that does other work too, waiting at full speed makes small models up to twenty times slower.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_WAIT_POLICY": "PASSIVE"}

_LIMIT = 1e-5
_MARKER = "figures.json"

Say = Callable[[str], None]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "demo",
        help="everything at once, on the bundled sample",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--out", default="dagpack-demo", metavar="DIR", help="folder for what it makes (default: ./dagpack-demo)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; the status is 1 if packed and unpacked training differ."""
    if os.path.lexists(options.out) and not _reusable(options.out):
        raise UsageError(f"--out {options.out}: is there already and is not of an earlier demo; choose another folder")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    say = Printer(options.json)
    with quiet_libraries(progress=False):
        figures = demonstrate(options.out, say)
    say.result(figures)
    return 0 if figures["exactness"]["largest"] < _LIMIT else 1


def _reusable(folder: str) -> bool:
    return os.path.isdir(folder) and (not os.listdir(folder) or os.path.isfile(os.path.join(folder, _MARKER)))


def demonstrate(
    out: str, say: Say, *, sessions: list[str] | None = None, epochs: int = 2, rounds: int = 3, parts: int = 8
) -> dict[str, Any]:
    """Go through the steps, and say what comes of each.

    Args:
        out: Folder for the model, the picture and the figures.
        say: Prints a text.
        sessions: Session files, by default the bundled ones.
        epochs: Epochs of training.
        rounds: Rounds of the measurement of speed.
        parts: Parts of TRL's epoch, of which each round runs one.

    Returns:
        All figures, for JSON.
    """
    from dagpack_hf import load_sessions, tokenize_conversations
    from dagpack_hf.pi import session_files
    from dagpack_hf.sample import sample_sessions, sample_tokenizer

    start = time.perf_counter()
    files = session_files(sessions or sample_sessions())
    os.makedirs(out, exist_ok=True)

    say("1. Sessions of the pi coding agent\n")
    conversations, loaded = load_sessions(files, return_report=True)
    say(str(loaded))

    say("\n2. Tokens, with every shared prefix once\n")
    tokenizer = sample_tokenizer()
    trees, rendered = tokenize_conversations(conversations, tokenizer, return_report=True)
    reports = _pack(trees, say)
    max_length = reports[0].max_length

    with tempfile.TemporaryDirectory() as work_dir:
        training = _train(trees, tokenizer, max_length, epochs, work_dir, os.path.join(out, "model"), say)
        exactness, speed = _compare(
            conversations, trees, tokenizer, max_length, rounds, parts, os.path.join(out, "model"), work_dir, say
        )

    say("\n6. Saved\n")
    with open(os.path.join(out, "session_tree.svg"), "w", encoding="utf-8") as file:
        file.write(_picture(files[0], conversations, tokenizer))
    figures = {
        "load": asdict(loaded),
        "render": asdict(rendered),
        "packing": [report.to_dict() for report in reports],
        "training": training,
        "exactness": exactness,
        "speed": speed,
        "seconds": time.perf_counter() - start,
        "machine": _machine(),
    }
    with open(os.path.join(out, _MARKER), "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=2)
    say(f"{'model':<22}{os.path.join(out, 'model')}")
    say(f"{'picture of a session':<22}{os.path.join(out, 'session_tree.svg')}")
    say(f"{'figures':<22}{os.path.join(out, _MARKER)}")
    say(f"\nDone in {figures['seconds']:.0f} s. Your own sessions: dagpack stats")
    return figures


def _pack(trees: Dataset, say: Say) -> list[Any]:
    from dagpack_hf import TokenForest, pack_forest
    from dagpack_hf.cli.stats import compare, window_lengths
    from dagpack_hf.packing import iter_trees

    forest = TokenForest.from_trees(iter_trees(trees))
    lengths = window_lengths(forest.longest_path)
    reports = [pack_forest(forest, length, loss_weighting="paths")[1] for length in lengths]
    say(f"{reports[0]}\n\n{compare(reports)}\n")
    say(
        "Longer windows share more. On CPU both sides of the comparison below compute attention for all pairs of a\n"
        f"window, so it uses {lengths[0]:,} tokens: the shortest that hold every turn, where TRL's packing is fastest."
    )
    return reports


def _train(
    trees: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    epochs: int,
    work_dir: str,
    model_dir: str,
    say: Say,
) -> dict[str, Any]:
    from dagpack_hf import DagSFTConfig, DagSFTTrainer
    from dagpack_hf.cli.exactness import quiet, trainer_options
    from dagpack_hf.recipe import tiny_llama

    model = tiny_llama(tokenizer, seed=0)
    options = trainer_options(work_dir) | {"logging_strategy": "epoch", "num_train_epochs": epochs}
    trainer = DagSFTTrainer(
        model=model,
        args=DagSFTConfig(
            **options, max_length=max_length, loss_weighting="paths", learning_rate=3e-3, lr_scheduler_type="constant"
        ),
        train_dataset=trees,
        eval_dataset=trees,
        processing_class=tokenizer,
    )
    quiet(trainer)
    say(f"\n3. Training: a Llama of {model.num_parameters() / 1e6:.2f} M parameters, random weights\n")
    before = trainer.evaluate()["eval_loss"]
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    after = trainer.evaluate()["eval_loss"]
    means = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    say(f"{'':<18}{'steps':>6}  loss per target token")
    say(f"{'before':<18}{0:>6}  {before:.3f}")
    for epoch, mean in enumerate(means, 1):
        say(f"{f'epoch {epoch}, mean':<18}{trainer.state.global_step * epoch // epochs:>6}  {mean:.3f}")
    say(f"{'after':<18}{trainer.state.global_step:>6}  {after:.3f}")
    trainer.save_model(model_dir)
    return {
        "parameters": model.num_parameters(),
        "max_length": max_length,
        "steps": trainer.state.global_step,
        "loss_before": before,
        "loss_epochs": means,
        "loss_after": after,
        "seconds": seconds,
    }


def _compare(
    conversations: Dataset,
    trees: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    rounds: int,
    parts: int,
    model_dir: str,
    work_dir: str,
    say: Say,
) -> tuple[dict[str, Any], dict[str, Any]]:
    from transformers import LlamaForCausalLM

    from dagpack_hf.cli import exactness, speed

    sequences = exactness.unpacked_sequences(conversations, tokenizer)
    say("\n4. Exactness: packed against ordinary unpacked training, from the saved weights, in float32\n")
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype="float32")
    exact = exactness.compare(model, trees, sequences, tokenizer, max_length, work_dir)
    count = len(sequences.input_ids)
    say(f"One step over all {count} turns: {count} sequences of {sequences.logical_tokens:,} tokens, one at a time,")
    say("against packed rows in DagSFTTrainer. Largest relative difference:\n")
    say(f"{'loss':<16}{exact.loss:9.1e}  |packed - unpacked| / |unpacked|; both {exact.loss_unpacked:.6f}")
    worst = f"worst of {exact.parameters} parameters"
    say(f"{'gradients':<16}{exact.gradient_norm:9.1e}  ||packed - unpacked|| / ||unpacked||, {worst}")
    say(f"{'gradients':<16}{exact.gradient_max:9.1e}  max|packed - unpacked| / max|unpacked|, {worst}")
    say(f"\n{'Equal' if exact.largest < _LIMIT else 'NOT EQUAL'} to {_LIMIT:.0e}: {exact.largest:.1e} at most.")

    say("\n5. Speed: an epoch of the same turns, model and window length, with TRL's packing=True\n")
    took = speed.measure(trees, sequences, tokenizer, max_length, work_dir, rounds=rounds, parts=parts)
    say(f"{'':<16}{'windows':>8}{'s/epoch':>10}{'logical tokens/s':>18}")
    for name, windows, epoch in (
        ("TRL packing", took.trl_windows, took.trl_epoch),
        ("dagpack", took.dagpack_windows, took.dagpack_epoch),
    ):
        say(f"{name:<16}{windows:>8,}{epoch:>10.2f}{took.logical_tokens / epoch:>18,.0f}")
    say(f"\n{took.ratio:.1f} times faster: medians of {rounds} rounds in turns, whole epochs of dagpack, and of TRL")
    say(f"{took.trl_windows_run} of {took.trl_windows} windows in all, scaled by tokens.")
    derived = {name: getattr(took, name) for name in ("dagpack_epoch", "trl_epoch", "ratio")}
    return asdict(exact) | {"largest": exact.largest}, asdict(took) | derived


def _picture(file: str, conversations: Dataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """The entry tree of a session, with the tokens that each entry adds to the context."""
    from dagpack_hf.view import session_svg

    tokens: dict[str, int] = {}
    for row in conversations:
        if row["session"] != file:
            continue
        before = 0
        for count, entry in enumerate(row["entry_ids"], 1):
            messages = row["messages"][:count]
            length = len(tokenizer.apply_chat_template(messages, tools=row["tools"], return_dict=False))
            if entry is not None:
                tokens.setdefault(entry, length - before)
            before = length
    return session_svg(file, tokens=tokens)


def _machine() -> dict[str, Any]:
    import platform

    import torch
    import transformers
    import trl

    return {
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }

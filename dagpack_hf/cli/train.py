"""`dagpack train`: fine-tune on pi sessions, as `recipes/sft_pi.py` does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from dagpack_hf.cli.arguments import HelpFormatter

_DESCRIPTION = """\
Fine-tune a model on pi sessions with DagSFTTrainer. The options are those of TRL's and transformers'
training arguments, and can stand in a YAML file (--config FILE). The ones used most:
"""

_EXAMPLES = """\
examples:
  dagpack train --model_name_or_path Qwen/Qwen3-0.6B --max_length 32768 --output_dir out
  dagpack train --config my.yaml --learning_rate 1e-5
  dagpack train --sessions sample --tiny_model true --max_length 7168 --use_cpu --bf16 false \\
      --report_to none --num_train_epochs 2 --output_dir out

On several devices: accelerate launch -m dagpack_hf train ...

TRL's telemetry (which kind of model and machine, never data) is off; HF_HUB_DISABLE_TELEMETRY=0 turns it on.
"""

_MOST_USED = {
    "--sessions PATH ...": "session files or folders; 'sample' is the bundled sample (default: pi's own folder)",
    "--model_name_or_path NAME|FOLDER": "the model to start from, on the Hub or in a folder",
    "--tiny_model true": "a tiny random model instead, to try things out without a download",
    "--output_dir DIR": "where checkpoints and the model are saved",
    "--max_length N": "window length in tokens (default: 32768); see dagpack stats",
    "--overflow error|truncate|drop": "what to do with turns that are longer (default: error)",
    "--loss_weighting once|paths": "weight of a target that several turns share (default: once)",
    "--per_device_train_batch_size N": "windows for each device and step (default: 8)",
    "--num_train_epochs N": "passes over the data (default: 3)",
    "--learning_rate X": "peak learning rate (default: 2e-5)",
    "--use_peft": "train a LoRA adapter; --lora_r, --lora_alpha, ...",
    "--redact": "replace secrets and personal data by placeholders (they are counted in any case)",
    "--deny FILE": "regular expressions of what else to look for",
    "--config FILE": "a YAML file with options",
    "--help-all": "all options",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand to the list of commands; `main` reads its options."""
    commands.add_parser("train", help="fine-tune a model on pi sessions", add_help=False)


def main(arguments: Sequence[str]) -> int:
    """Train, or show the help.

    Args:
        arguments: Arguments after `train`.

    Returns:
        The exit status.
    """
    if not arguments or set(arguments) & {"-h", "--help"}:
        _short_parser().print_help()
        return 0 if arguments else 2
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    from dagpack_hf import recipe

    options = ["--help" if argument == "--help-all" else argument for argument in arguments]
    recipe.run(options, prog="dagpack train", examples=_EXAMPLES)
    return 0


def _short_parser() -> argparse.ArgumentParser:
    width = max(map(len, _MOST_USED))
    options = "\n".join(f"  {option:<{width}}  {text}" for option, text in _MOST_USED.items())
    return argparse.ArgumentParser(
        prog="dagpack train",
        usage="dagpack train [OPTION ...]",
        description=f"{_DESCRIPTION}\n{options}",
        epilog=_EXAMPLES,
        add_help=False,
        formatter_class=HelpFormatter,
    )

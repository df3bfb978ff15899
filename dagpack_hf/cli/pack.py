"""`dagpack pack`: session files to a data set of packed rows on disk, and on the Hub if that is asked for."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import (
    HelpFormatter,
    Printer,
    UsageError,
    add_json,
    add_sessions,
    load_tokenizer,
    positive,
    quiet_libraries,
    session_paths,
    show_progress,
)
from dagpack_hf.cli.reading import add_reading, loading_options
from dagpack_hf.cli.redaction import add_redaction, read_deny, redact_or_scan
from dagpack_hf.cli.rendering import add_rendering, rendering_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DESCRIPTION = """\
Read pi sessions, render every trained turn in its exact context, merge everything by shared
prefixes and pack it into windows. The rows are saved as Parquet shards, with a card that states the
report: a folder that datasets.load_dataset reads and DagSFTTrainer trains on. A run that is stopped
leaves the folder as it was.

Nothing leaves this machine without --push-to-hub. Packed rows hold the texts of the sessions as token
ids, so pushing them uploads the sessions. What is pushed is always redacted (as with --redact), read
once more, and refused if something is still found; the repository is private unless --public is given.
"""

_EPILOG = """\
examples:
  dagpack pack --tokenizer Qwen/Qwen3-0.6B --max-length 32768 --out rows
  dagpack pack ~/sessions --tokenizer ./my-model --max-length 65536 --overflow truncate --out rows
  dagpack pack sample --tokenizer sample --max-length 7168 --out rows --json
  dagpack pack --tokenizer Qwen/Qwen3-0.6B --max-length 32768 --out rows --push-to-hub me/my-sessions

dagpack stats shows which window lengths keep how much of the sharing.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "pack",
        help="session files to a data set of packed rows on disk",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_sessions(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME|FOLDER",
        help="tokenizer with a chat template, as the model has it; 'sample' is the bundled one",
    )
    parser.add_argument("--max-length", required=True, type=positive, metavar="N", help="window length in tokens")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--loss-weighting",
        choices=["once", "paths"],
        default="once",
        help="weight of a target that several turns share: once, or as often as turns train it, which equals training "
        "on the unpacked data (default: once)",
    )
    parser.add_argument(
        "--strategy",
        choices=["best", "dfs"],
        default="best",
        help="how windows are filled: the best of several packings, or depth first until a window is full "
        "(default: best)",
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time to search for fewer windows than the first packing has (default: 0)",
    )
    parser.add_argument(
        "--bucket-size",
        type=positive,
        metavar="N",
        help="pack within shuffled groups of N conversations, for windows that are less alike; costs sharing "
        "(default: all together)",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="pack in partitions what takes more memory than that, such as 8GB (default: what the machine has)",
    )
    parser.add_argument(
        "--overflow",
        choices=["error", "truncate", "drop"],
        default="error",
        help="what to do with turns that are longer than a window (default: error)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="shuffles the windows (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the rows in DIR")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="500MB",
        metavar="SIZE",
        help="largest size of a file, such as 500MB or 2GB (default: 500MB)",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="REPO_ID",
        help="push the rows to this data set on the Hub too, a private one",
    )
    parser.add_argument("--public", action="store_true", help="the data set on the Hub may be public")
    add_redaction(parser, pushes=True)
    add_rendering(parser, on_error="raise")
    add_reading(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pack, save, push if asked to, and print the reports."""
    _check(options)
    from dagpack_hf import load_sessions, pack_dataset, save_rows, tokenize_conversations

    say = Printer(options.json)
    progress = show_progress()
    with quiet_libraries(progress=progress):
        rendering = rendering_options(options)
        tokenizer = load_tokenizer(options.tokenizer, needs_template=options.template is None)
        reading = loading_options(options)
        deny = read_deny(options)
        conversations, loaded = load_sessions(session_paths(options.sessions), return_report=True, **reading)
        say(str(loaded))
        if not len(conversations):
            raise ValueError("no turn to train in these sessions, so there is nothing to pack")
        push = bool(options.push_to_hub)
        conversations, private = redact_or_scan(
            conversations, options.redact, deny, options.num_proc, push, use_cache=not options.no_cache
        )
        say(str(private))
        trees, rendered = tokenize_conversations(
            conversations, tokenizer, num_proc=options.num_proc, return_report=True, **rendering
        )
        say(str(rendered))
        rows, packed = pack_dataset(
            trees,
            options.max_length,
            loss_weighting=options.loss_weighting,
            overflow=options.overflow,
            strategy=options.strategy,
            effort=options.effort,
            bucket_size=options.bucket_size,
            max_memory=options.max_memory,
            seed=options.seed,
            progress=progress,
        )
        if not packed.loss_tokens:
            raise ValueError(
                f"no target fits into windows of --max-length {options.max_length} tokens; use longer ones"
            )
        result = {
            "seed": options.seed,
            "load": asdict(loaded),
            "redaction": private.to_dict(),
            "render": asdict(rendered),
        }
        save_rows(
            rows,
            options.out,
            packed,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            tokenizer=_public_name(options.tokenizer),
            details={name: _without_places(value) for name, value in result.items()},
            progress=progress,
        )
        say(f"\n{packed}\n\nsaved {len(rows):,} rows in {options.out}")
        if options.push_to_hub:
            say(f"pushed them to {_push(options, tokenizer)}")
    say.result({"tokenizer": options.tokenizer, **result, "packing": packed.to_dict(), "out": options.out})
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what would fail when the work is done.

    Raises:
        UsageError: the folder is in the way, or the options for the Hub are wrong.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from dagpack_hf.shards import check_destination

    try:
        check_destination(options.out, options.overwrite)
    except FileExistsError as error:
        raise UsageError(f"--out {error}") from error
    if options.push_to_hub:
        try:
            validate_repo_id(options.push_to_hub)
        except HFValidationError as error:
            raise UsageError(f"--push-to-hub {options.push_to_hub}: {error}") from error
    elif options.public:
        raise UsageError("--public says how to push, so it needs --push-to-hub REPO_ID")


def _push(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> str:
    """Push the folder; return where to."""
    from dagpack_hf import push_saved_rows

    try:
        pushed = push_saved_rows(
            options.out, options.push_to_hub, private=not options.public, decoder=tokenizer, deny=options.deny
        )
        return str(pushed.commit_url)
    except (OSError, ValueError) as error:
        again = f"push_saved_rows({options.out!r}, {options.push_to_hub!r}, private={not options.public})"
        raise OSError(
            f"the rows are saved in {options.out}, but not pushed: {error} When that is mended, dagpack_hf.{again} "
            "pushes them without packing again"
        ) from error


def _public_name(tokenizer: str) -> str:
    """Name of a tokenizer as others may see it: of a folder not where it lies."""
    return os.path.basename(os.path.abspath(tokenizer)) if os.path.isdir(tokenizer) else tokenizer


def _without_places(value: Any) -> Any:
    """A report without its examples, which are names of session files."""
    return {name: count for name, count in value.items() if name != "examples"} if isinstance(value, dict) else value


def _size(text: str) -> str:
    """Check a size in bytes."""
    from datasets.utils.py_utils import convert_file_size_to_int

    try:
        valid = convert_file_size_to_int(text) > 0
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 500MB or 2GB")
    return text

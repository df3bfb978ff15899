"""`dagpack pack`: session files to a data set of packed rows on disk."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

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
from dagpack_hf.cli.rendering import add_rendering, rendering_options

_DESCRIPTION = """\
Read pi sessions, render every trained turn in its exact context, merge everything by shared
prefixes and pack it into windows. The rows are saved as a data set that datasets.load_from_disk
reads and DagSFTTrainer trains on, with report.json beside them.
"""

_EPILOG = """\
examples:
  dagpack pack --tokenizer Qwen/Qwen3-0.6B --max-length 32768 --out rows
  dagpack pack ~/sessions --tokenizer ./my-model --max-length 65536 --overflow truncate --out rows
  dagpack pack sample --tokenizer sample --max-length 7168 --out rows --json

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
        "--overflow",
        choices=["error", "truncate", "drop"],
        default="error",
        help="what to do with turns that are longer than a window (default: error)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="shuffles the windows (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if an earlier run made it")
    add_rendering(parser, on_error="raise")
    add_reading(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pack, save and print the reports."""
    check_folder(options.out, options.overwrite)
    from dagpack_hf import load_sessions, pack_dataset, tokenize_conversations

    say = Printer(options.json)
    progress = show_progress()
    with quiet_libraries(progress=progress):
        rendering = rendering_options(options)
        tokenizer = load_tokenizer(options.tokenizer, needs_template=options.template is None)
        reading = loading_options(options)
        conversations, loaded = load_sessions(session_paths(options.sessions), return_report=True, **reading)
        say(str(loaded))
        if not len(conversations):
            raise ValueError("no turn to train in these sessions, so there is nothing to pack")
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
            seed=options.seed,
            progress=progress,
        )
        if not packed.loss_tokens:
            raise ValueError(
                f"no target fits into windows of --max-length {options.max_length} tokens; use longer ones"
            )
        result = {
            "tokenizer": options.tokenizer,
            "seed": options.seed,
            "load": asdict(loaded),
            "render": asdict(rendered),
            "packing": packed.to_dict(),
        }
        with new_folder(options.out) as folder:
            rows.save_to_disk(folder)
            with open(os.path.join(folder, "report.json"), "w", encoding="utf-8") as file:
                json.dump(result, file, indent=2)
    say(f"\n{packed}\n\nsaved {len(rows):,} rows in {options.out}")
    say.result({**result, "out": options.out})
    return 0


def check_folder(path: str, overwrite: bool) -> None:
    """Refuse a folder that is there, unless it may be replaced.

    Raises:
        UsageError: If the folder is in the way.
    """
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
        return
    ours = all(os.path.isfile(os.path.join(path, name)) for name in ("report.json", "dataset_info.json"))
    if not ours:
        raise UsageError(f"--out {path}: is there already and holds no rows of an earlier run; choose another folder")
    if not overwrite:
        raise UsageError(f"--out {path}: is there already; choose another folder, or replace it with --overwrite")


@contextmanager
def new_folder(path: str) -> Iterator[str]:
    """A folder that appears under its name when it is complete, in place of the one that was there."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.") as work:
        fresh, old = os.path.join(work, "new"), os.path.join(work, "old")
        os.mkdir(fresh)
        yield fresh
        if os.path.lexists(path):
            os.rename(path, old)
        try:
            os.rename(fresh, path)
        except OSError:
            if os.path.lexists(old):
                os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)

"""`dagpack stats`: what session files hold, what sharing saves on them, and what other layouts would cost."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import (
    SAMPLE,
    HelpFormatter,
    Printer,
    add_json,
    add_sessions,
    add_tokenizer,
    load_tokenizer,
    positive,
    quiet_libraries,
    session_paths,
    show_progress,
)
from dagpack_hf.cli.documents import LEGEND, add_documents, check_documents, cost_options, run_documents
from dagpack_hf.cli.reading import add_reading, loading_options
from dagpack_hf.cli.rendering import add_rendering, rendering_options

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dagpack_hf.packing import PackReport
    from dagpack_hf.stats import LayoutCost
    from dagpack_hf.trie import TokenForest

_DESCRIPTION = """\
Read pi sessions and show what they hold, what was left out and why, and what packing by shared
prefixes saves: tokens with and without sharing, and windows against the least possible number;
and beside it what padding, concatenating and best fit cost. With --documents the same comparison
for documents of any kind. Nothing is written but the cache of what was read.
"""

_EPILOG = """\
examples:
  dagpack stats                                       all of your pi sessions
  dagpack stats session.jsonl --tokenizer Qwen/Qwen3-0.6B
  dagpack stats ~/sessions --max-length 16384 32768
  dagpack stats sample --json | jq .packing[].reuse_ratio
  dagpack stats --documents lognormal --median 1200 --window 1024 2048 4096
  dagpack stats --documents lengths.jsonl --window 2048

reading the table:
  logical tokens    what training costs with one sequence for each turn
  unique tokens     what is left when every shared prefix counts once
  executed tokens   what the windows compute: unique tokens and what has to be repeated
  lower bound       windows that no packing can do without
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "stats",
        help="what session files hold, and what sharing saves",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_sessions(parser)
    add_tokenizer(parser)
    parser.add_argument(
        "--max-length",
        "--window",
        nargs="+",
        type=positive,
        metavar="N",
        help="window lengths in tokens (default: 1, 2 and 4 times the longest path, rounded up to a multiple of 128; "
        "2048 for documents that are drawn)",
    )
    add_documents(parser)
    add_rendering(parser, on_error="skip")
    add_reading(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the load report, the token table and the comparison of layouts."""
    check_documents(options)
    if options.documents is not None:
        return run_documents(options)
    from dagpack_hf import TokenForest, load_sessions, tokenize_conversations
    from dagpack_hf.packing import iter_trees
    from dagpack_hf.stats import cost_table

    say = Printer(options.json)
    with quiet_libraries(progress=show_progress()):
        rendering = rendering_options(options)
        tokenizer = load_tokenizer(options.tokenizer, needs_template=options.template is None)
        reading = loading_options(options)
        conversations, loaded = load_sessions(session_paths(options.sessions), return_report=True, **reading)
        say(str(loaded))
        result: dict[str, Any] = {
            "load": asdict(loaded),
            "tokenizer": options.tokenizer,
            "render": None,
            "tokens": None,
            "packing": [],
            "layouts": [],
        }
        if len(conversations):
            trees, rendered = tokenize_conversations(
                conversations, tokenizer, num_proc=options.num_proc, return_report=True, **rendering
            )
            result["render"] = asdict(rendered)
            forest = TokenForest.from_trees(iter_trees(trees))
            result["tokens"] = token_counts(forest)
            lengths = options.max_length or window_lengths(forest.longest_path)
            reports, costs = pack_and_compare(forest, sorted(set(lengths)) if len(trees) else [], options)
            result["packing"] = [report.to_dict() for report in reports]
            result["layouts"] = [cost.to_dict() for cost in costs]
            say(f"{rendered}\ntokenizer {tokenizer_name(options.tokenizer)}")
            say(
                "tokens {per_turn:,} turn by turn, {per_leaf:,} leaf by leaf, {tree:,} as a tree".format(
                    **result["tokens"]
                )
            )
            for text in tables(reports):
                say(f"\n{text}")
            if costs:
                say(f"\nlayouts, every distinct path one document\n{cost_table(costs)}\n\n{LEGEND}")
        else:
            say("No turn to train, so there is nothing to pack.")
    say.result(result)
    return 0


def pack_and_compare(
    forest: TokenForest, lengths: list[int], options: argparse.Namespace
) -> tuple[list[PackReport], list[LayoutCost]]:
    """Pack for each window length; return the reports, and the costs beside those of other layouts of the leaves."""
    from dagpack_hf import pack_forest
    from dagpack_hf.stats import LAYOUTS, dag_cost, layout_costs

    documents = leaf_lengths(forest)
    others = [layout for layout in LAYOUTS if layout != "dag"]
    reports, costs = [], []
    for max_length in lengths:
        rows, report = pack_forest(forest, max_length, overflow="truncate")
        reports.append(report)
        costs += layout_costs(documents, max_length, layouts=others, forest=forest, **cost_options(options))
        costs.append(dag_cost([rows], report))
    return reports, costs


def leaf_lengths(forest: TokenForest) -> npt.NDArray[np.int64]:
    """Return the tokens of each path from a root to a leaf, `int64[L]`."""
    import numpy as np

    return forest.depth[forest.leaves].astype(np.int64) + forest.length[forest.leaves]


def token_counts(forest: TokenForest) -> dict[str, int]:
    """Return what the turns cost as one sequence each, as one for each leaf of the tree, and as a tree."""
    per_leaf = int(leaf_lengths(forest).sum())
    return {"per_turn": forest.logical_tokens, "per_leaf": per_leaf, "tree": forest.num_tokens}


def tokenizer_name(name: str) -> str:
    """Say which tokenizer it is, and what the bundled one is good for."""
    if name != SAMPLE:
        return name
    return "of the sample (an approximation: give the model's own with --tokenizer)"


def window_lengths(longest: int) -> list[int]:
    """Return 1, 2 and 4 times the longest path, each rounded up to a multiple of 128."""
    return [-(-times * max(longest, 1) // 128) * 128 for times in (1, 2, 4)]


def tables(reports: list[PackReport]) -> list[str]:
    """Return the report of the longest window in full, and a comparison of all of them."""
    if not reports:
        return []
    texts = [str(reports[-1])]
    if len(reports) > 1:
        texts.append(compare(reports))
    return texts


def compare(reports: list[PackReport]) -> str:
    """Return a table with one line for each window length."""
    head = ("window", "x longest", "windows", "bound", "executed", "saves", "padding", "not trained")
    lines: list[tuple[str, ...]] = [head]
    for report in reports:
        lines.append(
            (
                f"{report.max_length:,}",
                f"{report.max_length / max(report.longest_path, 1):.1f}",
                f"{report.windows:,}",
                f"{report.lower_bound:,}",
                f"{report.executed_tokens:,}",
                f"{report.speedup_bound:.2f}x",
                f"{report.padding_tokens:,}",
                f"{report.overflow.get('lost_targets', 0):,}",
            )
        )
    if not any(report.overflow for report in reports):
        lines = [line[:-1] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

"""`dagpack stats --documents`: the arithmetic of packing for documents that are drawn or read from a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import Printer, UsageError, positive, show_progress

if TYPE_CHECKING:
    from dagpack_hf.stats import Documents, LayoutCost

LOGNORMAL = "lognormal"

_DRAWN = {"count": 1000, "median": 120.0, "sigma": 1.0, "draws": 20}
"""Options of drawn documents, and their defaults."""

_WINDOW = 2048

LEGEND = """\
wasted: positions without a token of a document. cross-document: share of the causal pairs that cross a
document boundary. pairs: of a query and a key; blocks: of 128x128; masked: under a document mask, for dag a
tree mask. repeated: tokens computed again. cut off: tokens beyond the window, not computed."""


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "the arithmetic of packing",
        "What padding, concatenating and cutting, best fit and DAG packing cost: positions, attention, tokens "
        "computed again.",
    )
    group.add_argument(
        "--documents",
        metavar="lognormal|FILE",
        help="in place of sessions: 'lognormal' draws lengths of documents; a JSONL file has one document in a line, "
        "a number of tokens, a list of token ids, or an object with 'length' or 'input_ids'",
    )
    group.add_argument("--count", type=positive, metavar="N", help="documents of a draw (default: 1000)")
    group.add_argument("--median", type=float, metavar="N", help="their median length in tokens (default: 120)")
    group.add_argument(
        "--sigma", type=float, metavar="X", help="standard deviation of the logarithm of their length (default: 1.0)"
    )
    group.add_argument(
        "--draws", type=positive, metavar="N", help="draws, seeds 0 to N-1, that are averaged (default: 20)"
    )
    group.add_argument(
        "--separator-tokens",
        type=_not_negative,
        default=1,
        metavar="N",
        help="end-of-text tokens after each document where documents are concatenated (default: 1)",
    )
    group.add_argument(
        "--pad-to",
        choices=["max_length", "longest"],
        default="max_length",
        help="width of padded rows: the window, or the longest document (default: max_length)",
    )


def check_documents(options: argparse.Namespace) -> None:
    """Refuse options that would be without effect.

    Raises:
        UsageError: sessions beside `--documents`, or how to draw documents where none are drawn.
    """
    if options.documents is not None and options.sessions:
        raise UsageError("--documents takes the place of sessions, so give no session files with it")
    unused = [f"--{name}" for name in _DRAWN if getattr(options, name) is not None]
    if unused and options.documents != LOGNORMAL:
        raise UsageError(f"{', '.join(unused)}: only for documents that are drawn (--documents {LOGNORMAL})")


def run_documents(options: argparse.Namespace) -> int:
    """Print the table of drawn documents, or of those of a file."""
    from dagpack_hf.stats import cost_table

    say = Printer(options.json)
    source, costs = _drawn(options) if options.documents == LOGNORMAL else _read(options)
    say("{text}\n\n{table}\n\n{legend}".format(text=source.pop("text"), table=cost_table(costs), legend=LEGEND))
    say.result({"documents": source, "layouts": [cost.to_dict() for cost in costs]})
    return 0


def cost_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of `layout_costs`."""
    return {"separator_tokens": options.separator_tokens, "pad_to": options.pad_to}


def _drawn(options: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """What was drawn, and the mean costs."""
    from tqdm.auto import tqdm

    from dagpack_hf.stats import layout_costs, lognormal_lengths, mean_costs

    given = {name: getattr(options, name) for name in _DRAWN}
    drawn: dict[str, Any] = {name: _DRAWN[name] if value is None else value for name, value in given.items()}
    windows = sorted(set(options.max_length or [_WINDOW]))
    draws: list[list[LayoutCost]] = []
    tokens = 0
    for seed in tqdm(range(drawn["draws"]), desc="Draws", disable=not show_progress()):
        lengths = lognormal_lengths(drawn["count"], median=drawn["median"], sigma=drawn["sigma"], seed=seed)
        tokens += int(lengths.sum())
        draws.append([cost for window in windows for cost in layout_costs(lengths, window, **cost_options(options))])
    mean_tokens = tokens / drawn["draws"]
    text = (
        f"{drawn['count']:,} log-normal documents, median {drawn['median']:g}, sigma {drawn['sigma']:g}; "
        f"{mean_tokens:,.0f} tokens; mean of {drawn['draws']} draws"
    )
    return {"text": text, "distribution": LOGNORMAL, **drawn, "tokens": mean_tokens}, mean_costs(draws)


def _read(options: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """What was read, and its costs."""
    from tqdm.auto import tqdm

    from dagpack_hf.cli.stats import window_lengths
    from dagpack_hf.stats import layout_costs, read_documents

    documents = read_documents(options.documents)
    lengths = documents.lengths
    windows = sorted(set(options.max_length or window_lengths(int(lengths.max(initial=0)))))
    costs = [
        cost
        for window in tqdm(windows, desc="Windows", disable=not show_progress())
        for cost in layout_costs(lengths, window, forest=documents.forest, **cost_options(options))
    ]
    return _source(options.documents, documents), costs


def _source(path: str, documents: Documents) -> dict[str, Any]:
    lengths = documents.lengths
    empty = int((lengths == 0).sum())
    unique = None if documents.forest is None else documents.forest.num_tokens
    text = f"{len(lengths):,} documents, {lengths.sum():,} tokens"
    text += f", {unique:,} of them distinct" if unique is not None else " (what they share is not known from lengths)"
    text += f"; {empty:,} empty ones are left out" if empty else ""
    return {
        "text": text,
        "file": path,
        "count": len(lengths),
        "tokens": int(lengths.sum()),
        "unique_tokens": unique,
        "empty": empty,
    }


def _not_negative(text: str) -> int:
    """Parse a number of tokens that may be 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)

"""Figures of `dagpack show`: what packing makes of sequences, and what it costs, of the user's own data.

`add_arguments` adds the options, `is_asked_for` says whether there is something to draw, and `draw` does it. The
command they belong to has the session files, the tokenizer, and how sessions are read and rendered. Without any data
the figures are those of the small game, and of documents that are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import Printer, UsageError, positive, quiet_libraries, show_progress
from dagpack_hf.cli.figure_data import FigureData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOWS = (128, 256, 512, 1024, 2048, 4096, 8192)
_MEDIANS = (120, 1200)
_DRAWS = 20
_OPTIONS = ("out", "theme", "episodes", "merge", "documents", "lengths", "row", "stretches")


def add_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add the options.

    Args:
        parser: The command's parser.
        without: Options that the parser has already, such as `--out`.
    """
    group = parser.add_argument_group(
        "figures", "One figure as SVG or PNG; needs matplotlib. Without data of yours those of the small game."
    )

    def add(*flags: str, **settings: Any) -> None:
        if not set(flags) & set(without):
            group.add_argument(*flags, **settings)

    add(
        "--figure",
        choices=list(FIGURES),
        help="chains: the sequences as they are; graph: what merging makes of them; window: a packed window, X, Y, "
        "positions and mask; waste, cross-document: positions wasted and attention across documents, by window "
        "length; crossing-pairs: a row under a causal and a document mask",
    )
    add("--out", metavar="FILE", help="file of the figure, .svg or .png")
    add("--theme", choices=["light", "dark"], help="colours (default: light)")
    add("--episodes", metavar="FILE", help='in place of sessions: JSONL of {"states": [...], "actions": [...]}')
    add(
        "--merge",
        choices=["state", "prefix"],
        help="how episodes are merged (default: state); messages of sessions always by prefix",
    )
    add(
        "--documents",
        metavar="FILE",
        help="for waste and cross-document, in place of sessions: JSONL of lengths or token ids",
    )
    add("--lengths", nargs="+", type=positive, metavar="N", help="for crossing-pairs: tokens of each document")
    add(
        "--stretches",
        action="store_true",
        help="for graph and window: a box for each stretch without a branch (always for sessions)",
    )
    add("--row", type=_number, metavar="N", help="for window: which, counted from 0 (default: 0)")
    add(
        "--max-length",
        "--window",
        nargs="+",
        type=positive,
        metavar="N",
        help="window length in tokens, or several to compare",
    )


def is_asked_for(options: argparse.Namespace) -> bool:
    """Whether a figure is to be drawn.

    Raises:
        UsageError: options of a figure without `--figure`, or a page as well.
    """
    if options.figure is None:
        given = [name for name in _OPTIONS if getattr(options, name, None)]
        if given:
            raise UsageError(f"{', '.join(f'--{name}' for name in given)}: only for a figure; add --figure NAME")
        return False
    if getattr(options, "html", None) is not None:
        raise UsageError("--html and --figure: one at a time")
    return True


def draw(options: argparse.Namespace) -> int:
    """Draw the figure that was asked for, and say where it is.

    Raises:
        UsageError: the command line is wrong, or matplotlib is not installed.
        ValueError: the data cannot be drawn; the message says why.
        OSError: a file cannot be read or written.
    """
    from dagpack_hf.view.theme import FORMATS, require_matplotlib, save_figure

    if not options.out or not options.out.lower().endswith(FORMATS):
        raise UsageError(f"--figure {options.figure}: give its file with --out, ending in {' or '.join(FORMATS)}")
    source = FigureData.of(options)
    try:
        require_matplotlib()
    except ImportError as error:
        raise UsageError(str(error)) from error
    with quiet_libraries(progress=show_progress()):
        save_figure(FIGURES[options.figure](source), options.out)
    Printer(json_output=True)(f"{options.out}: {options.figure} of {source}")
    Printer(options.json).result({"figure": options.figure, "file": options.out, "data": str(source)})
    return 0


def _chains(source: FigureData) -> Figure:
    from dagpack_hf.view.chains import chains_figure

    episodes, name, action_name = source.episodes()
    is_long = source.kind == "sessions"
    return chains_figure(
        [each[0] for each in episodes],
        None if is_long else [each[1] for each in episodes],
        name=name,
        action_name=action_name,
        stretches=is_long,
        theme=source.theme,
    )


def _graph(source: FigureData) -> Figure:
    from dagpack_hf.view.graph import graph_figure

    episodes, name, action_name = source.episodes()
    return graph_figure(
        source.graph(episodes),
        name=name,
        action_name=action_name,
        stretches=source.stretches,
        theme=source.theme,
    )


def _window(source: FigureData) -> Figure:
    from dagpack_hf import pack_forest
    from dagpack_hf.cli.stats import window_lengths
    from dagpack_hf.view.row_cells import token_namer
    from dagpack_hf.view.window import window_figure

    options = source.options
    if source.kind == "sessions":
        forest = source.forest()
        name = token_namer(source.tokenizer().decode)
    else:
        episodes, state_name, _ = source.episodes()
        graph = source.graph(episodes)
        forest = graph.to_forest()

        def name(ids: list[int]) -> str:
            return state_name(graph.nodes(ids[:1])[0].state)

    max_length = (source.windows or window_lengths(forest.longest_path))[0]
    rows, _ = pack_forest(forest, max_length, overflow="truncate" if source.kind == "sessions" else "error")
    row = options.row or 0
    if not 0 <= row < len(rows):
        raise UsageError(f"--row {row}: there are {len(rows):,} windows, counted from 0")
    return window_figure(rows, row, name=name, stretches=source.stretches, theme=source.theme)


def _waste(source: FigureData) -> Figure:
    from dagpack_hf.stats import cost_series
    from dagpack_hf.view.arithmetic import waste_figure

    if source.kind:
        return waste_figure(*cost_series(_costs(source), "waste"), theme=source.theme)
    title = f"Positions wasted, by window length: log-normal documents, median {_MEDIANS[0]}"
    return waste_figure(*cost_series(_drawn(source, _MEDIANS[0])), theme=source.theme, title=title)


def _cross_document(source: FigureData) -> Figure:
    from dagpack_hf.stats import cost_series
    from dagpack_hf.view.arithmetic import cross_document_figure

    if source.kind:
        windows, shares = cost_series(_costs(source), "cross_document_share")
        shares.pop("padded", None)
        return cross_document_figure(windows, shares, theme=source.theme)
    lines = {}
    for median in _MEDIANS:
        windows, shares = cost_series(_drawn(source, median, "concatenated"), "cross_document_share")
        lines[f"median {median:,}"] = shares["concatenated"]
    return cross_document_figure(windows, lines, theme=source.theme)


def _crossing_pairs(source: FigureData) -> Figure:
    from dagpack_hf.view.arithmetic import crossing_pairs_figure

    return crossing_pairs_figure(source.options.lengths or (9, 8, 7), theme=source.theme)


FIGURES: dict[str, Callable[[FigureData], Any]] = {
    "chains": _chains,
    "graph": _graph,
    "window": _window,
    "waste": _waste,
    "cross-document": _cross_document,
    "crossing-pairs": _crossing_pairs,
}
"""Figures by name."""


def _costs(source: FigureData) -> list[Any]:
    """What the layouts of the user's documents cost at several window lengths."""
    from tqdm.auto import tqdm

    from dagpack_hf.cli.stats import leaf_lengths
    from dagpack_hf.stats import layout_costs, read_documents

    if source.kind == "documents":
        documents = read_documents(source.options.documents)
        lengths, forest = documents.lengths, documents.forest
    else:
        forest = source.forest()
        lengths = leaf_lengths(forest)
    if not len(lengths):
        raise UsageError(f"{source}: no document, so there is nothing to draw")
    return [
        cost
        for window in tqdm(_windows(source, lengths), desc="Windows", disable=not show_progress())
        for cost in layout_costs(lengths, window, forest=forest)
    ]


def _drawn(source: FigureData, median: int, *layouts: str) -> list[Any]:
    """What the layouts of log-normal documents cost, in the mean."""
    from dagpack_hf.stats import LAYOUTS, layout_costs, lognormal_lengths, mean_costs

    windows = source.windows or _WINDOWS
    draws = [lognormal_lengths(median=median, seed=seed) for seed in range(_DRAWS)]
    return mean_costs(
        [
            [cost for window in windows for cost in layout_costs(each, window, layouts=layouts or LAYOUTS)]
            for each in draws
        ]
    )


def _windows(source: FigureData, lengths: Any) -> list[int]:
    """The window lengths that were given, or some that hold the longest path, or most documents, and multiples."""
    from dagpack_hf.cli.stats import window_lengths

    if source.windows:
        return source.windows
    longest = int(lengths.max())
    if source.kind == "sessions":
        return window_lengths(longest)
    return [window for window in _WINDOWS if lengths.mean() <= window < 4 * longest] or window_lengths(longest)


def _number(text: str) -> int:
    """Parse a number of a row, from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)

"""One partition: its pieces merged, made consistent with its neighbours, and packed.

The tokens that a partition shares with others get the tallies that they have in the whole corpus; then paths are
limited, as they would be there; then what a later partition holds as well becomes context, and a last path that lies
wholly in a later partition is taken out. The rest is the ordinary plan.

Why limiting each partition gives what limiting the corpus gives: no splitter is longer than a window, so paths that
agree on a whole window are in one partition, and what is shared ends at least one token before the limit. So tokens
beyond the limit, and the places where runs of targets cross it, are in one partition each. Under `"drop"` what crosses
is taken out of the run before the limit, which may begin in what is shared; there the tallies have to be handed on
from partition to partition, in order (`limit_partition`).

Cost: as packing in memory, for the pieces of the partition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from dagpack_hf.columns import SequenceColumns, is_tree_dataset, table_trees
from dagpack_hf.external.border import Border, SharedPath
from dagpack_hf.external.edges import path_tokens, tallies_of, with_tallies, without_last_leaf
from dagpack_hf.external.lines import PartLine
from dagpack_hf.forest_packing import ForestPlan, plan_forest
from dagpack_hf.layout import Rows, RowWriter
from dagpack_hf.overflow import Overflow, limit_paths
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport
from dagpack_hf.spans import IntArray
from dagpack_hf.trie import TokenForest


@dataclass(frozen=True)
class Outcome:
    """What the report of the corpus needs to know of a packed partition.

    Args:
        partition: its number.
        report: its own report.
        line: leaf line of what was packed.
        full: leaf line before paths were limited; `None` if none had to be.
    """

    partition: int
    report: PackReport
    line: PartLine
    full: PartLine | None


@dataclass(frozen=True)
class PartitionPlan:
    """A packed partition before it is written.

    Args:
        plan: its rows, and its report as far as it is known.
        figures: its outcome, without what only the rows tell.
    """

    plan: ForestPlan
    figures: Outcome

    @property
    def writer(self) -> RowWriter:
        """The rows."""
        return self.plan.writer

    def outcome(self, portions: Iterable[Rows]) -> Outcome:
        """The outcome, when all portions of the rows went through."""
        return replace(self.figures, report=self.plan.report(portions))


def plan_partition(pieces: pa.Table, border: Border, options: PackOptions) -> PartitionPlan:
    """Plan the windows of a partition.

    Args:
        pieces: all of its pieces, in any order.
        border: what it shares with others.
        options: those of the corpus. The seed of the partition is derived from theirs, and it gets its share of
            `effort`.
    """
    limited = _limit(_merge(pieces), border, options)
    plan = plan_forest(limited.packed, partition_options(options, border), advice=False)
    report = replace(
        plan.figures,
        logical_tokens=0,
        source_targets=limited.source_targets,
        overflow={name: getattr(limited.lost, name) for name in ("cut_sequences", "lost_sequences", "lost_targets")},
    )
    return PartitionPlan(replace(plan, figures=report), Outcome(border.partition, report, limited.line, limited.full))


def limit_partition(pieces: pa.Table, border: Border, options: PackOptions) -> SharedPath:
    """What is left of the tallies that a partition shares with later ones when it is limited; for `Border.after`."""
    return _limit(_merge(pieces), border, options).left


def partition_options(options: PackOptions, border: Border) -> PackOptions:
    """The options of one partition."""
    seed = options.seed
    if seed is not None:
        seed = int(np.random.SeedSequence([seed, border.partition]).generate_state(1, np.uint64)[0])
    return replace(options, seed=seed, effort=options.effort * border.share)


@dataclass(frozen=True)
class _Limited:
    """A partition that fits.

    Args:
        packed: what is packed; it trains nothing that a later partition trains.
        left: tallies that its last path shares with later partitions.
        lost: what was lost, but for `lost_tokens`.
        source_targets: labelled tokens of its pieces.
        line: leaf line of `packed`.
        full: leaf line before it was limited, if that cut anything.
    """

    packed: TokenForest
    left: SharedPath
    lost: Overflow
    source_targets: int
    line: PartLine
    full: PartLine | None


def _merge(pieces: pa.Table) -> TokenForest:
    if not is_tree_dataset(pieces.column_names):
        return SequenceColumns.of(pieces).forest()
    return TokenForest.from_trees(table_trees(pieces))


def _limit(forest: TokenForest, border: Border, options: PackOptions) -> _Limited:
    source_targets = forest.num_source_targets
    forest, first, last = _with_corpus_tallies(forest, border)
    fitting, lost = limit_paths(forest, options.max_length, options.overflow)
    edge = int(fitting.leaves[-1]) if fitting.num_nodes else -1
    kept = _agreeing(fitting, edge, last)
    token = path_tokens(fitting, edge, kept)
    left = _left(tallies_of(fitting, token), border.last)
    context = SharedPath(np.zeros(kept, np.int64), None if fitting.tally.weight is None else np.zeros(kept))
    packed, kept = _without_shared_end(with_tallies(fitting, token, context), last[:kept])
    front = _agreeing(packed, int(packed.leaves[0]) if packed.num_nodes else -1, first)
    return _Limited(
        packed=packed,
        left=left,
        lost=replace(lost, lost_tokens=0),
        source_targets=source_targets,
        line=PartLine.of(packed, front, kept, border.common),
        full=PartLine.of(forest, len(first), len(last), border.common) if lost else None,
    )


def _with_corpus_tallies(forest: TokenForest, border: Border) -> tuple[TokenForest, IntArray, IntArray]:
    """The forest with the tallies of the whole corpus, and the shared tokens of its first and its last path."""
    ends = forest.leaves
    first = path_tokens(forest, int(ends[0]), len(border.first))
    last = path_tokens(forest, int(ends[-1]), len(border.last))
    ids = forest.path(int(ends[0]))[: len(first)], forest.path(int(ends[-1]))[: len(last)]
    token = np.concatenate([first, last[border.common :]])
    return with_tallies(forest, token, border.first.then(border.last.beyond(border.common))), *ids


def _without_shared_end(forest: TokenForest, last: IntArray) -> tuple[TokenForest, int]:
    """Take out the last path as far as nothing else needs it, if it is a prefix of `last`.

    Returns:
        The forest, and how many tokens its last path has in common with `last`.
    """
    while forest.num_nodes:
        node = forest.num_nodes - 1
        shared = _agreeing(forest, node, last)
        if shared < int(forest.depth[node]) + int(forest.length[node]):
            return forest, shared
        forest = without_last_leaf(forest)
    return forest, 0


def _agreeing(forest: TokenForest, node: int, ids: IntArray) -> int:
    """How many tokens a path has in common with these."""
    if node < 0:
        return 0
    path = forest.path(node)[: len(ids)]
    differs = np.flatnonzero(path != ids[: len(path)])
    return int(differs[0]) if len(differs) else len(path)


def _left(kept: SharedPath, whole: SharedPath) -> SharedPath:
    """Tallies of a shared path: of what is kept of it after limiting, and 0 for what was cut."""
    cut = len(whole) - len(kept)
    count = np.concatenate([kept.count, np.zeros(cut, np.int64)])
    if whole.weight is None:
        return SharedPath(count, None)
    weight = kept.count.astype(np.float64) if kept.weight is None else kept.weight
    return SharedPath(count, np.concatenate([weight, np.zeros(cut)]))

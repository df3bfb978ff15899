"""What each layout of a set of documents costs: positions, attention, and tokens that are computed again.

Four layouts. *Padded*, *concatenated* and *best fit* are those of `dagpack_hf.baselines`; *dag* is `pack_forest`. The
documents are known by their lengths, or merged as a `TokenForest`, which also tells what they share.

A position is *wasted* if it holds no token of a document: padding, and the end-of-text tokens that separate documents
in the concatenated layout. A token is *repeated* if the same tokens from the beginning of a document up to it were
computed before: duplicates in the layouts that write every document out, replay and branch copies in dag.

Cost: O(n log n) in documents, and for dag what packing costs; a portion of its rows is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dagpack_hf.baselines.placement import LongArray, document_lengths, place
from dagpack_hf.columns import PORTION
from dagpack_hf.forest_packing import plan_forest
from dagpack_hf.layout import Rows
from dagpack_hf.pack_options import PackOptions, check_choice
from dagpack_hf.pack_report import PackReport
from dagpack_hf.stats.attention import (
    causal_blocks,
    causal_pairs,
    document_blocks,
    document_pairs,
    tree_blocks,
    tree_pairs,
)
from dagpack_hf.trie import TokenForest

LAYOUTS = ("padded", "concatenated", "best_fit", "dag")

PAD_TO = ("max_length", "longest")


@dataclass(frozen=True)
class LayoutCost:
    """What one layout of a set of documents costs. `None`: does not apply, or cannot be known from lengths.

    Args:
        layout: one of `LAYOUTS`.
        max_length: window length in tokens.
        rows: number of rows.
        width: positions of each row, padding included.
        tokens: positions that hold a token of a document.
        separators: positions that hold an end-of-text token between documents.
        repeated_tokens: tokens that were computed before; `None` if only lengths are known.
        cut_documents: documents that are truncated, or divided among rows.
        cut_tokens: tokens beyond the window, in no row.
        lower_bound: rows that this kind of layout cannot do without.
        causal_pairs: pairs of a query and a key, both tokens, under a causal mask of the row.
        document_pairs: those within a document, under a document mask.
        tree_pairs: those of a position and its ancestors, under a tree mask.
        causal_blocks: 128x128 blocks of rows under a causal mask, padding included.
        document_blocks: those with a visible pair of tokens under a document mask.
        tree_blocks: those with a visible pair of tokens under a tree mask.
    """

    layout: str
    max_length: int
    rows: int
    width: int
    tokens: int
    separators: int = 0
    repeated_tokens: int | None = None
    cut_documents: int = 0
    cut_tokens: int = 0
    lower_bound: int | None = None
    causal_pairs: int | None = None
    document_pairs: int | None = None
    tree_pairs: int | None = None
    causal_blocks: int | None = None
    document_blocks: int | None = None
    tree_blocks: int | None = None

    @property
    def positions(self) -> int:
        """Positions of all rows, padding included."""
        return self.rows * self.width

    @property
    def waste(self) -> float:
        """Share of the positions that hold no token of a document."""
        return 1 - self.tokens / self.positions if self.positions else 0.0

    @property
    def cross_document_share(self) -> float | None:
        """Share of the causal pairs that cross a document boundary: what is attended without a document mask."""
        if self.causal_pairs is None or self.document_pairs is None:
            return None
        return 1 - self.document_pairs / self.causal_pairs if self.causal_pairs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures, the derived ones included, for JSON."""
        names = ("positions", "waste", "cross_document_share")
        return asdict(self) | {name: getattr(self, name) for name in names}


def layout_costs(
    lengths: npt.ArrayLike,
    max_length: int,
    *,
    layouts: Sequence[str] = LAYOUTS,
    separator_tokens: int = 1,
    pad_to: str = "max_length",
    forest: TokenForest | None = None,
) -> list[LayoutCost]:
    """What layouts of documents cost.

    Args:
        lengths: tokens of each document. Documents of 0 tokens are left out.
        max_length: window length in tokens. Longer documents are truncated, but cut where they are concatenated.
        layouts: some of `"padded"`, `"concatenated"`, `"best_fit"` and `"dag"`.
        separator_tokens: end-of-text tokens after each document where documents are concatenated; 0 if the lengths
            have them already. They count as part of the document in the attention, and as waste in the positions.
        pad_to: width of padded rows: `"max_length"`, or `"longest"`, the longest document.
        forest: the same documents, merged. Without it nothing is known to be shared, so dag packs documents that have
            nothing in common.

    Returns:
        One for each layout, in that order.

    Raises:
        ValueError: an option or a length is wrong.

    Example:
        >>> padded, concatenated = layout_costs([3, 5, 2], 8, layouts=["padded", "concatenated"])
        >>> padded.positions, padded.tokens, concatenated.positions, concatenated.tokens, concatenated.separators
        (24, 10, 16, 10, 3)
    """
    for layout in layouts:
        check_choice("layout", layout, LAYOUTS)
    check_choice("pad_to", pad_to, PAD_TO)
    if separator_tokens < 0:
        raise ValueError(f"separator_tokens must be at least 0, got {separator_tokens}.")
    documents = document_lengths(lengths)
    documents = documents[documents > 0]
    costs = []
    for layout in layouts:
        if layout == "dag":
            costs.append(_dag_cost(documents, max_length, forest))
        else:
            costs.append(_placed_cost(documents, max_length, layout, separator_tokens, pad_to, forest))
    return costs


def sequence_costs(
    sequences: Sequence[Sequence[int] | npt.NDArray[np.integer]], max_length: int, **options: Any
) -> list[LayoutCost]:
    """What layouts of token sequences cost; options as of `layout_costs`.

    Example:
        >>> *_, dag = sequence_costs([[1, 2, 3], [1, 2, 4]], 8)
        >>> dag.tokens, dag.repeated_tokens  # 2 is copied at the branch point
        (5, 1)
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return layout_costs(lengths, max_length, forest=TokenForest.from_sequences(sequences), **options)


def dag_cost(portions: Iterable[Rows], report: PackReport) -> LayoutCost:
    """What packed rows cost.

    Args:
        portions: the rows, all of them.
        report: what packing said about them.
    """
    pairs = blocks = 0
    for rows in portions:
        pairs += tree_pairs(rows)
        blocks += tree_blocks(rows)
    return LayoutCost(
        layout="dag",
        max_length=report.max_length,
        rows=report.windows,
        width=report.max_length,
        tokens=report.executed_tokens,
        repeated_tokens=report.replay_tokens,
        cut_documents=report.overflow.get("cut_sequences", 0),
        cut_tokens=report.overflow.get("lost_tokens", 0),
        lower_bound=report.lower_bound,
        tree_pairs=pairs,
        tree_blocks=blocks,
    )


def _dag_cost(documents: LongArray, max_length: int, forest: TokenForest | None) -> LayoutCost:
    merged = _unrelated(documents) if forest is None else forest
    plan = plan_forest(merged, PackOptions(max_length, overflow="truncate", seed=None), advice=False)
    cost = dag_cost(plan.writer.portions(PORTION), plan.figures)
    if forest is not None:
        return cost
    return replace(cost, repeated_tokens=None)


def _placed_cost(
    documents: LongArray, max_length: int, layout: str, separator_tokens: int, pad_to: str, forest: TokenForest | None
) -> LayoutCost:
    is_cut = layout == "concatenated"
    separator = separator_tokens if is_cut else 0
    placement = place(documents + separator, max_length, layout)
    placed = int(placement.length.sum())
    separators = separator * len(documents)
    tokens = placed - separators
    width = max_length
    if layout == "padded" and pad_to == "longest":
        width = int(placement.length.max(initial=0))
    parts = np.bincount(placement.document, minlength=len(documents))
    return LayoutCost(
        layout=layout,
        max_length=max_length,
        rows=placement.rows,
        width=width,
        tokens=tokens,
        separators=separators,
        repeated_tokens=None if forest is None else tokens - _distinct(forest, None if is_cut else max_length),
        cut_documents=int((parts > 1).sum() if is_cut else (documents > max_length).sum()),
        cut_tokens=int(documents.sum()) - tokens,
        lower_bound=-(-placed // max_length) if layout == "best_fit" else None,
        causal_pairs=causal_pairs(placement),
        document_pairs=document_pairs(placement),
        causal_blocks=causal_blocks(placement.rows, width),
        document_blocks=document_blocks(placement),
    )


def _distinct(forest: TokenForest, max_length: int | None) -> int:
    """Tokens of a forest, up to some depth."""
    if max_length is None:
        return forest.num_tokens
    return int(np.clip(max_length - forest.depth.astype(np.int64), 0, forest.length).sum())


def _unrelated(documents: LongArray) -> TokenForest:
    """A forest of documents of these lengths that have nothing in common."""
    offsets = np.concatenate([[0], np.cumsum(documents)])
    tokens = np.zeros(offsets[-1], np.int32)
    tokens[offsets[:-1]] = np.arange(len(documents))
    return TokenForest.from_arrays(tokens, offsets)

"""Examples to partitions: each path goes where the splitters put it.

A token tree whose leaves fall into several partitions is cut: each gets the part above its leaves, and a token that
several get is trained in the first of these pieces and context in the others. A sequence stays whole, and equal ones
come to the same partition.

Cost: what is written is copied once; see `branches` for what is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dagpack_hf.columns import is_tree_dataset
from dagpack_hf.external.border import Summary
from dagpack_hf.external.branches import NO_TOKENS, Branches
from dagpack_hf.external.splitters import Splitters
from dagpack_hf.kernels.paths import assign, locate
from dagpack_hf.kernels.pieces import COUNTS, LABELS, TARGETS, climb, reach_along, tally_along, write_pieces
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.spans import LongArray

_LISTS = pa.large_list(pa.int32())


def piece_schema(columns: list[str]) -> pa.Schema:
    """The schema of pieces of a data set with these columns."""
    if not is_tree_dataset(columns):
        return pa.schema({name: _LISTS for name in ("input_ids", "labels") if name in columns})
    names = dict.fromkeys(("input_ids", "target_count", "node_length", "node_parent"), _LISTS)
    weights = {"target_weight": pa.large_list(pa.float32())} if "target_weight" in columns else {}
    return pa.schema({**names, "logical_tokens": pa.int64(), **weights})


@dataclass(frozen=True)
class Scattered:
    """What comes of a table.

    Args:
        pieces: for each partition that gets any, a table of its pieces, with the columns of the source.
        summary: what they add to the summary of the partitions.
    """

    pieces: dict[int, pa.Table]
    summary: Summary


def scatter(table: pa.Table, splitters: Splitters, options: PackOptions) -> Scattered:
    """Bring the examples of a table to their partitions.

    Args:
        table: some examples of the corpus, with the columns of packing only.
        splitters: as `choose_splitters` finds them; none may be longer than a window.
        options: under `overflow="drop"` sequences that are longer than a window are left out.

    Raises:
        ValueError: an example is wrong; the message names it by its position in the table.
    """
    longest = int(np.diff(splitters.offset).max(initial=0))
    if longest > options.max_length:
        raise ValueError(f"A splitter has {longest} tokens, a window only max_length={options.max_length}.")
    branches = Branches.of(table, options)
    reach, low, high, common, near = locate(
        branches.values, branches.begin, branches.end, branches.parent, splitters.tokens, splitters.offset
    )
    partition, first = assign(branches.parent, reach, low, high, splitters.offset)
    leaves = np.flatnonzero(partition >= 0)
    leaves = leaves[np.lexsort((branches.example[leaves], partition[leaves]))]
    pieces = _cut(branches, leaves, partition, first)

    summary = Summary.empty(splitters)
    reach_along(partition, common, near, splitters.shared, summary.reach)
    tally_along(
        branches.marks,
        branches.mark_begin,
        branches.kind,
        branches.weights,
        branches.begin,
        branches.end,
        reach,
        common,
        near,
        first,
        splitters.shared,
        splitters.offset,
        summary.count,
        summary.weight,
    )
    np.add.at(summary.tokens, pieces.partition, np.diff(pieces.offset))
    weighted = bool(len(branches.weights))
    total = Summary(
        summary.tokens,
        summary.reach,
        summary.count,
        summary.weight,
        weighted,
        branches.logical_tokens,
        branches.dropped,
    )
    return Scattered(pieces.tables(piece_schema(table.column_names), branches), total)


@dataclass(frozen=True)
class _Pieces:
    """Pieces in the order of their partitions, one for each partition that an example has paths in.

    Args:
        partition: `int64[G]`, where each belongs.
        offset: `int64[G + 1]`, where its tokens begin.
        ids: `int32[total]`.
        marks: counts or labels, or empty.
        weights: `float32[total]`, or empty.
        node_offset: `int64[G + 1]`, where its nodes begin.
        node_length: `int32[K]`.
        node_parent: `int32[K]`.
    """

    partition: LongArray
    offset: LongArray
    ids: np.ndarray
    marks: np.ndarray
    weights: np.ndarray
    node_offset: LongArray
    node_length: np.ndarray
    node_parent: np.ndarray

    def tables(self, schema: pa.Schema, branches: Branches) -> dict[int, pa.Table]:
        """A table for each partition."""
        tokens = pa.array(self.offset, pa.int64())
        columns = {"input_ids": pa.LargeListArray.from_arrays(tokens, pa.array(self.ids))}
        if branches.kind == LABELS:
            columns["labels"] = pa.LargeListArray.from_arrays(tokens, pa.array(self.marks))
        if branches.kind == COUNTS:
            nodes = pa.array(self.node_offset, pa.int64())
            columns["target_count"] = pa.LargeListArray.from_arrays(tokens, pa.array(self.marks))
            columns["node_length"] = pa.LargeListArray.from_arrays(nodes, pa.array(self.node_length))
            columns["node_parent"] = pa.LargeListArray.from_arrays(nodes, pa.array(self.node_parent))
            columns["logical_tokens"] = pa.array(np.zeros(len(self.partition), np.int64))
        if "target_weight" in schema.names:
            without = pa.nulls(len(self.partition), pa.large_list(pa.float32()))
            weights = pa.array(self.weights)
            has_weights = len(branches.weights)
            columns["target_weight"] = pa.LargeListArray.from_arrays(tokens, weights) if has_weights else without
        whole = pa.table(columns, schema=schema)
        found, begin = np.unique(self.partition, return_index=True)
        bounds = [*begin.tolist(), len(self.partition)]
        return {
            int(each): whole.slice(low, high - low)
            for each, low, high in zip(found.tolist(), bounds, bounds[1:], strict=False)
        }


def _cut(branches: Branches, leaves: LongArray, partition: LongArray, first: LongArray) -> _Pieces:
    """The pieces of all examples; `leaves` are in the order of their partitions and, within these, of examples."""
    own, example = partition[leaves], branches.example[leaves]
    begins = np.ones(len(leaves), bool)
    begins[1:] = (own[1:] != own[:-1]) | (example[1:] != example[:-1])
    group = np.append(np.flatnonzero(begins), len(leaves))
    own = own[group[:-1]]
    n = len(branches.begin)
    none = np.zeros(0, np.int64)
    nodes = np.empty(climb(leaves, group, branches.parent, np.full(n, -1, np.int64), none)[-1], np.int64)
    node_offset = climb(leaves, group, branches.parent, np.full(n, -1, np.int64), nodes)
    node_length = branches.end[nodes] - branches.begin[nodes]
    total = int(node_length.sum())
    ids = np.empty(total, np.int32)
    marks = np.empty(0 if branches.kind == TARGETS else total, np.int32)
    weights = np.empty(total if len(branches.weights) else 0, np.float32)
    offset, node_parent, is_right = write_pieces(
        nodes,
        node_offset,
        own,
        first,
        branches.values,
        branches.marks,
        branches.mark_begin,
        branches.kind,
        branches.weights,
        branches.begin,
        branches.end,
        branches.parent,
        ids,
        marks if len(marks) else NO_TOKENS,
        weights,
    )
    if not is_right:
        assert branches.sequences is not None, "token trees are checked as they are read"
        branches.sequences.check()
        raise AssertionError("a sequence was refused and then found right")
    return _Pieces(own, offset, ids, marks, weights, node_offset, node_length.astype(np.int32), node_parent)

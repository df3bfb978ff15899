"""What runs on the nodes of a cluster: the steps of packing, on tables as Ray hands them over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from dagpack_hf.columns import PORTION, rows_to_table
from dagpack_hf.external.border import Border, SharedPath, Summary
from dagpack_hf.external.branches import Extent, measure, sample_paths
from dagpack_hf.external.packing import BATCH_TOKENS, Block, naming
from dagpack_hf.external.partitions import Outcome, limit_partition, plan_partition
from dagpack_hf.external.scatter import scatter
from dagpack_hf.external.splitters import Splitters
from dagpack_hf.pack_options import PackOptions


def measure_table(table: pa.Table, max_length: int) -> Extent:
    """How much there is in a table."""
    return measure(_plain(table), max_length)


def sample_table(table: pa.Table, before: int, step: int, options: PackOptions) -> list[np.ndarray]:
    """Every so many paths of a table that so many paths come before."""
    return list(sample_paths(_plain(table), before, step, options))


def scatter_tables(
    blocks: Sequence[Block], splitters: Splitters, options: PackOptions, *tables: pa.Table
) -> Iterator[Summary | pa.Table | None]:
    """The summary of some tables, then their pieces for each partition, `None` for one that gets none."""
    summary = Summary.empty(splitters)
    pieces: dict[int, list[pa.Table]] = {}
    for block, table in zip(blocks, tables, strict=True):
        table = _plain(table)
        step = max(block.extent.examples * BATCH_TOKENS // max(block.extent.tokens, 1), 1)
        for low in range(0, table.num_rows, step):
            with naming(block.first + low):
                scattered = scatter(table.slice(low, step), splitters, options)
            summary = summary + scattered.summary
            for partition, piece in scattered.pieces.items():
                pieces.setdefault(partition, []).append(piece)
    yield summary
    for partition in range(splitters.partitions):
        yield pa.concat_tables(pieces.pop(partition)) if partition in pieces else None


def limit_pieces(border: Border, options: PackOptions, *pieces: pa.Table) -> SharedPath:
    """What a partition leaves to the next one when paths are limited."""
    return limit_partition(pa.concat_tables(pieces), border, options)


def pack_pieces(border: Border, options: PackOptions, *pieces: pa.Table) -> Iterator[pa.Table | Outcome]:
    """The rows of a partition, portion by portion, then its outcome."""
    plan = plan_partition(pa.concat_tables(pieces), border, options)
    tokens, weight = 0, 0.0
    for rows in plan.writer.portions(PORTION):
        part = plan.outcome([rows]).report
        tokens, weight = tokens + part.loss_tokens, weight + part.loss_weight
        yield rows_to_table(rows)
    outcome = plan.outcome([])
    yield replace(outcome, report=replace(outcome.report, loss_tokens=tokens, loss_weight=weight))


def _plain(table: pa.Table) -> pa.Table:
    """A table with lists where Ray Data has tensors, as it makes them of numpy arrays."""
    return pa.table({name: _lists(name, table[name]) for name in table.column_names})


def _lists(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if not isinstance(kind, pa.BaseExtensionType):
        return column
    dimensions = len(kind.shape) if hasattr(kind, "shape") else getattr(kind, "ndim", None)
    if dimensions != 1:
        raise ValueError(f"The column {name} has the type {kind}; packing needs lists of integers.")
    if pa.types.is_struct(kind.storage_type):
        kind = kind.storage_type.field("data").type
        return pa.chunked_array([chunk.storage.field("data") for chunk in column.chunks], kind)
    return pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)

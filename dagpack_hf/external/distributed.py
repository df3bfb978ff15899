"""The same packing on a Ray cluster, for corpora that are too large for one machine.

Ray Data reads what is packed, and has the rows afterwards. Between the two are plain Ray tasks on the blocks of the
data set and on partitions, with the functions that `packing` applies one after the other; so the rows are the same,
byte for byte. Operators of Ray Data are not used there: scattering has to give each partition what is its own, and a
summary besides, and rows have to come in a given order, while its shuffles have one output, hash or sort every row
once more, and promise no order of groups.

The data set is executed once, in order, and its blocks are kept until they are scattered: passes that read it anew
might see other examples. Partitions are packed before the call returns, so that the report is complete, and rows may
be read any number of times without being packed again.

Cost: the object store, which Ray spills to disk, holds the columns of packing twice while they are scattered, and the
rows. A task has one group of blocks or one partition in memory. To the driver come sizes, sampled paths (64 MB at
most), summaries and 16 bytes for each leaf; of the tokens themselves nothing, but those of the splitters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from dagpack_hf.columns import ROW_FEATURES, is_tree_dataset, packing_columns
from dagpack_hf.external.border import Border, Summary, draw_borders
from dagpack_hf.external.cluster import Cluster
from dagpack_hf.external.memory import FIXED_BYTES, SAFETY, memory_limit, needed_memory, partitions_for
from dagpack_hf.external.packing import (
    Block,
    batches,
    measure_dataset,
    naming,
    packing_order,
    refuse_overlong,
    sample_step,
    total_extent,
)
from dagpack_hf.external.partitions import Outcome
from dagpack_hf.external.reports import join_outcomes
from dagpack_hf.external.splitters import Splitters, choose_splitters
from dagpack_hf.external.tasks import limit_pieces, measure_table, pack_pieces, sample_table, scatter_tables
from dagpack_hf.forest_packing import warn_of_losses
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport

if TYPE_CHECKING:
    import ray

GROUP_TOKENS = 16 * 1024 * 1024
"""Tokens that one task scatters, if that does not make too many pieces."""

SCATTER_BYTES = 32
"""Memory that scattering a token takes: itself and its label, read and written, and what is known of its stretch."""

MOST_PIECES = 1024 * 1024
"""Pieces of all groups and partitions together: Ray keeps a record of each on the driver."""

LEAST_TOKENS = 1024 * 1024
"""Tokens of a partition that is made so that no core is idle."""


def pack_ray_dataset(
    dataset: ray.data.Dataset | Dataset,
    max_length: int,
    *,
    loss_weighting: str = "once",
    overflow: str = "error",
    strategy: str = "best",
    effort: float = 0.0,
    seed: int | None = 0,
    partitions: int | None = None,
    max_memory: int | str | None = None,
    progress: bool = True,
) -> tuple[ray.data.Dataset, PackReport]:
    """Merge a data set by common prefixes and pack it into windows, on a Ray cluster.

    Every target is trained exactly once, with its weight in the whole data set. The rows depend on the data, the
    options and the number of partitions, not on the cluster or on how the data is cut into blocks. They are those
    that `pack_dataset` gives where it packs in so many partitions.

    Needs the extra `ray`, and the package on every node. Connects to the cluster that `RAY_ADDRESS` names, or starts
    Ray on this machine, without usage statistics, unless `ray.init` was called before.

    Args:
        dataset: with the columns that `pack_dataset` reads: a Ray data set, such as `ray.data.read_parquet` gives, or
            one of `datasets`, which is then sent to the cluster block by block.
        max_length: window length in tokens.
        loss_weighting: `"once"` or `"paths"`, as in `pack_dataset`.
        overflow: `"error"`, `"truncate"` or `"drop"`, as in `pack_dataset`. With `"drop"` the partitions of token
            trees are limited one after the other, if any tree is too long.
        strategy: `"best"` or `"dfs"`, as in `pack_dataset`.
        effort: seconds of further search for a packing with fewer windows, shared out among the partitions. How far it
            gets depends on the machines.
        seed: shuffles the windows within partitions, and the partitions; `None` keeps them in depth-first order.
        partitions: number of partitions, each packed by one task. Fewer if the data set has fewer different paths. By
            default as many as `max_memory` demands, or as the cluster has cores if there is enough to pack; set it to
            get the same rows on any cluster.
        max_memory: memory that one task may take, in bytes or as `"8GB"`. By default an equal share of a node's memory
            for each of its cores.
        progress: show progress bars.

    Returns:
        The rows (columns `input_ids`, `shift_labels`, `position_ids`, `subtree_end`, `loss_weight`) as a Ray data set
        with blocks in order, and the report.

    Raises:
        ImportError: Ray is not installed.
        TypeError: not a data set, or several in a dictionary.
        ValueError: columns are missing, an example is wrong, a path is too long, or an option is unknown.

    Example:
        >>> dataset = ray.data.read_parquet("s3://bucket/trees")  # doctest: +SKIP
        >>> rows, report = pack_ray_dataset(dataset, max_length=32768)  # doctest: +SKIP
        >>> rows.write_parquet("s3://bucket/rows")  # doctest: +SKIP
    """
    options = PackOptions(max_length, loss_weighting, overflow, strategy, effort, None, seed)
    if partitions is not None and not (isinstance(partitions, int | np.integer) and partitions >= 1):
        raise ValueError(f"partitions must be at least 1, or None, got {partitions!r}.")
    limit = None if max_memory is None else memory_limit(max_memory)
    cluster = Cluster.connect(progress)
    tables, columns = _read(cluster, dataset, options)
    return _pack_tables(cluster, tables, columns, options, partitions, limit)


def _pack_tables(
    cluster: Cluster,
    tables: list[Any],
    columns: Sequence[str],
    options: PackOptions,
    partitions: int | None,
    limit: int | None,
) -> tuple[Any, PackReport]:
    """Pack references to tables; they are taken out of the list when they are no longer needed."""
    blocks = _measured(cluster, tables, options)
    extent = total_extent(blocks)
    refuse_overlong(extent, options)
    needed = needed_memory(extent, columns)
    if partitions is None:
        enough = min(cluster.cores, extent.tokens // max(LEAST_TOKENS, 64 * options.max_length))
        partitions = max(partitions_for(needed, limit or cluster.memory_of_core), enough)
    splitters = _sampled_splitters(cluster, tables, blocks, options, partitions)
    pieces, summary = _scattered(cluster, tables, blocks, splitters, options)
    borders = draw_borders(summary, splitters)
    memory = FIXED_BYTES + int(SAFETY * needed / splitters.partitions)
    if options.overflow == "drop" and is_tree_dataset(columns) and extent.longer:
        borders = _handed_on(cluster, borders, pieces, options, memory)
    in_order = [borders[at] for at in packing_order(len(borders), options.seed)]
    rows, outcomes = _packed(cluster, in_order, pieces, options, memory)
    report = join_outcomes(outcomes, summary, options)
    warn_of_losses(report, options.overflow)
    rows = rows or [cluster.ray.put(ROW_FEATURES.arrow_schema.empty_table())]
    return cluster.ray.data.from_arrow_refs(rows), report


def _read(cluster: Cluster, dataset: Any, options: PackOptions) -> tuple[list[Any], list[str]]:
    """References to the tables of a data set, in order, and their columns."""
    ray = cluster.ray
    if isinstance(dataset, ray.data.Dataset):
        names = packing_columns(dataset.columns() or [])
        with _ordered(dataset.context.execution_options):
            return list(dataset.select_columns(names).to_arrow_refs()), names
    if isinstance(dataset, Dataset):
        names = packing_columns(dataset.column_names)
        columns = dataset.select_columns(names)
        arrow = columns.with_format("arrow")
        ranges = batches(measure_dataset(columns, options.max_length))
        return [ray.put(arrow[first:last]) for first, last in ranges], names
    raise TypeError(
        f"pack_ray_dataset needs a data set of `ray.data` or of `datasets`, got {type(dataset).__name__}. Pack each "
        "split of a dictionary on its own."
    )


@contextmanager
def _ordered(options: Any) -> Iterator[None]:
    """Let Ray Data keep blocks in order: which paths are sampled depends on it."""
    given = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = given


def _measured(cluster: Cluster, tables: Sequence[Any], options: PackOptions) -> list[Block]:
    task = cluster.task(measure_table)
    blocks: list[Block] = []
    try:
        for extent in cluster.results("measuring", [task.remote(table, options.max_length) for table in tables]):
            blocks.append(Block(_end(blocks), extent))
    except ValueError:
        with naming(_end(blocks)):
            raise
    return blocks


def _end(blocks: Sequence[Block]) -> int:
    return blocks[-1].last if blocks else 0


def _sampled_splitters(
    cluster: Cluster, tables: Sequence[Any], blocks: Sequence[Block], options: PackOptions, partitions: int
) -> Splitters:
    step = sample_step(total_extent(blocks), partitions)
    before = np.cumsum([0, *(block.extent.paths for block in blocks)]).tolist()
    task = cluster.task(sample_table)
    calls = [task.remote(table, first, step, options) for table, first in zip(tables, before, strict=False)]
    return choose_splitters([path for paths in cluster.results("sampling", calls) for path in paths], partitions)


def _scattered(
    cluster: Cluster, tables: list[Any], blocks: Sequence[Block], splitters: Splitters, options: PackOptions
) -> tuple[dict[int, list[Any]], Summary]:
    """For each partition references to its pieces, and the summary of all."""
    groups = list(_groups(blocks, splitters.partitions, cluster.cores))
    largest = max((total_extent(blocks[low:high]).tokens for low, high in groups), default=0)
    memory = FIXED_BYTES + SCATTER_BYTES * largest
    task = cluster.task(scatter_tables, memory, num_returns=1 + splitters.partitions)
    shared = cluster.ray.put(splitters)
    calls = [task.remote(blocks[low:high], shared, options, *tables[low:high]) for low, high in groups]
    tables.clear()
    summary = Summary.empty(splitters)
    pieces: dict[int, list[Any]] = {}
    parts = cluster.results("scattering", [returned[0] for returned in calls])
    for part, (_, *returned) in zip(parts, calls, strict=True):
        summary = summary + part
        for partition in np.flatnonzero(part.tokens).tolist():
            pieces.setdefault(partition, []).append(returned[partition])
    return pieces, summary


def _groups(blocks: Sequence[Block], partitions: int, cores: int) -> Iterator[tuple[int, int]]:
    """Ranges of blocks that are scattered together: few enough, but so many that all cores have some."""
    total = total_extent(blocks).tokens
    size = max(min(GROUP_TOKENS, total // cores), total * partitions // MOST_PIECES)
    low, tokens = 0, 0
    for at, block in enumerate(blocks):
        if at > low and tokens + block.extent.tokens > size:
            yield low, at
            low, tokens = at, 0
        tokens += block.extent.tokens
    if low < len(blocks):
        yield low, len(blocks)


def _handed_on(
    cluster: Cluster, borders: Sequence[Border], pieces: dict[int, list[Any]], options: PackOptions, memory: int
) -> list[Border]:
    """Hand the tallies of what is shared from partition to partition, as sequences are dropped from them."""
    task = cluster.task(limit_pieces, memory)
    found: list[Border] = []
    for border in borders:
        if found:
            left = task.remote(found[-1], options, *pieces[found[-1].partition])
            border = border.after(cluster.get(left))
        found.append(border)
    return found


def _packed(
    cluster: Cluster, borders: Sequence[Border], pieces: dict[int, list[Any]], options: PackOptions, memory: int
) -> tuple[list[Any], list[Outcome]]:
    """References to the rows of partitions, in the order of these, and their outcomes."""
    # A search for seconds finds other rows when it is repeated, so what is lost with a node must not be packed again.
    retries = {"max_retries": 0} if options.effort else {}
    task = cluster.task(pack_pieces, memory, num_returns="streaming", **retries)
    calls = [task.remote(border, options, *pieces.pop(border.partition)) for border in borders]
    rows: list[Any] = []

    def outcome(returned: Iterator[Any]) -> Any:
        *tables, last = returned
        rows.extend(tables)
        return last

    return rows, list(cluster.results("packing", calls, outcome))

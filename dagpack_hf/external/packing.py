"""A data set that is larger than memory: measured, scattered to partitions on disk, and packed partition by partition.

Four passes: lengths alone; a sample of the paths, for the splitters; all of it, to the partitions; and the partitions,
one after the other. The rows depend on the data, the options and the number of partitions, and on nothing else.

Cost: memory for one batch, then for one partition, and of the whole 8 to 16 bytes for each leaf; on disk once what the
data set takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset

from dagpack_hf.columns import PORTION, is_tree_dataset, packing_columns, written
from dagpack_hf.external.border import Border, Summary, draw_borders
from dagpack_hf.external.branches import Extent, measure, sample_paths
from dagpack_hf.external.memory import memory_limit, needed_memory, partitions_for, surely_fits
from dagpack_hf.external.partitions import limit_partition, plan_partition
from dagpack_hf.external.reports import join_outcomes
from dagpack_hf.external.scatter import piece_schema, scatter
from dagpack_hf.external.spill import Spill
from dagpack_hf.external.splitters import Splitters, choose_splitters
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport
from dagpack_hf.sequence_counts import UncountedError

BLOCK_EXAMPLES = 256
"""Examples that are measured at once."""

BATCH_TOKENS = 4 * 1024 * 1024
"""Tokens that are scattered at once."""

SAMPLE_TOKENS = 16 * 1024 * 1024
"""Tokens of the sample at most."""

SAMPLES = 256
"""Paths that are sampled for each partition, unless the sample gets too large."""

PARTITION_STAGES = ("sampling", "scattering", "packing")

Advance = Callable[[str, float], None]
"""Told of the stage, and the share of it that is done."""


@dataclass(frozen=True)
class Block:
    """Some examples in a row.

    Args:
        first: the first one.
        extent: how much there is in them.
    """

    first: int
    extent: Extent

    @property
    def last(self) -> int:
        """One past the last one."""
        return self.first + self.extent.examples


@dataclass(frozen=True)
class LargeDataset:
    """A data set that is not packed in memory.

    Args:
        dataset: has the columns of packing only.
        options: how to pack it.
        blocks: what `measure_dataset` found.
        partitions: how many partitions it takes.
    """

    dataset: Dataset
    options: PackOptions
    blocks: Sequence[Block]
    partitions: int

    @classmethod
    def of(cls, dataset: Dataset, options: PackOptions, max_memory: int | str | None) -> LargeDataset | None:
        """A data set, unless it can be packed in so much memory, or has to be.

        Raises:
            ValueError: it cannot be packed in `max_memory`, or not at all.
        """
        limit = memory_limit(max_memory)
        in_buckets = options.bucket_size is not None
        if (in_buckets and max_memory is None) or surely_fits(dataset, limit):
            return None
        dataset = dataset.select_columns(packing_columns(dataset.column_names))
        blocks = measure_dataset(dataset, options.max_length)
        needed = needed_memory(total_extent(blocks), dataset.column_names)
        partitions = partitions_for(needed, limit)
        if partitions == 1:
            return None
        if options.count_sequences:
            raise UncountedError(
                f"count_sequences needs a data set that is packed in memory, which may take {needed:,} bytes: raise "
                f"max_memory from {limit:,}, or leave count_sequences out."
            )
        if in_buckets:
            raise ValueError(
                f"bucket_size draws examples from all over the data set, so it is packed in memory, which may take "
                f"{needed:,} bytes: raise max_memory from {limit:,}, or leave bucket_size out."
            )
        return cls(dataset, options, blocks, partitions)

    def pack(self, write: Callable[[pa.Table], None], advance: Advance = lambda stage, share: None) -> PackReport:
        """Pack it; the pieces are on the disk of the data set. See `pack_partitioned`."""
        refuse_overlong(total_extent(self.blocks), self.options)
        splitters = sample_splitters(self.dataset, self.options, self.blocks, self.partitions, advance)
        return pack_partitioned(
            self.dataset,
            self.options,
            write,
            blocks=self.blocks,
            splitters=splitters,
            folder=_folder_beside(self.dataset),
            advance=advance,
        )


def _folder_beside(dataset: Dataset) -> Path | None:
    """The folder of a data set's files, `None` if it has none or nothing can be written there."""
    if not dataset.cache_files:
        return None
    folder = Path(dataset.cache_files[0]["filename"]).parent
    return folder if os.access(folder, os.W_OK) else None


def measure_dataset(dataset: Dataset, max_length: int) -> list[Block]:
    """Measure a data set, which has the columns of packing only, without reading its tokens.

    Raises:
        ValueError: columns that contradict each other.
    """
    arrow = dataset.with_format("arrow")
    blocks = []
    for first in range(0, len(dataset), BLOCK_EXAMPLES):
        with naming(first):
            table = arrow[first : first + BLOCK_EXAMPLES]
            blocks.append(Block(first, measure(table, max_length)))
    return blocks


def total_extent(blocks: Sequence[Block]) -> Extent:
    """The extent of all blocks."""
    return sum((block.extent for block in blocks), Extent())


def refuse_overlong(extent: Extent, options: PackOptions) -> None:
    """Raise if paths are too long and nothing was said about what to do with them."""
    if options.overflow == "error" and extent.longer:
        raise ValueError(
            f"{extent.longer} of {extent.paths} paths are longer than max_length={options.max_length} tokens (the "
            f"longest has {extent.longest}). Choose a larger max_length (two to four times the longest path keeps "
            'most of the sharing), or set overflow="truncate" to cut what lies beyond, or overflow="drop" to leave '
            "out the sequences that reach beyond."
        )


def sample_step(extent: Extent, partitions: int) -> int:
    """One of so many paths is in the sample."""
    by_tokens = -(-extent.path_tokens // SAMPLE_TOKENS)
    return max(by_tokens, extent.paths // (SAMPLES * partitions), 1)


def sample_splitters(
    dataset: Dataset,
    options: PackOptions,
    blocks: Sequence[Block],
    partitions: int,
    advance: Advance = lambda stage, share: None,
) -> Splitters:
    """Splitters of a data set; arguments as of `pack_partitioned`."""
    step = sample_step(total_extent(blocks), partitions)
    return choose_splitters(list(_sample(dataset, blocks, step, options, advance)), partitions)


def pack_partitioned(
    dataset: Dataset,
    options: PackOptions,
    write: Callable[[pa.Table], None],
    *,
    blocks: Sequence[Block],
    splitters: Splitters,
    folder: Path | None = None,
    advance: Advance = lambda stage, share: None,
) -> PackReport:
    """Pack a data set in partitions.

    Args:
        dataset: has the columns of packing only.
        options: how to pack it. With a seed partitions come in random order, the windows of each shuffled, else all in
            depth-first order.
        write: gets the rows, table by table.
        blocks: what `measure_dataset` found.
        splitters: where partitions begin; none may be longer than a window.
        folder: where the pieces are kept in the meantime, by default the temporary folder of the system.
        advance: told how far it is.

    Returns:
        The report. All but `windows`, and what follows from them (executed and padding tokens), is what packing in
        memory reports.

    Raises:
        ValueError: an example is wrong, or a path is too long.
    """
    extent = total_extent(blocks)
    refuse_overlong(extent, options)
    with Spill(folder, piece_schema(dataset.column_names), splitters.partitions) as spill:
        summary = Summary.empty(splitters)
        for part in _scattered(dataset, blocks, splitters, options, spill, advance):
            summary = summary + part
        borders = draw_borders(summary, splitters)
        if options.overflow == "drop" and is_tree_dataset(dataset.column_names) and extent.longer:
            borders = _handed_on(borders, spill, options)
        outcomes = []
        for done, at in enumerate(packing_order(len(borders), options.seed)):
            plan = plan_partition(spill.read(borders[at].partition), borders[at], options)
            advance("packing", done / len(borders))
            outcomes.append(plan.outcome(written(plan.writer.portions(PORTION), write)))
        advance("packing", 1.0)
    return join_outcomes(outcomes, summary, options)


def packing_order(partitions: int, seed: int | None) -> list[int]:
    """The order in which the rows of partitions, those that are not empty, come."""
    if seed is None:
        return list(range(partitions))
    return np.random.default_rng(seed).permutation(partitions).tolist()


def _handed_on(borders: list[Border], spill: Spill, options: PackOptions) -> list[Border]:
    """Hand the tallies of what is shared from partition to partition, as sequences are dropped from them."""
    found: list[Border] = []
    for border in borders:
        if found:
            border = border.after(limit_partition(spill.read(found[-1].partition), found[-1], options))
        found.append(border)
    return found


def _sample(
    dataset: Dataset, blocks: Sequence[Block], step: int, options: PackOptions, advance: Advance
) -> Iterator[np.ndarray]:
    arrow = dataset.with_format("arrow")
    before = 0
    for done, block in enumerate(blocks):
        advance("sampling", done / len(blocks))
        yield from sample_paths(arrow[block.first : block.last], before, step, options)
        before += block.extent.paths


def _scattered(
    dataset: Dataset,
    blocks: Sequence[Block],
    splitters: Splitters,
    options: PackOptions,
    spill: Spill,
    advance: Advance,
) -> Iterator[Summary]:
    arrow = dataset.with_format("arrow")
    for first, last in batches(blocks):
        advance("scattering", first / len(dataset))
        with naming(first):
            scattered = scatter(arrow[first:last], splitters, options)
        spill.append(scattered.pieces)
        yield scattered.summary


def batches(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Ranges of examples with about as many tokens as are scattered at once, or one example if that has more."""
    first, tokens = 0, 0
    for block in blocks:
        if tokens and tokens + block.extent.tokens > BATCH_TOKENS:
            yield first, block.first
            first, tokens = block.first, 0
        tokens += block.extent.tokens
        if tokens > BATCH_TOKENS:
            each = max(block.extent.examples * BATCH_TOKENS // tokens, 1)
            for low in range(block.first, block.last, each):
                yield low, min(low + each, block.last)
            first, tokens = block.last, 0
    if blocks and first < blocks[-1].last:
        yield first, blocks[-1].last


@contextmanager
def naming(first: int) -> Iterator[None]:
    """Say in errors which examples a position is counted from."""
    try:
        yield
    except ValueError as error:
        if not first:
            raise
        raise ValueError(f"From example {first} of the data set on: {error}") from error

"""How much memory packing may take, and how many partitions that makes.

What is counted is what packing in memory touches again and again, mapped or not: the tokens with their labels or
counts, and what the forest and the plan keep for each stretch and path. It is counted as if nothing was shared.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from datasets import Dataset

from dagpack_hf.columns import is_tree_dataset
from dagpack_hf.external.branches import Extent

STRETCH_BYTES = 400
"""Memory for each stretch: of the forest 40 to 80 bytes while it grows and 32 afterwards, of its segments 150, of the
plan 60 for each leaf; rounded up."""

FIXED_BYTES = 256 * 1024**2
"""A batch on its way to the partitions, and a portion of rows."""

MOST_TIMES = 16
"""Memory that packing takes, in sizes of the stored columns; of a data set of any sense it is less."""

SAFETY = 1.25
"""Partitions are only about equal."""

MOST_PARTITIONS = 4096

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_limit(max_memory: int | str | None) -> int:
    """Bytes that packing may take.

    Args:
        max_memory: bytes, or text such as `"8GB"` or `"500MiB"`; `None` for what the machine, or its container, has.

    Raises:
        ValueError: it is no amount of memory.
    """
    if max_memory is None:
        return physical_memory()
    if isinstance(max_memory, int) and not isinstance(max_memory, bool) and max_memory > 0:
        return max_memory
    if isinstance(max_memory, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", max_memory.strip().upper())
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return max(int(float(match[1]) * _UNITS[match[2]]), 1)
    raise ValueError(f'max_memory must be a number of bytes above 0, or text such as "8GB", got {max_memory!r}.')


def physical_memory() -> int:
    """Bytes of memory that the machine, or the container, has."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not known on this system: then there is no limit
        limits.append(2**62)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return min(limits)


def surely_fits(dataset: Dataset, limit: int) -> bool:
    """Whether a data set is so small that it need not be measured."""
    stored = sum(dataset.data.column(name).nbytes for name in dataset.column_names)
    return FIXED_BYTES + MOST_TIMES * stored + STRETCH_BYTES * len(dataset) <= limit


def needed_memory(extent: Extent, columns: Sequence[str]) -> int:
    """Bytes that packing a data set in memory takes, if nothing in it is shared."""
    per_token = 4
    if is_tree_dataset(columns):
        per_token += 4 + 8  # counts; ids and counts once more, put together
        per_token += 12 if "target_weight" in columns else 0
    elif "labels" in columns:
        per_token += 4
    return extent.tokens * per_token + extent.nodes * STRETCH_BYTES


def partitions_for(needed: int, limit: int) -> int:
    """How many partitions take no more than the limit each; 1 if the whole does."""
    if needed + FIXED_BYTES <= limit:
        return 1
    room = max(limit - FIXED_BYTES, limit // 4, 1)
    return min(max(math.ceil(SAFETY * needed / room), 1), MOST_PARTITIONS)

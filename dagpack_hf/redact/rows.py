"""Packed rows, read once more before they are pushed: their texts again, from the token ids.

What was replaced was replaced in conversations; what is pushed are rows. So the last look is at these, path by path,
with the text that the chat template put around it.

Cost: that of decoding and scanning every path from a root to a leaf; prefixes are read with each of their leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from datasets.utils import tqdm

from dagpack_hf.redact.deny import Deny
from dagpack_hf.redact.people import machine_names
from dagpack_hf.redact.redactor import Redactor
from dagpack_hf.redact.report import RedactionReport
from dagpack_hf.redact.scanner import SecretScanner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = ["input_ids", "subtree_end"]
_BATCH_SIZE = 16


def scan_rows(
    files: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    deny: Deny | None = None,
    names: Iterable[str] = (),
) -> RedactionReport:
    """Count the secrets and personal data in packed rows.

    Args:
        files: Parquet files of `save_rows`.
        tokenizer: The tokenizer that made the ids.
        deny: Patterns of the user, as for `scan_conversations`.
        names: User names to look for, besides those of this machine.
    """
    redactor = Redactor(SecretScanner(deny, [*machine_names(), *names]))
    for path in files:
        shard = pq.ParquetFile(path)
        with tqdm(total=shard.metadata.num_rows, desc="Looking for secrets in rows", unit=" rows") as bar:
            for batch in shard.iter_batches(_BATCH_SIZE, columns=_COLUMNS):
                for ids, ends in zip(*(batch[name] for name in _COLUMNS), strict=True):
                    paths = row_paths(ids.values.to_numpy(), ends.values.to_numpy())
                    redactor.scan([tokenizer.decode(path) for path in paths], f"row {redactor.rows}")
                    bar.update()
    return redactor.report()


def row_paths(ids: npt.NDArray[np.int32], subtree_end: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the token ids of each path of one row, from a root to a leaf.

    Args:
        ids: `int32[n]`, the token at each position.
        subtree_end: `int32[n]`, one past the last position of its subtree.

    Example:
    >>> paths = row_paths(np.array([1, 2, 3, 4]), np.array([4, 3, 3, 4]))
    >>> [path.tolist() for path in paths]
    [[1, 2, 3], [1, 4]]
    """
    for leaf in np.flatnonzero(subtree_end == np.arange(1, len(ids) + 1)):
        yield ids[: leaf + 1][subtree_end[: leaf + 1] > leaf]

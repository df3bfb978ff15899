"""Documents to do the arithmetic for: drawn from a distribution, or read from a file.

Lengths of texts are close to log-normal, so median and sigma (the standard deviation of the logarithm) describe many
corpora. A file has one document in a line of JSON: a number of tokens, a list of token ids, or an object with `length`
or `input_ids`.

Cost: of a file of lengths 8 bytes for each document, of token ids 4 for each token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dagpack_hf.baselines.placement import LongArray
from dagpack_hf.spans import token_array
from dagpack_hf.trie import TokenForest

MOST_TOKENS = 2**31 - 1
"""The longest document that can be merged."""


@dataclass(frozen=True)
class Documents:
    """Documents of a file.

    Args:
        lengths: `int64[n]`, tokens of each.
        sequences: their token ids, `None` if only lengths are known.
    """

    lengths: LongArray
    sequences: Sequence[npt.NDArray[np.int32]] | None = None

    @cached_property
    def forest(self) -> TokenForest | None:
        """The documents merged, `None` if only lengths are known."""
        return None if self.sequences is None else TokenForest.from_sequences(self.sequences)


def lognormal_lengths(count: int = 1000, *, median: float = 120.0, sigma: float = 1.0, seed: int = 0) -> LongArray:
    """Draw lengths of documents: log-normal, rounded to whole tokens, at least 1.

    Args:
        count: number of documents.
        median: median length in tokens.
        sigma: standard deviation of the natural logarithm of the length.
        seed: of numpy's default generator.

    Returns:
        `int64[count]`.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> lognormal_lengths(4, median=120)
        array([136, 105, 228, 133])
    """
    if count < 0:
        raise ValueError(f"count must be at least 0 documents, got {count}.")
    if not 0 < median < np.inf:
        raise ValueError(f"median must be a number of tokens above 0, got {median}.")
    if not 0 <= sigma < np.inf:
        raise ValueError(f"sigma must be a number of at least 0, got {sigma}.")
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    if drawn.max(initial=0) > MOST_TOKENS:
        raise ValueError(f"median={median:g} and sigma={sigma:g} give documents of more than {MOST_TOKENS} tokens.")
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def read_documents(path: str | os.PathLike[str]) -> Documents:
    """Read lengths or token ids of documents from a JSONL file.

    Args:
        path: The file. Each line is a number, a list of token ids, or an object with `length` or `input_ids`; empty
            lines are passed over.

    Returns:
        The documents; with token ids if every line has them.

    Raises:
        ValueError: a line is none of these, or some have lengths and others token ids; the message names file and
            line.
        OSError: the file cannot be read.
    """
    lengths: list[int] = []
    sequences: list[npt.NDArray[np.int32]] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{os.fspath(path)}, line {number}"
            document = _document(line, where)
            if isinstance(document, int):
                lengths.append(document)
            else:
                sequences.append(_token_ids(document, where))
            if lengths and sequences:
                raise ValueError(f"{where}: a file has either lengths or token ids, and this line has the other.")
    if sequences:
        return Documents(np.fromiter(map(len, sequences), np.int64, len(sequences)), sequences)
    return Documents(np.array(lengths, np.int64))


def _document(line: bytes, where: str) -> Any:
    """Length or token ids that a line says."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no JSON ({error}).") from error
    if isinstance(value, dict):
        value = value.get("input_ids", value.get("length"))
    if isinstance(value, list):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MOST_TOKENS:
            raise ValueError(f"{where}: a length of {value} is outside 0 .. {MOST_TOKENS}.")
        return value
    raise ValueError(
        f"{where}: is no document. A line is a number of tokens, a list of token ids, or an object with `length` or "
        "`input_ids`."
    )


def _token_ids(values: list[Any], where: str) -> npt.NDArray[np.int32]:
    if any(type(value) is not int for value in values):
        raise ValueError(f"{where}: token ids must be whole numbers.")
    try:
        return token_array(values, 0)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {str(error).removeprefix('Sequence 0: ')}") from error

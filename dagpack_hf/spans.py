"""What the trie is grown from: token sequences as spans of flat arrays, checked.

Design. Arrays are taken where they are. Several of them, such as the chunks of an Arrow column, are seen as one
through a view that begins at the lowest address and reaches over all of them (`one_view`); only places that belong to
one are ever read. The view keeps them alive, and so does each view of it.

What costs nothing to check is checked at once; what has to be read token by token (ids below 0, labels that differ
from their token) is noticed by the kernels, which read it anyway. Either way there is one wording: the input is gone
through one by one, and the first that is wrong is named.

Cost: 0 bytes per token of int32 sequences in arrays, 4 where they are int64 or lists; 16 bytes per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label of a token that is not a target, as in PyTorch's cross entropy."""

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
TokenSequence = Sequence[int] | npt.NDArray[np.integer]
Chunks = npt.NDArray[np.integer] | Sequence[npt.NDArray[np.integer]]

MORE_WEIGHTS = "There are more weights than sequences; weights must have one number for each sequence."


@dataclass(frozen=True)
class Spans:
    """Stretches of a flat array. The arrays are read-only, as the kernels are compiled for that.

    Args:
        values: `int32[...]`, what the spans are positions in.
        begin: `int64[n]`, first position of each span.
        end: `int64[n]`, one past its last position.
    """

    values: IntArray
    begin: LongArray
    end: LongArray

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: int) -> IntArray:
        return self.values[self.begin[index] : self.end[index]]


@dataclass(frozen=True)
class SequenceSpans:
    """Sequences.

    Args:
        ids: their tokens.
        labels: their labels, `None` if every token is a target.
        weights: `float64[n]`, as they were given; `None` if there are none.
    """

    ids: Spans
    labels: Spans | None = None
    weights: FloatArray | None = None

    def check(self) -> None:
        """Go through the sequences one by one and raise for the first that is wrong."""
        for index in range(len(self.ids)):
            ids = token_array(self.ids[index], index)
            if self.labels is not None and index < len(self.labels):
                label_array(ids, self.labels[index], index)
            if self.weights is not None and index < len(self.weights):
                weight_array(self.weights[index : index + 1], f"Sequence {index}: weight")

    def check_weights(self) -> None:
        """Raise if there is not one good weight for each sequence."""
        if self.weights is None:
            return
        if not are_weights(self.weights).all() or len(self.weights) != len(self.ids):
            self.check()
        if len(self.weights) < len(self.ids):
            raise ValueError(_no_weight(len(self.weights)))
        if len(self.weights) > len(self.ids):
            raise ValueError(MORE_WEIGHTS)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


class _Reach:
    """Memory that reaches over several arrays, which it keeps alive, as numpy takes it (the array interface)."""

    def __init__(self, arrays: Sequence[IntArray], address: int, size: int) -> None:
        self._arrays = tuple(arrays)
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(np.int32).str,
            "shape": (size,),
            "data": (address, True),  # read-only
        }


def one_view(arrays: Sequence[IntArray]) -> tuple[IntArray, LongArray]:
    """See several arrays as one, without a copy.

    Args:
        arrays: contiguous and aligned arrays anywhere in memory.

    Returns:
        `int32[...]`, which begins with the array at the lowest address and reaches to the end of the one at the
        highest; what lies between them must not be read, so it cannot be copied or pickled as a whole. And
        `int64[len(arrays)]`, where in it each array begins (0 for an empty one).
    """
    size = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if not size.any():
        return read_only(np.zeros(0, np.int32)), np.zeros(len(arrays), np.int64)
    address = np.fromiter((array.__array_interface__["data"][0] for array in arrays), np.int64, len(arrays))
    held = np.flatnonzero(size)
    lowest = int(address[held].min())
    first = np.where(size > 0, address - lowest, 0) // 4
    return np.asarray(_Reach(arrays, lowest, int((first + size).max()))), first


def _spans(arrays: Sequence[IntArray]) -> Spans:
    view, begin = one_view(arrays)
    end = begin + np.fromiter(map(len, arrays), np.int64, len(arrays))
    return Spans(view, read_only(begin), read_only(end))


# Sequences


def read_sequences(
    sequences: Iterable[TokenSequence], labels: Iterable[TokenSequence] | None, weights: Iterable[float] | None
) -> SequenceSpans:
    """Sequences one by one; see `TokenForest.from_sequences`."""
    ids: list[IntArray] = []
    marks: list[IntArray] = []
    numbers: list[float] = []
    next_labels = None if labels is None else iter(labels)
    next_weight = None if weights is None else iter(weights)

    def read() -> SequenceSpans:
        given = None if weights is None else read_only(np.array(numbers, np.float64).reshape(-1))
        return SequenceSpans(_spans(ids), None if labels is None else _spans(marks), given)

    try:
        for index, sequence in enumerate(sequences):
            ids.append(sequence if _is_plain(sequence) else token_array(sequence, index))  # type: ignore[arg-type]
            if next_labels is not None:
                marks.append(_aligned_labels(ids[-1], next(next_labels, None), index))
            if next_weight is not None:
                weight = next(next_weight, None)
                if weight is None:
                    raise ValueError(_no_weight(index))
                numbers.append(weight)
        if next_weight is not None and next(next_weight, None) is not None:
            raise ValueError(MORE_WEIGHTS)
    except ValueError:
        read().check()
        raise
    spans = read()
    spans.check_weights()
    return spans


def read_arrays(
    tokens: Chunks,
    offsets: Chunks,
    labels: Chunks | None = None,
    weights: npt.ArrayLike | None = None,
    label_offsets: Chunks | None = None,
) -> SequenceSpans:
    """Sequences in flat arrays; see `TokenForest.from_arrays`."""
    ids = _read_chunks(tokens, offsets, "offsets", token_array)
    marks = None
    if labels is not None:
        name = "offsets" if label_offsets is None else "label_offsets"
        bounds = offsets if label_offsets is None else label_offsets
        marks = _read_chunks(labels, bounds, name, lambda part, index: label_array(ids[index], part, index))
        if len(marks) != len(ids):
            raise ValueError(
                f"There are labels of {len(marks)} sequences and tokens of {len(ids)}; label_offsets and offsets must "
                "be of the same sequences."
            )
    given = None if weights is None else read_only(np.array(weights, np.float64).reshape(-1))
    spans = SequenceSpans(ids, marks, given)
    if marks is not None and not np.array_equal(ids.end - ids.begin, marks.end - marks.begin):
        spans.check()
    spans.check_weights()
    return spans


def _read_chunks(
    values: Chunks, offsets: Chunks, name: str, convert: Callable[[npt.NDArray[Any], int], IntArray]
) -> Spans:
    """Spans of one array or several; what is not int32 is copied chunk by chunk."""
    chunks: list[Any] = [values] if isinstance(values, np.ndarray) else list(values)
    bounds = [offsets] if isinstance(offsets, np.ndarray) else list(offsets)
    if len(chunks) != len(bounds):
        raise ValueError(f"There are {len(chunks)} chunks but {name} of {len(bounds)}; each chunk has its own.")
    count = 0
    for at, (chunk, bound) in enumerate(zip(chunks, bounds, strict=True)):
        bounds[at] = bound = _checked_offsets(bound, len(chunk), name, at)
        if not _is_plain(chunk):
            chunks[at] = _int32(chunk, bound, count, convert)
            bounds[at] = bound - bound[0]
        count += len(bound) - 1
    if len(chunks) == 1:
        (bound,) = bounds
        return Spans(read_only(chunks[0]), read_only(bound[:-1]), read_only(bound[1:]))
    view, first = one_view(chunks)
    begin, end = np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    for bound, shift in zip(bounds, first, strict=True):
        np.add(bound[:-1], shift, out=begin[at : at + len(bound) - 1])
        np.add(bound[1:], shift, out=end[at : at + len(bound) - 1])
        at += len(bound) - 1
    return Spans(view, read_only(begin), read_only(end))


def _checked_offsets(offsets: npt.NDArray[np.integer], size: int, name: str, chunk: int) -> LongArray:
    array = np.asarray(offsets)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise ValueError(
            f"Chunk {chunk}: {name} must be a flat array of at least one integer, got {array.dtype} of shape "
            f"{array.shape}."
        )
    array = np.ascontiguousarray(array, np.int64)
    descends = array[1:] < array[:-1]
    if descends.any() or array[0] < 0 or array[-1] > size:
        place = ""
        if descends.any():
            at = int(descends.argmax())
            place = f", and at {at} from {array[at]} down to {array[at + 1]}"
        raise ValueError(
            f"Chunk {chunk}: {name} must ascend from at least 0 to at most {size}, the length of the chunk; they go "
            f"from {array[0]} to {array[-1]}{place}."
        )
    return array


def _int32(
    chunk: npt.NDArray[Any], offsets: LongArray, first: int, convert: Callable[[npt.NDArray[Any], int], IntArray]
) -> IntArray:
    """The part of a chunk that `offsets` cover, as int32; `first` is the number of its first sequence."""
    part = np.asarray(chunk)[offsets[0] : offsets[-1]]
    limits = np.iinfo(np.int32)
    if part.ndim == 1 and part.dtype.kind in "iu" and (not part.size or within(part, limits.min, limits.max)):
        return np.require(part, np.int32, ["C", "A"])
    bounds = (offsets - offsets[0]).tolist()
    pieces = [convert(part[low:high], first + at) for at, (low, high) in enumerate(pairwise(bounds))]
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def within(array: npt.NDArray[np.integer], low: int, high: int) -> bool:
    """Whether all values are between two bounds, these included."""
    return int(array.min()) >= low and int(array.max()) <= high


def _is_plain(array: object) -> bool:
    """Whether this is an array that the kernels can read where it is."""
    return (
        isinstance(array, np.ndarray)
        and array.dtype == np.int32
        and array.ndim == 1
        and array.flags.c_contiguous
        and array.flags.aligned
    )


def _aligned_labels(ids: IntArray, labels: Any, index: int) -> IntArray:
    return labels if _is_plain(labels) and len(labels) == len(ids) else label_array(ids, labels, index)


# What one sequence may hold


def _no_weight(index: int) -> str:
    return f"Sequence {index}: no weight; weights must have one number for each sequence."


def token_array(sequence: TokenSequence, index: int) -> IntArray:
    """Token ids as int32; `index` is the number of the sequence."""
    array = np.asarray(sequence)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"Sequence {index}: token ids must be a flat list of integers, got {array.dtype} of shape {array.shape}."
        )
    limit = np.iinfo(np.int32).max
    outside = (array < 0) | (array > limit)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(f"Sequence {index}: token id {array[at]} at position {at} is outside 0 .. {limit}.")
    return np.require(array, np.int32, ["C", "A"])


def label_array(ids: IntArray, labels: TokenSequence | None, index: int) -> IntArray:
    """Labels of a sequence as int32."""
    array = np.asarray([] if labels is None else labels)
    if array.shape != ids.shape:
        raise ValueError(f"Sequence {index}: {len(ids)} tokens but {array.size} labels; they must be aligned.")
    differs = (array != IGNORE_INDEX) & (array != ids)
    if differs.any():
        at = int(differs.argmax())
        raise ValueError(
            f"Sequence {index}: label {array[at]} at position {at} differs from its token {ids[at]}. A label must be "
            "the token itself or -100: in a trie the target of a position is its child."
        )
    return np.require(array, np.int32, ["C", "A"])


def rounded(given: FloatArray) -> npt.NDArray[np.float32]:
    """Weights as they are kept; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return given.astype(np.float32)


def are_weights(given: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether each is a float32 that is finite and at least 0."""
    array = rounded(given)
    return np.isfinite(array) & (array >= 0)


def weight_array(weight: npt.ArrayLike, owner: str) -> npt.NDArray[np.float32]:
    """Weights as float32; `owner` is what they are called."""
    given = np.asarray(weight, np.float64)
    refused = ~are_weights(given)
    if refused.any():
        at = int(refused.argmax())
        place = f" of token {at}" if given.size > 1 else ""
        raise ValueError(
            f"{owner}{place} is {given[at]}. A weight must be a finite float32 of at least 0; give 0 to what should "
            "not count."
        )
    return rounded(given)

"""What the trie is grown from: sequences and token trees as spans of flat arrays, checked.

Design. Arrays are taken where they are. Several of them, such as the chunks of an Arrow column, are seen as one
through a view that begins at the lowest address and reaches over all of them (`one_view`); only places that belong to
one are ever read. Of token trees the columns are put together, which is a copy of their distinct tokens.

What costs nothing to check is checked at once; what has to be read token by token (ids below 0, labels that differ
from their token) is noticed by the kernels, which read it anyway. Either way there is one wording: the input is gone
through one by one, and the first that is wrong is named.

Cost: 0 bytes per token of int32 sequences in arrays, 4 where they are int64 or lists, 8 to 16 of trees; 16 bytes per
sequence, 64 per node of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dagpack_hf.trie import TokenTree

IGNORE_INDEX = -100
"""Label of a token that is not a target, as in PyTorch's cross entropy."""

TREES_AT_ONCE = 1024
"""Trees whose columns are checked and put together at once."""

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
TokenSequence = Sequence[int] | npt.NDArray[np.integer]
Chunks = npt.NDArray[np.integer] | Sequence[npt.NDArray[np.integer]]


@dataclass(frozen=True)
class Spans:
    """Stretches of a flat array. The arrays are read-only, as the kernels are compiled for that.

    Args:
        values: `int32[...]`, what the spans are positions in.
        begin: `int64[n]`, first position of each span.
        end: `int64[n]`, one past its last position.
        owners: the arrays that `values` is a view of, if it is one of several.
    """

    values: IntArray
    begin: LongArray
    end: LongArray
    owners: Sequence[IntArray] = ()

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


@dataclass(frozen=True)
class TreeColumns:
    """The columns of some token trees, put together. The arrays are read-only.

    Args:
        ids: `int32[total]`, tokens of their nodes.
        counts: `int32[total]`, target counts.
        weights: `float64[total]`, target weights; `None` if none of the trees has any.
        begin: `int64[n]`, first token of each node.
        end: `int64[n]`, one past its last token.
        owner: `int64[n]`, the node that each hangs from, -1 for a root.
        hangs_from: `int64[n]`, the token it hangs from, -1 for a root.
        logical_tokens: of these trees.
    """

    ids: IntArray
    counts: IntArray
    weights: FloatArray | None
    begin: LongArray
    end: LongArray
    owner: LongArray
    hangs_from: LongArray
    logical_tokens: int


@dataclass(frozen=True)
class TreeSpans:
    """The nodes of token trees. The arrays are read-only.

    Args:
        ids: tokens of the nodes.
        owner: `int64[n]`, the node that each hangs from, -1 for a root.
        hangs_from: `int64[n]`, the token it hangs from, -1 for a root.
        parts: the columns that the trees came in, for their counts and weights.
    """

    ids: Spans
    owner: LongArray
    hangs_from: LongArray
    parts: Sequence[TreeColumns]


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def one_view(arrays: Sequence[IntArray]) -> tuple[IntArray, LongArray]:
    """See several arrays as one, without a copy.

    Args:
        arrays: contiguous and aligned arrays anywhere in memory. They have to stay alive as long as the view.

    Returns:
        `int32[...]`, which begins with the array at the lowest address and reaches to the end of the one at the
        highest; what lies between them must not be read. And `int64[len(arrays)]`, where in it each array begins (0
        for an empty one).
    """
    size = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if not size.any():
        return read_only(np.zeros(0, np.int32)), np.zeros(len(arrays), np.int64)
    address = np.fromiter((array.__array_interface__["data"][0] for array in arrays), np.int64, len(arrays))
    held = np.flatnonzero(size)
    lowest = held[address[held].argmin()]
    first = np.where(size > 0, address - address[lowest], 0) // 4
    view = np.lib.stride_tricks.as_strided(
        arrays[lowest], shape=(int((first + size).max()),), strides=(4,), writeable=False
    )
    return view, first


def _spans(arrays: Sequence[IntArray]) -> Spans:
    view, begin = one_view(arrays)
    end = begin + np.fromiter(map(len, arrays), np.int64, len(arrays))
    return Spans(view, read_only(begin), read_only(end), arrays)


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
    return Spans(view, read_only(begin), read_only(end), chunks)


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
    if part.ndim == 1 and part.dtype.kind in "iu" and (not part.size or _within(part, limits.min, limits.max)):
        return np.require(part, np.int32, ["C", "A"])
    bounds = (offsets - offsets[0]).tolist()
    pieces = [convert(part[low:high], first + at) for at, (low, high) in enumerate(pairwise(bounds))]
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _within(array: npt.NDArray[np.integer], low: int, high: int) -> bool:
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


# Token trees


def read_trees(trees: Iterable[TokenTree]) -> TreeSpans:
    """Nodes of token trees; see `TokenForest.from_trees`."""
    iterator = iter(trees)
    parts: list[TreeColumns] = []
    count = 0
    while batch := list(islice(iterator, TREES_AT_ONCE)):
        parts.append(_read_columns(batch, count))
        count += len(batch)
    view, first = one_view([part.ids for part in parts])
    nodes = np.cumsum([0, *(len(part.begin) for part in parts)])[:-1]

    def shifted(name: str, shift: LongArray) -> LongArray:
        columns = [getattr(part, name) for part in parts]
        return _joined([np.where(c < 0, -1, c + by) for c, by in zip(columns, shift.tolist(), strict=True)], np.int64)

    ids = Spans(view, shifted("begin", first), shifted("end", first), [part.ids for part in parts])
    return TreeSpans(ids, shifted("owner", nodes), shifted("hangs_from", first), parts)


def _read_columns(trees: list[TokenTree], first: int) -> TreeColumns:
    """Put the columns of trees together; `first` is the number of the first tree."""
    columns = _join_columns(trees)
    if columns is None:
        for index, tree in enumerate(trees, start=first):
            _check_tree(tree, index)
        raise AssertionError("a tree was refused and then found right")
    return columns


def _join_columns(trees: list[TokenTree]) -> TreeColumns | None:
    """Put the columns of trees together, unless one of them is wrong."""
    size = np.array([(len(t.input_ids), len(t.target_count), len(t.node_length), len(t.node_parent)) for t in trees])
    token = np.concatenate([[0], np.cumsum(size[:, 0])])
    node = np.concatenate([[0], np.cumsum(size[:, 2])])
    ids = _tree_ids(trees)
    length = _joined([tree.node_length for tree in trees], np.int64)
    hangs_from = _joined([tree.node_parent for tree in trees], np.int64)
    before = np.concatenate([[0], np.cumsum(length)])
    if (
        ids is None
        or not np.array_equal(size[:, 0], size[:, 1])
        or not np.array_equal(size[:, 2], size[:, 3])
        or not np.array_equal(before[node], token)
        or length.min(initial=0) < 0
    ):
        return None
    token_above = np.where(hangs_from < 0, hangs_from, hangs_from + np.repeat(token[:-1], size[:, 2]))
    if hangs_from.min(initial=-1) < -1 or np.any(token_above >= before[:-1]):
        return None
    counts = _joined([tree.target_count for tree in trees], np.int32)
    weights = None
    if any(tree.target_weight is not None for tree in trees):
        given = [tree.target_count if tree.target_weight is None else tree.target_weight for tree in trees]
        if any(len(each) != size[at, 0] for at, each in enumerate(given)):
            return None
        weights = _joined(given, np.float64)
        weighed = np.repeat([tree.target_weight is not None for tree in trees], size[:, 0])
        rounded = _rounded(weights)
        if np.any(weighed & ~(are_weights(weights) & ((rounded == 0) | (counts != 0)))):
            return None
        weights = np.where(weighed, rounded, weights)
    return TreeColumns(
        ids=ids,
        counts=counts,
        weights=None if weights is None else read_only(weights),
        begin=read_only(before[:-1]),
        end=read_only(before[1:]),
        owner=read_only(np.where(token_above < 0, -1, np.searchsorted(before[:-1], token_above, side="right") - 1)),
        hangs_from=read_only(token_above),
        logical_tokens=sum(int(tree.logical_tokens) for tree in trees),
    )


def _tree_ids(trees: list[TokenTree]) -> IntArray | None:
    """Ids of all trees, unless there is one that is none."""
    arrays = [np.asarray(tree.input_ids) for tree in trees]
    limit = np.iinfo(np.int32).max
    for at, array in enumerate(arrays):
        if array.dtype == np.int32 and array.ndim == 1:
            continue
        if array.ndim != 1 or (array.size and not (array.dtype.kind in "iu" and _within(array, 0, limit))):
            return None
        arrays[at] = array.astype(np.int32)
    ids = _joined(arrays, np.int32)
    return ids if ids.min(initial=0) >= 0 else None


def _joined(arrays: Iterable[Any], dtype: type) -> npt.NDArray[Any]:
    pieces = [np.zeros(0, dtype), *arrays]
    return read_only(np.concatenate(pieces, dtype=dtype, casting="unsafe"))


def _check_tree(tree: TokenTree, index: int) -> None:
    """Raise if a tree is wrong."""
    ids = token_array(tree.input_ids, index)
    count = np.asarray(tree.target_count)
    length = np.asarray(tree.node_length, np.int64)
    hangs_from = np.asarray(tree.node_parent, np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    if len(count) != len(ids) or len(length) != len(hangs_from) or offset[-1] != len(ids):
        raise ValueError(
            f"Token tree {index}: {len(ids)} input_ids, {len(count)} target_count, node_length summing to "
            f"{offset[-1]} over {len(length)} nodes and {len(hangs_from)} node_parent contradict each other. "
            "Build token trees with `tokenize_conversations`."
        )
    if length.min(initial=0) < 0:
        node = int(length.argmin())
        raise ValueError(
            f"Token tree {index}: node {node} has {length[node]} tokens; node_length must not be below 0."
        )
    misplaced = (hangs_from >= offset[:-1]) | (hangs_from < -1)
    if misplaced.any():
        node = int(misplaced.argmax())
        raise ValueError(
            f"Token tree {index}: node {node} hangs from token {hangs_from[node]}, which does not come before its own "
            f"tokens (they begin at {offset[node]}). Parents must come before children."
        )
    if tree.target_weight is not None:
        _check_tree_weight(tree.target_weight, count, index)


def _check_tree_weight(weight: npt.NDArray[np.floating], count: npt.NDArray[np.integer], index: int) -> None:
    if len(weight) != len(count):
        raise ValueError(
            f"Token tree {index}: {len(count)} target_count and {len(weight)} target_weight contradict each other. "
            "Give each token a weight (0 where it is no target), or leave target_weight out."
        )
    weight = weight_array(weight, f"Token tree {index}: target_weight")
    without_target = (weight > 0) & (count == 0)
    if without_target.any():
        at = int(without_target.argmax())
        raise ValueError(
            f"Token tree {index}: token {at} has target_weight {weight[at]}, but its target_count is 0. A weight is "
            "the sum over the sequences that have the token as a target, so it must be 0 where there are none."
        )


# What one sequence or tree may hold

MORE_WEIGHTS = "There are more weights than sequences; weights must have one number for each sequence."


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


def _rounded(given: FloatArray) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return given.astype(np.float32)


def are_weights(given: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether each is a float32 that is finite and at least 0."""
    array = _rounded(given)
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
    return _rounded(given)

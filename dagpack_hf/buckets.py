"""Packing within buckets of examples, so that what is in a window comes from a few examples only.

The forest stays one; only its leaves are divided. A leaf goes into the bucket of the first example, in shuffled order,
that ends there, and each bucket is planned on its own. So every target is still trained exactly once, with the count
and weight it has in the whole corpus, by the first window that holds it. What it costs is sharing: ancestors that
leaves of several buckets have in common are replayed in each of them, and each bucket has a last window to fill.

Cost: one step for each forest node that an example passes, besides that of planning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagpack_hf.kernels.buckets import first_visitors
from dagpack_hf.kernels.rows import collect_segments
from dagpack_hf.pack import Windows, pack_windows
from dagpack_hf.segments import Segments
from dagpack_hf.spans import SequenceSpans
from dagpack_hf.token_trees import TreeSpans
from dagpack_hf.trie import TokenForest

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Where the tokens of each example are, as stretches that hang from one another.

    Args:
        values: `int32`, the tokens of all examples.
        example_begin: `int64[E + 1]`, first stretch of each example.
        begin: `int64[S]`, first token of each stretch.
        end: `int64[S]`, one past its last one.
        owner: `int64[S]`, the stretch that each hangs from, -1 for none.
        hangs_from: `int64[S]`, the token it hangs from.
    """

    values: npt.NDArray[np.int32]
    example_begin: LongArray
    begin: LongArray
    end: LongArray
    owner: LongArray
    hangs_from: LongArray

    @classmethod
    def of_sequences(cls, spans: SequenceSpans) -> Examples:
        """Examples that are one sequence each."""
        count = len(spans.ids)
        none = np.full(count, -1, np.int64)
        return cls(spans.ids.values, np.arange(count + 1), spans.ids.begin, spans.ids.end, none, none)

    @classmethod
    def of_trees(cls, spans: TreeSpans, nodes: LongArray) -> Examples:
        """Examples that are token trees; `nodes` is the number of nodes of each."""
        begin = np.concatenate([[0], np.cumsum(nodes)]).astype(np.int64)
        return cls(spans.ids.values, begin, spans.ids.begin, spans.ids.end, spans.owner, spans.hangs_from)

    def __len__(self) -> int:
        return len(self.example_begin) - 1


def pack_buckets(
    forest: TokenForest,
    segments: Segments,
    examples: Examples,
    max_length: int,
    *,
    bucket_size: int,
    strategy: str = "best",
    effort: float = 0.0,
    seed: int | None = 0,
) -> Windows:
    """Put every leaf into one window, those of a bucket into windows of their own.

    Args:
        forest: the merged corpus, all of whose paths fit a window.
        segments: its segments.
        examples: the examples it was merged from, all of them.
        max_length: tokens of a window.
        bucket_size: examples of a bucket.
        strategy: as in `pack_windows`.
        effort: as in `pack_windows`; each bucket gets a share by its number of leaves.
        seed: shuffles the examples; `None` keeps them in order.

    Returns:
        Windows, bucket by bucket.
    """
    leaves = segments.leaves
    bucket = _first_example(forest, segments, examples, seed) // bucket_size
    leaf: list[LongArray] = [np.zeros(0, np.int64)]
    sizes: list[LongArray] = [np.zeros(0, np.int64)]
    slot, own, above = np.full((3, len(segments)), -1, np.int64)
    for members in _groups(bucket):
        count = collect_segments(leaves[members], segments.parent, slot, own, above)
        ids = own[:count].copy()
        slot[ids] = -1
        part = Segments(
            above[:count].copy(), segments.start[ids], segments.length[ids], segments.depth[ids], segments.target[ids]
        )
        share = effort * len(members) / len(leaves)
        windows = pack_windows(part, max_length, strategy=strategy, effort=share, seed=seed or 0)
        leaf.append(ids[windows.leaf])
        sizes.append(np.diff(windows.offset))
    return Windows(np.concatenate(leaf), np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64))


def _first_example(forest: TokenForest, segments: Segments, examples: Examples, seed: int | None) -> LongArray:
    """For each leaf segment, in preorder, the place in shuffled order of the first example that ends there."""
    count = len(examples)
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    visitor = first_visitors(
        order,
        examples.example_begin,
        examples.begin,
        examples.end,
        examples.owner,
        examples.hangs_from,
        examples.values,
        NodeIndex.of(forest),
    )
    node = np.searchsorted(forest.start, segments.start[segments.leaves])  # a leaf is written as it is
    return visitor[node]


class NodeIndex(NamedTuple):
    """What one needs to follow tokens down a forest.

    Args:
        first_token: `int32[N]`, first token of each node.
        length: `int32[N]`, its tokens.
        child_begin: `int64[N + 2]`; the children of `v` are `children[child_begin[v + 1] : child_begin[v + 2]]`, those
            of the root have `v = -1`.
        children: `int64[N]`, nodes by parent, siblings by first token.
    """

    first_token: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    child_begin: LongArray
    children: LongArray

    @classmethod
    def of(cls, forest: TokenForest) -> NodeIndex:
        """The index of a forest."""
        children = np.argsort(forest.parent, kind="stable")
        child_begin = np.searchsorted(forest.parent[children], np.arange(-1, forest.num_nodes + 1))
        return cls(forest.values[forest.source], forest.length, child_begin, children)


def _groups(bucket: LongArray) -> Iterator[LongArray]:
    """The indices of each bucket, ascending."""
    order = np.argsort(bucket, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(bucket[order])) + 1) if len(order) else ()

"""Segments, overflow, rows and unpacking: compiled loops against the plain code, byte for byte."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest, unpack
from dagpack_hf.kernels.preorder import link_children
from dagpack_hf.layout import ROW_COLUMNS, Rows, RowWriter, layout_rows
from dagpack_hf.overflow import limit_paths
from dagpack_hf.pack import Windows
from dagpack_hf.segments import Segments, build_segments
from tests import reference_rows
from tests.corpora import labelled_sequences

SEGMENT_ARRAYS = ("parent", "start", "length", "depth", "target")
FOREST_ARRAYS = ("tokens", "target_count", "parent", "start", "length", "depth")
weights_of_sequences = st.sampled_from([0.0, 0.25, 1.0, 1 / 3, 3.0, 1e-40, 1e6])


@st.composite
def forests(draw, max_sequences: int = 9, max_tokens: int = 10) -> TokenForest:
    """Labelled sequences, half of the time with weights."""
    sequences, labels = draw(labelled_sequences(max_sequences, max_tokens))
    weights = None
    if draw(st.booleans()):
        weights = draw(st.lists(weights_of_sequences, min_size=len(sequences), max_size=len(sequences)))
    return TokenForest.from_sequences(sequences, labels, weights)


def assert_same_bytes(one, other, names) -> None:
    for name in names:
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name


def random_windows(segments: Segments, seed: int, count: int) -> Windows:
    """Leaves in windows at random, whatever their size."""
    rng = np.random.default_rng(seed)
    return Windows.from_assignment(segments.leaves, rng.integers(0, count, len(segments.leaves)))


@settings(max_examples=400, deadline=None)
@given(forests())
def test_segments_are_those_of_the_plain_code(forest):
    assert_same_bytes(build_segments(forest), reference_rows.build_segments(forest), SEGMENT_ARRAYS)


@settings(max_examples=400, deadline=None)
@given(forests(), st.integers(0, 9), st.integers(1, 5), st.sampled_from(["once", "paths"]), st.sampled_from([None, 3]))
def test_rows_are_those_of_the_plain_code(forest, draw, count, weighting, seed):
    segments = build_segments(forest)
    windows = random_windows(segments, draw, count)
    options = {"loss_weighting": weighting, "seed": seed}
    rows = layout_rows(forest, segments, windows, **options)
    plain = reference_rows.layout_rows(forest, segments, windows, **options)
    assert_same_bytes(rows, plain, ("offsets", *ROW_COLUMNS))
    paths, plain_paths = unpack(rows), reference_rows.unpack(plain)
    assert [path.tolist() for path in paths] == [path.tolist() for path in plain_paths]
    assert all(path.dtype == np.int32 for path in paths)


@settings(deadline=None)
@given(forests(), st.integers(0, 9), st.integers(1, 9), st.integers(1, 40), st.sampled_from([None, 3]))
def test_rows_in_portions_are_the_same_rows(forest, draw, count, positions, seed):
    segments = build_segments(forest)
    writer = RowWriter(forest, segments, random_windows(segments, draw, count), seed=seed)
    whole = writer.write(0, len(writer))
    portions = list(writer.portions(positions))
    assert sum(map(len, portions)) == len(whole)
    for name in ROW_COLUMNS:
        assert b"".join(getattr(p, name).tobytes() for p in portions) == getattr(whole, name).tobytes()
    for portion, after in itertools.pairwise([*portions, None]):
        assert len(portion) == 1 or portion.offsets[-1] <= positions
        assert after is None or portion.offsets[-1] + after.offsets[1] > positions, "a portion is not full"


@settings(max_examples=400, deadline=None)
@given(forests(), st.integers(1, 10), st.sampled_from(["truncate", "drop"]))
def test_overflow_is_that_of_the_plain_code(forest, limit, overflow):
    clipped, lost = limit_paths(forest, limit, overflow)
    plain, plain_lost = reference_rows.limit_paths(forest, limit, overflow)
    assert lost == plain_lost
    assert_same_bytes(clipped, plain, FOREST_ARRAYS)
    assert (clipped.target_weight is None) == (plain.target_weight is None)
    if clipped.target_weight is not None:
        assert_same_bytes(clipped, plain, ("target_weight",))


@pytest.mark.parametrize("size", [2, 31, 32, 33, 34, 5000])
@pytest.mark.parametrize("largest", [1, 3, 5000, 2**40])
def test_children_are_sorted_by_weight_and_then_by_number(size, largest):
    rng = np.random.default_rng(size)
    length = rng.integers(0, largest, size, endpoint=True)
    weight, child, sibling = np.empty((3, size + 1), np.int64)
    link_children(size, np.full(size, -1), length, weight, child, sibling)
    found, node = [], child[size]
    while node >= 0:
        found.append(int(node))
        node = sibling[node]
    assert found == np.argsort(-length, kind="stable").tolist()
    assert weight[size] == length.sum()


def star(leaves: int, tokens: int, seed: int = 0) -> TokenForest:
    """One root with many children of random length, and a chain below the first."""
    rng = np.random.default_rng(seed)
    length = np.concatenate([[3], rng.integers(1, tokens, leaves)]).astype(np.int32)
    parent = np.array([-1] + [0] * leaves, np.int32)
    ids = rng.integers(0, 1000, int(length.sum()), dtype=np.int32)
    count = rng.integers(0, 3, len(ids), dtype=np.int32)
    return TokenForest.from_tokens(ids, count, parent, length, np.where(parent < 0, 0, 3).astype(np.int32), len(ids))


@pytest.mark.parametrize("weighting", ["once", "paths"])
def test_a_window_with_hundreds_of_children(weighting):
    forest = star(700, 40)
    segments = build_segments(forest)
    assert_same_bytes(segments, reference_rows.build_segments(forest), SEGMENT_ARRAYS)
    windows = random_windows(segments, 0, 3)
    rows = layout_rows(forest, segments, windows, loss_weighting=weighting)
    assert_same_bytes(
        rows, reference_rows.layout_rows(forest, segments, windows, loss_weighting=weighting), ROW_COLUMNS
    )


def test_a_chain_of_a_hundred_thousand_nodes():
    """Nothing recurses."""
    depth = np.arange(100_000, dtype=np.int32)
    parent = depth - 1
    forest = TokenForest.from_tokens(depth % 7, np.ones_like(depth), parent, np.ones_like(depth), depth, 1)
    segments = build_segments(forest)
    rows = layout_rows(forest, segments, Windows(segments.leaves, np.array([0, 1])))
    assert rows.position_ids.tolist() == list(range(100_000))
    assert (rows.subtree_end == 100_000).all()
    (path,) = unpack(rows)
    assert path.tobytes() == forest.tokens.tobytes()
    clipped, lost = limit_paths(forest, 60_000, "drop")
    assert (clipped.num_nodes, clipped.num_targets, lost.lost_targets) == (0, 0, 100_000)


def test_no_rows():
    forest = TokenForest.from_sequences([])
    segments = build_segments(forest)
    rows = layout_rows(forest, segments, Windows(segments.leaves, np.zeros(1, np.int64)))
    assert len(segments) == len(rows) == 0 and unpack(rows) == []
    assert isinstance(rows, Rows) and all(getattr(rows, name).size == 0 for name in ROW_COLUMNS)


def test_writing_keeps_up_with_memory():
    """A floor far below the measured speed (400 M positions/s), for loops that the compiler no longer vectorises."""
    length = np.full(2_000, 1_000, np.int32)
    ids = np.zeros(int(length.sum()), np.int32)
    zeros = np.zeros_like(length)
    forest = TokenForest.from_tokens(ids, ids + 1, zeros - 1, length, zeros, len(ids))
    segments = build_segments(forest)
    windows = Windows(segments.leaves, np.arange(len(segments) + 1))
    layout_rows(forest, segments, windows)
    spent = []
    for _ in range(5):
        before = time.thread_time()
        layout_rows(forest, segments, windows)
        spent.append(time.thread_time() - before)
    assert len(ids) / min(spent) > 40e6


def test_kernels_compile_in_seconds_and_are_cached(tmp_path):
    code = """
import time
import numpy as np
from dagpack_hf import TokenForest, unpack
from dagpack_hf.layout import layout_rows
from dagpack_hf.overflow import limit_paths
from dagpack_hf.pack import Windows
from dagpack_hf.segments import build_segments
for weights in (None, [1.0, 2.0]):
    forest = TokenForest.from_sequences([[1, 2, 3, 4], [1, 2, 5]], weights=weights)
    before = time.process_time()
    clipped, _ = limit_paths(forest, 3, "drop")
    segments = build_segments(clipped)
    unpack(layout_rows(clipped, segments, Windows(segments.leaves, np.array([0, len(segments.leaves)]))))
    if weights is None:
        print(time.process_time() - before)
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    cold, warm = (
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout)
        for _ in range(2)
    )
    assert warm < cold / 3 and cold < 15


def test_rows_can_be_written_when_forest_and_tokens_are_gone():
    """The writer holds the arrays that the tokens are in, several of which are seen as one."""
    arrays = [np.array([1, 2, at], np.int32) for at in range(4)]
    alive = [weakref.ref(array) for array in arrays]
    forest = TokenForest.from_sequences(arrays)
    segments = build_segments(forest)
    writer = RowWriter(forest, segments, random_windows(segments, 0, 2))
    del arrays, forest, segments
    gc.collect()
    assert all(array() is not None for array in alive)
    assert sorted(path.tolist() for path in unpack(writer.write(0, len(writer)))) == [[1, 2, at] for at in range(4)]


@settings(deadline=None)
@given(forests(), st.integers(1, 10), st.sampled_from(["truncate", "drop"]))
def test_what_is_left_of_a_forest_has_runs_that_differ(forest, limit, overflow):
    tally = limit_paths(forest, limit, overflow)[0].tally
    differs = tally.count[1:] != tally.count[:-1]
    if tally.weight is not None:
        differs |= tally.weight[1:] != tally.weight[:-1]
    assert differs.all() and np.all(tally.length > 0)

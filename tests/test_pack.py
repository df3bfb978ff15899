"""The plan: against plain Python on random trees, against the optimum on tiny ones, and at its borders."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest
from dagpack_hf.kernels import plan, rooms
from dagpack_hf.pack import (
    Windows,
    dissolve,
    executed_tokens,
    least_executed_tokens,
    lower_bound,
    pack_bottom_up,
    pack_nearest,
    pack_walk,
    pack_windows,
    window_sizes,
)
from dagpack_hf.segments import Segments, build_segments
from tests import reference_packing as reference
from tests.corpora import labelled_sequences
from tests.exact_packing import fewest_windows

PACKINGS = (pack_walk, pack_bottom_up, pack_nearest)


def tree(parent, length) -> tuple[Segments, TokenForest]:
    """A tree in preorder, as segments without copies and as a forest."""
    parent, length = np.array(parent, np.int64), np.array(length, np.int64)
    depth = np.zeros(len(parent), np.int64)
    for node in range(len(parent)):
        if parent[node] >= 0:
            depth[node] = depth[parent[node]] + length[parent[node]]
    none, no_tokens = np.full(len(parent), -1), np.zeros(0, np.int32)
    forest = TokenForest.from_tokens(
        no_tokens, no_tokens, parent.astype(np.int32), length.astype(np.int32), depth.astype(np.int32), 0
    )
    return Segments(parent, forest.start, length, depth, none), forest


def random_tree(seed: int, nodes: int, longest: int = 30) -> tuple[Segments, TokenForest]:
    rng = np.random.default_rng(seed)
    branchiness = rng.random()
    parent, open_nodes = [], []
    for node in range(nodes):
        while open_nodes and rng.random() < branchiness:
            open_nodes.pop()
        parent.append(open_nodes[-1] if open_nodes else -1)
        open_nodes.append(node)
    return tree(parent, rng.integers(1, 1 + int(rng.integers(1, longest)), nodes))


def agent_sessions(seed: int, leaves: int, turns: int = 20) -> tuple[Segments, TokenForest]:
    """A system prompt for every 40 sessions; turns of some 500 tokens, of which one in twenty branches."""
    rng = np.random.default_rng(seed)
    parent: list[int] = []
    length: list[int] = []

    def add(above: int, tokens: float) -> int:
        parent.append(above)
        length.append(int(tokens) + 1)
        return len(parent) - 1

    found = 0
    while found < leaves:
        system = add(-1, rng.lognormal(np.log(5000), 0.3))
        for _ in range(40):
            stack = [(system, min(int(rng.geometric(1 / turns)), 3 * turns))]
            while stack:
                node, left = stack.pop()
                for _ in range(int(rng.integers(2, 5)) if rng.random() < 0.05 else 1):
                    turn = add(node, min(rng.lognormal(np.log(450), 0.9), 8000))
                    stack.extend([(turn, left - 1)] if left > 1 else [])
                    found += left <= 1
    return tree(*in_preorder(parent, length))


def in_preorder(parent: list[int], length: list[int]) -> tuple[list[int], list[int]]:
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    order, stack = [], children[-1][::-1]
    while stack:
        order.append(stack.pop())
        stack.extend(children.get(order[-1], [])[::-1])
    new = {node: index for index, node in enumerate(order)} | {-1: -1}
    return [new[parent[node]] for node in order], [length[node] for node in order]


def longest_path(segments: Segments) -> int:
    return int((segments.depth + segments.length).max())


def as_lists(windows: Windows) -> list[list[int]]:
    return [windows.of(index).tolist() for index in range(len(windows))]


def check(segments: Segments, windows: Windows, max_length: int) -> None:
    """Every leaf in one window, all in order, no window too long."""
    lists = as_lists(windows)
    assert sorted(leaf for leaves in lists for leaf in leaves) == segments.leaves.tolist()
    assert all(leaves and leaves == sorted(leaves) for leaves in lists)
    assert [leaves[0] for leaves in lists] == sorted(leaves[0] for leaves in lists)
    assert (windows.leaf.dtype, windows.offset.dtype) == (np.int64, np.int64)
    sizes = [reference.size(segments, leaves) for leaves in lists]
    assert max(sizes, default=0) <= max_length
    assert window_sizes(segments, windows).tolist() == sizes
    assert executed_tokens(segments, windows) == sum(sizes)


@st.composite
def segments_and_length(draw):
    """Trees without copies, or corpora with copies and segments of no tokens."""
    if draw(st.booleans()):
        segments = random_tree(draw(st.integers(0, 10**6)), draw(st.integers(1, 60)))[0]
    else:
        segments = build_segments(TokenForest.from_sequences(*draw(labelled_sequences(12, 9, 3))))
    return segments, longest_path(segments) + draw(st.integers(0, 60))


@settings(max_examples=300, deadline=None)
@given(segments_and_length())
def test_kernels_agree_with_plain_python(case):
    """The walk, nearest and dissolve leaf by leaf; bottom up in its sizes, since equal bundles may change places."""
    segments, max_length = case
    assert as_lists(pack_walk(segments, max_length)) == reference.walk(segments, max_length)
    assert as_lists(pack_nearest(segments, max_length)) == reference.nearest(segments, max_length)
    bundles = pack_bottom_up(segments, max_length)
    expected = [reference.size(segments, leaves) for leaves in reference.bottom_up(segments, max_length)]
    assert sorted(window_sizes(segments, bundles)) == sorted(expected)
    for packing in PACKINGS:
        windows = packing(segments, max_length)
        check(segments, windows, max_length)
        dissolved = dissolve(segments, max_length, windows)
        check(segments, dissolved, max_length)
        assert as_lists(dissolved) == reference.dissolve(segments, max_length, as_lists(windows))


@settings(max_examples=200, deadline=None)
@given(segments_and_length(), st.integers(0, 5))
def test_best_is_the_best_and_effort_never_worse(case, seed):
    segments, max_length = case
    walk = pack_windows(segments, max_length, strategy="dfs")
    assert as_lists(walk) == reference.walk(segments, max_length)
    best = pack_windows(segments, max_length)
    candidates = [walk, *(dissolve(segments, max_length, packing(segments, max_length)) for packing in PACKINGS[1:])]
    costs = [(len(windows), executed_tokens(segments, windows)) for windows in candidates]
    assert (len(best), executed_tokens(segments, best)) == min(costs)
    searched = pack_windows(segments, max_length, effort=0.002, seed=seed)
    check(segments, best, max_length)
    check(segments, searched, max_length)
    assert (len(searched), executed_tokens(segments, searched)) <= min(costs)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.integers(0, 60))
def test_bound_agrees_with_plain_python(seed, nodes, slack):
    segments, forest = random_tree(seed, nodes)
    max_length = (longest_path(segments) if nodes else 1) + slack
    expected = reference.lower_bound(forest, max_length)
    assert (lower_bound(forest, max_length), least_executed_tokens(forest, max_length)) == expected


@settings(max_examples=200, deadline=None)
@given(labelled_sequences(12, 9, 3), st.integers(0, 12))
def test_bound_holds_with_copies_at_branch_points(corpus, slack):
    forest = TokenForest.from_sequences(*corpus)
    max_length = forest.longest_path + slack
    segments = build_segments(forest)
    windows = pack_windows(segments, max_length)
    assert lower_bound(forest, max_length) <= len(windows)
    assert forest.num_tokens <= least_executed_tokens(forest, max_length) <= executed_tokens(segments, windows)


def test_dissolve_gives_up_after_failures_in_a_row_only():
    """Of two hundred windows, leaves of 60 stay, and between them pairs of 30 vanish until no room of 30 is left."""
    segments, _ = tree([-1] * 300, [60, 30, 30] * 100)
    windows = Windows.from_assignment(segments.leaves, np.array([0, 1, 1] * 100) + np.repeat(np.arange(100) * 2, 3))
    dissolved = dissolve(segments, 100, windows)
    assert as_lists(dissolved) == reference.dissolve(segments, 100, as_lists(windows))
    assert len(windows) - len(dissolved) > 2 * reference.PATIENCE


def tiny_forests(count: int):
    """Forests of 3 to 9 leaves, and window lengths of one to three longest paths."""
    rng = np.random.default_rng(0)
    seed = 0
    while count:
        seed += 1
        segments, forest = random_tree(seed, int(rng.integers(3, 16)))
        if 3 <= len(segments.leaves) <= 9:
            count -= 1
            yield segments, forest, int(longest_path(segments) * rng.uniform(1, 3))


def test_tiny_forests_against_the_optimum():
    ratios, tight = [], 0
    for segments, forest, max_length in tiny_forests(500):
        optimum = fewest_windows(segments.parent.tolist(), segments.length.tolist(), max_length)
        bound = lower_bound(forest, max_length)
        windows = pack_windows(segments, max_length)
        check(segments, windows, max_length)
        assert bound <= optimum <= len(windows)
        ratios.append(len(windows) / optimum)
        tight += bound == optimum
    assert np.mean(ratios) <= 1.02
    assert tight >= 400


def test_conflicts_make_the_bound_tight():
    """Below a trunk of 10, leaves of 7, 7 and 7: no two in a window of 20, though three fit by their tokens in two."""
    _, forest = tree([-1, 0, 0, 0], [10, 6, 6, 6])
    assert lower_bound(forest, 20) == 3
    assert least_executed_tokens(forest, 20) == 48
    assert lower_bound(forest, 22) == 2


def test_the_longest_leaf_below_a_child_stands_for_it():
    """One of the three leaves that conflict has a shorter sibling before it."""
    _, forest = tree([-1, 0, 0, 0, 3, 3], [10, 6, 6, 1, 1, 5])
    assert lower_bound(forest, 20) == 3


@pytest.mark.parametrize("seed", range(3))
def test_agent_sessions_come_close_to_the_bound(seed):
    segments, forest = agent_sessions(seed, 3000)
    max_length = 4 * longest_path(segments)
    windows = pack_windows(segments, max_length)
    assert len(windows) <= 1.05 * lower_bound(forest, max_length)
    assert len(windows) < len(pack_windows(segments, max_length, strategy="dfs"))


def test_documents_come_close_to_the_bound():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1, 10_000).astype(int), 1, 4096)
    segments, forest = tree([-1] * 10_000, lengths)
    assert len(pack_windows(segments, 4096)) <= 1.01 * lower_bound(forest, 4096)


def test_effort_finds_fewer_windows():
    segments, _ = agent_sessions(1, 300)
    max_length = longest_path(segments)
    windows = pack_windows(segments, max_length)
    started = time.monotonic()
    searched = pack_windows(segments, max_length, effort=0.5)
    assert 0.4 < time.monotonic() - started < 5
    check(segments, searched, max_length)
    assert len(searched) < len(windows)


def test_effort_ends_at_the_bound():
    segments, _ = tree([-1] * 10, [5] * 10)
    started = time.monotonic()
    assert len(pack_windows(segments, 10, effort=60)) == 5
    assert time.monotonic() - started < 30


def test_iterations_depend_on_the_seed_alone(monkeypatch):
    """With a clock that ends every search after five looks, equal seeds give equal windows."""
    segments, _ = agent_sessions(5, 300)

    def searched(seed: int) -> list[list[int]]:
        ticks = iter(range(6))
        monkeypatch.setattr("dagpack_hf.pack.time.monotonic", lambda: next(ticks))
        return as_lists(pack_windows(segments, 2 * longest_path(segments), effort=5, seed=seed))

    assert searched(0) == searched(0) != searched(1)


# Borders


def test_nothing_to_pack():
    segments, forest = tree([], [])
    for effort in (0.0, 0.01):
        windows = pack_windows(segments, 8, effort=effort)
        assert len(windows) == 0 and windows.offset.tolist() == [0] and windows.leaf.tolist() == []
    assert lower_bound(forest, 8) == least_executed_tokens(forest, 8) == 0
    assert window_sizes(segments, windows).tolist() == []


@pytest.mark.parametrize("max_length", [5, 6, 10**9])
def test_one_leaf(max_length):
    segments, forest = tree([-1], [5])
    assert as_lists(pack_windows(segments, max_length, effort=0.01)) == [[0]]
    assert (lower_bound(forest, max_length), least_executed_tokens(forest, max_length)) == (1, 5)


def test_leaves_longer_than_half_a_window_are_alone():
    segments, forest = tree([-1] * 1000, [51] * 1000)
    windows = pack_windows(segments, 100, effort=0.01)
    check(segments, windows, 100)
    assert len(windows) == lower_bound(forest, 100) == 1000


def test_windows_as_long_as_the_longest_path():
    segments, forest = agent_sessions(0, 500)
    max_length = longest_path(segments)
    windows = pack_windows(segments, max_length)
    check(segments, windows, max_length)
    assert lower_bound(forest, max_length) <= len(windows) <= len(pack_walk(segments, max_length))


def test_thousands_of_equal_tiny_leaves():
    segments, forest = tree([-1] + [0] * 20_000, [100] + [3] * 20_000)
    windows = pack_windows(segments, 130)
    assert len(windows) == 2000
    assert window_sizes(segments, windows).tolist() == [130] * 2000
    assert lower_bound(forest, 130) == 2000


def test_a_deep_trunk_with_thousands_of_branch_points():
    """Ten thousand leaves, one at each token of a trunk, up which hundreds of bins go."""
    leaves = 10_000
    rng = np.random.default_rng(0)
    trunk = np.arange(leaves) * 2
    parent = np.empty(2 * leaves, np.int64)
    parent[trunk], parent[trunk + 1] = trunk - 2, trunk
    parent[0] = -1
    length = np.ones(2 * leaves, np.int64)
    length[trunk + 1] = rng.integers(1, 3000, leaves)
    segments, forest = tree(*in_preorder(parent.tolist(), length.tolist()))
    max_length = longest_path(segments) + 2000
    pack_windows(segments, max_length)
    started = time.monotonic()
    windows = pack_windows(segments, max_length)
    assert time.monotonic() - started < 5
    sizes = window_sizes(segments, windows)
    assert sizes.max() <= max_length
    assert sorted(windows.leaf.tolist()) == segments.leaves.tolist()
    assert len(windows) <= 1.02 * lower_bound(forest, max_length)


def test_paths_longer_than_a_window_are_refused():
    segments, forest = tree([-1, 0, 0], [3, 4, 5])
    message = "The longest path has 8 tokens, a window only max_length=7"
    with pytest.raises(ValueError, match=message):
        pack_windows(segments, 7)
    with pytest.raises(ValueError, match=message):
        lower_bound(forest, 7)
    with pytest.raises(ValueError, match=message):
        least_executed_tokens(forest, 7)


def test_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="strategy must be 'best' or 'dfs', got 'first'"):
        pack_windows(tree([-1], [3])[0], 8, strategy="first")


def test_input_is_not_changed():
    segments, _ = random_tree(1, 40)
    windows = pack_walk(segments, longest_path(segments))
    kept = windows.leaf.copy(), windows.offset.copy()
    dissolve(segments, longest_path(segments), windows)
    assert np.array_equal(kept[0], windows.leaf) and np.array_equal(kept[1], windows.offset)


def test_windows_from_the_window_of_each_leaf():
    leaves, window_of = np.array([2, 3, 5, 8]), np.array([7, 1, 7, 4])
    windows = Windows.from_assignment(leaves, window_of)
    assert as_lists(windows) == [[2, 5], [3], [8]]
    assert windows.offset.tolist() == [0, 2, 3, 4]
    assert window_of.tolist() == [7, 1, 7, 4]


@given(st.integers(1, 20_000), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_tightest_room_against_a_list(max_length, seed):
    rng = np.random.default_rng(seed)
    index = rooms.no_rooms(30, max_length)
    entered: dict[int, int] = {}
    for _ in range(200):
        window, free = int(rng.integers(30)), int(rng.integers(max_length + 1))
        if window in entered and rng.random() < 0.5:
            rooms.take(index, window)
            del entered[window]
        elif window not in entered:
            rooms.put(index, window, free)
            entered[window] = free
        tokens = int(rng.integers(max_length + 1))
        fitting = [room for room in entered.values() if room >= tokens]
        found = rooms.tightest(index, tokens)
        assert entered[found] == min(fitting) if fitting else found == -1


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_least_of_a_range(values, data):
    low = data.draw(st.integers(0, len(values) - 1))
    high = data.draw(st.integers(low + 1, len(values)))
    assert plan.least(plan.minimum_tree(np.array(values)), low, high) == min(values[low:high])

"""The plan of states against brute force on small rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf.recurrent.plan import CELL, COPIES, SHORTEST, ChainLayout, Layout, StatePlan
from tests.reference_recurrent import batch_of, expected_cells, path_to, row_of

ROWS = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 7]), min_size=1, max_size=30), st.integers(1, 3)),
    min_size=1,
    max_size=3,
)


def batch(rows, padding):
    return batch_of([row_of(steps, stretch) for steps, stretch in rows], padding)


def positions_of(parent: np.ndarray) -> list[int]:
    return np.flatnonzero(parent != -2).tolist()


def pieces(layout: Layout, size: int) -> list[tuple[int, ...]]:
    """The positions in each `size` places, which must be at the front."""
    filled = np.ones(len(layout.position_M), bool)
    filled[layout.empty] = False
    found = []
    for start in range(0, len(filled), size):
        here = filled[start : start + size]
        count = int(here.sum())
        assert here[:count].all()
        found.append(tuple(layout.position_M[start : start + count].tolist()))
    return found


def is_found(layout: Layout, parent: np.ndarray) -> bool:
    positions = positions_of(parent)
    places = layout.place_N[positions]
    return layout.position_M[places].tolist() == positions and not np.isin(places, layout.empty).any()


@given(ROWS, st.integers(0, 3))
def test_parents_and_depths(rows, padding):
    parent, end, lengths = batch(rows, padding)
    plan = StatePlan(end, lengths)
    assert plan.parent_N.tolist() == parent.tolist()
    for i in positions_of(parent):
        assert plan.depth_N[i] == len(path_to(parent, i)) - 1


@given(ROWS, st.integers(0, 3))
def test_without_lengths_lone_positions_at_the_end_are_padding(rows, padding):
    parent, end, _ = batch(rows, padding)
    width = end.shape[1]
    for b in range(len(end)):
        for i in range(width - 1, -1, -1):
            at = b * width + i
            if parent[at] >= 0 or (i + 1 < width and parent[at + 1] == at):
                break
            parent[at] = -2
    assert StatePlan(end).parent_N.tolist() == parent.tolist()


@given(ROWS, st.integers(0, 3), st.integers(0, 4))
def test_a_run_comes_after_its_last_ancestors(rows, padding, above):
    parent, end, lengths = batch(rows, padding)
    runs = StatePlan(end, lengths).runs(above)
    assert is_found(runs, parent)
    position = runs.position_M.copy()
    position[runs.empty] = -1
    for i in positions_of(parent):
        ancestors = [-1] * above + path_to(parent, i)[:-1]
        place = runs.place_N[i]
        assert position[place - above : place].tolist() == ancestors[len(ancestors) - above :]
    leaves = len(positions_of(parent)) - len({p for p in parent.tolist() if p >= 0})
    assert len(position) == len(parent) + above * leaves


@given(ROWS, st.integers(0, 3), st.integers(1, 9))
def test_cells_are_the_pieces_of_all_paths(rows, padding, length):
    parent, end, lengths = batch(rows, padding)
    cells = StatePlan(end, lengths).cells(length)
    assert is_found(cells.layout, parent)
    above = expected_cells(np.where(parent == -2, -1, parent), length)
    above = {cell: up for cell, up in above.items() if parent[cell[0]] != -2}
    found = pieces(cells.layout, length)
    assert sorted(found) == sorted(above)
    before: list[tuple[int, ...]] = []
    for parents in cells.steps:
        here, found = found[: len(parents)], found[len(parents) :]
        if before:
            assert [before[p] for p in parents] == [above[cell] for cell in here]
        else:
            assert {above[cell] for cell in here} == {()}
        before = here
    assert not found


@given(ROWS, st.integers(0, 3), st.integers(1, 9))
def test_chains_go_on_from_the_ends_of_their_parents(rows, padding, length):
    parent, end, lengths = batch(rows, padding)
    chains = StatePlan(end, lengths).chains(length)
    assert is_found(chains.layout, parent)
    above = {cell: up for cell, up in expected_cells(parent, length).items() if parent[cell[0]] != -2}
    left = dict(above)
    start, ends = 0, [()]
    for level, calls in enumerate(chains.levels):
        last = []
        for call in calls:
            count, longest = call.shape
            found = pieces_between(chains, start, count, longest)
            start += count * longest
            assert call.lengths.tolist() == [len(chain) for chain in found] and call.lengths.max() == longest
            assert call.goes_on == (level + 1 < len(chains.levels))
            assert (call.parents is None) == (level == 0)
            for index, chain in enumerate(found):
                before = ends[0] if call.parents is None else ends[call.parents[index]]
                for at in range(0, len(chain), length):
                    cell = chain[at : at + length]
                    assert left.pop(cell) == before
                    before = cell
                last.append(before)
        ends = last
    assert not left and start == len(chains.layout.position_M)


def pieces_between(chains: ChainLayout, start: int, count: int, longest: int) -> list[tuple[int, ...]]:
    empty = chains.layout.empty
    empty = empty[(empty >= start) & (empty < start + count * longest)] - start
    position = chains.layout.position_M[start : start + count * longest]
    return pieces(Layout(position, empty, chains.layout.place_N), longest)


def test_calls_are_padded_little():
    """A trunk of 4 cells and branches of 1 to 20 cells: groups of like lengths, longest first."""
    steps = [0] * 256
    for branch in range(20):
        steps += [64 * branch] + [0] * (64 * (branch + 1) - 1)
    _, end = row_of(steps)
    trunk, branches = StatePlan(end[None]).chains(CELL).levels
    assert [call.shape for call in trunk] == [(1, 256)]
    assert [(call.lengths // 64).tolist() for call in branches] == [
        [20, 19, 18, 17, 16, 15],  # three quarters of 20; 14 and less would be padded by more than 4
        [14, 13, 12, 11, 10],  # 10 by 4
        [9, 8, 7, 6],  # 6 by 3
        [5, 4, 3],  # 3 by 2; 2 by 3 more would be too much
        [2, 1],
    ]


def test_long_cells_are_taken_where_they_copy_little():
    chain = np.full((1, 1024), 1024)
    assert [StatePlan(chain).cell_length(longest) for longest in (256, 128, 64, 16, 4)] == [256, 128, 64, 16, 4]
    _, end = row_of([0] * 320 + [128, *[0] * 127] * 8)
    plan = StatePlan(end[None])
    assert plan.cell_length(256) == CELL
    assert len(plan.cells(128).layout.position_M) > COPIES * len(end) > len(plan.cells(CELL).layout.position_M)


def test_cells_of_chains_are_shortened_where_branches_are_short():
    _, star = row_of([0] * 130 + [60, *[0] * 59] * 6)
    _, bush = row_of([0] * 20 + [10, *[0] * 9] * 20)
    assert [StatePlan(end[None]).chain_length() for end in (star, bush)] == [CELL, SHORTEST]
    padded = np.tile(np.arange(1, 4 * len(bush) + 1), (1, 1))
    padded[0, : len(bush)] = bush
    assert StatePlan(padded, np.array([len(bush)])).chain_length() == SHORTEST, "padding does not count"


def test_batches_of_padding_have_no_cells():
    plan = StatePlan(np.tile(np.arange(1, 9), (2, 1)), np.array([0, 0]))
    assert plan.is_empty and plan.chains(CELL).levels == [] and len(plan.cells(4).layout.position_M) == 0
    assert not StatePlan(np.array([[1]]), np.array([1])).is_empty


def test_layouts_are_made_once_and_plans_can_be_sent():
    plan = StatePlan(np.array([[4, 3, 3, 4, 5]]))
    assert plan.chains(4) is plan.chains(4) and plan.runs(3) is plan.runs(3) and plan.runs(3) is not plan.runs(2)
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.cells(2).layout.position_M.tolist() == plan.cells(2).layout.position_M.tolist()


@pytest.mark.parametrize(
    ("end", "lengths", "message"),
    [
        ([1, 2], None, r"shape \(batch, length\), got \(2,\)"),
        ([[1, 1]], None, "subtree_end must lie in"),
        ([[1, 3]], None, "subtree_end must lie in"),
        ([[1, 2]], [3], "at most 2"),
        ([[1, 2]], [1, 1], "one for each of 1 rows"),
    ],
)
def test_vectors_that_are_no_rows_are_refused(end, lengths, message):
    with pytest.raises(ValueError, match=message):
        StatePlan(np.array(end), None if lengths is None else np.array(lengths))

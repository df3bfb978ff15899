"""The transition graph and its walk, against dictionaries and against what is known of the ls20 episodes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import pack_forest
from dagpack_hf.graph import TransitionGraph, ViolationError, trained_pairs
from tests.reference_graph import ReferenceGraph, check_rows

LS20 = Path(__file__).parents[1] / ".." / "shared" / "games" / "ls20"
needs_ls20 = pytest.mark.skipif(not LS20.exists(), reason="needs the episodes in ../shared/games/ls20")


@cache
def ls20():
    with gzip.open(LS20 / "episodes.jsonl.gz", "rt") as file:
        return [(each["states"], each["actions"]) for each in map(json.loads, file)]


@cache
def ls20_without_counter():
    """The episodes as grids without rows 61 and 62."""
    with gzip.open(LS20 / "states.jsonl.gz", "rt") as file:
        grid = {each["hash"]: tuple(each["grid"][:61] + each["grid"][63:]) for each in map(json.loads, file)}
    return [([grid[state] for state in states], actions) for states, actions in ls20()]


def build(episodes, merge="state", **options):
    return TransitionGraph.from_episodes(episodes, merge, progress=False, **options)


def check(graph, reference, times=2, **packing):
    """Compare the rows of a walk, in windows of some times its longest path, with the walk of the reference."""
    forest = graph.to_forest()
    rows, _ = pack_forest(forest, times * max(forest.longest_path, 1), **packing)
    paths = reference.walk()
    check_rows(list(rows), paths, lambda each: tuple(graph.nodes([each])[0]))
    assert sum(len(path) > 1 for path in paths) == graph.num_transitions
    return rows


@needs_ls20
def test_ls20_merged_by_state():
    graph = build(ls20())
    assert (graph.num_states, graph.num_pairs, graph.num_transitions, graph.num_prefixes) == (701, 997, 997, 1227)
    assert (graph.num_joins, graph.violations, graph.num_steps, graph.num_ambiguous) == (219, [], 1485, 0)
    reference = ReferenceGraph(ls20(), lambda state: True)
    for strategy, times, windows in [("dfs", 1, 52), ("best", 1, 44), ("best", 30, 1)]:
        rows = check(graph, reference, times, strategy=strategy)
        assert len(rows) <= windows
    x, y = trained_pairs(rows)
    crossed = {(a.state, b.action, b.state) for a, b in zip(graph.nodes(x), graph.nodes(y), strict=True)}
    steps = {(s, a, t) for states, acts in ls20() for s, a, t in zip(states, acts, states[1:], strict=False)}
    assert len(x) == 997 and crossed == steps


@needs_ls20
def test_ls20_merged_by_prefix():
    graph = build(ls20(), "prefix")
    assert (graph.num_transitions, graph.num_prefixes, graph.violations) == (1227, 1227, [])
    assert graph.num_joins == 219
    check(graph, ReferenceGraph(ls20(), lambda state: False))


@needs_ls20
def test_ls20_without_its_step_counter():
    episodes = ls20_without_counter()
    with pytest.raises(ViolationError, match="for 4 pairs of them") as error:
        build(episodes)
    expected = ReferenceGraph(episodes, lambda state: True).violations()
    assert len(expected) == 4
    found = {}
    for violation in error.value.violations:
        outcomes = {each.state: list(zip(each.episodes, each.steps, strict=True)) for each in violation.outcomes}
        found[("state", violation.state), violation.action] = outcomes
    assert found == expected
    assert all(len(each.outcomes) == 2 for each in error.value.violations)

    graph = build(episodes, on_violation="prefix")
    assert (graph.num_states, graph.num_pairs, len(graph.violations), graph.num_ambiguous) == (49, 146, 4, 0)
    apart = {state for (_, state), _ in expected}
    rows = check(graph, ReferenceGraph(episodes, lambda state: state not in apart))
    x, y = trained_pairs(rows)
    crossed = {(a.state, b.action, b.state) for a, b in zip(graph.nodes(x), graph.nodes(y), strict=True)}
    steps = {(s, a, t) for states, acts in episodes for s, a, t in zip(states, acts, states[1:], strict=False)}
    assert crossed == steps and len(steps) == 150


@st.composite
def worlds(draw, deterministic=True):
    """Random walks in a small random world."""
    size, moves = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    table = draw(st.lists(st.integers(0, size - 1), min_size=size * moves, max_size=size * moves))
    episodes = []
    for _ in range(draw(st.integers(0, 6))):
        states, actions = [draw(st.integers(0, size - 1))], draw(st.lists(st.integers(0, moves - 1), max_size=9))
        for action in actions:
            after = table[states[-1] * moves + action]
            if not deterministic and draw(st.integers(0, 5)) == 0:
                after = (after + 1) % size
            states.append(after)
        episodes.append(([f"s{each}" for each in states], actions))
    return episodes


@settings(max_examples=60)
@given(worlds(), st.integers(1, 3), st.sampled_from(["best", "dfs"]))
def test_random_worlds(episodes, factor, strategy):
    reference = ReferenceGraph(episodes, lambda state: True)
    graph = build(episodes)
    assert graph.violations == []
    check(graph, reference, factor, strategy=strategy)
    tree = build(episodes, "prefix")
    check(tree, ReferenceGraph(episodes, lambda state: False), factor, strategy=strategy)
    assert graph.num_prefixes == tree.num_prefixes == tree.num_transitions >= graph.num_transitions


@settings(max_examples=60)
@given(worlds(deterministic=False))
def test_random_worlds_with_violations(episodes):
    expected = ReferenceGraph(episodes, lambda state: True).violations()
    if expected:
        with pytest.raises(ViolationError):
            build(episodes)
    graph = build(episodes, on_violation="prefix")
    assert {(("state", each.state), each.action) for each in graph.violations} == set(expected)
    apart = {state for (_, state), _ in expected}
    reference = ReferenceGraph(episodes, lambda state: state not in apart)
    check(graph, reference)
    assert graph.num_ambiguous == len(reference.violations())
    tree = build(episodes, "prefix", on_violation="error")
    assert len(tree.violations) == len(ReferenceGraph(episodes, lambda state: False).violations())


@settings(max_examples=60)
@given(worlds(), st.integers(2, 6))
def test_short_paths_lose_no_transition(episodes, max_path):
    graph = build(episodes)
    forest = graph.to_forest(max_path=max_path)
    assert forest.longest_path <= max_path
    rows, _ = pack_forest(forest, max_path)
    x, y = trained_pairs(rows)
    crossed = Counter((a.state, b.action, b.state) for a, b in zip(graph.nodes(x), graph.nodes(y), strict=True))
    steps = {(s, a, t) for states, acts in episodes for s, a, t in zip(states, acts, states[1:], strict=False)}
    assert crossed == Counter(steps)


def test_two_actions_between_the_same_states_and_a_loop():
    episodes = [(["a", "b", "a", "b", "b"], [1, 2, 3, 1])]
    graph = build(episodes)
    assert (graph.num_states, graph.num_transitions, graph.num_joins) == (2, 4, 1)
    assert graph.nodes(range(graph.num_nodes)) == [("a", None), ("b", 1), ("a", 2), ("b", 3)]
    check(graph, ReferenceGraph(episodes, lambda state: True))


def test_each_start_is_a_root_and_one_that_was_reached_is_none():
    episodes = [("abc", [1, 1]), ("xb", [1]), ("bc", [1])]
    forest = build(episodes).to_forest()
    assert np.count_nonzero(forest.parent < 0) == 2
    assert forest.logical_tokens == 7
    assert forest.num_tokens == 2 + 3


def test_a_virtual_root_puts_each_start_at_depth_one():
    graph = build([("abc", [1, 1]), ("xb", [1])])
    forest = graph.to_forest(virtual_root=graph.num_nodes)
    rows, _ = pack_forest(forest, 16)
    assert np.count_nonzero(forest.parent < 0) == 1
    starts = [each for each, node in enumerate(graph.nodes(range(graph.num_nodes))) if node.action is None]
    assert len(starts) == 2
    assert all(rows.position_ids[rows.input_ids == each].tolist() == [1] for each in starts)
    x, y = trained_pairs(rows)
    assert graph.num_nodes not in x.tolist() and len(y) == 3
    assert forest.logical_tokens == 5 + 2


def test_weights_are_once_or_as_often_as_episodes_take_a_transition():
    graph = build([("abc", [1, 1]), ("abx", [1, 2]), ("ab", [1])])
    weights = {}
    for weighting in ("once", "paths"):
        rows, report = pack_forest(graph.to_forest(), 8, loss_weighting=weighting)
        _, y = trained_pairs(rows)
        weights[weighting] = dict(
            zip([n.state for n in graph.nodes(y)], rows.loss_weight[rows.loss_weight > 0].tolist(), strict=True)
        )
        assert report.logical_tokens == 8
    assert weights == {"once": {"b": 1, "c": 1, "x": 1}, "paths": {"b": 3, "c": 1, "x": 1}}


def test_noise_is_dropped():
    # 0 is a no-op at b, and a jump at c
    episodes = [("abbc", [1, 0, 1]), ("abcxy", [1, 1, 9, 1])]
    asked = []

    def noise(state, action, after):
        asked.append((state, action, after))
        return action in (0, 9)

    graph = build(episodes, drop=noise)
    assert sorted(asked) == sorted(set(asked)) and len(asked) == 5, "each transition is asked about once"
    assert graph.num_dropped == 2 and graph.num_steps == 5
    check(graph, ReferenceGraph([("abc", [1, 1]), ("abc", [1, 1]), ("xy", [1])], lambda state: True))
    prefix = build(episodes, "prefix", drop=noise)
    check(prefix, ReferenceGraph([("abc", [1, 1]), ("abc", [1, 1]), ("xy", [1])], lambda state: False))


def test_places_of_violations_are_those_of_the_given_episodes():
    episodes = [("abbc", [1, 0, 1]), ("abbd", [1, 0, 1])]
    with pytest.raises(ViolationError) as error:
        build(episodes, drop=lambda state, action, after: action == 0)
    (violation,) = error.value.violations
    assert (violation.state, violation.action) == ("b", 1)
    places = {each.state: (each.episodes.tolist(), each.steps.tolist()) for each in violation.outcomes}
    assert places == {"c": ([0], [2]), "d": ([1], [2])}
    assert "from 'b' action 1 leads to 'c' (once, in episode 0 by action 2)" in str(error.value)


def test_a_long_episode_and_a_long_path():
    count = 100_000
    graph = build([(range(count + 1), [0] * count), ([0] * 3, [1, 1])])
    assert graph.num_transitions == count + 1
    assert graph.to_forest().longest_path == count + 1
    assert graph.to_forest(max_path=100).longest_path == 100
    assert build([(range(count + 1), [0] * count)], "prefix").num_transitions == count


def test_no_episodes():
    for merge in ("state", "prefix"):
        graph = build([], merge)
        assert (graph.num_states, graph.num_transitions, graph.num_prefixes, graph.num_joins) == (0, 0, 0, 0)
        assert graph.to_forest().num_tokens == 0
        assert len(build([(["a"], [])], merge).to_dataset()) == 0


@pytest.mark.parametrize(
    ("episodes", "error", "message"),
    [
        ([("ab", [1, 2])], ValueError, "Episode 0 has 2 states and 2 actions; there must be one state more"),
        ([("ab", [1]), ("a",)], ValueError, "Episode 1 is no pair"),
        ([("ab", [1]), 5], ValueError, "Episode 1 is no pair"),
        ([(["a", ["b"]], [1])], TypeError, "Episode 0, state 1 is a list, which cannot be hashed"),
        ([("ab", [{}])], TypeError, "Episode 0, action 0 is a dict"),
    ],
)
def test_malformed_episodes(episodes, error, message):
    with pytest.raises(error, match=message):
        build(episodes)


@pytest.mark.parametrize(("options", "message"), [({"merge": "x"}, "merge"), ({"on_violation": "x"}, "on_violation")])
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=f"{message} must be"):
        build([], **options)

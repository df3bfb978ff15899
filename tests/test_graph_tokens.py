"""Nodes as spans of tokens: targets, weights, paths that are cut, encodings that could be confused, positions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest, pack_dataset, pack_forest
from dagpack_hf.games import ACTIONS, KeysAndDoors, random_episodes
from dagpack_hf.graph import TransitionGraph, trained_pairs, with_positions
from tests.corpora import row_prefixes
from tests.reference_graph import ReferenceGraph
from tests.test_graph import build, worlds

END = 99
"""Ends the tokens of a state, so that they are no beginning of another one's."""


def encode_state(state):
    """One to three tokens and an end."""
    number = int(state[1:])
    return [10 + number] * (1 + number % 3) + [END]


def encode_action(action):
    return [50] * (action % 2) + [60 + action]


def context(path):
    """Tokens of a path of the walk."""
    tokens = []
    for state, action in path:
        tokens += ([] if action is None else encode_action(action)) + encode_state(state)
    return tokens


def expected_targets(paths, targets):
    """How often each prefix is trained: what the transitions train, each alone in its walk context."""
    trained = Counter()
    for path in paths:
        if len(path) == 1:
            continue
        state, action = path[-1]
        tokens = context(path)
        begin = len(tokens) - len(encode_state(state))
        low = begin - len(encode_action(action)) if targets != "states" else begin
        high = begin if targets == "actions" else len(tokens)
        trained.update(tuple(tokens[: at + 1]) for at in range(low, high))
    return trained


def trained_targets(rows):
    """Of rows: each trained prefix, with the sum of its weights, and how often it is trained."""
    weights, times = Counter(), Counter()
    for row in rows:
        for prefix, label, weight in zip(row_prefixes(row), row["shift_labels"], row["loss_weight"], strict=True):
            if label != -100:
                weights[(*prefix, int(label))] += float(weight)
                times[(*prefix, int(label))] += 1
    return weights, times


@settings(max_examples=60)
@given(worlds(), st.sampled_from(["states", "actions", "both"]), st.sampled_from(["state", "prefix"]))
def test_every_transition_is_trained_in_its_walk_context(episodes, targets, merge):
    graph = build(episodes, merge)
    forest = graph.to_forest(encode_state, encode_action, targets=targets)
    paths = ReferenceGraph(episodes, lambda state: merge == "state").walk()
    expected = expected_targets(paths, targets)
    rows, _ = pack_forest(forest, 2 * max(forest.longest_path, 1))
    weights, times = trained_targets(rows)
    assert times == weights == Counter(dict.fromkeys(expected, 1))
    if merge == "prefix" and episodes:
        by_steps = Counter()
        for states, actions in episodes:
            nodes = list(zip(states, [None, *actions], strict=True))
            by_steps += expected_targets([nodes[: end + 1] for end in range(1, len(nodes))], targets)
        rows, _ = pack_forest(forest, 2 * max(forest.longest_path, 1), loss_weighting="paths")
        assert trained_targets(rows)[0] == by_steps, "as often as episodes take it"
    written_out = [context(list(zip(states, [None, *actions], strict=True))) for states, actions in episodes]
    assert forest.logical_tokens == (sum(map(len, written_out)) if graph.num_transitions else 0)


def test_the_data_set_packs_like_the_forest():
    episodes = [(["s0", "s1", "s2"], [1, 2]), (["s3", "s1", "s4"], [1, 3])]
    graph = build(episodes)
    dataset = graph.to_dataset(encode_state, encode_action, targets="both")
    assert len(dataset) == 2
    forest = graph.to_forest(encode_state, encode_action, targets="both")
    rows, _ = pack_forest(forest, 32)
    packed, report = pack_dataset(dataset, 32, progress=False, seed=None)
    assert [row["input_ids"] for row in packed] == [row["input_ids"].tolist() for row in rows]
    assert report.logical_tokens == forest.logical_tokens == sum(dataset["logical_tokens"])


def test_paths_that_are_cut_go_on_from_the_state_alone():
    episodes = [([f"s{index}" for index in range(8)], [0] * 7)]
    graph = build(episodes)
    forest = graph.to_forest(encode_state, encode_action, max_path=12)
    assert forest.longest_path <= 12
    rows, _ = pack_forest(forest, 12)
    _, times = trained_targets(rows)
    ends = [prefix for prefix in times if prefix[-1] == END]
    assert len(ends) == 7 and set(times.values()) == {1}
    roots = {
        each
        for each in range(8)
        for prefix in ends
        if list(prefix[: len(encode_state(f"s{each}"))]) == encode_state(f"s{each}")
    }
    assert len(roots) > 2
    with pytest.raises(ValueError, match=r"max_path=7 has no room .* that takes 8 tokens"):
        graph.to_forest(encode_state, encode_action, max_path=7)
    assert graph.to_forest(encode_state, encode_action, max_path=8).longest_path == 8


def test_a_virtual_root_of_several_tokens_counts_to_the_path():
    graph = build([(["s0", "s1", "s2"], [0, 0]), (["s3", "s1"], [0])])
    forest = graph.to_forest(encode_state, encode_action, virtual_root=[7, 8], max_path=11)
    assert np.count_nonzero(forest.parent < 0) == 1 and forest.longest_path == 10
    assert forest.tokens[:2].tolist() == [7, 8] and forest.target_count[:2].tolist() == [0, 0]
    with pytest.raises(ValueError, match="takes 10 tokens"):
        graph.to_forest(encode_state, encode_action, virtual_root=[7, 8], max_path=9)


@pytest.mark.parametrize(
    ("encode_state", "encode_action", "message"),
    [
        (lambda state: [1], lambda action: [action], "encode_state gives the same tokens for 's0' and 's1'"),
        (encode_state, lambda action: [5], "encode_action gives the same tokens for 1 and 2"),
        (
            lambda state: {"s0": [9], "s1": [3, 4], "s2": [4]}[state],
            lambda action: {1: [2], 2: [2, 3]}[action],
            "The tokens of action 1 with state 's1' and action 2 with state 's2' are the same",
        ),
        (lambda state: [], lambda action: [action], "encode_state gives no token for 's0'"),
        (lambda state: [-1], lambda action: [action], "flat list of token ids from 0 to .*; for 's0' it gives"),
        (lambda state: [[1]], lambda action: [action], "flat list of token ids"),
        (lambda state: [1.5], lambda action: [action], "flat list of token ids"),
        (lambda state: [2**31], lambda action: [action], "flat list of token ids"),
        (encode_state, None, "Give both encode_state and encode_action"),
    ],
)
def test_encodings_that_are_refused(encode_state, encode_action, message):
    graph = build([(["s0", "s1", "s0", "s2"], [1, 1, 2])])
    with pytest.raises(ValueError, match=message):
        graph.to_forest(encode_state, encode_action)


def test_an_unknown_choice_of_targets():
    with pytest.raises(ValueError, match="targets must be"):
        build([]).to_forest(targets="all")


def test_positions_by_distance():
    # the walk reaches d by way of b and c; the way through x is shorter
    episodes = [("abcd", [1, 1, 1]), ("axd", [2, 1])]
    graph = build(episodes)
    distances = graph.distances()
    names = [f"{state}{action or ''}" for state, action in graph.nodes(range(graph.num_nodes))]
    assert dict(zip(names, distances.tolist(), strict=True)) == {"a": 0, "b1": 1, "c1": 2, "d1": 2, "x2": 1}
    rows, _ = pack_forest(graph.to_forest(), 16)
    moved = with_positions(rows, lambda ids, depth: distances[ids])
    assert moved.position_ids.tolist() == distances[rows.input_ids].tolist() != rows.position_ids.tolist()
    assert moved.input_ids is rows.input_ids
    packed, _ = pack_dataset(graph.to_dataset(), 16, progress=False)
    assert with_positions(packed, lambda ids, depth: depth + 5)[0]["position_ids"] == [
        each + 5 for each in packed[0]["position_ids"]
    ]
    assert with_positions(packed, lambda ids, depth: distances[ids]).features == packed.features
    for wrong in (lambda ids, depth: depth[1:], lambda ids, depth: depth - 1, lambda ids, depth: depth * 0.5):
        with pytest.raises(ValueError, match="Row 0: the position function must give an integer from 0 up"):
            with_positions(rows, wrong)
    with pytest.raises(TypeError, match="needs rows"):
        with_positions(graph.to_dataset(), lambda ids, depth: depth)


@given(worlds())
def test_distances_are_the_shortest(episodes):
    graph = build(episodes)
    steps = {(s, a, t) for states, acts in episodes for s, a, t in zip(states, acts, states[1:], strict=False)}
    distance = {states[0]: 0 for states, _ in episodes}
    for _ in range(10):
        for source, _, target in steps:
            if source in distance:
                distance[target] = min(distance.get(target, 99), distance[source] + 1)
    expected = [
        0 if action is None else 1 + min(distance[s] for s, a, t in steps if (a, t) == (action, state))
        for state, action in graph.nodes(range(graph.num_nodes))
    ]
    assert graph.distances().tolist() == expected


def test_one_id_nodes_merged_by_prefix_are_the_trie_of_the_episodes():
    episodes = random_episodes(KeysAndDoors(), 30, 12, seed=3)
    graph = TransitionGraph.from_episodes(episodes, "prefix", progress=False)
    forest = graph.to_forest()
    names = {name: index for index, name in enumerate(graph.nodes(range(graph.num_nodes)))}
    plain = TokenForest.from_sequences(
        [[names[node] for node in zip(each.states, [None, *each.actions], strict=True)] for each in episodes]
    )
    assert len(ACTIONS) == 4
    for name in ("parent", "length", "depth", "tokens", "target_count"):
        assert getattr(forest, name).tolist() == getattr(plain, name).tolist(), name
    rows, _ = pack_forest(forest, 64)
    assert len(trained_pairs(rows)[0]) == graph.num_transitions


@given(worlds(), st.integers(0, 5), st.sampled_from(["state", "prefix"]))
def test_another_order_trains_the_same_transitions(episodes, seed, merge):
    graph = build(episodes, merge)
    forest, again = (graph.to_forest(seed=seed) for _ in range(2))
    assert forest.tokens.tolist() == again.tokens.tolist()
    rows, _ = pack_forest(forest, 2 * max(forest.longest_path, 1), loss_weighting="paths")
    plain, _ = pack_forest(graph.to_forest(), 2 * max(graph.to_forest().longest_path, 1), loss_weighting="paths")
    trained = [
        Counter(
            zip(*(each.tolist() for each in trained_pairs(each)), each.loss_weight[each.loss_weight > 0], strict=True)
        )
        for each in (rows, plain)
    ]
    if merge == "prefix":
        assert trained[0] == trained[1]
    states = [Counter({(graph.nodes([x])[0].state, y, w): n for (x, y, w), n in each.items()}) for each in trained]
    assert states[0] == states[1]


def test_another_order_gives_other_contexts():
    episodes = random_episodes(KeysAndDoors(), 20, 20, seed=1)
    graph = TransitionGraph.from_episodes(episodes, progress=False)
    paths = set()
    for seed in range(3):
        forest = graph.to_forest(seed=seed)
        paths.add(tuple(forest.tokens.tolist()))
        assert forest.num_tokens == graph.num_transitions + 1
    assert len(paths) == 3

"""The game: its rules, move by move, and what its episodes have to do with the graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf.games import ACTIONS, CELLAR, KeysAndDoors, State, play, random_episodes
from dagpack_hf.graph import TransitionGraph, ViolationError


def test_keys_open_doors_once_and_are_used_up():
    game = KeysAndDoors(("#####", "#@aA#", "##B##", "#####"), steps=20)
    states = play(game, ["down", "right", "down", "right", "left", "left", "right"]).states
    assert states == [
        State(1, 1, 0, 0, 0, 20),
        State(1, 1, 0, 0, 0, 19),  # a wall
        State(1, 2, 1, 1, 0, 18),  # key a
        State(1, 2, 1, 1, 0, 17),  # door B is closed, key a does not fit
        State(1, 3, 0, 1, 1, 16),  # door A opens
        State(1, 2, 0, 1, 1, 15),  # no key where it has been taken
        State(1, 1, 0, 1, 1, 14),
        State(1, 2, 0, 1, 1, 13),
    ]


def test_the_level_starts_over_when_no_step_is_left():
    game = KeysAndDoors(("#####", "#@a.#", "#####"), steps=3)
    states = play(game, ["right", "right", "right", "left"]).states
    assert [state.left for state in states] == [3, 2, 1, 3, 2]
    assert states[3] == game.start and states[4] == State(1, 1, 0, 0, 0, 2)


def test_nothing_is_played_after_the_exit():
    game = KeysAndDoors(("####", "#@*#", "####"), steps=2)
    episode = play(game, ["right", "left", "left"])
    assert episode.actions == ["right"] and len(episode.states) == 2 and game.is_won(episode.states[-1])
    assert game.step(episode.states[-1], "left") == episode.states[-1]
    assert play(game, []).states == [game.start]


def test_the_drawing():
    game = KeysAndDoors(("######", "#@aA*#", "#bB..#", "######"), steps=20)
    states = play(game, ["down", "right", "right"]).states
    assert game.draw(states[0]) == ("######", "#@aA*#", "#bB..#", "######", "keys - left 20")
    assert game.draw(states[1]) == ("######", "#.aA*#", "#@B..#", "######", "keys b left 19")
    assert game.draw(states[3]) == ("######", "#.aA*#", "#..@.#", "######", "keys - left 17")


def test_every_door_of_the_default_maze_can_be_opened_and_the_exit_is_reached():
    game = KeysAndDoors()
    seen, front, steps, first_exit = {game.start}, [game.start], 0, None
    while front:
        steps += 1
        front = list({game.step(state, action) for state in front for action in ACTIONS} - seen)
        seen.update(front)
        if first_exit is None and any(map(game.is_won, front)):
            first_exit = steps
    assert first_exit == 11 < game.steps
    assert {state.opened for state in seen} == {0, 1, 2, 3, 6, 7}
    assert len({game.draw(state) for state in seen}) == len(seen), "no two states look alike"


@given(st.integers(0, 1000), st.integers(1, 30))
def test_random_episodes_merge_by_state_and_not_without_the_counter(seed, steps):
    episodes = random_episodes(KeysAndDoors(steps=steps), 5, 12, seed)
    assert episodes == random_episodes(KeysAndDoors(steps=steps), 5, 12, seed)
    graph = TransitionGraph.from_episodes(episodes, progress=False)
    assert graph.violations == [] and graph.num_steps == sum(len(each.actions) for each in episodes)
    blind = [([state[:5] for state in each.states], each.actions) for each in episodes]
    if 1 < steps < 5:
        over = TransitionGraph.from_episodes(blind, on_violation="prefix", progress=False)
        assert over.num_ambiguous <= len(over.violations)
    if steps > 12:
        assert TransitionGraph.from_episodes(blind, progress=False).num_transitions <= graph.num_transitions


def test_without_the_counter_starting_over_is_a_surprise():
    blind = [
        ([state[:5] for state in each.states], each.actions)
        for each in random_episodes(KeysAndDoors(steps=6), 40, 12, seed=0)
    ]
    with pytest.raises(ViolationError):
        TransitionGraph.from_episodes(blind, progress=False)


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        (("###", "#@#", "####"), 9, "equally long"),
        ((), 9, "equally long"),
        (("###", "#@.", "###"), 9, "walls"),
        (("####", "#@1#", "####"), 9, "no '1'"),
        (("###", "#.#", "###"), 9, "one start"),
        (CELLAR, 0, "steps must be at least 1"),
    ],
)
def test_mazes_that_are_refused(rows, steps, message):
    with pytest.raises(ValueError, match=message):
        KeysAndDoors(rows, steps)


def test_an_unknown_action():
    with pytest.raises(ValueError, match="no action 'jump'; there are up, down, left, right"):
        KeysAndDoors().step(KeysAndDoors().start, "jump")

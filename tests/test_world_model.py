"""The recipe: what it trains on, what it measures, and that it runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dagpack_hf.games import KeysAndDoors, play
from dagpack_hf.graph import TransitionGraph

RECIPE = Path(__file__).parents[1] / "recipes" / "world_model.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("world_model", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs(recipe, capsys):
    threads = torch.get_num_threads()
    recipe.main(["--quick", "--threads", str(threads), "--budget", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["episodes"] == 40 and figures["held_out_episodes"] == 10
    assert figures["transitions"] < figures["prefixes"] <= figures["steps"] == 40 * 24
    assert 0 < figures["held_out_unseen"] < figures["held_out_transitions"]
    for kind in ("packed", "unpacked"):
        run = figures[kind]
        assert 0 <= run["accuracy"] <= 1 and run["steps"] == run["curve"][-1][0] and run["seconds"] >= 1
        assert run["seconds_to_target"] is None


def test_no_held_out_episode_is_trained(recipe):
    options = recipe.parse(["--episodes", "30", "--held_out", "30", "--length", "3"])
    train, held_out = recipe.episodes_of(options)
    assert len(train) == 30 and 0 < len(held_out) < 30
    assert not {tuple(each.actions) for each in train} & {tuple(each.actions) for each in held_out}


class Oracle(torch.nn.Module):
    """Predicts the next token of its batch, but for some places."""

    def __init__(self, wrong=()):
        super().__init__()
        self.wrong = wrong

    def forward(self, input_ids, use_cache):
        following = torch.roll(input_ids, -1, dims=1)
        for row, position in self.wrong:
            following[row, position - 1] += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 1000).float())


def test_the_accuracy_counts_transitions_whose_every_token_is_right(recipe, monkeypatch):
    monkeypatch.setattr(recipe, "ordinary_attention", lambda model, name: torch.no_grad())
    game = KeysAndDoors()
    held_out = [play(game, ["left", "right", "up"]), play(game, ["left", "down"])]
    accuracy = recipe.NextState(held_out, set(recipe.transitions(held_out[:1])))
    assert accuracy.is_unseen.tolist() == [False, False, False, False, True]
    assert accuracy(Oracle()) == (1.0, 1.0)
    state, move = recipe.STATE_TOKENS, recipe.STATE_TOKENS + 1
    assert accuracy(Oracle([(0, state)])) == (1.0, 1.0), "actions are not predicted"
    assert accuracy(Oracle([(0, 1)])) == (1.0, 1.0), "nor is the start"
    assert accuracy(Oracle([(0, state + 1), (0, state + 2)])) == (pytest.approx(0.8), 1.0)
    assert accuracy(Oracle([(0, state + 2 * move + state)])) == (pytest.approx(0.8), 1.0), "the last token"
    assert accuracy(Oracle([(1, state + move + 1)])) == (pytest.approx(0.8), 0.0)


def test_both_ways_train_the_same_transitions(recipe):
    episodes, _ = recipe.episodes_of(recipe.parse(["--quick", "--walks", "1"]))
    graph = TransitionGraph.from_episodes(episodes, progress=False)
    packed = recipe.packed_data(graph, recipe.parse(["--quick", "--walks", "1"]))
    unpacked = recipe.unpacked_data(episodes)
    trained = sum(sum(each != 0 for each in row) for row in packed["target_count"])
    assert trained == graph.num_transitions * recipe.STATE_TOKENS
    assert sum(sum(row) for row in packed["target_count"]) == sum(
        sum(label != -100 for label in row) for row in unpacked["labels"]
    )
    assert sum(packed["logical_tokens"]) == sum(map(len, unpacked["input_ids"]))
    two = recipe.packed_data(graph, recipe.parse(["--quick", "--walks", "2"]))
    assert two[0]["input_ids"] != two[-1]["input_ids"]

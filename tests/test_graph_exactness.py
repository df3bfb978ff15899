"""Training on the rows of a graph is training on its transitions, each alone in its walk context.

The reference walks in dictionaries, writes every transition out as a full sequence of its own, and runs it through the
model's own eager attention. Nothing of it comes from the package. Windows are small, so that paths are replayed.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from dagpack_hf import pack_forest
from dagpack_hf.attention import enable, ordinary_attention
from dagpack_hf.collator import DagCollator
from dagpack_hf.games import ACTIONS, KeysAndDoors, random_episodes
from dagpack_hf.graph import TransitionGraph
from tests.reference_graph import ReferenceGraph
from tests.test_exactness import gradients, packed_loss, relative
from tests.tiny_models import tiny_model

EPISODES = random_episodes(KeysAndDoors(steps=6), 6, 9, seed=1)


def encode_state(state):
    row, column, keys, taken, opened, left = state
    return [10 + row, 20 + column, 30 + keys, 40 + taken, 50 + opened, 60 + left]


def encode_action(action):
    return [3 + ACTIONS.index(action)]


def transitions(paths, targets):
    """Each transition as a sequence and the labels of its last node."""
    for path in paths:
        tokens, labels = [], []
        for state, action in path:
            tokens += [] if action is None else encode_action(action)
            tokens += encode_state(state)
        state, action = path[-1]
        labels = [-100] * (len(tokens) - 7)
        labels += (encode_action(action) if targets != "states" else [-100]) if action else []
        labels += encode_state(state) if targets != "actions" else [-100] * 6
        if len(path) > 1:
            yield tokens, labels


def loss_of(model, tokens, labels):
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("targets", ["states", "both"])
@pytest.mark.parametrize("weighting", ["once", "paths"])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("llama", torch.float32, 1e-5), ("gpt2", torch.float64, 1e-12)]
)
def test_gradients(name, dtype, tolerance, weighting, targets):
    graph = TransitionGraph.from_episodes(EPISODES, progress=False)
    paths = ReferenceGraph(EPISODES, lambda state: True).walk()
    steps = Counter((s, a, t) for e in EPISODES for s, a, t in zip(e.states, e.actions, e.states[1:], strict=False))
    assert len(steps) == graph.num_transitions < graph.num_steps

    forest = graph.to_forest(encode_state, encode_action, targets=targets)
    rows, report = pack_forest(forest, forest.longest_path + 8, loss_weighting=weighting)
    assert report.windows > 2 and report.replay_tokens > 50
    model = tiny_model(name, dtype)
    enable(model)
    loss = packed_loss(model, DagCollator(max_length=rows.offsets[-1])(list(rows)))
    found = gradients(model, loss)

    with ordinary_attention(model, "eager"):
        crossed = [path for path in paths if len(path) > 1]
        reference = sum(
            loss_of(model, tokens, labels)
            * (1 if weighting == "once" else steps[path[-2][0], path[-1][1], path[-1][0]])
            for path, (tokens, labels) in zip(crossed, transitions(paths, targets), strict=True)
        )
        expected = gradients(model, reference)
    assert abs(loss.item() - reference.item()) <= tolerance * reference.item()
    assert found.keys() == expected.keys()
    assert max(relative(found[each], expected[each]) for each in expected) <= tolerance

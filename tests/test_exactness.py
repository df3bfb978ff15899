"""Invariants 1 and 2: packed training computes what ordinary unpacked training computes.

The reference knows nothing of the package: one forward pass for each sequence with the model's own eager attention,
the cross entropy of its labels, summed. The windows are small, so that paths run through several of them and ancestors
are replayed, and longer than the sliding windows of the models that have one.

Tolerances are relative to the largest value compared. float64: the model and both computations run in float64, what
is left is the order of summation (1e-12). float32: some hundred additions in another order (1e-5).
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dagpack_hf import TokenForest, pack_forest
from dagpack_hf.attention import DagVisibility, enable, ordinary_attention, tile_plan
from dagpack_hf.collator import DagCollator
from tests.corpora import row_prefixes
from tests.tiny_models import ARCHITECTURES, VOCABULARY, WINDOW, tiny_model

MAX_LENGTH = 40

CASES = [
    ("gpt2", torch.float64, 1e-12),
    ("llama", torch.float32, 1e-5),
    ("qwen3", torch.float32, 1e-5),
    ("gemma3_text", torch.float32, 1e-5),
    ("mistral_sliding", torch.float32, 1e-5),
    ("gpt_oss", torch.float32, 1e-5),
    ("qwen3_moe", torch.float32, 1e-5),
]


def corpus(seed: int = 0):
    """Nested prefixes, equal sequences and prefixes of each other; masks that differ on shared tokens."""
    rng = np.random.default_rng(seed)
    token = lambda count: rng.integers(3, VOCABULARY, count).tolist()  # noqa: E731
    trunk = token(14)
    middles = [token(6), token(4)]
    sequences = [trunk[: int(rng.integers(4, 15))] + token(int(rng.integers(2, 12))) for _ in range(4)]
    sequences += [trunk + middles[k % 2] + token(int(rng.integers(1, 14))) for k in range(6)]
    sequences += [sequences[-1], sequences[-2][:-1], trunk, token(9)]
    labels = []
    for sequence in sequences:
        mask = rng.random(len(sequence)) < 0.6
        mask[: int(rng.integers(0, 4))] = False
        labels.append([t if m else -100 for t, m in zip(sequence, mask, strict=True)])
    return sequences, labels


def losses_by_prefix(model, sequences, labels):
    """Differentiable loss of each distinct labelled prefix, and how many sequences train it."""
    losses, counts = {}, {}
    for sequence, label in zip(sequences, labels, strict=True):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        per_token = F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=-100, reduction="none")
        for at, target in enumerate(label[1:], start=1):
            if target != -100:
                prefix = tuple(sequence[: at + 1])
                losses[prefix] = per_token[at - 1]
                counts[prefix] = counts.get(prefix, 0) + 1
    return losses, counts


def unpacked_loss(model, sequences, labels, weighting):
    if weighting == "paths":
        total = 0.0
        for sequence, label in zip(sequences, labels, strict=True):
            logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=-100, reduction="sum")
        return total
    losses, _ = losses_by_prefix(model, sequences, labels)
    return sum(losses.values())


def packed_batch(sequences, labels, weighting, max_length=MAX_LENGTH):
    rows, report = pack_forest(
        TokenForest.from_sequences(sequences, labels), max_length, loss_weighting=weighting, seed=1
    )
    return rows, report, DagCollator(max_length=max_length, padding="max_length")(list(rows))


def packed_logits(model, batch, backend="auto"):
    visibility = DagVisibility(batch["subtree_end"], batch["position_ids"], backend)
    return model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], dag_visibility=visibility, use_cache=False
    ).logits


def packed_loss(model, batch, backend="auto"):
    logits = packed_logits(model, batch, backend)
    per_token = F.cross_entropy(
        logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="none", ignore_index=-100
    )
    return (per_token * batch["loss_weight"].flatten().to(per_token.dtype)).sum()


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("weighting", ["paths", "once"])
@pytest.mark.parametrize("backend", ["tile", "dense"])
@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES, ids=[case[0] for case in CASES])
def test_packed_training_equals_unpacked_training(name, dtype, tolerance, backend, weighting, monkeypatch):
    for constant, size in (("TILE", 8), ("POOL", 8), ("WHOLE", 24)):  # several tiles in a window
        monkeypatch.setattr(tile_plan, constant, size)
    sequences, labels = corpus()
    model = tiny_model(name, dtype)
    enable(model)
    rows, report, batch = packed_batch(sequences, labels, weighting)
    assert report.windows > 2 and report.replay_tokens > 30, "ancestors must be replayed"
    assert report.longest_path > WINDOW + 10

    with ordinary_attention(model, "eager"):
        reference = unpacked_loss(model, sequences, labels, weighting)
        reference_gradients = gradients(model, reference)
        with torch.no_grad():
            seen = {
                tuple(sequence[: at + 1]): logits
                for sequence in sequences
                for at, logits in enumerate(model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0])
            }
    loss = packed_loss(model, batch, backend)
    packed_gradients = gradients(model, loss)

    assert abs(loss.item() - reference.item()) <= tolerance * abs(reference.item())
    assert packed_gradients.keys() == reference_gradients.keys()
    assert all(torch.any(g != 0) for g in reference_gradients.values() if g.dim() > 1), (
        "the reference trains everything"
    )
    worst = {n: relative(packed_gradients[n], reference_gradients[n]) for n in reference_gradients}
    assert max(worst.values()) <= tolerance, max(worst.items(), key=lambda item: item[1])

    with torch.no_grad():
        logits = packed_logits(model, batch, backend)
    scale = max(row.abs().max() for row in seen.values())
    checked = 0
    for index, row in enumerate(rows):
        for position, prefix in enumerate(row_prefixes(row)):
            assert (logits[index, position] - seen[prefix]).abs().max() <= tolerance * scale, (index, position)
            checked += 1
    assert checked == report.executed_tokens


@pytest.mark.parametrize("max_length", [34, 40, 64, 500])
def test_the_window_length_does_not_matter(max_length):
    sequences, labels = corpus(seed=3)
    model = tiny_model("gpt2", torch.float64)
    enable(model)
    _, _, batch = packed_batch(sequences, labels, "paths", max_length)
    with ordinary_attention(model, "eager"):
        reference = gradients(model, unpacked_loss(model, sequences, labels, "paths"))
    packed = gradients(model, packed_loss(model, batch))
    assert max(relative(packed[n], reference[n]) for n in reference) <= 1e-12


def test_a_branch_that_changes_does_not_move_the_others():
    """A sabotage that the tolerances must catch: with plain causal attention the logits differ by far more."""
    sequences, labels = corpus()
    model = tiny_model("llama")
    enable(model)
    _, _, batch = packed_batch(sequences, labels, "paths")
    right = packed_loss(model, batch).item()
    everything = dict(batch, subtree_end=torch.full_like(batch["subtree_end"], batch["subtree_end"].shape[1]))
    assert abs(packed_loss(model, everything).item() - right) > 1e-3 * right


def test_every_architecture_of_the_issue_is_covered():
    assert {name for name, _, _ in CASES} <= set(ARCHITECTURES)
    assert (
        tiny_model("gemma3_text").config.sliding_window
        == tiny_model("mistral_sliding").config.sliding_window
        == WINDOW
    )

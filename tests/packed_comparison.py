"""Compare a model on packed rows with the same model on each sequence alone: logits, and gradients of the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dagpack_hf.attention import DagVisibility, inputs_for, ordinary_attention
from tests.shrunk_models import VOCABULARY, WINDOW
from tests.tiny_trees import TreeRow, lay_out, random_sequences

TOLERANCE = 1e-10
"""Largest difference of logits and gradients, relative to the largest of all, in float64."""


class Float64Everywhere(TorchFunctionMode):
    """Compute in float64 where a model's code asks for float32, as norms, routers and rotary tables do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Compute, and make tensors, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Everywhere():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Difference:
    """Largest differences, relative to the largest logit and the largest gradient."""

    logits: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self.logits, self.gradients)


def rows() -> list[TreeRow]:
    """Two rows of one batch: branches, several roots, depths beyond every window, padding.

    Sequences of one forest are dealt out in turn, so the second row repeats ancestors that the first one trains.
    """
    sequences = [[token + 3 for token in each] for each in random_sequences(4, 10, 16, VOCABULARY - 3)]
    forests = [sequences[::2], sequences[1::2]]
    lengths = [len(lay_out(forest).input_ids) for forest in forests]
    found = [lay_out(forest, max(lengths) + 2 - length) for forest, length in zip(forests, lengths, strict=True)]
    for row in found:
        assert max(map(len, row.paths)) > 3 * WINDOW - 1 and (row.parent[:-2] == -1).sum() > 1
    assert any(trained == 0 for *_, trained in _targets(found, replay=True))
    return found


def _targets(rows: list[TreeRow], replay: bool = False) -> list[tuple[int, int, int, int]]:
    """Row, position, target and weight: the number of sequences that train it, all of them where it is met first."""
    count = Counter(tuple(each[: end + 1]) for row in rows for each in row.sequences for end in range(1, len(each)))
    met: dict[tuple[int, ...], int] = {}
    targets = []
    for b, row in enumerate(rows):
        for sequence, path in zip(row.sequences, row.paths, strict=True):
            for end in range(1, len(sequence)):
                prefix = tuple(sequence[: end + 1])
                weight = 0 if prefix in met else count[prefix]
                if weight or (replay and met[prefix] != b):
                    targets.append((b, path[end - 1], sequence[end], weight))
                met.setdefault(prefix, b)
    return targets


def difference(model: PreTrainedModel, rows: list[TreeRow]) -> Difference:
    """Compare; `model` is switched on for packed rows and in training mode without any dropout."""
    packed_logits, packed_gradients = _packed(model, rows)
    with ordinary_attention(model, "eager"):
        alone_logits, alone_gradients = _alone(model, rows)
    assert packed_gradients.keys() == alone_gradients.keys()
    gradient = max(x.abs().max() for x in alone_gradients.values())
    pairs = zip(packed_logits, alone_logits, strict=True)
    return Difference(
        logits=max(((packed - alone).abs().max() / alone.abs().max()).item() for packed, alone in pairs),
        gradients=max(
            ((packed_gradients[name] - alone).abs().max() / gradient).item() for name, alone in alone_gradients.items()
        ),
    )


def _packed(model: PreTrainedModel, rows: list[TreeRow]) -> tuple[list[Tensor], dict[str, Tensor]]:
    vectors = {name: torch.tensor([getattr(row, name).tolist() for row in rows]) for name in _VECTORS}
    visibility = DagVisibility(vectors["subtree_end"], vectors["position_ids"])
    logits = model(input_ids=vectors["input_ids"], use_cache=False, **inputs_for(model, visibility)).logits
    row_N, position_N, target_N, weight_N = (torch.tensor(each) for each in zip(*_targets(rows), strict=True))
    losses_N = F.cross_entropy(logits[row_N, position_N], target_N, reduction="none")
    gradients = _gradients(model, (losses_N * weight_N).sum())
    return [logits[b, path].detach() for b, row in enumerate(rows) for path in row.paths], gradients


_VECTORS = ("input_ids", "position_ids", "subtree_end")


def _alone(model: PreTrainedModel, rows: list[TreeRow]) -> tuple[list[Tensor], dict[str, Tensor]]:
    logits, losses = [], []
    for sequence in (sequence for row in rows for sequence in row.sequences):
        logits_TV = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
        logits.append(logits_TV.detach())
        losses.append(F.cross_entropy(logits_TV[:-1], torch.tensor(sequence[1:]), reduction="sum"))
    return logits, _gradients(model, torch.stack(losses).sum())


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

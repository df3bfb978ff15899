"""The small row of the start-up probe, and how far logits on it are from those of each sequence alone.

The row has a prefix, two branches, a second tree and padding. For models with recurrent layers paths are longer than
two cells, the first branch branches again within a cell, and one of its leaves is a single token.

Shape suffixes: `T` positions, `V` vocabulary, `S` sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .visibility import DagVisibility

LENGTH = 24
"""Tokens of each probe sequence, without sliding windows and recurrent layers."""

LONGEST = 160
"""Tokens of each probe sequence at most; a window that needs more is not outgrown."""

BEGINNING = 3
"""Tokens at the start of a branch that a short convolution computes from tokens before it."""

_PADDING = 2

_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class ProbeRow:
    """A row and what it is made of.

    Attributes:
        input_ids_1T (`torch.Tensor` of shape `(1, T)`, int64): The tokens.
        spans (`dict[str, slice]`): Where each part lies.
        sequences (`list[tuple[str, ...]]`): The parts of each sequence, from its root.
        visibility ([`DagVisibility`]): What each position sees.
    """

    input_ids_1T: Tensor
    spans: dict[str, slice]
    sequences: list[tuple[str, ...]]
    visibility: DagVisibility

    def sequence(self, parts: tuple[str, ...]) -> Tensor:
        """The tokens of a sequence, of shape `(1, T)`."""
        return torch.cat([self.input_ids_1T[:, self.spans[part]] for part in parts], dim=1)

    def altered(self, part: str, vocabulary: int) -> tuple[Tensor, list[str]]:
        """The tokens with those of a part replaced, and the parts that do not come after it on any path."""
        input_ids_1T = self.input_ids_1T.clone()
        input_ids_1T[:, self.spans[part]] = (input_ids_1T[:, self.spans[part]] + 1) % vocabulary
        after = {each for parts in self.sequences if part in parts for each in parts[parts.index(part) :]}
        return input_ids_1T, [each for each in self.spans if each not in after]


def probe_row(model: PreTrainedModel, backend: str, recurrent: bool) -> ProbeRow:
    """Lay out the row.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, for its sizes and its device.
        backend (`str`):
            The backend to probe with.
        recurrent (`bool`):
            Whether it has recurrent layers.

    Returns:
        [`ProbeRow`]: The row, the same for the same model.
    """
    config = model.config.get_text_config()
    window = sliding_window(model) or getattr(config, "attention_chunk_size", None)
    length = window + LENGTH if window is not None and outgrows(model, window) else min(LENGTH, _longest(model))
    parts = _parts(length) if not recurrent else _nested_parts(_longest(model))
    spans: dict[str, slice] = {}
    depths: list[int] = []
    ends: list[int] = []
    for part, (above, size) in parts.items():
        start = len(depths)
        spans[part] = slice(start, start + size)
        depth = depths[spans[above].stop - 1] + 1 if above else 0
        depths += range(depth, depth + size)
        ends += [len(depths)] * size
        while above:
            ends[spans[above]] = [len(depths)] * parts[above][1]
            above = parts[above][0]
    for _ in range(_PADDING):
        depths.append(0)
        ends.append(len(depths))
    device = next(model.get_input_embeddings().parameters()).device
    generator = torch.Generator().manual_seed(0)
    input_ids_1T = torch.randint(vocabulary_of(model), (1, len(depths)), generator=generator)
    visibility = DagVisibility(torch.tensor([ends]).to(device), torch.tensor([depths]).to(device), backend)
    return ProbeRow(input_ids_1T.to(device), spans, _sequences(parts), visibility)


Parts = dict[str, tuple[str | None, int]]
"""The part above each part, and its tokens."""


def _parts(length: int) -> Parts:
    fork = length // 2
    return {
        "prefix": (None, fork),
        "first branch": ("prefix", length - fork),
        "second branch": ("prefix", length - fork),
        "second tree": (None, fork),
    }


def _nested_parts(length: int) -> Parts:
    """Paths of 160 tokens fork at 72 and 140, in the second and the third cell.

    The second branch has more cells than the first has up to its fork, so that the first is padded in its call.
    """
    fork, second_fork = length * 9 // 20, length * 7 // 8
    return {
        "prefix": (None, fork),
        "first branch": ("prefix", second_fork - fork),
        "leaf of the first branch": ("first branch", length - second_fork),
        "leaf of one token": ("first branch", 1),
        "second branch": ("prefix", length - fork),
        "second tree": (None, max(1, length // 5)),
    }


def _sequences(parts: Parts) -> list[tuple[str, ...]]:
    inner = {above for above, _ in parts.values()}
    sequences = []
    for part in parts:
        path = [part]
        while above := parts[path[-1]][0]:
            path.append(above)
        if part not in inner:
            sequences.append(tuple(path[::-1]))
    return sequences


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many of a model's tokens the probe uses."""
    return min(512, model.config.get_text_config(decoder=True).vocab_size)


def sliding_window(model: PreTrainedModel) -> int | None:
    """The sliding window of a model's layers, `None` if they have none."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def outgrows(model: PreTrainedModel, window: int) -> bool:
    """Whether the sequences of the probe can be longer than a window."""
    return window + LENGTH <= _longest(model)


def _longest(model: PreTrainedModel) -> int:
    return min(LONGEST, getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def relative_errors(computed_TV: Tensor, right_TV: Tensor) -> Tensor:
    """Length of the difference of the logits over the length of the logits, of each token.

    Args:
        computed_TV (`torch.Tensor` of shape `(T, V)`):
            Logits.
        right_TV (`torch.Tensor` of shape `(T, V)`):
            What they should be.

    Returns:
        `torch.Tensor` of shape `(T,)`, float32 or float64: The relative errors.
    """
    right_TV = right_TV.to(torch.promote_types(right_TV.dtype, torch.float32))
    return (computed_TV.to(right_TV) - right_TV).norm(dim=-1) / right_TV.norm(dim=-1)


def of_part(model: PreTrainedModel, error_T: Tensor) -> float:
    """What counts of the errors of a part: the largest, in half precision the median, of it and of its beginning."""
    if coarsest_dtype(model) in (torch.float32, torch.float64):
        return error_T.max().item()
    return max(error_T.median().item(), error_T[:BEGINNING].median().item())


def limit_of(model: PreTrainedModel) -> float:
    """The largest relative error that a model may have, by its coarsest dtype."""
    dtype = coarsest_dtype(model)
    if dtype == torch.float32 and model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 1e-2
    return _LIMITS.get(dtype, _LIMITS[torch.bfloat16]) if dtype is not None else _LIMITS[torch.bfloat16]


def coarsest_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Dtype of the parameters with the fewest bits of mantissa; `None` if some are quantised."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not all(dtype in _LIMITS for dtype in dtypes):
        return None
    return max(dtypes, key=lambda dtype: _LIMITS[dtype])

"""The start-up probe: does this model compute packed rows right?

A row of two sequences that share a prefix, a third of its own and two positions of padding is computed at once, and
each sequence is computed alone with the model's own eager attention. The logits of every token must agree. That finds
what no config tells: state carried along the row, a layer that ignores the visibility, positions that are not depths,
attention to later tokens.

A sliding window or a chunk that the probe can afford to outgrow is tested the same way, with sequences longer than it.
Of a larger window it is only tested that a layer asks for it by that size.

What counts is, per token, the length of the difference of the logits over the length of the logits: in float32 and
float64 the largest of all tokens, in half precision the median of each part of the row. There rounding sends single
tokens of a mixture of experts to another expert, which moves their logits by 20 % without anything being wrong.
Limits, by the coarsest dtype of the parameters:

| dtype | limit | why |
| --- | --- | --- |
| float64 | 1e-5 | 10 times the rounding of models that keep their norms in float32 |
| float32 | 1e-4 | 50 times the rounding seen, and below the least fault known, 8e-4 for a short convolution |
| float32 with TF32 | 1e-2 | 10 bits of mantissa |
| float16 | 2e-2 | 10 bits of mantissa |
| bfloat16 and quantised | 1e-1 | 7 bits of mantissa; 3e-2 seen in models of two layers |

So half precision shows only faults that change most tokens of a branch, such as a visibility that is not used; a short
convolution would pass here, and is found by [`check_model`].

Cost: 110 tokens through the model, up to 720 under a sliding window; milliseconds for a tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .interface import NAME, MissingVisibilityError
from .ready_mask import inputs_for, route_of
from .support import UnsupportedModelError, base_model_of
from .switch import ordinary_attention
from .visibility import DagVisibility

LENGTH = 24
"""Tokens of each probe sequence, without sliding windows."""

LONGEST = 160
"""Tokens of each probe sequence at most; a window that needs more is not outgrown."""

_PADDING = 2

_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def probe(model: nn.Module, backend: str = "auto") -> float:
    """Compare packed with unpacked logits on a small row.

    Call it after [`enable`], before the model is wrapped for parallel training, on the device it will train on. The
    state of the model, its training mode and the random state are left as they were.

    Args:
        model (`torch.nn.Module`):
            The model, with the attention `"dagpack"`; PEFT models are probed with their adapters.
        backend (`str`, *optional*, defaults to `"auto"`):
            The backend to probe with; see [`select_backend`].

    Returns:
        `float`: The largest relative difference found.

    Raises:
        UnsupportedModelError: If the logits differ by more than the limit, or no attention layer got the visibility.
    """
    base = base_model_of(model)
    input_ids_1T, spans, visibility = _probe_row(base, backend)
    with _evaluation(base):
        packed_TV = _packed_logits(base, input_ids_1T, visibility)
        with ordinary_attention(base, "eager"):
            errors = _errors(base, input_ids_1T, packed_TV, spans)
    part, worst = max(errors.items(), key=lambda item: float("inf") if isnan(item[1]) else item[1])
    limit = _limit(base)
    if not worst <= limit:
        raise UnsupportedModelError(
            f"{type(base).__name__} computes packed rows wrongly: on the {part} of the probe its logits differ by "
            f"{worst:.1e} (relative) from those of the sequence alone, where {limit:.0e} is the limit for "
            f"{_coarsest_dtype(base) or 'quantised weights'}. Some layer lets information pass between branches, or "
            "does not use position_ids or the sliding window as packed rows need it"
        )
    return worst


def probe_head(model: nn.Module) -> float:
    """Compare the fused LM head that TRL gives a model with the model's own logits.

    The fused head projects the last hidden state by the output embeddings. A model that does more than that before or
    after would train on other logits than its own, packed or not.

    Call it after [`~trl.trainer.utils.add_fused_lm_head`], which [`~trl.SFTTrainer`] does when it is made.

    Args:
        model (`torch.nn.Module`):
            The model, wrapped or not, with any attention.

    Returns:
        `float`: The relative difference of the log-probabilities.

    Raises:
        UnsupportedModelError: If they differ by more than the limit, or the fused head does not work at all.
    """
    base = base_model_of(model)
    name = type(base).__name__
    device = next(base.get_input_embeddings().parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(512, base.config.get_text_config(decoder=True).vocab_size)
    input_ids_1T, target_1T = torch.randint(vocabulary, (2, 1, LENGTH), generator=generator).to(device)
    with _evaluation(base), ordinary_attention(base, "eager"):
        logits_1TV = base(input_ids=input_ids_1T, use_cache=False).logits
        try:
            fused = base(input_ids=input_ids_1T, shift_labels=target_1T, fused_lm_head=True, use_cache=False)
        except (AttributeError, TypeError) as cause:
            raise UnsupportedModelError(f"TRL's fused LM head does not work with {name}: {cause}") from cause
    logits_1TV = logits_1TV.to(torch.promote_types(logits_1TV.dtype, torch.float32))
    own_1T = logits_1TV.log_softmax(-1).gather(-1, target_1T.to(logits_1TV.device)[..., None])[..., 0]
    error = ((fused.log_probs.to(own_1T) - own_1T).norm() / own_1T.norm()).item()
    if not error <= _limit(base):
        raise UnsupportedModelError(
            f"TRL's fused LM head gives other log-probabilities than {name} itself (they differ by {error:.1e}, "
            "relative): the model does more to its last hidden state than project it, and would train on wrong logits"
        )
    return error


def _packed_logits(model: PreTrainedModel, input_ids_1T: Tensor, visibility: DagVisibility) -> Tensor:
    """Compute the row, and see that the attention layers asked for what they should."""
    name = type(model).__name__
    try:
        output = model(input_ids=input_ids_1T, use_cache=False, **inputs_for(model, visibility))
    except (MissingVisibilityError, TypeError) as error:
        if isinstance(error, TypeError) and "dag_visibility" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{name} does not hand keyword arguments on to its attention layers, so these cannot learn what each "
            "position sees; it cannot be trained on packed rows"
        ) from error
    if route_of(model) == "ready mask":
        return output.logits[0]
    if not visibility.windows:
        raise UnsupportedModelError(
            f'no attention layer of {name} called the attention "{NAME}": call enable(model) first; if it was called, '
            "the model computes attention in code of its own and cannot be trained on packed rows"
        )
    window = _sliding_window(model)
    if window is not None and not _outgrows(model, window) and window not in visibility.windows:
        raise UnsupportedModelError(
            f"the config of {name} has a sliding window of {window}, but no layer passes it to its attention; "
            "set sliding_window=None if the window is not needed"
        )
    return output.logits[0]


def _sliding_window(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def _longest(model: PreTrainedModel) -> int:
    return min(LONGEST, getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def _outgrows(model: PreTrainedModel, window: int) -> bool:
    return window + LENGTH <= _longest(model)


def _probe_row(model: PreTrainedModel, backend: str) -> tuple[Tensor, dict[str, slice], DagVisibility]:
    """Lay out prefix, first branch, second branch, second tree, padding."""
    window = _sliding_window(model) or getattr(model.config.get_text_config(), "attention_chunk_size", None)
    length = window + LENGTH if window is not None and _outgrows(model, window) else min(LENGTH, _longest(model))
    fork = length // 2
    depths = {
        "prefix": range(fork),
        "first branch": range(fork, length),
        "second branch": range(fork, length),
        "second tree": range(fork),
    }
    spans: dict[str, slice] = {}
    position_ids: list[int] = []
    subtree_end: list[int] = []
    for part, depth in depths.items():
        spans[part] = slice(len(position_ids), len(position_ids) + len(depth))
        position_ids += depth
        subtree_end += [len(position_ids)] * len(depth)
    subtree_end[spans["prefix"]] = [spans["second branch"].stop] * fork
    for _ in range(_PADDING):
        position_ids.append(0)
        subtree_end.append(len(position_ids))

    device = next(model.get_input_embeddings().parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    input_ids_1T = torch.randint(min(512, vocabulary), (1, len(position_ids)), generator=generator)
    ends_1T, depths_1T = torch.tensor([subtree_end]), torch.tensor([position_ids])
    return input_ids_1T.to(device), spans, DagVisibility(ends_1T.to(device), depths_1T.to(device), backend)


def _errors(
    model: PreTrainedModel, input_ids_1T: Tensor, packed_TV: Tensor, spans: dict[str, slice]
) -> dict[str, float]:
    """Compute each sequence alone and compare the tokens of each part of the row."""
    every_token = _coarsest_dtype(model) in (torch.float32, torch.float64)
    sequences = [("prefix", "first branch"), ("prefix", "second branch"), ("second tree",)]
    errors = {}
    for parts in sequences:
        alone_1T = torch.cat([input_ids_1T[:, spans[part]] for part in parts], dim=1)
        alone_TV = model(input_ids=alone_1T, use_cache=False).logits[0]
        alone_TV = alone_TV.to(torch.promote_types(alone_TV.dtype, torch.float32))
        row_TV = torch.cat([packed_TV[spans[part]] for part in parts]).to(alone_TV.dtype)
        error_T = (row_TV - alone_TV).norm(dim=-1) / alone_TV.norm(dim=-1)
        lengths = [spans[part].stop - spans[part].start for part in parts]
        for part, part_T in zip(parts, error_T.split(lengths), strict=True):
            errors[part] = (part_T.max() if every_token else part_T.median()).item()
    return errors


def _limit(model: PreTrainedModel) -> float:
    dtype = _coarsest_dtype(model)
    if dtype == torch.float32 and model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 1e-2
    return _LIMITS.get(dtype, _LIMITS[torch.bfloat16]) if dtype is not None else _LIMITS[torch.bfloat16]


def _coarsest_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Dtype of the parameters with the fewest bits of mantissa; `None` if some are quantised."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not all(dtype in _LIMITS for dtype in dtypes):
        return None
    return max(dtypes, key=lambda dtype: _LIMITS[dtype])


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and everything as before afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = [model.device] if isinstance(model, PreTrainedModel) and model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

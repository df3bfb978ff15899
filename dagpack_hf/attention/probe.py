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

So half precision shows only faults that change most tokens of a branch, such as a visibility that is not used.

Models with recurrent layers are probed more closely, since more can go wrong (`dagpack_hf.recurrent`): on a row
with paths of 160 tokens, branches in branches and a leaf of one token. Each recurrent module must call the functions
it names with the states of the row. Where one part of the row is altered, nothing may move that does not come after
it, in any dtype. The beginning of each part counts by itself, since that is what a convolution would get wrong. The
limit is five times the difference of the model's own logits in and out of a batch, if that is larger.

Cost: 110 tokens through the model, up to 720 under a sliding window; 2,800 with recurrent layers, in 11 passes.
Milliseconds for a tiny model without such layers, 0.1 to 0.9 s with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dagpack_hf.recurrent import KEYWORD, DagStates, packed_states, plan_of, recurrent_modules
from dagpack_hf.recurrent.check import unreached, watched

from .comparison import (
    LENGTH,
    ProbeRow,
    coarsest_dtype,
    limit_of,
    of_part,
    outgrows,
    probe_row,
    relative_errors,
    sliding_window,
    vocabulary_of,
)
from .interface import NAME, MissingVisibilityError
from .ready_mask import inputs_for, route_of
from .support import ATTENTION_LAYER_TYPES, UnsupportedModelError, base_model_of
from .switch import ordinary_attention

NOISE = 5
"""How many times the noise of the model itself packed rows with recurrent layers may differ by."""

LEAK = 0.02
"""The part of the limit by which a branch may move when another is altered; deterministic kernels move none."""

Errors = dict[str, float]
"""The error of each part of the row."""


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
        UnsupportedModelError: If the logits differ by more than the limit, no attention layer got the visibility, a
            recurrent layer did not get the states, or a branch moves when another is altered.
    """
    base = base_model_of(model)
    recurrent = bool(recurrent_modules(base))
    row = probe_row(base, backend, recurrent)
    with _evaluation(base), packed_states(base):
        packed_TV = _packed_logits(base, row)
        with ordinary_attention(base, "eager"):
            alone = {parts: base(input_ids=row.sequence(parts), use_cache=False).logits[0] for parts in row.sequences}
            limit = max(limit_of(base), NOISE * _batch_noise(base, row, alone)) if recurrent else limit_of(base)
        if recurrent:
            _refuse_leaks(base, row, packed_TV, limit)
    part, worst = _worst(_errors(base, row, packed_TV, alone))
    if not worst <= limit:
        raise UnsupportedModelError(
            f"{type(base).__name__} computes packed rows wrongly: on the {part} of the probe its logits differ by "
            f"{worst:.1e} (relative) from those of the sequence alone, where {limit:.0e} is the limit for "
            f"{coarsest_dtype(base) or 'quantised weights'}. Some layer lets information pass between branches, or "
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
    input_ids_1T, target_1T = torch.randint(vocabulary_of(base), (2, 1, LENGTH), generator=generator).to(device)
    with _evaluation(base), ordinary_attention(base, "eager"):
        logits_1TV = base(input_ids=input_ids_1T, use_cache=False).logits
        try:
            fused = base(input_ids=input_ids_1T, shift_labels=target_1T, fused_lm_head=True, use_cache=False)
        except (AttributeError, TypeError) as cause:
            raise UnsupportedModelError(f"TRL's fused LM head does not work with {name}: {cause}") from cause
    logits_1TV = logits_1TV.to(torch.promote_types(logits_1TV.dtype, torch.float32))
    own_1T = logits_1TV.log_softmax(-1).gather(-1, target_1T.to(logits_1TV.device)[..., None])[..., 0]
    error = ((fused.log_probs.to(own_1T) - own_1T).norm() / own_1T.norm()).item()
    if not error <= limit_of(base):
        raise UnsupportedModelError(
            f"TRL's fused LM head gives other log-probabilities than {name} itself (they differ by {error:.1e}, "
            "relative): the model does more to its last hidden state than project it, and would train on wrong logits"
        )
    return error


def _packed_logits(model: PreTrainedModel, row: ProbeRow) -> Tensor:
    """Compute the row, and see that each layer asked for what it should."""
    name = type(model).__name__
    states = DagStates(plan_of(row.visibility.subtree_end_BT))
    try:
        with watched(model, states) as reached:
            logits_TV = _logits(model, row, row.input_ids_1T, states)
    except (MissingVisibilityError, TypeError) as error:
        if isinstance(error, TypeError) and "dag_visibility" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{name} does not hand keyword arguments on to its attention layers, so these cannot learn what each "
            "position sees; it cannot be trained on packed rows"
        ) from error
    except ValueError as error:  # what the attention function and the stand-ins of recurrent layers refuse
        raise UnsupportedModelError(f"{name} cannot be trained on packed rows: {error}") from error
    for reason in unreached(model, reached):
        raise UnsupportedModelError(f"{name} cannot be trained on packed rows: {reason}")
    if route_of(model) == "ready mask" or not _attends(model):
        return logits_TV
    windows = row.visibility.windows
    if not windows:
        raise UnsupportedModelError(
            f'no attention layer of {name} called the attention "{NAME}": call enable(model) first; if it was called, '
            "the model computes attention in code of its own and cannot be trained on packed rows"
        )
    window = sliding_window(model)
    if window is not None and not outgrows(model, window) and window not in windows:
        raise UnsupportedModelError(
            f"the config of {name} has a sliding window of {window}, but no layer passes it to its attention; "
            "set sliding_window=None if the window is not needed"
        )
    return logits_TV


def _logits(model: PreTrainedModel, row: ProbeRow, input_ids_1T: Tensor, states: DagStates) -> Tensor:
    inputs = inputs_for(model, row.visibility)
    if recurrent_modules(model):
        inputs[KEYWORD] = states
    return model(input_ids=input_ids_1T, use_cache=False, **inputs).logits[0]


def _attends(model: PreTrainedModel) -> bool:
    """Whether there is a layer with attention; a model of recurrent layers only has none."""
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return not (recurrent_modules(model) and layer_types) or not ATTENTION_LAYER_TYPES.isdisjoint(layer_types)


Alone = dict[tuple[str, ...], Tensor]
"""The logits of each sequence computed alone."""


def _errors(model: PreTrainedModel, row: ProbeRow, packed_TV: Tensor, alone: Alone) -> Errors:
    """How far the logits of each part are from those of the sequences."""
    errors = {}
    for parts, alone_TV in alone.items():
        row_TV = torch.cat([packed_TV[row.spans[part]] for part in parts])
        errors.update(_by_part(model, row, parts, relative_errors(row_TV, alone_TV)))
    return errors


def _by_part(model: PreTrainedModel, row: ProbeRow, parts: tuple[str, ...], error_T: Tensor) -> Errors:
    sizes = [row.spans[part].stop - row.spans[part].start for part in parts]
    return {part: of_part(model, part_T) for part, part_T in zip(parts, error_T.split(sizes), strict=True)}


def _batch_noise(model: PreTrainedModel, row: ProbeRow, alone: Alone) -> float:
    """How far the logits of the plain sequences are from each other, computed alone and in a batch."""
    longest = max(map(len, alone.values()))
    sequences = [row.sequence(parts) for parts in alone]
    batch_ST = torch.cat([nn.functional.pad(each, (0, longest - each.shape[1])) for each in sequences])
    logits_STV = model(input_ids=batch_ST, use_cache=False).logits
    errors: Errors = {}
    for (parts, alone_TV), batched_TV in zip(alone.items(), logits_STV, strict=True):
        errors.update(_by_part(model, row, parts, relative_errors(batched_TV[: len(alone_TV)], alone_TV)))
    return _worst(errors)[1]


def _refuse_leaks(model: PreTrainedModel, row: ProbeRow, packed_TV: Tensor, limit: float) -> None:
    """Alter one branch after another, and see that nothing moves that does not come after it."""
    for part in list(row.spans)[1:]:
        input_ids_1T, others = row.altered(part, vocabulary_of(model))
        moved_TV = _logits(model, row, input_ids_1T, DagStates(plan_of(row.visibility.subtree_end_BT)))
        errors = {
            other: of_part(model, relative_errors(moved_TV[row.spans[other]], packed_TV[row.spans[other]]))
            for other in others
        }
        other, worst = _worst(errors)
        if not worst <= LEAK * limit:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes packed rows wrongly: when the {part} of the probe is altered, the "
                f"logits of the {other} move by {worst:.1e} (relative), so its recurrent layers let information pass "
                "between branches"
            )


def _worst(errors: Errors) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: float("inf") if isnan(item[1]) else item[1])


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """No dropout, nothing kept for gradients, and everything as before afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = [model.device] if isinstance(model, PreTrainedModel) and model.device.type == "cuda" else []
    without_gradients = torch.no_grad() if not repacks_weights(model) else _input_gradients(model)
    with without_gradients, torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def repacks_weights(model: nn.Module) -> bool:
    """Whether evaluation changes the weights: bitsandbytes on a CPU.

    Weights of four bits are then put into a form for inference the first time that no gradient is wanted, and give no
    gradients ever after, in silence.
    """
    return bool(getattr(model, "is_loaded_in_4bit", False)) and next(model.parameters()).device.type == "cpu"


@contextmanager
def _input_gradients(model: nn.Module) -> Iterator[None]:
    """Every layer is called as if gradients were wanted."""
    embeddings = cast(PreTrainedModel, model).get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    try:
        yield
    finally:
        hook.remove()

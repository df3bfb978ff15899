"""Is FlexAttention exact: for each kind of mask in two dtypes, and through a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dagpack_hf.attention import DagVisibility, dense, flex, tile

from .model import make_model, sequence_way, stacked, tree_way
from .rows import document_rows, random_tree, tree_rows
from .run import Run, WrongResultError

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window 40": {"window": 40},
    "sinks": {"sinks": True},
    "soft cap": {"softcap": 5.0},
    "window 40, sinks": {"window": 40, "sinks": True},
    "window 200": {"window": 200},
}
"""In order of weight; time may end before the last."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Error over the largest value of the reference."""


def check_model(run: Run) -> None:
    """Loss and gradients of the model over merged rows and over their sequences."""
    length = min(run.options.length)
    if not run.enough_for("check model", 40):
        return
    with run.trying("model", required=True):
        model = make_model(run.options.model, run.device, checkpointing=not run.options.no_checkpointing)
        sequences = random_tree(length, 2, model.config.vocab_size, seed=0)
        merged = tree_way(model, tree_rows(sequences, length), length, run.device)
        apart = sequence_way(model, document_rows(sequences, length), length, run.device)
        targets = sum(len(sequence) - 1 for sequence in sequences)
        found = []
        for way in (merged, apart):
            loss = way.backward()
            found.append((loss / targets, [p.grad.float() / targets for p in model.parameters()]))
            model.zero_grad()
        (loss, gradients), (loss_apart, gradients_apart) = found
        error = max(
            ((x - y).norm() / y.norm()).item() for x, y in zip(gradients, gradients_apart, strict=True) if y.norm() > 0
        )
        run.figures["model"] = {"loss": [loss, loss_apart], "gradient_error": error}
        print(
            f"  model: loss {loss:.6f} merged, {loss_apart:.6f} apart; gradients differ by up to {error:.1e} of a norm"
        )
        bound = 5e-2 if model.dtype == torch.bfloat16 else 1e-4
        if not (error < bound and abs(loss / loss_apart - 1) < bound):
            raise WrongResultError(f"merged rows and their sequences differ by more than {bound:.0e}")


def check_masks(run: Run) -> None:
    """Every kind of mask in both dtypes, beside float64."""
    print(f"  {'error, and that of dense':<32}{'output':>20}{'gradients':>20}")
    results = run.figures["masks"] = {}
    length = 300 if run.options.tiny else 2000
    rows = [tree_rows(random_tree(size, 4, 1000, seed), size)[0] for seed, size in enumerate((length, length - 90))]
    visibility = stacked(rows, length, run.device)
    backends = {"flex": flex} if run.on_gpu else {"flex": flex, "tile": tile}
    for mask, mask_options in MASKS.items():
        reference = attended(dense, visibility, torch.float64, mask_options)
        for dtype, tolerance in TOLERANCE.items():
            own = errors(attended(dense, visibility, dtype, mask_options), reference)
            for name, backend in backends.items():
                case = f"{name}, {mask}, {str(dtype).removeprefix('torch.')}"
                if not run.enough_for(case, 12):
                    continue
                with run.trying(case, required=True):
                    gradients = run.on_gpu or name != "flex"
                    found = errors(attended(backend, visibility, dtype, mask_options, gradients), reference)
                    results[case] = {"errors": found, "dense_errors": own[: len(found)]}
                    shown = [f"{x:.1e} / {y:.1e}" for x, y in zip(found, own, strict=False)]
                    print(f"  {case:<32}" + "".join(f"{text:>20}" for text in shown))
                    if not max(found) < tolerance:
                        raise WrongResultError(f"error of {max(found):.1e}, at most {tolerance:.0e}")


def attended(
    backend: Any, visibility: DagVisibility, dtype: torch.dtype, mask: dict[str, Any], gradients: bool = True
) -> list[Tensor]:
    """Output and, if wanted, gradients. The inputs are the same numbers in every dtype, those of bfloat16."""
    batch, length = visibility.shape
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, length, 64) for heads in (4, 2, 2, 4)] + [(4,)]
    *inputs, output_grad, sinks = (
        torch.randn(shape, generator=generator).bfloat16().to(visibility.subtree_end_BT.device, dtype)
        for shape in shapes
    )
    mask = dict(mask)
    inputs += [sinks] if mask.pop("sinks", False) else []
    inputs = [x.requires_grad_(gradients) for x in inputs]
    output = backend.attend(*inputs[:3], visibility, sinks_H=inputs[3] if len(inputs) > 3 else None, **mask)
    return [output.detach(), *(torch.autograd.grad(output, inputs, output_grad) if gradients else ())]


def errors(found: list[Tensor], reference: list[Tensor]) -> list[float]:
    """Of the output, and the largest of the gradients."""
    each = [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(found, reference, strict=False)]
    return [each[0], max(each[1:])] if len(each) > 1 else each

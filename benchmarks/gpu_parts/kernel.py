"""How fast FlexAttention is alone, beside PyTorch's causal attention, and how long its masks take to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dagpack_hf.attention import DagVisibility, flex

from .model import MODELS, stacked
from .rows import document_rows, random_tree, tree_rows
from .run import Run, median_seconds

CAUSAL = "causal, sdpa"


def time_kernels(run: Run) -> None:
    """Attention of one layer of the model, for each length."""
    heads = ("visible", "forward ms", "TFLOP/s", "both ms", "TFLOP/s", "mask ms", "window")
    print(f"  {'':<28}" + "".join(f"{head:>11}" for head in heads))
    for length in run.options.length:
        rows: dict[str, dict[str, Any] | None] = {CAUSAL: None}
        rows["one sequence"] = document_rows([list(range(length))], length)[0]
        rows |= {f"reuse {n}": tree_rows(random_tree(length, n, 1000, 0), length)[0] for n in run.options.reuse}
        for name, row in rows.items():
            case = f"{name}, T={length}"
            if run.enough_for(case, 4 + length / 10_000):
                with run.trying(case):
                    figures = time_kernel(run, row, length)
                    run.figures.setdefault("kernel", {})[case] = figures
                    print_kernel(case, figures)


def time_kernel(run: Run, row: dict[str, Any] | None, length: int) -> dict[str, float]:
    """Figures of one row, or of causal attention without a row."""
    shape = MODELS[run.options.model]
    heads, size = shape["num_attention_heads"], shape["head_dim"]
    kv_heads = shape["num_key_value_heads"]
    inputs = [layer_input(n, length, size, run.device) for n in (heads, kv_heads, kv_heads)]
    figures: dict[str, float] = {}
    attend: Callable[..., Tensor]
    if row is None:
        pairs = length * (length + 1) // 2
        attend = causal
    else:
        visibility = stacked([row], length, run.device)
        pairs = visible_pairs(visibility)
        attend = lambda *x: flex.attend(*x, visibility)  # noqa: E731
        for name, window in (("mask_s", None), ("window_mask_s", 1024)):
            vectors = (visibility.subtree_end_BT, visibility.position_ids_BT, window)
            figures[name] = median_seconds(lambda v=vectors: flex.block_mask_of(*v), run)
    trains = run.on_gpu or row is None
    inputs = [x.requires_grad_(trains) for x in inputs]  # one kernel for both, with the log-sum-exps
    output_grad = torch.randn_like(inputs[0])
    operations = 4 * heads * size * pairs
    figures["visible"] = pairs / (length * (length + 1) / 2)
    figures["forward_s"] = median_seconds(lambda: attend(*inputs), run)
    figures["forward_tflops"] = operations / figures["forward_s"] / 1e12
    if trains:
        figures["both_s"] = median_seconds(lambda: torch.autograd.grad(attend(*inputs), inputs, output_grad), run)
        figures["both_tflops"] = 3.5 * operations / figures["both_s"] / 1e12  # as in the papers of FlashAttention
    return figures


def layer_input(heads: int, length: int, size: int, device: torch.device) -> Tensor:
    """Random numbers laid out as models have them in memory."""
    return torch.randn(1, length, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def visible_pairs(visibility: DagVisibility) -> int:
    ends = visibility.subtree_end_BT
    return int((ends - torch.arange(ends.shape[1], device=ends.device)).sum())


def print_kernel(case: str, figures: dict[str, float]) -> None:
    def cell(name: str, scale: float, digits: int) -> str:
        return f"{scale * figures[name]:>11.{digits}f}" if name in figures else f"{'-':>11}"

    cells = [
        cell("forward_s", 1e3, 2),
        cell("forward_tflops", 1, 1),
        cell("both_s", 1e3, 2),
        cell("both_tflops", 1, 1),
    ]
    cells += [cell("mask_s", 1e3, 2), cell("window_mask_s", 1e3, 2)]
    print(f"  {case:<28}{figures['visible']:>11.1%}" + "".join(cells))

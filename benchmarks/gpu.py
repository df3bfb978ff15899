"""FlexAttention on a GPU: is it exact, how fast is its kernel, how fast a training step beside sequences packed apart.

    python benchmarks/gpu.py [--out FILE] [--model NAME] [--length T ...] [--reuse R ...] [--seconds S]
    python benchmarks/gpu.py --tiny    # small shapes, also on a CPU

Three sections, each with its part of the time (`--seconds`, default 440). What does not fit is left out, with the
reason. Should something hang, the figures so far are printed when the time is over.

*correctness*: loss and gradients of the model below over merged rows, and over the sequences they were merged from.
Then output and gradients of `flex` in bfloat16 and float32 for each kind of mask, beside dense attention in float64;
the error of dense attention in the same dtype stands beside it. Two rows, one with padding, of a length that is no
multiple of a tile. A wrong result makes the exit code 1.

*kernel*: attention of one layer, forward alone and with backward, on rows that share prefixes and on one sequence, in
TFLOP/s of visible pairs (*visible* is their part of all causal pairs); beside it PyTorch's causal attention over one
sequence of that length. And the time of making a mask, without and with a sliding window.

*steps*: forward, backward and optimizer with the model call of `DagSFTTrainer`; random weights in bfloat16, gradient
checkpointing. The same sequences three ways: *dagpack*, merged and packed into one window; *flex documents*, packed by
best fit (TRL) under the mask of documents, by the same kernel and with a mask made as cheaply; *flash varlen*, packed
likewise, by PyTorch's FlashAttention for sequences of varying length, without mask or padding. Of more than
`--peer-windows` windows so many are computed, and their time is scaled by tokens. The *token ratio* is what sharing
gains if time goes with tokens.

On a CPU, where FlexAttention has no backward pass, `tile` stands in for it, and FlashAttention is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path

import datasets
import torch
import transformers
from gpu_parts.correctness import check_masks, check_model
from gpu_parts.kernel import time_kernels
from gpu_parts.model import MODELS
from gpu_parts.run import Run, Tee
from gpu_parts.steps import time_steps

SHARES = {"correctness": 0.3, "kernel": 0.15, "steps": 0.55}
"""Sections, and their parts of the time."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    quiet()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        print("There is no GPU. --tiny shows that the script works, and measures nothing.", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        if options.out:
            file = stack.enter_context(options.out.open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, file)))
        run = Run(options, device, SHARES)
        run.section("correctness", check_model, check_masks)
        run.section("kernel", time_kernels)
        run.section("steps", time_steps)
        return run.finish()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="file for everything that is printed")
    parser.add_argument("--seconds", type=float, default=440, help="the run ends after so long (default 440)")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b", help="shape of the model")
    parser.add_argument("--length", type=int, nargs="+", default=[8192, 32_768, 65_536], help="window lengths")
    parser.add_argument("--reuse", type=int, nargs="+", default=[2, 4, 10], help="source tokens over distinct tokens")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds at most (default 5)")
    parser.add_argument("--peer-windows", type=int, default=2, help="windows of documents computed (default 2)")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.length, options.reuse, options.rounds = "tiny", [256], [2, 4], 2
    return options


def quiet() -> None:
    """Only the figures."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    sys.exit(main())

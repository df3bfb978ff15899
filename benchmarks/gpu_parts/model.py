"""Models with random weights, and one pass over rows with the model call of `DagSFTTrainer`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from dagpack_hf import DagCollator
from dagpack_hf.attention import DagVisibility, check_model, ordinary_attention, packed_attention

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "qwen3-1.7b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}

VARLEN = "varlen"
"""Name of the attention of sequences side by side."""


def make_model(name: str, device: torch.device, checkpointing: bool = True) -> PreTrainedModel:
    """Random weights in bfloat16 on a GPU, in float32 on a CPU; ready to train."""
    kind = LlamaConfig if name.startswith("llama") else Qwen3Config
    config = kind(**MODELS[name], max_position_embeddings=131_072, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_model(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Rows on the device, and how the model computes them.

    Attributes:
        model: the model.
        batches: the rows, one a batch, as `DagCollator` makes them.
        attention: context in which the model attends as these rows need.
        inputs: what the model gets for a batch beside tokens, depths and targets.
    """

    model: PreTrainedModel
    batches: list[dict[str, Tensor]]
    attention: Callable[[], AbstractContextManager[None]]
    inputs: Callable[[dict[str, Tensor]], dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Tokens of all rows without padding."""
        return sum(int(batch["num_tokens"].sum()) for batch in self.batches)

    def backward(self) -> float:
        """Forward and backward over all rows; returns the summed loss. The gradients add up."""
        total = torch.zeros((), device=self.model.device)
        with self.attention():
            for batch in self.batches:
                outputs = self.model(
                    input_ids=batch["input_ids"],
                    position_ids=batch["position_ids"],
                    shift_labels=batch["shift_labels"],
                    use_cache=False,
                    fused_lm_head=True,
                    **self.inputs(batch),
                )
                loss = -(outputs.log_probs * batch["loss_weight"]).sum()
                loss.backward()
                total += loss.detach()
        return total.item()


def collate(rows: list[dict[str, Any]], width: int | None) -> dict[str, Tensor]:
    """Pad rows to a width, or to the longest of them."""
    longest = max(len(row["input_ids"]) for row in rows)
    return DagCollator(max_length=width or longest, padding="max_length" if width else "longest")(rows)


def stacked(rows: list[dict[str, Any]], width: int, device: torch.device) -> DagVisibility:
    """The rows as one batch, as attention gets them."""
    batch = collate(rows, width)
    return DagVisibility(batch["subtree_end"].to(device), batch["position_ids"].to(device))


def tree_way(model: PreTrainedModel, rows: list[dict[str, Any]], length: int, device: torch.device) -> PackedSequences:
    """Rows under their trees, by FlexAttention; on a CPU by tiles, for FlexAttention has no backward pass there."""
    backend = "flex" if device.type == "cuda" else "tile"

    def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"dag_visibility": DagVisibility(batch["subtree_end"], batch["position_ids"], backend)}

    return PackedSequences(model, _batches(rows, length, device), lambda: packed_attention(model), inputs)


def sequence_way(
    model: PreTrainedModel, rows: list[dict[str, Any]], length: int, device: torch.device, varlen: bool = False
) -> PackedSequences:
    """Rows of sequences side by side, by the same kernel, or by FlashAttention and then not padded."""
    if not varlen:
        return tree_way(model, rows, length, device)
    AttentionInterface.register(VARLEN, _varlen_forward)

    def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"starts": batch["starts"], "longest": batch["longest"]}

    batches = _batches(rows, None, device)
    for batch in batches:
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0]
        batch["starts"] = torch.nn.functional.pad(starts, (0, 1), value=batch["input_ids"].shape[1]).int()
        batch["longest"] = int(batch["position_ids"].max()) + 1
    return PackedSequences(model, batches, lambda: ordinary_attention(model, VARLEN), inputs)


def varlen_obstacle(device: torch.device) -> str | None:
    """Why FlashAttention for sequences of varying length cannot run, if so."""
    if device.type != "cuda":
        return "FlashAttention needs a GPU"
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _varlen_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    starts: Tensor | None = None,
    longest: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    output = varlen_attn(
        *packed, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    return output[None], None


def _batches(rows: list[dict[str, Any]], width: int | None, device: torch.device) -> list[dict[str, Tensor]]:
    return [{name: x.to(device) for name, x in collate([row], width).items()} for row in rows]

"""Packed against unpacked training: one step over all turns, loss and every gradient.

The packed side is the trainer as it is: rows of `pack_dataset`, one optimizer step that accumulates all of them, with
a learning rate of zero, and the gradients as the optimizer finds them. The unpacked side knows nothing of the package:
one sequence for each turn, as the chat template writes it, plain `model(input_ids)` with the attention of
transformers, cross entropy summed over the labelled tokens and divided by their number.

Cost: a forward and a backward pass over the unique tokens, and over the logical tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from dagpack_hf.config import DagSFTConfig
from dagpack_hf.packing import pack_dataset
from dagpack_hf.trainer import DagSFTTrainer


@dataclass(frozen=True)
class Sequences:
    """One sequence for each trained turn.

    Attributes:
        input_ids: Token ids of context and turn.
        labels: The same, -100 on the context.
    """

    input_ids: list[list[int]]
    labels: list[list[int]]

    @property
    def logical_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.input_ids))

    @property
    def labelled_tokens(self) -> int:
        """Tokens that are trained."""
        return sum(label != -100 for labels in self.labels for label in labels[1:])


@dataclass(frozen=True)
class Exactness:
    """Difference of packed and unpacked training of the same weights on the same turns.

    Attributes:
        loss_packed: Mean loss of a labelled token, packed.
        loss_unpacked: The same, unpacked.
        loss: `|packed - unpacked| / |unpacked|` of the loss.
        gradient_norm: Largest `||packed - unpacked|| / ||unpacked||` of all parameters' gradients.
        gradient_max: Largest `max|packed - unpacked| / max|unpacked|` of all parameters' gradients.
        parameter: The parameter with the largest `gradient_norm`.
        parameters: Parameters compared.
        packed_seconds: Time of the packed step.
        unpacked_seconds: Time of the unpacked step.
    """

    loss_packed: float
    loss_unpacked: float
    loss: float
    gradient_norm: float
    gradient_max: float
    parameter: str
    parameters: int
    packed_seconds: float
    unpacked_seconds: float

    @property
    def largest(self) -> float:
        """The largest of the three relative differences."""
        return max(self.loss, self.gradient_norm, self.gradient_max)


def unpacked_sequences(conversations: Dataset, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """Write every trained turn out as one sequence, as the chat template has it.

    Args:
        conversations: What `load_sessions` returns.
        tokenizer: Tokenizer whose template continues its own generation prompt, as the bundled one does.
    """
    sequences = Sequences([], [])
    for row in conversations:
        for turn, trained in enumerate(row["trained"]):
            if trained:
                options: dict[str, Any] = {"tools": row["tools"], "return_dict": False}
                before, whole = row["messages"][:turn], row["messages"][: turn + 1]
                context = cast(list[int], tokenizer.apply_chat_template(before, add_generation_prompt=True, **options))
                ids = cast(list[int], tokenizer.apply_chat_template(whole, **options))
                sequences.input_ids.append(ids)
                sequences.labels.append([-100] * len(context) + ids[len(context) :])
    return sequences


def compare(
    model: LlamaForCausalLM,
    trees: Dataset,
    sequences: Sequences,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    work_dir: str,
) -> Exactness:
    """Compare one packed step with one unpacked step from the same weights; the model keeps its weights.

    Args:
        model: The model, in float32.
        trees: Token trees of the turns.
        sequences: The same turns, one sequence each.
        tokenizer: Their tokenizer.
        max_length: Window length of the packed side, in tokens.
        work_dir: Folder for the trainer.
    """
    reference = type(model)(model.config)
    reference.load_state_dict(model.state_dict())
    start = time.perf_counter()
    unpacked_loss, unpacked = _unpacked_step(reference, sequences)
    middle = time.perf_counter()
    packed_loss, packed = _packed_step(model, trees, tokenizer, max_length, work_dir)
    end = time.perf_counter()
    norms = {name: _relative(packed[name] - unpacked[name], unpacked[name], 2.0) for name in unpacked}
    worst = max(norms, key=lambda name: norms[name])
    return Exactness(
        loss_packed=packed_loss,
        loss_unpacked=unpacked_loss,
        loss=abs(packed_loss - unpacked_loss) / abs(unpacked_loss),
        gradient_norm=norms[worst],
        gradient_max=max(_relative(packed[name] - unpacked[name], unpacked[name], torch.inf) for name in unpacked),
        parameter=worst,
        parameters=len(norms),
        packed_seconds=end - middle,
        unpacked_seconds=middle - start,
    )


def _relative(difference: torch.Tensor, reference: torch.Tensor, order: float) -> float:
    norm = torch.linalg.vector_norm
    return (norm(difference.double(), order) / norm(reference.double(), order).clamp(min=1e-30)).item()


def _unpacked_step(model: PreTrainedModel, sequences: Sequences) -> tuple[float, dict[str, torch.Tensor]]:
    model.set_attn_implementation("sdpa")
    model.train()
    total = 0.0
    for ids, labels in zip(sequences.input_ids, sequences.labels, strict=True):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")
        loss = loss / sequences.labelled_tokens
        loss.backward()
        total += loss.item()
    return total, _gradients(model)


def _packed_step(
    model: PreTrainedModel, trees: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, work_dir: str
) -> tuple[float, dict[str, torch.Tensor]]:
    rows, _ = pack_dataset(trees, max_length, loss_weighting="paths", progress=False)
    recorder = _GradientRecorder()
    trainer = DagSFTTrainer(
        model=model,
        args=DagSFTConfig(
            **trainer_options(work_dir),
            max_length=max_length,
            loss_weighting="paths",
            loss_normalization="step",
            gradient_accumulation_steps=len(rows),
            num_train_epochs=1,
            learning_rate=0.0,
            weight_decay=0.0,
            max_grad_norm=0.0,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    quiet(trainer)
    loss = trainer.train().training_loss
    return loss, recorder.gradients


class _GradientRecorder(TrainerCallback):
    """Keeps the gradients that the optimizer finds."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: PreTrainedModel
    ) -> None:
        """Copy the gradients."""
        self.gradients = _gradients(kwargs["model"])


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trainer_options(work_dir: str) -> dict[str, Any]:
    """Training arguments that all trainers of the demonstration have in common."""
    return {
        "output_dir": work_dir,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 0,
    }


def quiet(trainer: Trainer) -> None:
    """Keep a trainer from printing its logs."""
    trainer.remove_callback(PrinterCallback)

"""Every labelled token has the same share: of `eval_loss`, and of the gradients of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset
from dagpack_hf.attention import packed_attention
from tests.toy import shared_dataset, shared_sequences, tiny_llama, toy_tokenizer

LENGTH = 90


def unequal(count: int = 30, seed: int = 0) -> Dataset:
    """Some sequences have one target, others hundreds of times the weight: they are repeated."""
    sequences, labels = shared_sequences(count, seed)
    labels = [x if i % 3 else [-100] * (len(x) - 1) + x[-1:] for i, x in enumerate(labels)]
    repeated = [i for i in range(count) for _ in range(20 if i < 3 else 1)]
    return Dataset.from_dict({"input_ids": [sequences[i] for i in repeated], "labels": [labels[i] for i in repeated]})


def arguments(kind: type[SFTConfig], tmp_path, **options) -> SFTConfig:
    defaults = {
        "max_length": LENGTH,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "per_device_eval_batch_size": 2,
    }
    return kind(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, **{**defaults, **options})


def trainer_for(tmp_path, train, evaluation=None, callbacks=None, **options) -> DagSFTTrainer:
    return DagSFTTrainer(
        model=tiny_llama(),
        args=arguments(DagSFTConfig, tmp_path, **options),
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=toy_tokenizer(),
        callbacks=callbacks,
    )


def ordinary_eval_loss(tmp_path, evaluation: Dataset) -> float:
    """That of `SFTTrainer`, with the whole set in one batch: it averages the means of batches."""
    theirs = SFTTrainer(
        model=tiny_llama(),
        args=arguments(SFTConfig, tmp_path, per_device_eval_batch_size=len(evaluation)),
        train_dataset=shared_dataset(),
        eval_dataset=evaluation,
        processing_class=toy_tokenizer(),
    )
    return theirs.evaluate()["eval_loss"]


# Evaluation


def test_eval_loss_is_that_of_sft_trainer(tmp_path):
    evaluation = unequal()
    rows, _ = pack_dataset(evaluation, LENGTH, loss_weighting="paths", progress=False)
    weights = [sum(weight) for weight in rows["loss_weight"]]
    assert max(weights) > 20 * min(weights), "windows of very unequal weight"
    expected = ordinary_eval_loss(tmp_path, evaluation)
    for data in (evaluation, rows):
        for batch_size in (1, 4):
            trainer = trainer_for(tmp_path, shared_dataset(), data, per_device_eval_batch_size=batch_size)
            assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_several_sets_have_each_their_loss(tmp_path):
    sets = {"a": unequal(), "b": shared_dataset(9, 4), "packed": unequal(seed=5)}
    expected = {f"eval_{name}_loss": ordinary_eval_loss(tmp_path, data) for name, data in sets.items()}
    sets["packed"], _ = pack_dataset(sets["packed"], LENGTH, loss_weighting="paths", progress=False)
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "learning_rate": 0.0}
    trainer = trainer_for(tmp_path, shared_dataset(), sets, **options)
    assert {k: v for k, v in trainer.evaluate().items() if k in expected} == pytest.approx(expected, rel=1e-6)
    trainer.train()
    logged = {k: v for entry in trainer.state.log_history for k, v in entry.items() if k in expected}
    assert logged == pytest.approx(expected, rel=1e-6)


# Gradients


class GradientSum(TrainerCallback):
    """Sums the gradients that the optimizer gets."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps += 1
        for name, parameter in model.named_parameters():
            self.sums[name] = self.sums.get(name, 0) + parameter.grad.double()


def distinct_targets(data: Dataset) -> Iterator[tuple[list[int], list[int]]]:
    """Sequences in which a target that an earlier one has is context."""
    seen = set()
    for sequence, labels in zip(data["input_ids"], data["labels"], strict=True):
        kept = [-100] * len(sequence)
        for index in range(1, len(sequence)):
            path = tuple(sequence[: index + 1])
            if labels[index] != -100 and path not in seen:
                seen.add(path)
                kept[index] = sequence[index]
        yield sequence, kept


def gradient_of_the_mean(data: Dataset, weighting: str) -> dict[str, torch.Tensor]:
    """Of the mean loss over all targets of the unpacked sequences, in float64."""
    model = tiny_llama().double()
    pairs = distinct_targets(data) if weighting == "once" else zip(data["input_ids"], data["labels"], strict=True)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence, labels in pairs:
        logits = model(input_ids=torch.tensor([sequence])).logits[0, :-1]
        total = total + F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")
        count += sum(label != -100 for label in labels[1:])
    (total / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("weighting", ["once", "paths"])
@pytest.mark.parametrize(
    ("options", "last_step_is_incomplete"),
    [
        ({"per_device_train_batch_size": 1}, False),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}, True),
        ({"per_device_train_batch_size": 5}, True),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, True),
    ],
    ids=["one window", "accumulation", "batches", "both"],
)
def test_every_labelled_token_has_the_same_share_of_an_epoch(tmp_path, weighting, options, last_step_is_incomplete):
    """The gradients of the steps of the real trainer sum to that of the mean over all tokens, times the steps.

    Windows weigh very differently and their gradients are independent, so any other factor of a window shows.
    """
    data, gradients = unequal(), GradientSum()
    trainer = trainer_for(
        tmp_path, data, callbacks=[gradients], loss_weighting=weighting, learning_rate=0.0, num_train_epochs=1,
        max_grad_norm=0.0, logging_strategy="no", **options,
    )  # fmt: skip
    windows = trainer.pack_reports["train"].windows
    per_step = options["per_device_train_batch_size"] * options.get("gradient_accumulation_steps", 1)
    assert bool(windows % per_step) == last_step_is_incomplete
    trainer.train()
    assert gradients.steps == -(-windows // per_step)
    expected = gradient_of_the_mean(data, weighting)
    for name, gradient in expected.items():
        error = (gradients.sums[name] / gradients.steps - gradient).norm() / gradient.norm()
        assert error <= 1e-5, (name, error)


def test_so_it_is_with_batches_packed_on_the_fly(tmp_path):
    """The last batch has one example and the last step one batch."""
    data, gradients = shared_dataset(31), GradientSum()
    trainer = trainer_for(
        tmp_path, data, callbacks=[gradients], packing_scope="batch", loss_weighting="paths", learning_rate=0.0,
        loss_normalization="corpus", num_train_epochs=1, max_grad_norm=0.0, logging_strategy="no",
        per_device_train_batch_size=5, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert gradients.steps == 4
    for name, gradient in gradient_of_the_mean(data, "paths").items():
        assert (gradients.sums[name] / gradients.steps - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_targets_of_little_weight_have_the_same_mean(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(), loss_normalization="step")
    batch = next(iter(trainer.get_train_dataloader()))
    found = []
    for factor in (1.0, 1e-4, 0.0):
        batch["loss_weight"] = batch["loss_weight"] * factor
        with packed_attention(trainer.model), torch.no_grad():
            total = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
            found.append(trainer.compute_loss(trainer.model, batch, num_items_in_batch=total).item())
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[0] > 1 and found[2] == 0


def test_the_weight_of_a_step_gives_tokens_of_light_steps_more(tmp_path):
    """What `"corpus"` is there for: with `"step"` the same sum is another."""
    data, gradients = unequal(), GradientSum()
    options = {"per_device_train_batch_size": 1, "learning_rate": 0.0, "num_train_epochs": 1, "max_grad_norm": 0.0}
    trainer = trainer_for(tmp_path, data, callbacks=[gradients], loss_normalization="step", **options)
    trainer.train()
    expected = gradient_of_the_mean(data, "once")
    name = "lm_head.weight"
    assert (gradients.sums[name] / gradients.steps - expected[name]).norm() > 0.1 * expected[name].norm()

"""What the trainer logs: exact ratios of sums, whatever batches, windows and steps weigh."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from datasets import Dataset, IterableDataset

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset
from dagpack_hf.pack_report import PackReport
from dagpack_hf.training_metrics import Stopwatch
from tests.toy import shared_dataset, shared_sequences, tiny_llama, toy_tokenizer

BATCH = {"packing_scope": "batch", "loss_weighting": "paths"}


def trainer_for(tmp_path, dataset, eval_dataset=None, **options) -> DagSFTTrainer:
    defaults = {"max_length": 90, "save_strategy": "no", "report_to": [], "bf16": False, "logging_steps": 1}
    defaults |= {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 0.0}
    args = DagSFTConfig(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, **{**defaults, **options})
    return DagSFTTrainer(
        model=tiny_llama(),
        args=args,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=toy_tokenizer(),
    )


def entries(trainer: DagSFTTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


class Second(Stopwatch):
    """A lap always takes 2 seconds, so that tokens per second can be told."""

    def lap(self) -> float | None:
        return None if super().lap() is None else 2.0


def unique_tokens(sequences: list[list[int]]) -> int:
    return len({tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))})


@pytest.mark.parametrize("steps_of_log", [1, 3])
def test_of_batches_packed_on_the_fly_tokens_are_exact(tmp_path, steps_of_log):
    """Every entry of the log is checked against the sequences of its batches, counted one by one."""
    sequences, labels = shared_sequences(24)
    dataset = Dataset.from_dict({"input_ids": sequences, "labels": labels})
    trainer = trainer_for(
        tmp_path, dataset, **BATCH, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=steps_of_log, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer._metering.stopwatch = Second()
    trainer.train()
    logged = entries(trainer)
    assert len(logged) == 3 // steps_of_log
    each = 8 * steps_of_log
    for index, entry in enumerate(logged):
        batches = [sequences[low : low + 4] for low in range(index * each, (index + 1) * each, 4)]
        logical = sum(len(sequence) for batch in batches for sequence in batch)
        unique = sum(map(unique_tokens, batches))
        targets = 0
        for low in range(index * each, (index + 1) * each, 4):
            pairs = zip(sequences[low : low + 4], labels[low : low + 4], strict=True)
            paths = ((tuple(s[: i + 1]), label[i] != -100) for s, label in pairs for i in range(1, len(s)))
            targets += len({path for path, trained in paths if trained})
        assert entry["logical_tokens_per_second"] == pytest.approx(logical / 2, rel=1e-12)
        assert entry["loss_tokens_per_second"] == targets / 2
        assert entry["reuse_ratio"] == pytest.approx(logical / unique, rel=1e-12)
        assert 0 < entry["replay_share"] < 0.3
    executed = logged[-1]["num_tokens"]
    total = sum(unique_tokens(sequences[low : low + 4]) for low in range(0, 24, 4))
    if steps_of_log == 3:
        assert logged[0]["replay_share"] == pytest.approx(1 - total / executed, rel=1e-12)


def test_windows_stand_for_their_share_of_the_data_set(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(40), num_train_epochs=1, max_steps=-1, logging_steps=100)
    trainer._metering.stopwatch = Second()
    trainer.args.logging_strategy, trainer.args.logging_steps = "epoch", 1
    trainer.train()
    (entry,) = entries(trainer)
    report = trainer.pack_reports["train"]
    assert report.replay_tokens > 0 and report.reuse_ratio > 1.5
    assert entry["num_tokens"] == report.executed_tokens
    assert entry["logical_tokens_per_second"] == pytest.approx(report.logical_tokens / 2, rel=1e-12)
    assert entry["loss_tokens_per_second"] == report.loss_tokens / 2
    assert entry["reuse_ratio"] == pytest.approx(report.reuse_ratio, rel=1e-12)
    assert entry["replay_share"] == pytest.approx(report.replay_tokens / report.executed_tokens, rel=1e-12)


def test_of_rows_packed_beforehand_only_what_they_say_is_logged(tmp_path):
    rows, _ = pack_dataset(shared_dataset(40), 90, progress=False)
    trainer = trainer_for(tmp_path, rows)
    trainer.train()
    for entry in entries(trainer):
        assert entry["loss_tokens_per_second"] > 0
        assert not {"logical_tokens_per_second", "reuse_ratio", "replay_share"} & set(entry)


def test_a_stream_knows_its_tokens(tmp_path):
    def stream():
        for sequence, label in zip(*shared_sequences(40), strict=True):
            yield {"input_ids": sequence, "labels": label}

    trainer = trainer_for(tmp_path, IterableDataset.from_generator(stream), **BATCH, loss_normalization="step")
    trainer.train()
    assert all(entry["reuse_ratio"] > 1 and entry["logical_tokens_per_second"] > 0 for entry in entries(trainer))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_means_are_those_of_all_targets_since_the_last_entry(tmp_path, accumulation):
    """Accuracy, entropy and loss of the log, against all batches in one sum."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, "logging_steps": 2}
    trainer = trainer_for(tmp_path, shared_dataset(60), **options, max_steps=2)
    sums: Counter = Counter()
    forward = trainer.compute_loss

    def recorded(model, inputs, **kwargs):
        kwargs.pop("return_outputs", None)
        loss, outputs = forward(model, inputs, return_outputs=True, **kwargs)
        weight = inputs["loss_weight"].double()
        sums["weight"] += weight.sum().item()
        sums["loss"] -= (outputs.log_probs * weight).sum().item()
        sums["entropy"] += (outputs.entropy * weight).sum().item()
        sums["correct"] += (outputs.is_top1 * weight).sum().item()
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    (entry,) = entries(trainer)
    for name, figure in (("loss", "loss"), ("entropy", "entropy"), ("mean_token_accuracy", "correct")):
        assert entry[name] == pytest.approx(sums[figure] / sums["weight"], rel=1e-6), name


def test_evaluation_and_saving_do_not_count_as_time_of_training(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer = trainer_for(tmp_path, shared_dataset(), shared_dataset(8, 3), **options, save_only_model=True)
    predict, save = trainer.prediction_step, trainer.save_model
    trainer.prediction_step = lambda *args, **kwargs: time.sleep(0.4) or predict(*args, **kwargs)
    trainer.save_model = lambda *args, **kwargs: time.sleep(0.4) or save(*args, **kwargs)
    trainer.train()
    targets = trainer.pack_reports["train"].loss_tokens
    for entry in entries(trainer):
        assert entry["loss_tokens_per_second"] > targets / len(trainer.train_dataset) / 0.4
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 3 and not any("per_second" in key and "tokens" in key for key in evaluated[0])
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= set(evaluated[0])


def test_the_stopwatch_leaves_out_what_it_is_paused_for():
    watch = Stopwatch()
    assert watch.lap() is None
    with watch.paused():
        pass
    watch.start()
    with watch.paused():
        time.sleep(0.3)
    assert watch.lap() < 0.2
    time.sleep(0.05)
    watch.start()
    assert 0.05 <= watch.lap() < 0.3, "a running one is not started again"
    watch.stop()
    assert watch.lap() is None


def test_a_report_without_tokens_says_nothing(tmp_path):
    from dagpack_hf.training_metrics import CorpusShares

    empty = PackReport(8, "once", 0, 0, 0, 0, 0.0, 0, 0, 0, 0)
    assert CorpusShares.of(None) is None and CorpusShares.of(empty) is None


def test_tokens_are_counted_if_nothing_is_logged(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(40), logging_strategy="no", num_train_epochs=1, max_steps=-1)
    trainer.train()
    assert trainer._total_train_tokens == trainer.pack_reports["train"].executed_tokens
    assert not trainer._metrics["train"]

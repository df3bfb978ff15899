"""`DagSFTTrainer` beside `SFTTrainer`: same trajectory, same data formats, same habits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, IterableDataset
from trl import SFTConfig, SFTTrainer

from dagpack_hf import (
    DagCollator,
    DagSFTConfig,
    DagSFTTrainer,
    TokenForest,
    load_sessions,
    pack_dataset,
    tokenize_conversations,
)
from dagpack_hf.attention import MissingVisibilityError, UnsupportedModelError, packed_attention
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.preparation import count_targets
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from tests.toy import shared_dataset, shared_sequences, tiny_llama, toy_tokenizer
from tests.train_script import make_trainer

ROOT = Path(__file__).parents[1]
SAME_TRAJECTORY = {"packing_scope": "batch", "loss_weighting": "paths", "loss_normalization": "step"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(tmp_path, **options) -> DagSFTConfig:
    defaults = {"max_length": 128, "max_steps": 2, "save_strategy": "no", "report_to": [], "bf16": False}
    return DagSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, logging_strategy="no", **{**defaults, **options}
    )


def trainer_for(tmp_path, dataset, model=None, collator=None, eval_dataset=None, **options) -> DagSFTTrainer:
    return DagSFTTrainer(
        model=model or tiny_llama(),
        args=config(tmp_path, **options),
        data_collator=collator,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=toy_tokenizer(),
    )


def run(tmp_path, name, launcher=(), expect=0, **settings) -> dict:
    """Train in a process of its own and return what it saved."""
    out = tmp_path / f"{name}.pt"
    output_dir = settings.pop("output_dir", tmp_path / name)
    command = [
        *(launcher or [sys.executable]),
        "-m",
        "tests.train_script",
        str(out),
        str(output_dir),
        json.dumps(settings),
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stderr[-3000:]
    return torch.load(out) if expect == 0 else {}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# The trajectory of SFTTrainer


def test_twenty_steps_end_where_sft_trainer_ends(tmp_path):
    ours = make_trainer(str(tmp_path / "dag"), "dag", **SAME_TRAJECTORY)
    theirs = make_trainer(str(tmp_path / "sft"), "sft")
    start = {name: p.clone() for name, p in ours.model.state_dict().items()}
    for trainer in (ours, theirs):
        trainer.train()
    assert largest_difference(start, theirs.model.state_dict()) > 5e-3, "training moves the parameters"
    assert largest_difference(ours.model.state_dict(), theirs.model.state_dict()) <= 1e-5
    assert ours._total_train_tokens < theirs._total_train_tokens, "shared tokens are computed once"


def test_gradient_accumulation_ends_where_sft_trainer_ends(tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 10}
    ours = make_trainer(str(tmp_path / "dag"), "dag", **SAME_TRAJECTORY, **options)
    theirs = make_trainer(str(tmp_path / "sft"), "sft", **options)
    for trainer in (ours, theirs):
        trainer.train()
    assert largest_difference(ours.model.state_dict(), theirs.model.state_dict()) <= 1e-5


def test_two_processes_end_where_sft_trainer_ends(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    runs = {
        name: run(tmp_path, name, torchrun, trainer=name, **options)
        for name, options in (("dag", SAME_TRAJECTORY), ("sft", {}))
    }
    assert runs["dag"]["world"] == runs["sft"]["world"] == 2
    assert largest_difference(runs["dag"]["state"], runs["sft"]["state"]) <= 1e-5


def test_two_processes_train_packed_rows_as_one_does(tmp_path):
    """An odd number of windows: no rank repeats one, and each step has the weight it has in one process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {"max_length": 90, "max_steps": 8}
    two = run(tmp_path, "two", torchrun, per_device_train_batch_size=1, **options)
    one = run(tmp_path, "one", per_device_train_batch_size=2, **options)
    assert (two["world"], one["world"]) == (2, 1)
    assert largest_difference(two["state"], one["state"]) <= 1e-5


@pytest.mark.parametrize("scope", [{}, SAME_TRAJECTORY], ids=["dataset", "batch"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, scope):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5, "per_device_train_batch_size": 2, **scope}
    whole = run(tmp_path, "whole", **settings)
    run(tmp_path, "killed", kill_at=8, expect=-signal.SIGKILL, **settings)
    assert (tmp_path / "killed" / "checkpoint-5").is_dir() and not (tmp_path / "killed.pt").exists()
    resumed = run(tmp_path, "resumed", resume=True, output_dir=tmp_path / "killed", **settings)
    assert largest_difference(whole["state"], resumed["state"]) == 0


# Loss and normalisation


def reference_losses(model, sequences, labels) -> tuple[float, float]:
    """Summed loss and number of labelled tokens, one sequence at a time."""
    total, count = 0.0, 0
    with torch.no_grad():
        for sequence, label in zip(sequences, labels, strict=True):
            logits = model(input_ids=torch.tensor([sequence])).logits[0, :-1]
            total += F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=-100, reduction="sum").item()
            count += sum(x != -100 for x in label[1:])
    return total, count


@pytest.mark.parametrize("weighting", ["once", "paths"])
@pytest.mark.parametrize("scope", ["dataset", "batch"])
def test_eval_loss_is_that_of_the_unpacked_data(tmp_path, scope, weighting):
    sequences, labels = shared_sequences(30, seed=4)
    trainer = trainer_for(
        tmp_path,
        shared_dataset(),
        eval_dataset=Dataset.from_dict({"input_ids": sequences, "labels": labels}),
        packing_scope=scope,
        loss_weighting=weighting,
        per_device_eval_batch_size=3,
        max_length=100,
    )
    metrics = trainer.evaluate()
    total, count = reference_losses(trainer.model, sequences, labels)
    assert trainer.pack_reports["eval"].windows > 3
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-6)
    assert 0 <= metrics["eval_mean_token_accuracy"] <= 1 and metrics["eval_entropy"] > 0


def test_corpus_normalization_gives_every_target_the_same_share(tmp_path):
    """The losses of an epoch sum to the mean loss times the steps, whatever the weight of each window."""
    trainer = trainer_for(tmp_path, shared_dataset(40), max_length=90, per_device_train_batch_size=2)
    weights, losses = [], []
    trainer.model.train()
    with packed_attention(trainer.model), torch.no_grad():
        for batch in trainer.get_train_dataloader():
            loss = trainer.compute_loss(trainer.model, batch)
            weights.append(batch["loss_weight"].sum().item())
            losses.append(loss.item())
    mean_weight = trainer.pack_reports["train"].loss_weight / len(losses)
    assert max(weights) > 1.5 * min(weights), "windows of unequal weight"
    total = trainer._metering.take("train", trainer.accelerator)["loss"]
    assert sum(losses) * mean_weight == pytest.approx(total, rel=1e-5)
    assert sum(weights) == trainer.pack_reports["train"].loss_weight


def test_step_normalization_divides_by_the_weight_of_the_step(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(), loss_normalization="step")
    batches = [{"loss_weight": torch.tensor([[1.0, 0.0, 2.0]])}, {"loss_weight": torch.tensor([[4.0]])}]
    assert trainer._get_num_items_in_batch(batches, torch.device("cpu")).item() == 7


def test_dft_loss_weighs_by_probability(tmp_path):
    plain, dft = (trainer_for(tmp_path, shared_dataset(), loss_type=kind) for kind in ("nll", "dft"))
    batch = next(iter(plain.get_train_dataloader()))
    losses = []
    for trainer in (plain, dft):
        with packed_attention(trainer.model), torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, batch).item())
    assert 0 < losses[1] < 0.1 * losses[0]


# Data formats

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Add 2 and 2."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "7"},
]

FORMATS = {
    "text": ({"text": ["the cat sat", "the cat ran", "a dog"]}, {}),
    "prompt-completion": ({"prompt": ["the cat", "the cat"], "completion": [" sat", " ran"]}, {}),
    "prompt-completion, loss on all": (
        {"prompt": ["the cat", "the cat"], "completion": [" sat", " ran"]},
        {"completion_only_loss": False},
    ),
    "messages": ({"messages": [MESSAGES, MESSAGES[:3]]}, {}),
    "messages, assistant only": ({"messages": [MESSAGES, MESSAGES[:3]]}, {"assistant_only_loss": True}),
    "conversational prompt-completion": ({"prompt": [MESSAGES[:2]], "completion": [MESSAGES[2:3]]}, {}),
    "from/value": ({"conversations": [[{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]]}, {}),
    "tokenised": ({"input_ids": [[1, 2, 3, 4], [1, 2, 5]]}, {}),
    "tokenised with a mask": (
        {"input_ids": [[1, 2, 3, 4], [1, 2, 5]], "completion_mask": [[0, 0, 1, 1], [0, 0, 1]]},
        {"completion_only_loss": True},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_trains_the_tokens_that_sft_trainer_trains(tmp_path, name):
    columns, options = FORMATS[name]
    dataset = Dataset.from_dict(columns)
    ours = trainer_for(tmp_path, dataset, loss_weighting="paths", **options)
    theirs = SFTTrainer(
        model=tiny_llama(),
        args=SFTConfig(str(tmp_path), max_length=128, report_to=[], bf16=False, use_cpu=True, **options),
        train_dataset=dataset,
        processing_class=toy_tokenizer(),
    )
    prepared = theirs.train_dataset
    forest = TokenForest.from_sequences(prepared["input_ids"][:], prepared["labels"][:])
    report = ours.pack_reports["train"]
    assert report.loss_weight == forest.num_source_targets > 0
    assert (report.unique_tokens, report.logical_tokens) == (forest.num_tokens, forest.logical_tokens)
    expected, _ = pack_dataset(prepared, 128, loss_weighting="paths", seed=42, progress=False)
    assert ours.train_dataset.select(range(len(expected)))[:] == expected[:]
    ours.train()


@pytest.mark.parametrize("scope", ["dataset", "batch"])
def test_sessions_train_as_they_are_loaded(tmp_path, scope):
    sessions = load_sessions(sorted(sample_sessions().glob("*.jsonl"))[:2])
    tokenizer = sample_tokenizer()
    trees = tokenize_conversations(sessions, tokenizer)
    trainer = DagSFTTrainer(
        model=tiny_llama(vocab_size=len(tokenizer)),
        args=config(tmp_path, max_length=4096, packing_scope=scope, per_device_train_batch_size=4, max_steps=1),
        train_dataset=sessions,
        processing_class=tokenizer,
    )
    expected, report = pack_dataset(trees, 4096, seed=42, progress=False)
    if scope == "dataset":
        assert trainer.train_dataset.select(range(len(expected)))[:] == expected[:]
        assert trainer.pack_reports["train"] == report
    else:
        assert trainer.train_dataset[:] == trees[:]
        assert trainer._total_weight == sum(map(sum, trees["target_count"]))
    trainer.train()
    assert trainer._total_train_tokens > 2000


def test_rows_packed_beforehand_are_taken_as_they_are(tmp_path):
    rows, _ = pack_dataset(shared_dataset(), 90, progress=False)
    trainer = trainer_for(tmp_path, rows, per_device_train_batch_size=1)
    assert trainer.train_dataset.column_names == list(ROW_COLUMNS)
    assert trainer.train_dataset[:] == rows[:]
    trainer.train()


def test_empty_rows_fill_the_last_batch_and_train_nothing(tmp_path):
    rows, report = pack_dataset(shared_dataset(), 90, progress=False)
    batch_size = len(rows) - 1
    trainer = trainer_for(tmp_path, rows, per_device_train_batch_size=batch_size)
    assert len(trainer.train_dataset) == 2 * batch_size
    assert trainer._total_weight == report.loss_weight


def test_a_stream_is_packed_batch_by_batch(tmp_path):
    def stream():
        for sequence, label in zip(*shared_sequences(40), strict=True):
            yield {"input_ids": sequence, "labels": label}

    dataset = IterableDataset.from_generator(stream)
    trainer = trainer_for(tmp_path, dataset, **SAME_TRAJECTORY)
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(ValueError, match='packing_scope="batch"'):
        trainer_for(tmp_path, dataset)


@pytest.mark.parametrize("scope", ["dataset", "batch"])
@pytest.mark.parametrize("overflow", ["truncate", "drop", "error"])
def test_sequences_longer_than_the_window(tmp_path, caplog, scope, overflow):
    sequences = [list(range(1, 101)), [1, 2, 3, 150]]
    dataset = Dataset.from_dict({"input_ids": sequences})
    options = {"max_length": 64, "overflow": overflow, "packing_scope": scope, "loss_weighting": "paths"}
    if overflow == "error":
        with pytest.raises(ValueError, match="longer than max_length=64"):
            trainer_for(tmp_path, dataset, **options)
        return
    trainer = trainer_for(tmp_path, dataset, **options)
    kept = 63 + 3 if overflow == "truncate" else 3
    assert trainer._total_weight == kept
    assert "labelled tokens are not trained" in caplog.text


def test_sequences_without_labels_are_left_out_and_counted(tmp_path, caplog):
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [-100, -100]]})
    trainer = trainer_for(tmp_path, dataset)
    assert trainer.pack_reports["train"].unique_tokens == 2
    assert "1 sequences without a labelled token are left out" in caplog.text


def test_count_targets_is_what_shifted_labels_within_the_window_count():
    sequences, labels = shared_sequences(10)
    dataset = Dataset.from_dict({"input_ids": sequences, "labels": labels}).select([3, 1, 9])
    for limit in (1, 2, 30, 500):
        expected = [sum(x != -100 for x in labels[i][1:limit]) for i in (3, 1, 9)]
        assert count_targets(dataset, limit).tolist() == expected


# Habits of the host


def test_a_model_by_name_named_evaluation_sets_and_the_best_checkpoint(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    held_out = {"a": shared_dataset(8, 3), "b": shared_dataset(9, 4)}
    trainer = DagSFTTrainer(
        model=str(tmp_path / "model"),
        args=config(tmp_path, **options, load_best_model_at_end=True, metric_for_best_model="eval_a_loss"),
        train_dataset=shared_dataset(),
        eval_dataset=held_out,
    )
    trainer.train()
    assert set(trainer.pack_reports) == {"train", "a", "b"}
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert {"eval_a_loss", "eval_b_loss"} <= logged
    total, count = reference_losses(trainer.model, *held_out["b"][:].values())
    assert trainer.evaluate(held_out["b"])["eval_loss"] == pytest.approx(total / count, rel=1e-6)
    assert trainer.predict(trainer.eval_dataset["b"]).metrics["test_loss"] == pytest.approx(total / count, rel=1e-6)


def test_lora_trains_and_saves_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = DagSFTTrainer(
        model=model,
        args=config(tmp_path, learning_rate=1e-2),
        train_dataset=shared_dataset(),
        processing_class=toy_tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    moved = {n for n, p in trainer.model.named_parameters() if "lora_B" in n and torch.any(p != 0)}
    assert len(moved) == 4
    base = trainer.model.get_base_model()
    assert torch.equal(base.model.embed_tokens.weight, before["model.embed_tokens.weight"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(tmp_path, reentrant):
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    on, off = (
        trainer_for(tmp_path, shared_dataset(), gradient_checkpointing=flag, max_steps=3, learning_rate=1e-3, **extra)
        for flag, extra in ((True, kwargs), (False, {}))
    )
    for trainer in (on, off):
        trainer.train()
    assert largest_difference(on.model.state_dict(), off.model.state_dict()) <= 1e-6


def test_the_model_generates_as_before_and_saves_no_trace(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        before = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    attention = model.config._attn_implementation
    trainer = trainer_for(tmp_path, shared_dataset(), model=model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.tensor([[1, 2, 3]])).logits, before)
    trainer.train()
    assert model.config._attn_implementation == attention
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
    trainer.save_model(str(tmp_path / "model"))
    assert "dagpack" not in (tmp_path / "model" / "config.json").read_text()
    with packed_attention(model), pytest.raises(MissingVisibilityError, match="ordinary_attention"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_the_logged_loss_is_the_mean_of_the_targets_whatever_a_window_weighs(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(40), max_length=90, per_device_train_batch_size=1, max_steps=6)
    trainer.args.logging_strategy, trainer.args.logging_steps = "steps", 1
    trainer.args.learning_rate = 0.0
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses == pytest.approx([np.log(264)] * 6, rel=0.03)


def test_metrics_are_logged(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset())
    trainer.args.logging_strategy, trainer.args.logging_steps = "steps", 1
    trainer.train()
    first = trainer.state.log_history[0]
    executed = trainer.pack_reports["train"].executed_tokens
    assert first["loss"] == pytest.approx(np.log(264), rel=0.05)
    assert first["num_tokens"] == executed, "an epoch of one step, padding not counted"
    assert 0 <= first["mean_token_accuracy"] <= 1 and first["entropy"] == pytest.approx(np.log(264), rel=0.05)


def test_a_plain_sft_config_is_taken_over(tmp_path):
    trainer = DagSFTTrainer(
        model=tiny_llama(),
        args=SFTConfig(str(tmp_path), max_length=77, report_to=[], bf16=False, use_cpu=True),
        train_dataset=shared_dataset(),
        processing_class=toy_tokenizer(),
    )
    assert isinstance(trainer.args, DagSFTConfig) and trainer.args.max_length == 77


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True},
        {"eval_packing": True},
        {"padding_free": True},
        {"max_length": None},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"packing_scope": "batch", "loss_normalization": "corpus"},
        {"packing_scope": "epoch"},
        {"loss_weighting": "mean"},
        {"loss_normalization": "token"},
        {"overflow": "wrap"},
        {"attn_backend": "flash"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_conflict_are_refused_by_name(tmp_path, options):
    name = "loss_normalization" if len(options) == 2 else next(iter(options))
    with pytest.raises(ValueError, match=name):
        config(tmp_path, **options)


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"])
def test_arguments_that_need_logits_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        DagSFTTrainer(
            model=tiny_llama(), args=config(tmp_path), train_dataset=shared_dataset(), **{name: lambda *_: 0}
        )


def test_images_and_foreign_collators_are_refused(tmp_path):
    with pytest.raises(ValueError, match="images"):
        trainer_for(tmp_path, Dataset.from_dict({"text": ["a"], "images": [["x"]]}))
    with pytest.raises(ValueError, match="DagCollator, got function"):
        trainer_for(tmp_path, shared_dataset(), collator=lambda examples: examples)


def test_models_that_would_be_wrong_are_refused_before_the_data_are_touched(tmp_path):
    with pytest.raises(UnsupportedModelError, match="attention_dropout"):
        trainer_for(tmp_path, "not a data set", model=tiny_llama(attention_dropout=0.1))


# Collator


def test_collator_pads_with_positions_that_see_themselves_only():
    rows, _ = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]}), 3, seed=None, progress=False)
    batch = DagCollator(max_length=8, pad_token_id=9, pad_to_multiple_of=4)(list(rows))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert batch["shift_labels"].tolist() == [[2, 3, -100, -100], [5, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert batch["subtree_end"].tolist() == [[3, 3, 3, 4], [2, 2, 3, 4]]
    assert batch["loss_weight"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["num_tokens"].tolist() == [3, 2]
    assert DagCollator(max_length=8, padding="max_length")(list(rows))["input_ids"].shape == (2, 8)


def test_collator_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"columns input_ids, which are not rows.*pack_dataset"):
        DagCollator(max_length=8)([{"input_ids": [1]}])
    rows, _ = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3]]}), 3, progress=False)
    with pytest.raises(ValueError, match="A row of 3 tokens does not fit max_length=2"):
        DagCollator(max_length=2)(list(rows))
    with pytest.raises(ValueError, match="packing_scope must be"):
        DagCollator(max_length=2, packing_scope="epoch")

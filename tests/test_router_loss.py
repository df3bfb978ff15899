"""The load-balancing loss on packed rows: what ordinary training computes over the same tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import SFTConfig, SFTTrainer

from dagpack_hf import BatchPacker, DagCollator, DagSFTConfig, DagSFTTrainer, pack_dataset, router_loss
from dagpack_hf.router_loss import load_balancing_loss
from dagpack_hf.sequence_counts import sequence_counts
from tests.tiny_models import tiny_model
from tests.toy import shared_dataset, shared_sequences, toy_tokenizer

BATCH = {"packing_scope": "batch", "loss_weighting": "paths", "loss_normalization": "step"}
COEFFICIENT = 0.5


def arguments(kind: type[SFTConfig], tmp_path, **options) -> SFTConfig:
    defaults = {"max_length": 128, "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    defaults |= {"save_strategy": "no", "report_to": [], "bf16": False, "logging_steps": 1, "max_grad_norm": 0.0}
    return kind(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, **{**defaults, **options})


def moe(name: str) -> torch.nn.Module:
    return tiny_model(name, vocab_size=264).train()


def trainer_for(tmp_path, dataset, name="qwen3_moe", **options) -> DagSFTTrainer:
    return DagSFTTrainer(
        model=moe(name),
        args=arguments(DagSFTConfig, tmp_path, **options),
        train_dataset=dataset,
        processing_class=toy_tokenizer(),
    )


# Counting


def paths_of(row) -> list[tuple[int, ...]]:
    """The tokens up to each position of a row, by brute force."""
    ends = row["subtree_end"].tolist()
    return [
        tuple(row["input_ids"][j] for j in range(i + 1) if i < ends[j])
        for i in range(len(ends))
    ]  # fmt: skip


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(8, 20),
    st.integers(0, 3),
)
def test_each_token_of_each_sequence_is_counted_once(sequences, max_length, seed):
    rng = np.random.default_rng(seed)
    labels = [[token if rng.random() < 0.6 else -100 for token in sequence] for sequence in sequences]
    packer = BatchPacker(max_length, loss_weighting="paths")
    rows, _ = packer.pack({"input_ids": sequences, "labels": labels})
    counts = sequence_counts([np.array(sequence) for sequence in sequences], rows)
    expected = Counter(tuple(s[: end + 1]) for s in sequences for end in range(len(s)))
    found: Counter = Counter()
    for row, count in zip(rows, counts, strict=True):
        assert count.dtype == np.float32 and len(count) == len(row["input_ids"])
        for path, number in zip(paths_of(row), count.tolist(), strict=True):
            assert number in (0, expected[path])
            found[path] += int(number)
    assert found == expected


@pytest.mark.parametrize("weighting", ["once", "paths"])
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_the_collator_counts_what_it_packs(overflow, weighting):
    sequences = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3], [1, 5, 6, 7, 8, 9]]
    collator = DagCollator(5, loss_weighting=weighting, packing_scope="batch", overflow=overflow, count_sequences=True)
    batch = collator([{"input_ids": sequence} for sequence in sequences])
    count = batch["sequence_count"]
    assert count.dtype == torch.float32 and count.shape == batch["input_ids"].shape
    kept = [s[:5] for s in sequences if overflow == "truncate" or len(s) <= 5]
    tokens = [tuple(s[: i + 1]) for s in kept for i in range(len(s))]
    assert count.sum() == (len(tokens) if weighting == "paths" else len(set(tokens)))
    assert count.max() == (len(kept) if weighting == "paths" else 1)


# The loss


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_training_ends_where_sft_trainer_ends(tmp_path, name):
    """Same parameters, and same `aux_loss` in the log; far from where training ends without the loss."""
    data, options = shared_dataset(24), {"router_aux_loss_coef": COEFFICIENT, "gradient_accumulation_steps": 2}
    ours = trainer_for(tmp_path / "dag", data, name, **BATCH, **options)
    theirs = SFTTrainer(
        model=moe(name),
        args=arguments(SFTConfig, tmp_path / "sft", **options),
        train_dataset=data,
        processing_class=toy_tokenizer(),
    )
    without = trainer_for(tmp_path / "no", data, name, **BATCH, **{**options, "router_aux_loss_coef": 0.0})
    for trainer in (ours, theirs, without):
        trainer.train()
    states = [trainer.model.state_dict() for trainer in (ours, theirs, without)]

    def difference(one, other):
        return max((one[key] - other[key]).abs().max().item() for key in one)

    logged = [[e["aux_loss"] for e in trainer.state.log_history if "grad_norm" in e] for trainer in (ours, theirs)]
    assert len(logged[0]) == 6
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert difference(states[0], states[1]) <= 2e-4
    assert difference(states[0], states[2]) > 20 * difference(states[0], states[1])


def test_gradient_is_that_of_the_unpacked_batch(tmp_path):
    """In one step from the same parameters: a bound that no accumulated rounding blurs."""
    sequences, labels = shared_sequences(6)
    trainer = trainer_for(tmp_path, shared_dataset(6), **BATCH, router_aux_loss_coef=COEFFICIENT)
    batch = trainer.data_collator([{"input_ids": s, "labels": x} for s, x in zip(sequences, labels, strict=True)])
    assert batch["sequence_count"].sum() == sum(map(len, sequences)) and batch["sequence_count"].max() == 6
    model = trainer.model
    from dagpack_hf.attention import packed_attention

    with packed_attention(model):
        trainer.compute_loss(model, batch).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    width = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences])
    target = torch.tensor([x + [-100] * (width - len(x)) for x in labels])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
    outputs = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    (loss + COEFFICIENT * outputs.aux_loss).backward()
    for name, gradient in ours.items():
        theirs = dict(model.named_parameters())[name].grad
        assert (gradient - theirs).norm() <= 1e-5 * theirs.norm() + 1e-8, name


def test_a_batch_of_padding_has_no_loss():
    logits = (torch.randn(6, 4, requires_grad=True),)
    config = tiny_model("mixtral").config
    loss = load_balancing_loss(config, logits, torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits[0].grad, torch.zeros(6, 4))


def test_evaluation_is_of_the_targets_only(tmp_path):
    data = shared_dataset(8)
    with_loss, without = (
        DagSFTTrainer(
            model=moe("qwen3_moe"),
            args=arguments(DagSFTConfig, tmp_path, **BATCH, router_aux_loss_coef=coefficient),
            train_dataset=data,
            eval_dataset=data,
            processing_class=toy_tokenizer(),
        )
        for coefficient in (COEFFICIENT, 0.0)
    )
    assert with_loss.evaluate()["eval_loss"] == pytest.approx(without.evaluate()["eval_loss"], rel=1e-6)


# Where it is off


def test_it_is_off_where_rows_do_not_say_how_many_sequences_there_are(tmp_path, caplog, monkeypatch):
    from dagpack_hf import tokenize_conversations

    plain = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
    rows, _ = pack_dataset(plain, 8, progress=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    trees = tokenize_conversations(Dataset.from_dict({"messages": [messages]}), toy_tokenizer())
    for data, options in ((plain, {}), (rows, {}), (trees, BATCH)):
        caplog.clear()
        trainer = trainer_for(tmp_path, data, max_steps=1, **options)
        assert "load-balancing loss of the model (router_aux_loss_coef) is off" in caplog.text
        trainer.train()
        assert not any("aux_loss" in entry for entry in trainer.state.log_history)
        with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.01 .*packing_scope=\"batch\""):
            trainer_for(tmp_path, data, router_aux_loss_coef=0.01, **options)
    caplog.clear()
    trainer_for(tmp_path, plain, **BATCH, router_aux_loss_coef=0.01)
    assert "load-balancing" not in caplog.text
    monkeypatch.setattr(router_loss, "route_of", lambda model: "ready mask")
    trainer_for(tmp_path, plain, **BATCH)
    assert "models that take a ready mask have no room for it" in caplog.text

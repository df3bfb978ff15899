"""The load-balancing loss on packed rows: what ordinary training computes over the same tokens."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset, router_loss, tokenize_conversations
from dagpack_hf.attention import packed_attention
from dagpack_hf.router_loss import load_balancing_loss, wants_router_loss
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


def stacked_gradients(trainer: DagSFTTrainer) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of the whole training set as one batch, and the sum of its sequence counts."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    with packed_attention(trainer.model):
        trainer.compute_loss(trainer.model, batch).backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return found, batch["sequence_count"].sum().item()


def test_rows_packed_beforehand_have_the_gradient_of_the_unpacked_data(tmp_path):
    """In windows so small that ancestors are repeated: those do not count again."""
    sequences, _ = shared_sequences(6)
    options = {"loss_weighting": "paths", "loss_normalization": "step", "max_length": max(map(len, sequences))}
    rows = trainer_for(tmp_path, shared_dataset(6), **options, router_aux_loss_coef=COEFFICIENT)
    assert len(rows.train_dataset) > 1
    ours, counted = stacked_gradients(rows)
    assert counted == sum(map(len, sequences))
    theirs, _ = stacked_gradients(trainer_for(tmp_path, shared_dataset(6), **BATCH, router_aux_loss_coef=COEFFICIENT))
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-8, name
    without, _ = stacked_gradients(trainer_for(tmp_path, shared_dataset(6), **options, router_aux_loss_coef=1e-9))
    router = next(name for name in ours if name.endswith("mlp.gate.weight"))
    assert (ours[router] - without[router]).norm() > 1e-2 * ours[router].norm()


def test_rows_of_sessions_train_with_the_loss(tmp_path):
    """Token trees count their turns; rows that have the column are taken as they are."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    other = [*messages[:3], {"role": "assistant", "content": "c"}]
    trees = tokenize_conversations(Dataset.from_dict({"messages": [messages, other]}), toy_tokenizer())
    rows, _ = pack_dataset(trees, 128, loss_weighting="paths", count_sequences=True, progress=False)
    assert sum(map(sum, rows["sequence_count"])) == sum(trees["logical_tokens"])
    for data, options in ((trees, {}), (rows, {}), (trees, BATCH)):
        trainer = trainer_for(tmp_path, data, max_steps=1, router_aux_loss_coef=COEFFICIENT, **options)
        trainer.train()
        assert trainer.state.log_history[0]["aux_loss"] > 0


# Where it is off


def test_it_is_off_where_rows_do_not_say_how_many_sequences_there_are(tmp_path, caplog, monkeypatch):
    plain = Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 4]]})
    rows, _ = pack_dataset(plain, 8, progress=False)
    tree = {"input_ids": [1, 2, 3], "target_count": [0, 1, 1], "node_length": [3], "node_parent": [-1]}
    unclear = Dataset.from_list([{**tree, "logical_tokens": 5}])
    for data, options in ((rows, {}), (unclear, {}), (unclear, BATCH), (unclear.to_iterable_dataset(), BATCH)):
        caplog.clear()
        trainer = trainer_for(tmp_path, data, max_steps=1, **options)
        assert "load-balancing loss of the model (router_aux_loss_coef) is off" in caplog.text
        assert ("by their targets they have 3 tokens" in caplog.text) == (data is unclear)
        trainer.train()
        assert not any("aux_loss" in entry for entry in trainer.state.log_history)
        with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.01 .*count_sequences=True"):
            trainer_for(tmp_path, data, max_steps=1, router_aux_loss_coef=0.01, **options)
    caplog.clear()
    for options in ({}, BATCH):
        trainer_for(tmp_path, plain, **options, router_aux_loss_coef=0.01)
    assert "load-balancing" not in caplog.text
    monkeypatch.setattr(router_loss, "route_of", lambda model: "ready mask")
    trainer_for(tmp_path, plain, **BATCH)
    assert "the model takes a ready mask, which has no room for it" in caplog.text


def test_a_model_is_known_to_have_the_loss_before_it_is_loaded(tmp_path):
    for name, coefficient, wanted in (
        ("qwen3_moe", None, True),
        ("qwen3_moe", 0.0, False),
        ("qwen3_moe", 0.1, True),
        ("llama", None, False),
        ("llama", 0.1, False),
    ):
        model = moe(name)
        args = arguments(DagSFTConfig, tmp_path, router_aux_loss_coef=coefficient)
        model.save_pretrained(tmp_path / name)
        assert wants_router_loss(model, args) == wants_router_loss(str(tmp_path / name), args) == wanted

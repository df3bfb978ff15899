"""`DagSFTTrainer` beside `SFTTrainer` on models with recurrent layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from dagpack_hf.recurrent.functions import is_stand_in
from dagpack_hf.recurrent.modules import recurrent_modules
from tests.shrunk_models import VOCABULARY, tiny_causal_model
from tests.toy import toy_tokenizer

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sequences(count: int = 24) -> Dataset:
    """Sequences of up to 150 tokens; groups share 70 to 110 tokens, so branch points lie in the second cell."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, VOCABULARY, 70).tolist()
    middles = [rng.integers(3, VOCABULARY, 40).tolist() for _ in range(3)]
    found = []
    for index in range(count):
        head = trunk + middles[index % 3][: 20 * (1 + index % 2)]
        found.append(head + rng.integers(3, VOCABULARY, 1 + int(rng.integers(0, 40))).tolist())
    return Dataset.from_dict({"input_ids": found, "labels": found})


def trained(tmp_path, kind: str, model_type: str, steps: int = 20, **options):
    arguments = {
        "output_dir": str(tmp_path / kind),
        "max_length": 512 if kind == "dag" else 256,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "per_device_train_batch_size": 3,
        "router_aux_loss_coef": 0.0,
        "gradient_checkpointing": options.pop("gradient_checkpointing", False),
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    ours = {"packing_scope": "batch", "loss_weighting": "paths", "loss_normalization": "step"}
    trainer_class, args = (
        (DagSFTTrainer, DagSFTConfig(**arguments, **ours)) if kind == "dag" else (SFTTrainer, SFTConfig(**arguments))
    )
    torch.manual_seed(0)
    model = tiny_causal_model(model_type, torch.float32, vocab_size=264, **TWO_LAYERS)
    trainer = trainer_class(model, args, train_dataset=sequences(), processing_class=toy_tokenizer(), **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer, before, after


@pytest.mark.parametrize("batch_size", [1, 3])
def test_eval_loss_is_that_of_the_sequences(tmp_path, batch_size):
    """Rows are packed as a whole and filled up with rows of padding only, which are a batch of their own or in one."""
    data = sequences(10)
    model = tiny_causal_model("granitemoehybrid", torch.float32, vocab_size=264, **TWO_LAYERS)
    args = DagSFTConfig(
        str(tmp_path),
        max_length=256,
        per_device_eval_batch_size=batch_size,
        router_aux_loss_coef=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DagSFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=toy_tokenizer())
    metrics = trainer.evaluate()
    assert len(trainer.eval_dataset) % batch_size == 0
    if batch_size > 1:
        assert any(not row["input_ids"] for row in trainer.eval_dataset)
    total = count = 0.0
    with torch.no_grad():
        for sequence in data["input_ids"]:
            logits = trainer.model(input_ids=torch.tensor([sequence])).logits[0, :-1]
            total += F.cross_entropy(logits, torch.tensor(sequence[1:]), reduction="sum").item()
            count += len(sequence) - 1
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def largest(a, b) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "granitemoehybrid"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("peft_config", [None, LORA], ids=["all weights", "lora"])
def test_twenty_steps_end_where_sft_trainer_ends(tmp_path, model_type, checkpointing, peft_config):
    options = {"gradient_checkpointing": checkpointing, "peft_config": peft_config}
    ours, before, after = trained(tmp_path, "dag", model_type, **options)
    theirs, _, expected = trained(tmp_path, "sft", model_type, **options)
    assert largest(before, after) > 1e-3, "training moves the parameters"
    assert largest(after, expected) <= 1e-5
    assert ours._total_train_tokens < 0.6 * theirs._total_train_tokens, "shared tokens are computed once"
    for module in recurrent_modules(ours.model):
        assert not any(is_stand_in(module.namespace[name]) for name in module.functions)

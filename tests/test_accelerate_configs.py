"""The configurations of `recipes/accelerate`, as far as a machine without accelerators and DeepSpeed can tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from dagpack_hf import DagSFTConfig, DagSFTTrainer, trainer
from dagpack_hf.refusals import warn_if_unsharded
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer

FOLDER = Path(__file__).parents[1] / "recipes" / "accelerate"
EXPECTED = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    },
}


def test_each_configuration_has_a_test():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_the_configuration(name):
    """Unknown keys are refused by accelerate; what its launcher makes of the known ones is what the trainer gets."""
    path = str(FOLDER / f"{name}.yaml")
    config = load_config_from_file(path)
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
    args, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", path, "--main_process_port", "0", "train.py"])
    )
    args.deepspeed_fields_from_accelerate_config = ",".join(getattr(config, "deepspeed_config", None) or {})
    prepare = prepare_deepspeed_cmd_env if args.use_deepspeed else prepare_multi_gpu_env
    made = prepare(args)
    environment = made[1] if isinstance(made, tuple) else made
    assert {key: environment.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    assert (args.use_fsdp, args.use_deepspeed) == (name == "fsdp2", name.startswith("zero"))


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_fills_in_the_arguments_of_the_trainer(tmp_path, stage):
    """The `auto` values that accelerate writes for these configurations."""
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed; what it makes of the arguments is not checked"
    )
    written = yaml.safe_load((FOLDER / f"zero{stage}.yaml").read_text())["deepspeed_config"]
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": written["zero_stage"]},
        "bf16": {"enabled": "auto"},
    }
    args = DagSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, per_device_train_batch_size=3,
        gradient_accumulation_steps=4, max_grad_norm=0.7, report_to=[],
    )  # fmt: skip
    config = HfTrainerDeepSpeedConfig(auto)
    config.trainer_config_process(args)
    assert not config.mismatches and config.is_zero3() == (stage == 3) and config.is_zero2() == (stage == 2)
    assert config.config["train_micro_batch_size_per_gpu"] == 3 and config.config["gradient_accumulation_steps"] == 4
    assert config.config["gradient_clipping"] == 0.7 and config.config["bf16"]["enabled"] is True


def trainer_for(tmp_path, **options) -> DagSFTTrainer:
    args = DagSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=128, report_to=[], **options)
    return DagSFTTrainer(
        model=tiny_llama(), args=args, train_dataset=shared_dataset(), processing_class=toy_tokenizer()
    )


@pytest.mark.parametrize(
    ("fsdp", "processes", "is_on", "said"),
    [(True, 2, False, True), (True, 2, True, False), (None, 2, False, False), (True, 1, False, False)],
)
def test_that_nothing_is_sharded_is_said(caplog, fsdp, processes, is_on, said):
    args = SimpleNamespace(fsdp=fsdp, world_size=processes, device=torch.device("cpu"))
    warn_if_unsharded(args, is_on)
    assert ("FSDP is not used: accelerate shards on accelerators only, not on cpu" in caplog.text) == said


def test_partitioned_parameters_are_not_probed_and_that_is_said(tmp_path, monkeypatch, caplog):
    probed = []
    monkeypatch.setattr(trainer.attention, "probe", lambda *args: probed.append(args))
    trainer_for(tmp_path)
    assert len(probed) == 1 and "not probed" not in caplog.text
    monkeypatch.setattr(trainer, "is_deepspeed_zero3_enabled", lambda: True)
    trainer_for(tmp_path)
    assert len(probed) == 1
    assert "The parameters are partitioned (ZeRO-3), so the packed attention is not probed at start" in caplog.text

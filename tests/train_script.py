"""Trains a tiny model and saves its parameters; run as a program by `test_trainer.py`, alone or under torchrun.

python -m tests.train_script OUT.pt OUTPUT_DIR '{"trainer": "dag", ...}'
"""

import json
import os
import signal
import sys

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer


class Killer(TrainerCallback):
    """Ends the process at once after a step, as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def shard_on_cpu() -> None:
    """Make accelerate use FSDP on CPUs, where it knows plain data parallelism only; torch itself has it there."""
    prepare = AcceleratorState.__init__

    def with_fsdp(state, *args, fsdp_plugin=None, **kwargs):
        prepare(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = state.distributed_type

    AcceleratorState.__init__ = with_fsdp


class Progress(TrainerCallback):
    """Writes the step to a file, for the test that kills the process."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_step_end(self, args, state, control, **kwargs):
        with open(self.path, "w") as file:
            file.write(str(state.global_step))


def make_trainer(
    output_dir: str,
    trainer: str = "dag",
    kill_at: int | None = None,
    kill_saving_at: int | None = None,
    progress: str | None = None,
    examples: int = 50,
    **options,
):
    defaults = {
        "output_dir": output_dir,
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_length": 128,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    trainer_class, config_class = {"dag": (DagSFTTrainer, DagSFTConfig), "sft": (SFTTrainer, SFTConfig)}[trainer]
    made = trainer_class(
        model=tiny_llama(),
        args=config_class(**{**defaults, **options}),
        train_dataset=shared_dataset(examples),
        processing_class=toy_tokenizer(),
        callbacks=[*([Killer(kill_at)] if kill_at else []), *([Progress(progress)] if progress else [])],
    )
    if kill_saving_at:
        save = made._save_rng_state

        def save_or_die(folder: str) -> None:
            if made.state.global_step == kill_saving_at:
                os.kill(os.getpid(), signal.SIGKILL)
            save(folder)

        made._save_rng_state = save_or_die
    return made


def main(out: str, output_dir: str, options: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(options)
    resume = settings.pop("resume", False)
    if "fsdp" in settings:
        shard_on_cpu()
    examples = settings.pop("evaluate", 0)
    trainer = make_trainer(output_dir, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = trainer.evaluate(shared_dataset(examples, seed=3)) if examples else {}
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # gathers what is sharded
    if trainer.accelerator.is_main_process:
        wrapped = type(trainer.model_wrapped).__name__
        log = trainer.state.log_history
        torch.save(
            {"state": state, "world": trainer.args.world_size, "model": wrapped, "log": log, "eval": evaluated}, out
        )
    trainer.accelerator.wait_for_everyone()
    trainer.end()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the model apart can deadlock: gloo's threads want the interpreter's lock while the process group, whose
    # end waits for them, is destroyed under it.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

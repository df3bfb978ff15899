"""Trains a tiny model and saves its parameters; run as a program by `test_trainer.py`, alone or under torchrun.

python -m tests.train_script OUT.pt OUTPUT_DIR '{"trainer": "dag", ...}'
"""

import json
import os
import signal
import sys

import torch
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


def make_trainer(output_dir: str, trainer: str = "dag", kill_at: int | None = None, examples: int = 50, **options):
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
    return trainer_class(
        model=tiny_llama(),
        args=config_class(**{**defaults, **options}),
        train_dataset=shared_dataset(examples),
        processing_class=toy_tokenizer(),
        callbacks=[Killer(kill_at)] if kill_at else None,
    )


def main(out: str, output_dir: str, options: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(options)
    resume = settings.pop("resume", False)
    trainer = make_trainer(output_dir, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    if trainer.accelerator.is_main_process:
        torch.save({"state": trainer.model.state_dict(), "world": trainer.args.world_size}, out)
    trainer.accelerator.wait_for_everyone()
    trainer.end()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the model apart can deadlock: gloo's threads want the interpreter's lock while the process group, whose
    # end waits for them, is destroyed under it.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

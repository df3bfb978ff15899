"""Which windows each process gets under many ways of loading; run under torchrun by `test_distributed.py`.

python -m tests.distributed_script OUT.json '{"name": {options}, ...}'
"""

import json
import os
import sys

import torch
from accelerate.utils import gather_object

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer

DEFAULTS = {"max_length": 90, "per_device_train_batch_size": 1, "save_strategy": "no", "report_to": [], "bf16": False}


def epochs_of(output_dir: str, options: dict) -> list:
    """For each epoch, process and batch the windows by their token ids, and their attention pairs."""
    trainer = DagSFTTrainer(
        model=tiny_llama(),
        args=DagSFTConfig(output_dir=output_dir, use_cpu=True, disable_tqdm=True, **{**DEFAULTS, **options}),
        train_dataset=shared_dataset(60),
        processing_class=toy_tokenizer(),
    )
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = [
            [
                [ids[:length].tolist(), int((depths[:length] + 1).sum())]
                for ids, depths, length in zip(
                    batch["input_ids"], batch["position_ids"], batch["num_tokens"].tolist(), strict=True
                )
            ]
            for batch in loader
        ]
        epochs.append(gather_object([batches]))
    weight_of_a_step = [trainer._corpus_normalizer(), trainer._total_weight]
    return [len(trainer.train_dataset), trainer.pack_reports["train"].windows, epochs, weight_of_a_step]


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    found = {name: epochs_of(out + ".dir", options) for name, options in json.loads(settings).items()}
    if os.environ["RANK"] == "0":
        with open(out, "w") as file:
            json.dump(found, file)
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see train_script


if __name__ == "__main__":
    main(*sys.argv[1:])

r"""Fine-tune a model on your own pi coding-agent sessions.

On one GPU:

    python recipes/sft_pi.py --config recipes/one_gpu.yaml

`recipes/` has such a file for several GPUs (`ddp.yaml`, `fsdp2.yaml`, `zero3.yaml`), for LoRA (`lora.yaml`) and for
QLoRA (`qlora.yaml`); each says in its head the command and the hardware. `--smoke` tries any of them on CPU, on the
bundled sample with a tiny random model.

A try on the bundled sample, with a tiny random model, on CPU and without a download:

    accelerate launch --cpu recipes/sft_pi.py --config recipes/sft_pi_sample.yaml

The line above runs one process; this one runs two:

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 recipes/sft_pi.py --config recipes/sft_pi_sample.yaml
"""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported

from dagpack_hf.recipe import run

if __name__ == "__main__":
    run(examples=__doc__)

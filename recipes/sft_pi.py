r"""Fine-tune a model on your own pi coding-agent sessions.

Full training:

    accelerate launch recipes/sft_pi.py --model_name_or_path Qwen/Qwen3-0.6B --max_length 32768 --output_dir out

LoRA (pip install "dagpack-hf[peft]"):

    accelerate launch recipes/sft_pi.py --model_name_or_path Qwen/Qwen3-8B --use_peft --lora_r 32 --lora_alpha 16 \
        --learning_rate 2e-4 --max_length 65536 --output_dir out

A try on the bundled sample, with a tiny random model, on CPU and without a download:

    accelerate launch --cpu recipes/sft_pi.py --config recipes/sft_pi_sample.yaml

The line above runs one process; this one runs two:

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 recipes/sft_pi.py --config recipes/sft_pi_sample.yaml
"""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported

from dagpack_hf.recipe import make_parser, train  # noqa: E402

if __name__ == "__main__":
    session_args, training_args, model_args = make_parser(examples=__doc__).parse_args_and_config()
    train(session_args, training_args, model_args)

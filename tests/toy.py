"""A toy tokenizer, toy data and small trainers for the tests."""

from __future__ import annotations

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor -%}
<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special tokens; exact for any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(seed: int = 0, vocab_size: int = 264, **options) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        **{**sizes, **options},
    )
    return LlamaForCausalLM(config)


def shared_sequences(count: int = 24, seed: int = 0, vocabulary: int = 200) -> tuple[list[list[int]], list[list[int]]]:
    """Sequences with nested shared prefixes, and labels whose masks differ between sequences that share tokens."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, vocabulary, 40).tolist()
    middles = [rng.integers(0, vocabulary, 15).tolist() for _ in range(3)]
    sequences, labels = [], []
    for index in range(count):
        head = trunk[: 10 * int(rng.integers(1, 5))] + middles[index % 3]
        sequence = head + rng.integers(0, vocabulary, int(rng.integers(1, 25))).tolist()
        masked = int(rng.integers(0, len(head)))
        sequences.append(sequence)
        labels.append([-100] * masked + sequence[masked:])
    return sequences, labels


def shared_dataset(count: int = 24, seed: int = 0) -> Dataset:
    sequences, labels = shared_sequences(count, seed)
    return Dataset.from_dict({"input_ids": sequences, "labels": labels})

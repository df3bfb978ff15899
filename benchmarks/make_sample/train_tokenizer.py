"""Trains the bundled tokenizer on the text of the bundled sessions.

    python benchmarks/make_sample/train_tokenizer.py [--vocab-size 2048] [--folder dagpack_hf/sample]

A byte-level BPE without a normaliser: its alphabet is the 256 bytes, so every text can be encoded and comes back as
it was. The added tokens are those of the chat template `tokenizer/chat_template.jinja`, which is written by hand and
stays as it is. The same sessions give the same bytes (with one version of `tokenizers`); takes about a second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = Path(__file__).parents[2] / "dagpack_hf" / "sample"
END, PAD = "<|end|>", "<|pad|>"
CONTROL_TOKENS = [
    PAD,
    END,
    "<|system|>",
    "<|tools|>",
    "<|user|>",
    "<|assistant|>",
    "<|think|>",
    "<|/think|>",
    "<|call|>",
    "<|tool|>",
]


def message_texts(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of one message as the chat template writes them."""
    yield from (message.get("sections") or {}).values()
    for tool in message.get("toolsAdded", []):
        yield json.dumps({key: tool[key] for key in ("name", "description", "parameters")}, ensure_ascii=False)
    content = message.get("content") or ""
    for part in [{"text": content}] if isinstance(content, str) else content:
        if part.get("type") == "toolCall":
            yield json.dumps({"name": part["name"], "arguments": part["arguments"]}, ensure_ascii=False)
        else:
            yield part.get("thinking") or part["text"]


def session_texts(folder: Path) -> Iterator[str]:
    """Yield all texts that the sessions in `folder` show to a model, those of shared entries once per file."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for entry in map(json.loads, lines):
                yield from message_texts(entry.get("message", {}))
                if "summary" in entry:
                    yield entry["summary"]


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens, the control tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Train, and save beside the chat template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SAMPLE, help="holds `sessions/` and `tokenizer/`")
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()

    folder = args.folder / "tokenizer"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train(session_texts(args.folder / "sessions"), args.vocab_size),
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )
    tokenizer.save_pretrained(folder)
    print(f"{len(tokenizer)} tokens in {folder}")


if __name__ == "__main__":
    main()

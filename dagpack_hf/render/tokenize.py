"""Data sets of conversations into data sets of token trees, in `datasets.map`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from dagpack_hf.conversations import decode_column
from dagpack_hf.render.turn import Message, RenderError, render_turn
from dagpack_hf.trie import IGNORE_INDEX, TokenForest, TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TREE_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "target_count": List(Value("uint16")),
        "node_length": List(Value("int32")),
        "node_parent": List(Value("int32")),
        "logical_tokens": Value("int64"),
    }
)
"""Features of a data set of token trees."""

_REPORT_FEATURES = Features({"turns": Value("int64"), "skipped": Value("string")})


@dataclass(frozen=True)
class RenderReport:
    """Turns that were rendered, and those that were not.

    Args:
        turns: trained turns in the trees.
        skipped: number of skipped turns by reason.
        examples: for each reason, the first turn it happened to.
    """

    turns: int
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.turns:,} turns rendered"]
        lines += [
            f"{n:,} skipped: {reason} (for example {self.examples[reason]})" for reason, n in self.skipped.items()
        ]
        return "\n".join(lines)


def tokenize_conversations(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    on_error: str = "raise",
    num_proc: int | None = None,
    return_report: bool = False,
) -> Dataset | tuple[Dataset, RenderReport]:
    """Render every trained turn of a data set of conversations in its exact context, as token trees.

    Args:
        dataset: conversations: `messages`, optionally `tools`, and optionally `trained` (one bool per message: whether
            that assistant message is a target; without it every assistant message is).
        tokenizer: a fast tokenizer with a chat template.
        chat_template: a template to use instead of the tokenizer's own.
        chat_template_kwargs: further variables of the template, such as `{"enable_thinking": True}`.
        on_error: what to do with a turn that cannot be rendered as at inference: `"raise"`, or `"skip"` (it is
            counted by reason and shown).
        num_proc: processes.
        return_report: also return the `RenderReport`.

    Returns:
        One token tree for each conversation that has a trained turn (columns `input_ids`, `target_count`,
        `node_length`, `node_parent`, `logical_tokens`), and the report if asked for.

    Raises:
        ValueError: the columns are not those of conversations, or an option is unknown.
        RenderError: a turn cannot be rendered and `on_error` is `"raise"`.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
    if "messages" not in dataset.column_names:
        raise ValueError(
            f"Rendering needs a messages column; the data set has {', '.join(dataset.column_names) or 'none'}. Data "
            "that is not conversational needs no rendering: tokenise it and give it to pack_dataset."
        )
    columns = [name for name in ("messages", "tools", "trained") if name in dataset.column_names]
    rendered = (
        dataset.select_columns(columns)
        .with_format("arrow")
        .map(
            _render_batch,
            batched=True,
            batch_size=16,
            with_indices=True,
            num_proc=num_proc,
            remove_columns=columns,
            features=Features({**TREE_FEATURES, **_REPORT_FEATURES}),
            fn_kwargs={
                "tokenizer": tokenizer,
                "on_error": on_error,
                "options": {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs},
            },
            desc="Rendering conversations",
        )
    )
    rendered = rendered.with_format(None)
    report = _report(rendered)
    if report.skipped:
        logger.warning("%s", report)
    filled = np.flatnonzero(np.asarray(rendered["turns"]) > 0)
    trees = rendered.select_columns(list(TREE_FEATURES))
    if len(filled) < len(trees):
        trees = trees.select(filled)
    return (trees, report) if return_report else trees


def sequences_to_tree(sequences: list[list[int]], labels: list[list[int]]) -> TokenTree:
    """Merge the sequences of one conversation into a token tree.

    Raises:
        ValueError: more than 65,535 of the sequences share a target.
    """
    forest = TokenForest.from_sequences(sequences, labels)
    if forest.target_count.max(initial=0) > np.iinfo(np.uint16).max:
        raise ValueError(
            f"{forest.target_count.max()} sequences of one conversation share a target; a token tree counts up to "
            f"{np.iinfo(np.uint16).max}. Split the conversation."
        )
    last = forest.start + forest.length - 1
    return TokenTree(
        input_ids=forest.tokens,
        target_count=forest.target_count.astype(np.uint16),
        node_length=forest.length,
        node_parent=np.where(forest.parent < 0, -1, last[forest.parent] if forest.num_nodes else -1).astype(np.int32),
        logical_tokens=forest.logical_tokens,
    )


def _render_batch(
    table: pa.Table, indices: list[int], tokenizer: PreTrainedTokenizerBase, on_error: str, options: dict[str, Any]
) -> dict[str, list[Any]]:
    messages = decode_column(table["messages"])
    size = len(messages)
    tools = decode_column(table["tools"]) if "tools" in table.column_names else [None] * size
    trained = table["trained"].to_pylist() if "trained" in table.column_names else [None] * size
    out: dict[str, list[Any]] = {name: [] for name in (*TREE_FEATURES, *_REPORT_FEATURES)}
    for index, chat, schemas, targets in zip(indices, messages, tools, trained, strict=True):
        sequences, labels, skipped = _render_conversation(tokenizer, index, chat, schemas, targets, on_error, options)
        tree = sequences_to_tree(sequences, labels)
        for name in TREE_FEATURES:
            out[name].append(getattr(tree, name))
        out["turns"].append(len(sequences))
        out["skipped"].append(json.dumps(skipped))
    return out


def _render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    trained: list[bool] | None,
    on_error: str,
    options: dict[str, Any],
) -> tuple[list[list[int]], list[list[int]], list[tuple[str, str]]]:
    """Sequences and labels of the trained turns; reason and place of those that failed."""
    if trained is None:
        trained = [message["role"] == "assistant" for message in messages]
    if len(trained) != len(messages):
        raise ValueError(
            f"Conversation {index}: {len(messages)} messages but {len(trained)} values in `trained`; they must be "
            "aligned."
        )
    sequences, labels, skipped = [], [], []
    for turn in np.flatnonzero(trained).tolist():
        try:
            tokens = render_turn(tokenizer, messages, turn, tools=tools, **options)
        except RenderError as error:
            place = f"conversation {index}, message {turn}"
            if on_error == "raise":
                message = f'{error.detail} ({place}; on_error="skip" leaves such turns out and counts them)'
                raise RenderError(error.reason, message) from error
            skipped.append((error.reason, f"{place}: {error.detail}"))
            continue
        sequences.append(tokens.context_ids + tokens.target_ids)
        labels.append([IGNORE_INDEX] * len(tokens.context_ids) + tokens.target_ids)
    return sequences, labels, skipped


def _report(rendered: Dataset) -> RenderReport:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for text in rendered["skipped"]:
        for reason, example in json.loads(text):
            counts[reason] += 1
            examples.setdefault(reason, example)
    return RenderReport(sum(rendered["turns"]), dict(counts), examples)

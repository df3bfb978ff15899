"""Data sets of conversations into data sets of token trees.

Design. One function for `datasets.map`, in one process or several, and for streams: it reads the conversational
columns in whatever form they have, renders row by row and writes one token tree for each row, with the counts of what
happened beside it. The result of a run is cached by `datasets` under a fingerprint made of the data, the tokenizer,
the template and the options.

Cost. That of `conversation`, and one copy of the trees into Arrow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from dagpack_hf.code_digest import TRIE, code_digest
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.options import RenderOptions, template_source
from dagpack_hf.render.progress import TurnProgress, count_turn
from dagpack_hf.render.report import RenderReport
from dagpack_hf.render.rows import conversation_columns, conversation_rows, from_json, messages_of, weights_of

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

_WEIGHT_FEATURES = Features({"target_weight": List(Value("float32"))})
_COUNT_FEATURES = Features({"counts": Value("string")})
_BATCH_SIZE = 16
_COUNTERS = ("skipped", "variables", "context_losses")


def tokenize_conversations(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str = "original",
    chat_template_kwargs: dict[str, Any] | None = None,
    thinking: str = "keep",
    loss_on_thinking: bool = True,
    loss_roles: Sequence[str] = ("assistant",),
    control_tokens: str = "keep",
    date: str | None = None,
    windows: bool = True,
    on_error: str = "raise",
    num_proc: int | None = None,
    load_from_cache_file: bool | None = None,
    return_report: bool = False,
) -> Any:
    """Render every trained turn of a data set of conversations in its exact context, as token trees.

    Args:
        dataset: conversations: `messages`, or `prompt` and `completion` (of which the completion is trained), or
            `conversations`; optionally `tools`, `trained` (one bool per message: whether that message is a target;
            without it all are whose role is in `loss_roles`), `weights` (one float per message: how much the turn
            counts), `chat_template_kwargs` (further variables of the template) and `timestamp` (ISO 8601, the date
            that the template shows). A stream gives a stream.
        tokenizer: a tokenizer with a chat template.
        template: the chat template: `"original"` (the tokenizer's own, as a server uses it), `"training"` (TRL's
            variant of it that keeps earlier turns as they were), the path of a file, or the text of a template.
        chat_template_kwargs: further variables of the template, such as `{"enable_thinking": True}`. A variable that
            switches thinking is else chosen for each turn: on where the turn has thinking, off where it has none.
        thinking: `"keep"`, or `"drop"` to leave the thinking out of all messages.
        loss_on_thinking: whether the thinking of a turn is trained. If not it is context.
        loss_roles: roles whose messages are trained.
        control_tokens: what becomes of control tokens in plain text: `"keep"` (what a server makes of them) or
            `"neutralize"` (ordinary tokens of the same characters).
        date: ISO 8601 date that the template shows, if it shows one; by default each row's `timestamp`, or today.
        windows: whether contexts may be rendered in windows where the template allows it. The result is the same.
        on_error: what to do with a turn that cannot be rendered as at inference: `"raise"`, or `"skip"` (it is counted
            by reason and shown).
        num_proc: processes; not for streams.
        load_from_cache_file: whether to take the result of an earlier run; by default as `datasets` does.
        return_report: also return the `RenderReport`. That of a stream fills as the stream is read.

    Returns:
        One token tree for each conversation that has a trained turn (columns `input_ids`, `target_count`,
        `node_length`, `node_parent`, `logical_tokens`, and `target_weight` if there are `weights`), and the report if
        asked for.

    Raises:
        ValueError: the columns are not those of conversations, or an option is unknown.
        RenderError: a turn cannot be rendered and `on_error` is `"raise"`.
    """
    options = RenderOptions(
        template=template,
        chat_template_kwargs=chat_template_kwargs or {},
        thinking=thinking,
        loss_on_thinking=loss_on_thinking,
        loss_roles=loss_roles,
        control_tokens=control_tokens,
        date=date,
        windows=windows,
        on_error=on_error,
    )
    columns = conversation_columns(dataset)
    if not columns:
        raise ValueError(
            f"Rendering needs a messages column; the data set has {', '.join(dataset.column_names or ()) or 'none'}. "
            "Data that is not conversational needs no rendering: tokenise it and give it to pack_dataset."
        )
    make_trees = ConversationTokenizer(tokenizer, options, weighted="weights" in columns)
    if isinstance(dataset, IterableDataset):
        as_arrow = dataset.features is not None
        stream = (dataset.with_format("arrow") if as_arrow else dataset).map(
            make_trees.stream,
            batched=True,
            batch_size=_BATCH_SIZE,
            remove_columns=dataset.column_names,
            features=make_trees.features,
        )
        stream = stream.with_format(None) if as_arrow else stream
        return (stream, make_trees.report) if return_report else stream
    trees, report = _map(dataset, columns, make_trees, num_proc, load_from_cache_file)
    if report.skipped or report.fallbacks or report.context_losses or report.control_tokens:
        logger.warning("%s", report)
    return (trees, report) if return_report else trees


class ConversationTokenizer:
    """Batches of conversations to token trees, for `datasets.map(..., batched=True)`.

    Args:
        tokenizer: a tokenizer with a chat template.
        options: what to render.
        weighted: whether the trees carry weights.

    Attributes:
        report: what happened to the conversations of streams so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: RenderOptions, *, weighted: bool = False) -> None:
        self.renderer = ConversationRenderer(tokenizer, options)
        self.weighted = weighted
        self.report = RenderReport()

    @property
    def features(self) -> Features:
        """Features of the trees."""
        return Features({**TREE_FEATURES, **(_WEIGHT_FEATURES if self.weighted else {})})

    def fingerprint(self, dataset: Dataset) -> str:
        """Fingerprint of the trees of a data set: the same for the same data, tokenizer, template and options."""
        tokenizer, options = self.renderer.tokenizer, self.renderer.options
        sources = [template_source(tokenizer, options.template, has_tools) for has_tools in (False, True)]
        return Hasher.hash(
            [
                code_digest("render", *TRIE),
                dataset._fingerprint,
                self.renderer.encoder.fingerprint(),
                sorted(tokenizer.special_tokens_map.items()),
                sources,
                sorted(asdict(options).items()),
                self.weighted,
            ]
        )

    def table(self, table: pa.Table, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Token trees of an Arrow table, and the counts of each conversation as JSON."""
        out: dict[str, list[Any]] = {name: [] for name in (*self.features, *_COUNT_FEATURES)}
        for index, row in zip(indices, conversation_rows(table), strict=True):
            tree, counts = self._render(row, f"conversation {index}, ")
            for name in self.features:
                out[name].append(getattr(tree, name))
            out["counts"].append(json.dumps(counts))
        return out

    def stream(self, batch: pa.Table | Mapping[str, list[Any]]) -> Any:
        """Token trees of a batch of a stream; conversations without a rendered turn are left out.

        Returns:
            A table for a table, else a dictionary of lists.
        """
        out: dict[str, list[Any]] = {name: [] for name in self.features}
        for row in conversation_rows(batch):
            tree, counts = self._render(row, "")
            self.report.add(counts)
            if counts["turns"]:
                for name in self.features:
                    out[name].append(getattr(tree, name))
        if not isinstance(batch, pa.Table):
            return out
        return pa.table(out, schema=self.features.arrow_schema)

    def _render(self, row: dict[str, Any], place: str) -> tuple[Any, dict[str, Any]]:
        messages, trained = messages_of(row)
        tools = from_json(row.get("tools"))
        weights = weights_of(row, len(messages), place) if self.weighted else None
        tokens, counts = self.renderer.render(
            messages,
            tools or None,
            trained,
            variables=from_json(row.get("chat_template_kwargs")),
            timestamp=row.get("timestamp"),
            place=place,
            progress=count_turn,
        )
        found = asdict(counts) | {name: dict(getattr(counts, name)) for name in _COUNTERS}
        found["templates"] = [str(self.renderer.facts(bool(tools)))]
        return tokens.tree(None if weights is None else [weights[turn.index] for turn in tokens.turns]), found


def _map(
    dataset: Dataset,
    columns: list[str],
    make_trees: ConversationTokenizer,
    num_proc: int | None,
    load_from_cache_file: bool | None,
) -> tuple[Dataset, RenderReport]:
    with TurnProgress(_number_of_turns(dataset, make_trees.renderer.options)):
        rendered = (
            dataset.select_columns(columns)
            .with_format("arrow")
            .map(
                make_trees.table,
                batched=True,
                batch_size=_BATCH_SIZE,
                with_indices=True,
                num_proc=num_proc,
                remove_columns=columns,
                features=Features({**make_trees.features, **_COUNT_FEATURES}),
                load_from_cache_file=load_from_cache_file,
                new_fingerprint=make_trees.fingerprint(dataset),
                desc="Rendering conversations",
            )
            .with_format(None)
        )
    report = RenderReport()
    turns = []
    for text in rendered["counts"]:
        counts = json.loads(text)
        report.add(counts)
        turns.append(counts["turns"])
    trees = rendered.select_columns(list(make_trees.features))
    filled = np.flatnonzero(np.asarray(turns) > 0)
    return trees.select(filled) if len(filled) < len(trees) else trees, report


def _number_of_turns(dataset: Dataset, options: RenderOptions) -> int | None:
    """Turns that will be rendered, if it takes no reading of messages to know."""
    if "trained" not in dataset.column_names or options.loss_roles != ("assistant",):
        return None
    flags = dataset.select_columns(["trained"]).with_format("arrow")[:]["trained"].combine_chunks()
    return int(np.count_nonzero(flags.values.to_numpy(zero_copy_only=False))) if len(flags) else 0

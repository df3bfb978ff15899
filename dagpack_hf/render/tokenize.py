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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from dagpack_hf.conversations import decode_column, loads
from dagpack_hf.render.conversation import ConversationRenderer, RenderCounts
from dagpack_hf.render.options import RenderOptions, template_source
from dagpack_hf.render.progress import TurnProgress, count_turn
from dagpack_hf.render.template import Message

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
_COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "tools",
    "trained",
    "weights",
    "chat_template_kwargs",
    "timestamp",
)
_PLAIN = ("trained", "weights", "timestamp")
_BATCH_SIZE = 16
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass
class RenderReport:
    """Turns that were rendered, and those that were not.

    Attributes:
        turns: trained turns in the trees.
        skipped: number of skipped turns by reason.
        examples: for each reason, the first turn it happened to.
        templates: verdict on each chat template that was used: exact, exact with named losses, or refused.
        variables: number of turns by the template's variables that were chosen for them.
        context_losses: number of turns by what the template leaves out of their context.
        control_tokens: control tokens that occur in plain text.
        windowed: contexts that were rendered in windows.
        checked: of those the ones that were compared with the full rendering.
        fallbacks: conversations that were rendered in full because that comparison failed.
    """

    turns: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    templates: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)
    context_losses: dict[str, int] = field(default_factory=dict)
    control_tokens: int = 0
    windowed: int = 0
    checked: int = 0
    fallbacks: int = 0

    def __str__(self) -> str:
        lines = [f"{self.turns:,} turns rendered"]
        lines += [
            f"{n:,} skipped: {reason} (for example {self.examples[reason]})" for reason, n in self.skipped.items()
        ]
        lines += [f"chat template: {verdict}" for verdict in self.templates if verdict != "exact"]
        lines += [f"{n:,} with {variable}" for variable, n in sorted(self.variables.items())]
        lines += [
            f"{n:,} in a context of which the template leaves out: {part}"
            for part, n in sorted(self.context_losses.items())
        ]
        if self.control_tokens:
            lines.append(
                f"{self.control_tokens:,} control tokens in plain text, as a server takes them "
                '(control_tokens="neutralize" makes text of them)'
            )
        if self.fallbacks:
            lines.append(f"{self.fallbacks:,} conversations rendered in full: windows did not give the same text")
        return "\n  ".join(lines)

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of one conversation."""
        for each in fields(RenderCounts):
            value = counts[each.name]
            if each.name == "examples":
                for reason, example in value.items():
                    self.examples.setdefault(reason, example)
            elif isinstance(value, Mapping):
                mine = getattr(self, each.name)
                for name, number in value.items():
                    mine[name] = mine.get(name, 0) + number
            else:
                setattr(self, each.name, getattr(self, each.name) + value)
        for verdict in counts["templates"]:
            if verdict not in self.templates:
                self.templates.append(verdict)


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


def conversation_columns(dataset: Dataset | IterableDataset) -> list[str]:
    """Columns of a data set that make up conversations; none if it holds no conversations that are still to render."""
    names = dataset.column_names or list(next(iter(dataset), ()))
    found = [name for name in _COLUMNS if name in names]
    if "input_ids" in names:
        return []
    if {"messages", "conversations"} & set(found):
        return found
    if not {"prompt", "completion"} <= set(found):
        return []
    # JSON text is left to this package: what decodes it in `datasets` cannot read every integer.
    row = next(iter(dataset.select_columns(["prompt", "completion"]).with_format("arrow")), None)
    if row is None or None in [_json_list(row[name][0].as_py()) for name in ("prompt", "completion")]:
        return []
    return found


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
        backend = getattr(tokenizer, "backend_tokenizer", None)
        sources = [template_source(tokenizer, options.template, has_tools) for has_tools in (False, True)]
        return Hasher.hash(
            [
                _code_digest(),
                dataset._fingerprint,
                Hasher.hash(tokenizer) if backend is None else xxhash.xxh3_128_hexdigest(backend.to_str().encode()),
                sorted(tokenizer.special_tokens_map.items()),
                sources,
                sorted(asdict(options).items()),
                self.weighted,
            ]
        )

    def table(self, table: pa.Table, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Token trees of an Arrow table, and the counts of each conversation as JSON."""
        out: dict[str, list[Any]] = {name: [] for name in (*self.features, *_COUNT_FEATURES)}
        for index, row in zip(indices, _rows(table), strict=True):
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
        for row in _rows(batch):
            tree, counts = self._render(row, "")
            self.report.add(counts)
            if counts["turns"]:
                for name in self.features:
                    out[name].append(getattr(tree, name))
        if not isinstance(batch, pa.Table):
            return out
        return pa.table(out, schema=self.features.arrow_schema)

    def _render(self, row: dict[str, Any], place: str) -> tuple[Any, dict[str, Any]]:
        messages, trained = _messages(row)
        tools = _json(row.get("tools"))
        weights = row.get("weights")
        if weights is not None and len(weights) != len(messages):
            raise ValueError(
                f"{place}{len(messages)} messages but {len(weights)} values in `weights`; they must be aligned."
            )
        tokens, counts = self.renderer.render(
            messages,
            tools or None,
            trained,
            variables=_json(row.get("chat_template_kwargs")),
            timestamp=row.get("timestamp"),
            place=place,
            progress=count_turn,
        )
        found = asdict(counts) | {name: dict(getattr(counts, name)) for name in _COUNTERS}
        found["templates"] = [str(self.renderer.facts(bool(tools)))]
        if not self.weighted:
            return tokens.tree(), found
        return tokens.tree([1.0 if weights is None else weights[turn.index] for turn in tokens.turns]), found


_COUNTERS = ("skipped", "variables", "context_losses")


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


def _rows(batch: pa.Table | Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a batch, JSON text and what Arrow fills in decoded."""
    if isinstance(batch, pa.Table):
        batch = {
            name: batch[name].to_pylist() if name in _PLAIN else decode_column(batch[name])
            for name in batch.column_names
            if name in _COLUMNS
        }
    names = [name for name in _COLUMNS if name in batch]
    for values in zip(*(batch[name] for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def _messages(row: dict[str, Any]) -> tuple[list[Message], list[bool] | None]:
    """Messages of a row in whatever columns they are, and which of them are trained."""
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = _json_list(row["prompt"]), _json_list(row["completion"])
        if prompt is not None and completion is not None:
            return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)
    if row.get("messages") is not None:
        return _json(row["messages"]), row.get("trained")
    return [_chat_message(message) for message in _json(row.get("conversations")) or []], row.get("trained")


def _chat_message(message: dict[str, Any]) -> Message:
    """A message of the form `{"from": ..., "value": ...}` in the form of chat templates."""
    if "from" not in message:
        return message
    role = _SHAREGPT_ROLES.get(message["from"], message["from"])
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **rest}


def _json(value: Any) -> Any:
    return loads(value) if isinstance(value, str) else value


def _json_list(value: Any) -> list[Any] | None:
    """A list, or the JSON text of one; `None` for everything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


@cache
def _code_digest() -> str:
    """Hash of the code that makes trees, so that another version does not take them for its own."""
    digest = xxhash.xxh3_128()
    for path in sorted([*Path(__file__).parent.glob("*.py"), Path(__file__).parents[1] / "trie.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()

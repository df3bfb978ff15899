"""Turns rendered the naive way: the host's template and tokenizer on whole texts, and the stop tokens of families.

Nothing here comes from `dagpack_hf`; `dagpack_hf.render` is compared with it. With G the context and its generation
prompt and F the same with the turn, the turn is C = F[len(G):] up to and including its stop token.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import pre_tokenizers

from tests.real_tokenizers import borrowed_tokenizer, real_tokenizer, trl_template

Message = dict[str, Any]


@dataclass(frozen=True)
class Stop:
    """Stop token behind a text and behind calls, and whether the template writes it when the turn comes last."""

    text: str
    call: str
    written: bool = True

    def of(self, message: Message) -> str:
        return self.call if message.get("tool_calls") else self.text


STOPS = {
    "cohere": Stop("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Stop("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": Stop("<turn|>", "<|tool_response>"),
    "gemma": Stop("<end_of_turn>", "<end_of_turn>"),
    "gemma4": Stop("<turn|>", "<|tool_response>"),
    "glm4moe": Stop("<|user|>", "<|observation|>", written=False),
    "glm4moe_training": Stop("<|user|>", "<|observation|>"),
    "gptoss": Stop("<|return|>", "<|call|>"),
    "lfm2": Stop("<|im_end|>", "<|im_end|>"),
    "llama3": Stop("<|eot_id|>", "<|eot_id|>"),
    "muse": Stop("<|eot|>", "<|eot|>"),
    "nemotron": Stop("<|im_end|>", "<|im_end|>"),
    "phi3": Stop("<|end|>", "<|end|>"),
    "qwen": Stop("<|im_end|>", "<|im_end|>"),
}
"""By the beginning of a template's name, of which the longest counts."""

CONTROL = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "cohere": (
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    "gemma4": (
        "<|turn>",
        "<turn|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        "<|channel>",
        "<channel|>",
        '<|"|>',
        "<|think|>",
    ),
    "glm": (
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "/nothink",  # codespell:ignore nothink
    ),
    "lfm2": (
        "<|startoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|tool_list_start|>",
        "<|tool_list_end|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|tool_response_start|>",
        "<|tool_response_end|>",
    ),
    "muse": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}
"""Control tokens of families whose own tokenizer cannot be had."""

SENTINEL = "An answer of quite another kind."


def stop_of(template: str) -> Stop:
    return STOPS[max((name for name in STOPS if template.startswith(name)), key=len)]


def tokenizer_of(vocabulary: str, added: str | None, template: str) -> Any:
    """A real tokenizer, with control tokens of another family if need be, and a template that comes with TRL.

    `"llama2_first"` is Llama 2 as `legacy=False` loads it: a space comes before the first text only, not before
    each text behind a control token.
    """
    name = vocabulary.removesuffix("_first")
    tokenizer = copy.copy(borrowed_tokenizer(name, *CONTROL[added]) if added else real_tokenizer(name))
    if name != vocabulary:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.normalizer = None
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.chat_template = trl_template(template)
    return tokenizer


@dataclass(frozen=True)
class Conversation:
    """A row of a data set of conversations."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    trained: list[bool]
    timestamp: str

    def without_thinking(self) -> Conversation:
        messages = [{key: m[key] for key in m if key != "reasoning_content"} for m in self.messages]
        return Conversation(messages, self.tools, self.trained, self.timestamp)

    @property
    def targets(self) -> list[int]:
        return [index for index, trained in enumerate(self.trained) if trained]


def conversations(dataset: Any) -> list[Conversation]:
    def value(cell: Any) -> Any:
        return json.loads(cell) if isinstance(cell, str) else cell

    return [
        Conversation(value(row["messages"]), value(row["tools"]) or None, row["trained"], row["timestamp"])
        for row in dataset
    ]


@dataclass(frozen=True)
class NaiveTurn:
    """Context and turn as text; `spliced` if the rendering with the turn does not begin with the context."""

    context: str
    text: str
    variables: dict[str, Any] = field(default_factory=dict)
    spliced: bool = False


class CannotRender(Exception):
    """The template raises, or nothing that could be called the turn comes out."""


@contextmanager
def clock(timestamp: str) -> Iterator[None]:
    """Let the clock of the host's templates show the day of a time stamp."""
    with mock.patch("transformers.utils.chat_template_utils.datetime") as host:
        host.now.return_value = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
        yield


def render(
    tokenizer: Any, messages: Sequence[Message], tools: Any, prompt: bool, variables: dict[str, Any] | None = None
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **(variables or {})
        )
    except Exception as error:
        raise CannotRender(f"{type(error).__name__}: {error}") from error


def naive_turn(tokenizer: Any, stop: Stop, messages: Sequence[Message], turn: int, tools: Any) -> NaiveTurn:
    """Render `messages[turn]` behind the messages before it."""
    before, message = messages[:turn], messages[turn]
    choices: list[dict[str, Any]] = [{}]
    if "enable_thinking" in tokenizer.chat_template:
        choices.insert(0, {"enable_thinking": bool((message.get("reasoning_content") or "").strip())})
    for variables in choices:
        context = render(tokenizer, before, tools, True, variables)
        whole = render(tokenizer, messages[: turn + 1], tools, False, variables)
        if whole.startswith(context):
            break
    spliced = not whole.startswith(context)
    start = _splice(tokenizer, before, message, tools, context, whole, variables) if spliced else len(context)
    text = whole[start:]
    end = stop.of(message)
    if stop.written:
        if end not in text:
            raise CannotRender(f"no {end} in {text[-60:]!r}")
        text = text[: text.rindex(end)]
    return NaiveTurn(context, text + end, variables, spliced)


def _splice(
    tokenizer: Any,
    before: Sequence[Message],
    message: Message,
    tools: Any,
    context: str,
    whole: str,
    variables: dict[str, Any],
) -> int:
    """Where the turn begins in a rendering that changes what came before: where another answer would begin too."""
    bare = render(tokenizer, before, tools, False, variables)
    prompt = context[len(bare) :]
    if not prompt or not context.startswith(bare):
        raise CannotRender("there is no generation prompt to look for")
    other: Message = {"role": "assistant", "content": SENTINEL}
    if message.get("tool_calls"):
        call = {"name": "quite_another", "arguments": {"kind": SENTINEL}}
        other = {**other, "content": "", "tool_calls": [{"id": "another01", "type": "function", "function": call}]}
    another = render(tokenizer, [*before, other], tools, False, variables)
    shared = next((at for at, (a, b) in enumerate(zip(whole, another, strict=False)) if a != b), len(whole))
    at = whole.rfind(prompt, 0, shared)
    if at < 0:
        raise CannotRender("the rendering with the turn has no generation prompt")
    return at + len(prompt)


def lost_parts(text: str, message: Message) -> list[str]:
    """What of a message a rendering of it does not have: text, thinking, names of calls, strings in arguments."""
    lost = []
    content = message.get("content") or ""
    if content.strip() not in text:
        lost.append("text")
    if (message.get("reasoning_content") or "").strip() not in text:
        lost.append("thinking")
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if any(text.count(name) < names.count(name) for name in names):
        lost.append("call")
    for call in message.get("tool_calls") or ():
        if "call" not in lost and not all(_written(value, text) for value in _strings(call["function"]["arguments"])):
            lost.append("call")
    return lost


def _written(value: str, text: str) -> bool:
    """Whether a text has a string as it is, or as a literal of JSON or Python."""
    forms = (
        value.strip(),
        *(text[1:-1] for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))),
    )
    return any(form in text for form in forms)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class NaiveIds:
    """Ids of whole texts, from the tokenizer alone; equal texts are asked for once while `keep` is on."""

    def __init__(self, tokenizer: Any, keep: bool = True) -> None:
        self.tokenizer = tokenizer
        self.keep = keep
        self._known: dict[str, np.ndarray] = {}

    def of(self, texts: Sequence[str]) -> list[np.ndarray]:
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        for at in range(0, len(new), 4):
            batch = new[at : at + 4]
            found = self.tokenizer(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            self._known.update((text, np.array(ids, np.int32)) for text, ids in zip(batch, found, strict=True))
        ids = [self._known[text] for text in texts]
        if not self.keep:
            self._known.clear()
        return ids

    def turns(self, turns: Sequence[NaiveTurn]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of context and turn of each."""
        contexts = self.of([turn.context for turn in turns])
        wholes = self.of([turn.context + turn.text for turn in turns])
        return [
            (context, whole[len(context) :] if _begins(whole, context) else self.continuation(turn.text))
            for turn, context, whole in zip(turns, contexts, wholes, strict=True)
        ]

    def continuation(self, text: str) -> np.ndarray:
        """Ids of a text behind another that it does not join: behind a line break, if that keeps its ids, else alone.

        Tokenizers that put a space before a text would else put one here.
        """
        (alone,) = self.of(["\n"])
        (joined,) = self.of(["\n" + text])
        if not text.startswith("\n") and _begins(joined, alone):
            return joined[len(alone) :]
        (ids,) = self.of([text])
        return ids


def _begins(ids: np.ndarray, start: np.ndarray) -> bool:
    return len(ids) >= len(start) and np.array_equal(ids[: len(start)], start)

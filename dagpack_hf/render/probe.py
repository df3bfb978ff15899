"""What a chat template does, found out by rendering a few small conversations with it.

A template is a program that says nothing about itself. The probe renders texts that occur nowhere else, *sentinels*,
and looks where they arrive: which parts of a turn and of its context are written, which token ends a turn, whether
contexts can be rendered in windows, and whether thinking has a switch. From that follows the verdict: exact, exact
with named losses, or refused.

Cost. Some 500 renderings of up to 60 messages: 0.05 to 0.6 s for each template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dagpack_hf.render.context import WINDOWS, ContextText
from dagpack_hf.render.template import ChatTemplate, Message, RenderError, Tools, prepare_messages

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off."""

_PARTS = {
    "text": (),
    "thinking": (),
    "call": (),
    "text beside a call": ("call",),
    "thinking beside a call": ("call", "thinking"),
    "text and thinking beside a call": ("text beside a call", "thinking beside a call"),
    "parallel calls": ("call",),
}
"""What a turn can consist of, and the parts without which it cannot be written either."""


@dataclass(frozen=True)
class Ending:
    """How a template ends a turn.

    Args:
        stop: text of the stop token.
        rest: what the template writes behind it at the end of a conversation, which nobody samples.
        written: whether the template writes the stop token when the turn comes last. Some do not, and the token that
            opens the next message is the one that the model stops with.
    """

    stop: str
    rest: str = ""
    written: bool = True


@dataclass(frozen=True)
class TemplateFacts:
    """What the probe found.

    Args:
        endings: for a turn with and without tool calls (`True`, `False`) how it ends; no entry if no token ends it.
        turn_losses: parts of a turn that are not written, with the reason; a part that consists of others
            that are not written is left out.
        context_losses: parts of a context that are not written, with the reason.
        parts: whether content can be a list of parts.
        strips_thinking: whether contexts leave out the thinking of earlier turns.
        windows: which windows contexts can be rendered in, `None` for none.
        switch: name of the variable that switches thinking, `None` if there is none.
        refused: why no turn can be rendered at all, in short and in detail, `None` if turns can.
        texts: all that was rendered, in which the template's control tokens occur.
    """

    endings: dict[bool, Ending]
    turn_losses: dict[str, str]
    context_losses: dict[str, str]
    parts: bool
    strips_thinking: bool
    windows: str | None
    switch: str | None
    refused: tuple[str, str] | None
    texts: str

    @property
    def verdict(self) -> str:
        """`"exact"`, `"lossy"` or `"refused"`."""
        if self.refused is not None:
            return "refused"
        return "lossy" if self.turn_losses or self.context_losses else "exact"

    def __str__(self) -> str:
        if self.refused is not None:
            return f"refused: {': '.join(self.refused)}"
        losses = [f"no {part} in turns ({why})" for part, why in self.turn_losses.items()]
        losses += [f"no {part} in contexts ({why})" for part, why in self.context_losses.items()]
        return f"exact, except: {'; '.join(losses)}" if losses else "exact"


def probe_template(template: ChatTemplate, tokens: Sequence[str]) -> TemplateFacts:
    """Find out what a template does.

    Args:
        template: the template.
        tokens: texts of the tokenizer's added tokens, among which are those that end turns.
    """
    texts: list[str] = [template.literals]

    def render(messages: list[Message], tools: Tools = None, prompt: bool = False, **variables: Any) -> str:
        text = template.render(prepare_messages(messages), tools, generation_prompt=prompt, **variables)
        texts.append(text)
        return text

    endings: dict[bool, Ending] = {}
    reasons: dict[bool, RenderError] = {}
    find = _finder(tokens)
    for kind in (False, True):
        try:
            endings[kind] = _ending(render, kind, find)
        except RenderError as error:
            reasons[kind] = error
    switch = next((name for name in SWITCHES if name in template.names), None)
    turn_losses = dict(_losses(render, _turn_probes()))
    context_losses = dict(_losses(render, _context_probes()))
    if True in reasons:
        turn_losses.setdefault("call", str(reasons[True]))
    turn_losses = {
        part: why for part, why in turn_losses.items() if not any(needed in turn_losses for needed in _PARTS[part])
    }
    parts = context_losses.pop("parts of content", None) is None
    refused = (reasons[False].reason, reasons[False].detail) if False in reasons else None
    windows = None
    if refused is None:
        calls = not {"call", "tool result"} & context_losses.keys()
        windows = next((name for name in WINDOWS if _windows_hold(template, name, calls)), None)
    return TemplateFacts(
        endings=endings,
        turn_losses=turn_losses,
        context_losses=context_losses,
        parts=parts,
        strips_thinking=_strips(render),
        windows=windows,
        switch=switch,
        refused=refused,
        texts="\0".join(texts),
    )


Render = Callable[..., str]

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}
_OTHER_TOOL = {"type": "function", "function": {**_TOOL["function"], "name": "other_tool"}}  # type: ignore[dict-item]
_SYSTEM = {"role": "system", "content": "Probesystem"}
_USER = {"role": "user", "content": "Probequestion"}


def _call(value: str, number: int = 1) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": {"probe_key": value}}
    return {"id": f"probecal{number}", "type": "function", "function": function}


def _result(text: str, number: int = 1) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"probecal{number}", "name": "probe_tool"}


def _turn(text: str = "", thinking: str | None = None, *calls: str) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [_call(value, number) for number, value in enumerate(calls, 1)]
    return message


def _finder(tokens: Sequence[str]) -> Callable[[str], list[re.Match[str]]]:
    """Find all added tokens in a text, white space not among them."""
    visible = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    if not visible:
        return lambda text: []
    pattern = re.compile("|".join(map(re.escape, visible)))
    return lambda text: list(pattern.finditer(text))


def _ending(render: Render, with_call: bool, find: Callable[[str], list[re.Match[str]]]) -> Ending:
    """What ends a turn: compare it at the end of a conversation with the same turn in the middle of one."""
    mark = "Probeanswer"
    if with_call:
        turn, follow, tools = _turn("", None, mark), _result("Proberesult"), [_TOOL]
    else:
        turn, follow, tools = _turn(mark), {"role": "user", "content": "Probenext"}, None
    last = _behind(render([_USER, turn], tools), mark)
    try:
        between = _behind(render([_USER, turn, follow], tools), mark)
    except RenderError:
        between = last
    closes_call = _between_calls(render, mark) if with_call else ""
    common = next((i for i, (a, b) in enumerate(zip(last, between, strict=False)) if a != b), None)
    common = min(len(last), len(between)) if common is None else common
    found = [match for match in find(last) if match[0] not in closes_call]
    inside = [match for match in found if match.end() <= common]
    stop = inside[-1] if inside else next(reversed(found), None)
    if stop is not None and not _without(find, last[stop.end() :]).strip():
        return Ending(stop[0], last[stop.end() :])
    follows = find(between[len(last) :]) if between.startswith(last) else []
    if follows and not between[len(last) : len(last) + follows[0].start()].strip():
        return Ending(follows[0][0], last[len(last.rstrip()) :], written=False)
    raise RenderError(
        "the turn does not end on a stop token",
        f"it ends in {last[-20:]!r}. The template must close an assistant message with a token of the tokenizer",
    )


def _without(find: Callable[[str], list[re.Match[str]]], text: str) -> str:
    """A text without its added tokens."""
    for match in reversed(find(text)):
        text = text[: match.start()] + text[match.end() :]
    return text


def _between_calls(render: Render, mark: str) -> str:
    """What stands between two calls of one turn: it closes a call, not the turn."""
    try:
        text = render([_USER, _turn("", None, mark, "Probesecond")], [_TOOL])
    except RenderError:
        return ""
    return text[text.find(mark) : max(text.find("Probesecond"), 0)]


def _behind(text: str, mark: str) -> str:
    """What comes behind the last occurrence of a mark."""
    at = text.rfind(mark)
    if at < 0:
        raise RenderError("the turn is not written", f"{text[-60:]!r} has none of it")
    return text[at + len(mark) :]


def _turn_probes() -> Iterator[tuple[str, list[Message], Tools, list[str]]]:
    for part, turn, expected in (
        ("text", _turn("Probeanswer"), ["Probeanswer"]),
        ("thinking", _turn("Probeanswer", "Probethought"), ["Probeanswer", "Probethought"]),
        ("call", _turn("", None, "Probevalue"), ["probe_tool", "probe_key", "Probevalue"]),
        ("text beside a call", _turn("Probeanswer", None, "Probevalue"), ["Probeanswer", "Probevalue"]),
        ("thinking beside a call", _turn("", "Probethought", "Probevalue"), ["Probethought", "Probevalue"]),
        (
            "text and thinking beside a call",
            _turn("Probeanswer", "Probethought", "Probevalue"),
            ["Probeanswer", "Probethought", "Probevalue"],
        ),
        ("parallel calls", _turn("", None, "Probevalue", "Probesecond"), ["Probevalue", "Probesecond"]),
    ):
        yield part, [_USER, turn], ([_TOOL] if turn.get("tool_calls") else None), expected


def _context_probes() -> Iterator[tuple[str, list[Message], Tools, list[str]]]:
    called = [_USER, _turn("", None, "Probevalue"), _result("Proberesult")]
    both = [_result("Proberesult"), _result("Probeother", 2)]
    last = {"role": "user", "content": "Probenext"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Probequestion"}]}
    yield "system prompt", [_SYSTEM, _USER], None, ["Probesystem", "Probequestion"]
    yield "tools", [_SYSTEM, _USER], [_TOOL], ["probe_tool", "probe_key"]
    yield "text", [_USER, _turn("Probeanswer"), last], None, ["Probequestion", "Probeanswer", "Probenext"]
    yield "call", called, [_TOOL], ["Probevalue"]
    yield "tool result", called, [_TOOL], ["Proberesult"]
    yield (
        "parallel calls",
        [_USER, _turn("", None, "Probevalue", "Probesecond"), *both],
        [_TOOL],
        ["Probevalue", "Probesecond", "Proberesult", "Probeother"],
    )
    yield "parts of content", [parts], None, ["Probequestion"]


def _losses(
    render: Render, probes: Iterator[tuple[str, list[Message], Tools, list[str]]]
) -> Iterator[tuple[str, str]]:
    for part, messages, tools, expected in probes:
        context = messages[-1]["role"] != "assistant"
        try:
            text = render(messages, tools, context)
        except RenderError as error:
            yield part, f"the template raises: {error.detail}"
            continue
        missing = [sentinel for sentinel in expected if sentinel not in text]
        if missing:
            yield part, "the template does not write it"


def _strips(render: Render) -> bool:
    """Whether thinking is written in the turn itself, and not any more once the next user message has come."""
    messages = [_USER, _turn("Probeanswer", "Probethought")]
    try:
        own = render(messages)
        later = render([*messages, {"role": "user", "content": "Probenext"}], None, True)
    except RenderError:
        return False
    return "Probethought" in own and "Probethought" not in later


def _windows_hold(template: ChatTemplate, windows: str, calls: bool) -> bool:
    """Whether every context and turn of synthetic conversations reads the same in windows as in full."""
    used = False
    for messages, tools in _synthetic_conversations(calls):
        prepared = prepare_messages(messages)
        try:
            template.render(prepared, tools)
        except RenderError:
            continue
        windowed = ContextText(template, prepared, tools, windows=windows, calls=calls)
        text = ""
        for end in [end for end, message in enumerate(prepared) if end and message["role"] == "assistant"]:
            try:
                full = template.render(prepared[:end], tools, generation_prompt=True)
                whole = template.render(prepared[: end + 1], tools)
                update = windowed.render(end)
                before, extended = windowed.completion(end, update)
            except RenderError:
                return False
            text = text[: update.keep] + update.text
            if text != full or (extended.startswith(before) and whole != full + extended[len(before) :]):
                return False
            used = used or update.windowed > 0
    return used


def _synthetic_conversations(calls: bool) -> Iterator[tuple[list[Message], Tools]]:
    """Conversations with what can stand in a session. A template that raises on one is not asked about it.

    They have rounds with and without thinking and text, of several tools, some at once, short and long; questions left
    unanswered and asked twice; many questions, and many rounds after one.
    """
    rounds = (0, 3, 14, 1, 2) if calls else (0,) * 5
    for shape in range(4):
        yield _conversation(rounds, shape), ([_TOOL, _OTHER_TOOL] if calls else None)
    if calls:
        yield _conversation((1, 2, 4), 0, parallel=True), [_TOOL, _OTHER_TOOL]
        yield _conversation((1, 3, 2), 0, beside=True), [_TOOL, _OTHER_TOOL]
        yield _conversation((2, 4, 1), 2, beside=True, thinks=False), [_TOOL, _OTHER_TOOL]
        yield _conversation((26, 1), 2, size=40), [_TOOL, _OTHER_TOOL]
    yield _conversation((1 if calls else 0,) * 9, 3, size=60), ([_TOOL] if calls else None)
    yield _conversation((1 if calls else 0,) * 4, 0, system=2), ([_TOOL] if calls else None)


def _conversation(
    rounds: tuple[int, ...],
    shape: int,
    *,
    parallel: bool = False,
    beside: bool = False,
    thinks: bool = True,
    system: int | None = None,
    size: int = 1,
) -> list[Message]:
    """A conversation with as many rounds of tool calls after each question as given.

    Args:
        rounds: rounds of each question.
        shape: varies which turns think, whether there is a system prompt, and what is left unanswered.
        parallel: call two tools at once.
        beside: think and speak beside calls.
        thinks: whether anything is thought.
        system: number of the question that another system message stands before.
        size: repeats thinking and results, to make them long.
    """
    messages: list[Message] = [] if shape == 1 else [_SYSTEM]
    for question, number_of_rounds in enumerate(rounds):
        if question == system:
            messages.append({"role": "system", "content": "From now on, briefly."})
        messages.append({"role": "user", "content": f"Question {question}"})
        if question == 2 and shape != 3:
            messages.append({"role": "user", "content": "And another thing."})
        for number in range(number_of_rounds):
            messages += _round(f"{question} {number}", number + shape, parallel, beside, thinks, size)
        if shape == 2 and question == 1 and number_of_rounds:
            continue  # interrupted after a tool result
        thought = f"Conclusion {question} " * size if thinks and (question + shape) % 2 else None
        messages.append(_turn(f"Answer {question}.", thought))
    return messages


def _round(name: str, number: int, parallel: bool, beside: bool, thinks: bool, size: int) -> list[Message]:
    """A call and its result."""
    thinking = f"Thought {name} " * size if thinks and (number % 3 or beside) else None
    text = f"Look {name}." if beside or (number % 4 == 3 and thinking is None) else ""
    turn = _turn(text, thinking, f"value {name}", *([f"second {name}"] if parallel else []))
    if number % 5 == 4:
        turn["tool_calls"][0]["function"]["name"] = "other_tool"
    result = f"Result {name} " * size if number % 4 else "The same result."
    results = [_result(result), *([_result(f"Other {name}", 2)] if parallel else [])]
    return [turn, *results]

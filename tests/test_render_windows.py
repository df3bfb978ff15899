"""Contexts in windows: as the template renders them in full, at a cost that does not grow; lies are found."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagpack_hf.render import RenderOptions
from dagpack_hf.render.chunks import ChunkTrie
from dagpack_hf.render.conversation import ConversationRenderer, RenderCounts
from dagpack_hf.render.probe import TemplateFacts, probe_template
from dagpack_hf.render.template import ChatTemplate, Message, RenderError, prepare_messages, text_of
from dagpack_hf.render.turn import ConversationText
from tests.toy import toy_tokenizer

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"

FAMILIES = (
    *("qwen3", "qwen3_5_think", "qwen3_8", "qwen2_5", "glm4moe", "nemotron_3_nano", "gptoss", "llama3_1", "gemma4_v2"),
    *("lfm2_2_5", "muse_glimmer", "deepseek_r1_distill", "phi3"),
)
STOPS = (
    *("<|im_end|>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "<turn|>"),
    *("<|tool_response>", "<|eot|>", "<｜end▁of▁sentence｜>"),
)
CUTS = re.compile("|".join(map(re.escape, (*STOPS, "<|im_start|>", "<|start|>", "<|assistant|>", "<|turn>"))))
MARK = "dagpack witness 7c1e"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "Where."}}},
        },
    }
    for name in ("read", "bash")
]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def result(content: Any, number: int = 1) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"abcdefg{number:02}", "name": "read"}


def assistant(content: Any, *paths: str, thinking: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if paths:
        message["tool_calls"] = [
            {
                "id": f"abcdefg{number:02}",
                "type": "function",
                "function": {"name": ("read", "bash")[len(path) % 2], "arguments": {"path": path}},
            }
            for number, path in enumerate(paths, 1)
        ]
    return message


def session(rounds: list[int], *, thinking: bool = True, system: bool = True) -> list[Message]:
    """An agent session with as many rounds of tool calls after each question as given."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    for question, number_of_rounds in enumerate(rounds):
        messages.append(user(f"Question {question}, of old"))
        for number in range(number_of_rounds):
            thought = f"Thought {question} {number}" if thinking and number % 3 != 1 else None
            messages.append(assistant("", f"path {question} {number}", thinking=thought))
            messages.append(result(f"Result {question} {number}"))
        messages.append(assistant(f"Answer {question}", thinking=f"Conclusion {question}" if thinking else None))
    return messages


@cache
def facts_of(source: str) -> tuple[ChatTemplate, TemplateFacts]:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    return template, probe_template(template, STOPS)


def family(stem: str) -> tuple[ChatTemplate, TemplateFacts]:
    return facts_of((FOLDER / f"{stem}.jinja").read_text(encoding="utf-8"))


def rendered(
    template: ChatTemplate, facts: TemplateFacts, messages: list[Message], *, windows: bool
) -> tuple[dict[int, Any], ConversationText]:
    """For each turn its context, its text and the variables chosen for it, or why it is refused."""
    prepared = prepare_messages(messages)
    if not facts.parts:
        prepared = [{**message, "content": text_of(message)} for message in prepared]
    rendering = ConversationText(template, facts, prepared, TOOLS, ChunkTrie(CUTS), windows=windows)
    turns: dict[int, Any] = {}
    targets = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in targets:
        try:
            turn = rendering.turn(index, check=index == targets[-1])
        except RenderError as error:
            turns[index] = error.reason
        else:
            turns[index] = context_of(rendering.trie, turn.context), turn.text, turn.thought, turn.variables
    return turns, rendering


def context_of(trie: ChunkTrie, node: int) -> str:
    pieces = []
    while node >= 0:
        pieces.append(trie.chunks[trie.chunk[node]])
        node = trie.parent[node]
    return "".join(reversed(pieces))


# TRL's templates, any conversation.

texts = st.sampled_from(
    [
        *("Look at it.", "yes", "Thought 1", "", " \n", "é\u2028😀", "look", "seen", "witness", MARK),
        *("<tool_response>\nok\n</tool_response>", "<tool_response>a</tool_response>", "/no_think", "/think go"),
        *("<think>", "</think>", "<think>a</think>\n\nb", "a</think>b", "<|im_end|>", "<|im_start|>user\nhi"),
        *("<|channel|>final<|message|>a<|return|>", "<tool_call>\n{}\n</tool_call>", "[|x|]", "a" * 3000),
    ]
)
contents = st.one_of(
    texts, st.lists(texts, max_size=2).map(lambda items: [{"type": "text", "text": t} for t in items])
)
paths = st.one_of(texts, st.sampled_from(["a", "bb", "src/x.py"]))
thoughts = st.one_of(st.none(), texts)
questions = st.lists(contents.map(user), min_size=1, max_size=2)
answers = st.builds(lambda content, thinking: [assistant(content, thinking=thinking)], contents, thoughts)


def _round(content: Any, called: list[str], thinking: str | None, results: list[Any]) -> list[Message]:
    turn = assistant(content, *called, thinking=thinking)
    return [turn, *(result(content, number) for number, content in enumerate(results, 1))]


plain_rounds = st.builds(
    lambda path, thinking, content: _round("", [path], thinking, [content]), paths, thoughts, texts
)
odd_rounds = st.builds(
    _round, contents, st.lists(paths, min_size=1, max_size=3), thoughts, st.lists(contents, max_size=3)
)
oddities = st.sampled_from(
    [
        [{"role": "system", "content": "From now on, be kind."}],
        [result("no call")],
        [assistant("one"), assistant("two", thinking="Hm.")],
        [assistant("", "interrupted", thinking="Hm.")],
    ]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    rounds = st.one_of(plain_rounds, plain_rounds, plain_rounds, odd_rounds) if draw(st.booleans()) else plain_rounds
    messages = draw(st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]))[:]
    for _ in range(draw(st.integers(1, 4))):
        messages += draw(questions)
        for _ in range(draw(st.sampled_from([0, 1, 2, 5, 14]))):
            messages += draw(rounds)
        messages += draw(st.one_of(answers, answers, answers, st.just([])))
        messages += draw(st.one_of(st.just([]), st.just([]), oddities))
    return messages


@pytest.mark.parametrize("stem", FAMILIES)
def test_windows_render_what_full_rendering_does(stem: str) -> None:
    template, facts = family(stem)
    assert facts.windows == "rounds"
    windowed = []

    @settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(conversations())
    def compare(messages: list[Message]) -> None:
        found, rendering = rendered(template, facts, messages, windows=True)
        expected, naive = rendered(template, facts, messages, windows=False)
        assert found == expected
        assert naive.windowed == naive.checked == 0
        windowed.append(rendering.windowed)

    compare()
    if not {"call", "tool result"} & facts.context_losses.keys():
        assert sum(windowed) > 3


@pytest.mark.parametrize("stem", FAMILIES)
def test_sessions_render_in_windows_as_in_full(stem: str) -> None:
    template, facts = family(stem)
    for rounds, thinking in (([12, 3, 0, 17], True), ([0, 1, 2, 1, 0], False)):
        messages = session(rounds, thinking=thinking)
        found, rendering = rendered(template, facts, messages, windows=True)
        assert found == rendered(template, facts, messages, windows=False)[0]
        if stem in ("qwen3", "glm4moe", "nemotron_3_nano", "qwen2_5"):
            written = sum(not isinstance(turn, str) for turn in found.values())
            assert rendering.windowed > written / 2
            assert 0 < rendering.checked < written / 2


# Cost.


class CountingTemplate(ChatTemplate):
    rendered = 0

    def render(self, messages: Any, *args: Any, **options: Any) -> str:
        self.rendered += len(messages)
        return super().render(messages, *args, **options)


@pytest.mark.parametrize("stem", ["qwen3", "qwen2_5", "glm4moe", "gptoss"])
@pytest.mark.parametrize("rounds", [99, 7, 1])
def test_rendered_messages_grow_with_the_conversation_not_its_square(stem: str, rounds: int) -> None:
    original, facts = family(stem)
    template = CountingTemplate(original.source, original.variables)
    cost = {}
    for size in (200, 800):
        messages = session([rounds] * (size // (2 * rounds + 2)))
        template.rendered = 0
        rendered(template, facts, messages, windows=True)
        cost[size] = template.rendered / len(messages)
    assert cost[800] <= 1.5 * cost[200]
    assert cost[800] < 60


# Hostile templates.

BASE = """\
{%- set ns = namespace(users=0, last=-1, names=[], flag=false, total=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.total = ns.total + 1 -%}{%- endfor -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
<TOP>
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}
{%- set later = messages[loop.index:] -%}
<BEFORE>
{{- '<|im_start|>' + m.role + '\\n' -}}
<INSIDE>
{%- if m.reasoning_content and (<KEEP>) -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{- <CONTENT> -}}
{%- for c in m.tool_calls or [] -%}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
<BOTTOM>
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

ROUNDS_LATER = "(later | selectattr('role', 'equalto', 'tool') | list | length)"
SEEN_NAMES = (
    "{%- for m in messages -%}{%- for c in m.tool_calls or [] if c.function.name not in ns.names -%}"
    "{%- set ns.names = ns.names + [c.function.name] -%}{%- endfor -%}{%- endfor -%}"
)
CALLED = "{%- for m in messages if m.tool_calls -%}{%- set ns.flag = true -%}{%- endfor -%}"
LENGTHS = "(later | map(attribute='content') | join | length)"


def hostile(**changes: str) -> str:
    parts = {"TOP": "", "BEFORE": "", "INSIDE": "", "KEEP": "true", "CONTENT": "m.content", "BOTTOM": "", **changes}
    source = BASE
    for name, text in parts.items():
        source = source.replace(f"<{name}>", text)
    return source


HOSTILE = {
    "nothing special": hostile(),
    "thinking since the last question": hostile(KEEP="loop.index0 > ns.last"),
    "thinking of the last 2 questions": hostile(KEEP="ns.users > ns.total - 2"),
    "thinking of the last 3 questions": hostile(KEEP="ns.users > ns.total - 3"),
    "thinking of the last 12 questions": hostile(KEEP="ns.users > ns.total - 12"),
    "thinking of the last 2 rounds": hostile(KEEP=f"{ROUNDS_LATER} < 2"),
    "thinking of the last 5 rounds": hostile(KEEP=f"{ROUNDS_LATER} < 5"),
    "thinking of the last 28 rounds": hostile(KEEP=f"{ROUNDS_LATER} < 28"),
    "results of the last 6 rounds": hostile(
        CONTENT=f"'[old]' if m.role == 'tool' and {ROUNDS_LATER} > 6 else m.content"
    ),
    "results of the last 27 rounds": hostile(
        CONTENT=f"'[old]' if m.role == 'tool' and {ROUNDS_LATER} > 27 else m.content"
    ),
    "thinking of the last 200 characters": hostile(KEEP=f"{LENGTHS} < 200"),
    "thinking of the last 4000 characters": hostile(KEEP=f"{LENGTHS} < 4000"),
    "numbered messages": hostile(INSIDE="{{- loop.index ~ ' ' -}}"),
    "numbered questions": hostile(INSIDE="{{- ns.users ~ ' ' -}}"),
    "markers by parity": hostile(INSIDE="{{- 'AB'[loop.index % 2] -}}"),
    "markers that repeat after 7": hostile(INSIDE="{{- loop.index % 7 -}}"),
    "number of messages at the start": hostile(TOP="{{- messages | length -}}"),
    "number of messages at the end": hostile(BOTTOM="{{- messages | length -}}"),
    "a note at the start when it gets long": hostile(TOP="{{- 'LONG' if messages | length > 50 else '' -}}"),
    "a note at the end when it gets long": hostile(BOTTOM="{{- 'LONG' if messages | length > 50 else '' -}}"),
    "date": hostile(TOP="{{- strftime_now('%Y') -}}"),
    "tools before the last question": hostile(
        BEFORE="{%- if loop.index0 == ns.last -%}{{- tools | tojson -}}{%- endif -%}"
    ),
    "the third last message is marked": hostile(INSIDE="{{- '*' if loop.revindex == 3 else '' -}}"),
    "the third last message again at the end": hostile(BOTTOM="{{- messages[-3].content if messages[3:] else '' -}}"),
    "the ninth last message again at the end": hostile(BOTTOM="{{- messages[-9].content if messages[9:] else '' -}}"),
    "tools used so far": hostile(TOP=SEEN_NAMES + "{{- ns.names | join(', ') -}}"),
    "a note when two tools were used": hostile(TOP=SEEN_NAMES + "{{- 'MANY' if ns.names | length > 1 else '' -}}"),
    "a system prompt that knows of calls": hostile(TOP=CALLED + "{{- 'CALLED' if ns.flag else '' -}}"),
    "the last 15 messages": hostile(
        BEFORE="{%- if loop.revindex > 15 and not loop.first -%}{%- continue -%}{%- endif -%}"
    ),
    "the last 62 messages": hostile(
        BEFORE="{%- if loop.revindex > 62 and not loop.first -%}{%- continue -%}{%- endif -%}"
    ),
    "length so far": hostile(INSIDE="{%- set ns.users = ns.users + (m.content | length) -%}{{- ns.users -}}"),
}
NEVER_IN_WINDOWS = {
    *("thinking of the last 3 questions", "thinking of the last 5 rounds", "results of the last 6 rounds"),
    *("length so far", "the ninth last message again at the end", "the last 15 messages"),
    *("number of messages at the start", "number of messages at the end", "thinking of the last 200 characters"),
}

SESSIONS = (
    session([2, 0, 11, 1]),
    session([32, 1]),
    [*session([1] * 9), *session([1] * 5, thinking=False, system=False)],
)


def renderer_of(source: str) -> ConversationRenderer:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = source
    return ConversationRenderer(tokenizer, RenderOptions(on_error="skip"))


def with_renderer(
    renderer: ConversationRenderer, messages: list[Message]
) -> tuple[dict[int, tuple[str, str]], RenderCounts]:
    """Context and text of each turn that the renderer does not skip, fallback included."""
    tokens, counts = renderer.render(messages, TOOLS)
    return {turn.index: (context_of(tokens.trie, turn.context), turn.text) for turn in tokens.turns}, counts


def naive(source: str, messages: list[Message]) -> dict[int, tuple[str, str | None]]:
    """Context and text of each turn, all rendered in full; no text where the turn is not what follows the context."""
    template, prepared = ChatTemplate(source, {"eos_token": "<|im_end|>"}), prepare_messages(messages)
    turns: dict[int, tuple[str, str | None]] = {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            context = template.render(prepared[:index], TOOLS, generation_prompt=True)
            whole = template.render(prepared[: index + 1], TOOLS)
            goes_on = whole.startswith(context) and whole.endswith("<|im_end|>\n")
            turns[index] = context, whole[len(context) : -1] if goes_on else None
    return turns


FOUND_BY_COMPARISON = {
    *("thinking of the last 12 questions", "thinking of the last 28 rounds", "results of the last 27 rounds"),
    "the last 62 messages",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_rendered_in_full_or_right(name: str) -> None:
    source = HOSTILE[name]
    renderer = renderer_of(source)
    refused = renderer.facts().windows is None
    assert refused or name not in NEVER_IN_WINDOWS
    fallbacks = 0
    for messages in SESSIONS:
        found, counts = with_renderer(renderer, messages)
        fallbacks += counts.fallbacks
        for index, (context, text) in naive(source, messages).items():
            if text is None:
                assert index not in found or found[index][0] == context
            else:
                assert found[index] == (context, text)
    assert (fallbacks > 0) == (name in FOUND_BY_COMPARISON and not refused)


DEFEATS_THE_PROBE = hostile(
    TOP="{%- for m in messages if 'XYZZY' in m.content -%}{%- set ns.flag = true -%}{%- endfor -%}",
    CONTENT="'[gone]' if ns.flag and ('Question 1' in m.content or 'Result 0 3' in m.content) else m.content",
)
"""Forgets a question and a result, long after, when a magic word is said. No witness says what they say."""


UNANSWERED = "not later | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list"


def magic_at_the_end() -> list[Message]:
    """The last turn is in a window."""
    messages = session([1, 1, 14])
    messages[-4] = result("XYZZY")
    return messages


def magic_before_a_question() -> list[Message]:
    """The answer changes what was thought before it, and what follows is rendered in full."""
    messages = session([18, 0])
    messages[-8] = result("XYZZY")
    return messages


def magic_in_the_other_choice_of_variables() -> list[Message]:
    """The last turn alone does not think; those before it do, and are rendered with other variables."""
    messages = session([1, 1, 14])
    messages = [{**m, "reasoning_content": "Hm."} if m["role"] == "assistant" else m for m in messages]
    messages[-4] = result("XYZZY")
    messages[-1].pop("reasoning_content")
    return messages


@pytest.mark.parametrize(
    ("messages", "change"),
    [
        (magic_at_the_end(), ("", "")),
        (magic_before_a_question(), ("(true)", f"({UNANSWERED})")),
        (magic_in_the_other_choice_of_variables(), ("", "{{- '' if enable_thinking else '' -}}")),
    ],
    ids=["at the end", "before a question", "in the other choice of variables"],
)
def test_a_template_that_defeats_the_probe_is_found_and_rendered_in_full(
    messages: list[Message], change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagpack_hf.render.turn._CHECKED_SHARE", 0)  # found by no luck
    old, new = change
    source = DEFEATS_THE_PROBE.replace(old, new) if old else DEFEATS_THE_PROBE + new
    renderer = renderer_of(source)
    assert renderer.facts().windows == "rounds"
    found, counts = with_renderer(renderer, messages)
    assert counts.fallbacks == 1 and counts.windowed == 0 and counts.checked == 0
    expected = {index: turn for index, turn in naive(source, messages).items() if turn[1] is not None}
    assert {index: found[index] for index in expected} == expected


def test_after_a_fallback_no_window_is_used_again() -> None:
    renderer = renderer_of(DEFEATS_THE_PROBE)
    _, counts = renderer.render(session([1, 1, 14]), TOOLS)
    assert counts.fallbacks == 0 and counts.windowed > 10 and 0 < counts.checked < counts.windowed
    magic = session([1, 1, 14])
    magic[-4] = result("XYZZY")
    assert renderer.render(magic, TOOLS)[1].fallbacks == 1
    _, counts = renderer.render(session([1, 1, 14]), TOOLS)
    assert counts.fallbacks == counts.windowed == counts.checked == 0


def test_windows_can_be_switched_off() -> None:
    tokenizer = toy_tokenizer()
    messages = session([3, 14])
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions()).render(messages, TOOLS)
    full, counts_of_full = ConversationRenderer(tokenizer, RenderOptions(windows=False)).render(messages, TOOLS)
    assert counts.windowed > 10 and counts_of_full.windowed == counts_of_full.checked == 0
    assert [tokens.turn(number) for number in range(counts.turns)] == [full.turn(n) for n in range(counts.turns)]


def test_a_text_that_equals_the_witness_changes_nothing() -> None:
    template, facts = family("qwen3")
    for marked in ((3, 12, -5), (1,)):
        messages = session([4, 14])
        for at in marked:
            messages[at] = {**messages[at], "content": MARK}
        found, rendering = rendered(template, facts, messages, windows=True)
        assert found == rendered(template, facts, messages, windows=False)[0]
        assert (rendering.windowed > 0) == (1 not in marked)

"""What the probe finds out about a template, what a turn is refused for, and what becomes of control tokens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from dagpack_hf.render import RenderError, RenderOptions, probe_chat_template, render_turn
from dagpack_hf.render.arrival import context_parts
from dagpack_hf.render.control import ControlTokens, unused_character
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.probe import Ending, TemplateFacts, probe_template
from dagpack_hf.render.template import ChatTemplate
from tests.toy import toy_tokenizer

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
CONTROL = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]

NO_THINKING = "the template does not write it"
NO_CALLS = {"call", "tools", "tool result", "parallel calls"}
CHATML = {kind: Ending("<|im_end|>", "\n") for kind in (False, True)}


def source_of(stem: str) -> str:
    return (FOLDER / f"{stem}.jinja").read_text(encoding="utf-8")


def facts_of(source: str, tokens: tuple[str, ...] = CONTROL) -> TemplateFacts:
    return probe_template(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), tokens)


def tokenizer_of(template: str) -> Any:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def call(number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"id": f"abcdefg{number:02}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def user(text: str = "Add 1 and 2.") -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str = "3", number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "add", "tool_call_id": f"abcdefg{number:02}"}


def assistant(text: str = "", *calls: dict[str, Any], thinking: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if thinking is not None:
        message["reasoning_content"] = thinking
    return message


# TRL's templates.

FACTS: dict[str, dict[str, Any]] = {
    "qwen3": {"strips_thinking": True, "switch": "enable_thinking", "endings": CHATML, "parts": False},
    "qwen3_training": {"strips_thinking": False, "switch": "enable_thinking", "endings": CHATML, "parts": False},
    "qwen3_5_think": {"strips_thinking": True, "switch": "enable_thinking", "endings": CHATML, "parts": True},
    "qwen3_8": {"strips_thinking": False, "switch": "enable_thinking", "endings": CHATML, "parts": True},
    "nemotron_3_nano": {"strips_thinking": True, "switch": "enable_thinking", "endings": CHATML, "parts": True},
    "qwen2_5": {
        "verdict": "lossy",
        "turn_losses": {"thinking": NO_THINKING},
        "context_losses": {},
        "strips_thinking": False,
        "switch": None,
        "endings": CHATML,
    },
    "glm4moe": {
        "strips_thinking": True,
        "switch": "enable_thinking",
        "endings": {
            False: Ending("<|user|>", "", written=False),
            True: Ending("<|observation|>", "", written=False),
        },
    },
    "glm4moe_training": {
        "strips_thinking": True,
        "endings": {False: Ending("<|user|>", ""), True: Ending("<|observation|>", "")},
    },
    "gptoss": {
        "verdict": "lossy",
        "strips_thinking": True,
        "switch": None,
        "endings": {False: Ending("<|return|>", ""), True: Ending("<|call|>", "")},
        "context_losses": {"parallel calls": NO_THINKING},
    },
    "llama3_1": {
        "verdict": "lossy",
        "strips_thinking": False,
        "endings": {kind: Ending("<|eot_id|>", "") for kind in (False, True)},
        "turn_losses": {
            "thinking": NO_THINKING,
            "text beside a call": NO_THINKING,
            "parallel calls": "the template raises: This model only supports single tool-calls at once!",
        },
        "context_losses": {
            "parallel calls": "the template raises: This model only supports single tool-calls at once!"
        },
    },
    "phi3": {
        "verdict": "lossy",
        "endings": {False: Ending("<|end|>", "\n</s>")},
        "turn_losses": {"thinking": NO_THINKING, "call": NO_THINKING},
        "context_losses": dict.fromkeys(NO_CALLS, NO_THINKING),
    },
}


@pytest.mark.parametrize("stem", FACTS)
def test_facts_about_templates_in_use(stem: str) -> None:
    facts = facts_of(source_of(stem))
    expected = {"verdict": "exact", "windows": "rounds", "refused": None, **FACTS[stem]}
    assert {name: getattr(facts, name) for name in expected} == expected
    assert (str(facts) == "exact") == (expected["verdict"] == "exact")


@pytest.mark.parametrize("stem", ["gemma3", "cohere"])
def test_templates_that_know_no_tools(stem: str) -> None:
    facts = facts_of(source_of(stem), (*CONTROL, "<|END_OF_TURN_TOKEN|>"))
    assert facts.verdict == "lossy"
    assert facts.context_losses.keys() == NO_CALLS
    assert facts.turn_losses.keys() == {"thinking", "call"}
    assert list(facts.endings) == [False]


def test_a_template_that_takes_no_text_is_refused() -> None:
    facts = facts_of(source_of("idefics3"), (*CONTROL, "<end_of_utterance>"))
    assert facts.verdict == "refused" and facts.windows is None
    assert facts.refused is not None and facts.refused[0] == "the turn is not written"
    assert str(facts).startswith("refused: the turn is not written: ")


def test_the_verdict_by_tokenizer() -> None:
    tokenizer = tokenizer_of(source_of("qwen2_5"))
    assert str(probe_chat_template(tokenizer)) == (
        "exact, except: no thinking in turns (the template does not write it)"
    )
    assert str(probe_chat_template(tokenizer, template=str(FOLDER / "qwen3.jinja"))) == "exact"
    assert probe_chat_template(tokenizer, chat_template_kwargs={"bos_token": "x"}, template="training").turn_losses


# Small templates.

CALLS = (
    "{%- for c in m.tool_calls or [] -%}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{%- endfor -%}"
)
FIRST_CALL = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
THINKING = "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"


def small(
    *,
    top: str = "{{- tools | tojson if tools else '' -}}",
    messages: str = "messages",
    thinking: str = THINKING,
    content: str = "m.content",
    calls: str = CALLS,
    end: str = "<|im_end|>\\n",
    bottom: str = "",
) -> str:
    return (
        top
        + f"{{%- for m in {messages} -%}}{{{{- '<|im_start|>' + m.role + '\\n' -}}}}"
        + f"{thinking}{{{{- {content} -}}}}{calls}"
        + f"{{{{- '{end}' -}}}}{{%- endfor -%}}{bottom}"
        + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


def test_a_template_that_writes_everything() -> None:
    facts = facts_of(small())
    assert facts.verdict == "exact" and facts.endings == CHATML and facts.windows == "rounds"
    assert (facts.strips_thinking, facts.switch, facts.turn_losses, facts.context_losses) == (False, None, {}, {})
    assert facts.parts  # a list is written as Python does, its text included
    assert facts_of(small(content="m.content.strip()")).parts is False
    assert "<|im_end|>" in facts.texts and "<|return|>" not in facts.texts


@pytest.mark.parametrize(
    ("change", "turn_losses", "context_losses"),
    [
        ({"thinking": ""}, {"thinking"}, set()),
        ({"calls": ""}, {"call"}, {"call", "parallel calls"}),
        ({"calls": FIRST_CALL}, {"parallel calls"}, {"parallel calls"}),
        ({"calls": CALLS.replace("c.function.arguments | tojson", "''")}, {"call"}, {"call", "parallel calls"}),
        ({"messages": "messages if m.role != 'tool'"}, set(), {"tool result", "parallel calls"}),
        ({"messages": "messages if m.role != 'system'"}, set(), {"system prompt"}),
        ({"top": ""}, set(), {"tools"}),
        ({"top": "{{- '<tools>' if tools else '' -}}"}, set(), {"tools"}),
        ({"content": "('' if m.tool_calls else m.content)"}, {"text beside a call"}, set()),
        ({"thinking": THINKING.replace("if m", "if not m.tool_calls and m")}, {"thinking beside a call"}, set()),
        (
            {"thinking": THINKING.replace("if m", "if not (m.tool_calls and m.content) and m")},
            {"text and thinking beside a call"},
            set(),
        ),
        ({"thinking": THINKING.replace("if m", "if loop.last and m")}, set(), set()),
        ({"content": "(m.content if loop.last or m.role != 'assistant' else '')"}, set(), {"text"}),
    ],
)  # fmt: skip
def test_what_a_template_loses(change: dict[str, str], turn_losses: set[str], context_losses: set[str]) -> None:
    facts = facts_of(small(**change))
    assert facts.turn_losses.keys() == turn_losses
    assert facts.context_losses.keys() == context_losses
    assert facts.verdict == ("lossy" if turn_losses | context_losses else "exact")
    for part in turn_losses:
        assert f"no {part} in turns (the template does not write it)" in str(facts)
    for part in context_losses:
        assert f"no {part} in contexts (the template does not write it)" in str(facts)


def test_a_template_that_raises_is_a_loss_with_its_own_words() -> None:
    facts = facts_of(small(top="{%- if tools -%}{{ raise_exception('No tools here') }}{%- endif -%}"))
    why = "the template raises: No tools here"
    assert facts.context_losses == dict.fromkeys(("tools", "call", "tool result", "parallel calls"), why)
    assert facts.turn_losses == {"call": why} and list(facts.endings) == [False]
    refused = facts_of("{{ raise_exception('Never') }}")
    assert refused.verdict == "refused"
    assert refused.refused == ("the chat template raised an error", "Never")


@pytest.mark.parametrize(
    ("end", "bottom", "ending"),
    [
        ("<|im_end|>", "", Ending("<|im_end|>")),
        ("<|im_end|>\\n\\n", "", Ending("<|im_end|>", "\n\n")),
        ("</s>", "", Ending("</s>")),
        ("\\n<|im_end|>\\n", "", Ending("<|im_end|>", "\n")),
        ("", "", Ending("<|im_start|>", written=False)),
        ("\\n", "", Ending("<|im_start|>", "\n", written=False)),
        (
            "<|end|>\\n",
            "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}",
            Ending("<|end|>", "\n</s>"),
        ),
        ("<|end|>", "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}", Ending("<|end|>", "</s>")),
        ("<|end|></s>", "", Ending("</s>")),
    ],
)
def test_how_a_turn_ends(end: str, bottom: str, ending: Ending) -> None:
    assert facts_of(small(end=end, bottom=bottom)).endings == {False: ending, True: ending}


@pytest.mark.parametrize("end", [".", "[END]\\n", "<|im_end|>.", "<|im_end|> done"])
def test_a_turn_that_no_token_ends_is_refused(end: str) -> None:
    source = small(end=end).replace("<|im_start|>", "[START]")
    facts = facts_of(source)
    assert facts.verdict == "refused" and facts.endings == {}
    assert facts.refused is not None and facts.refused[0] == "the turn does not end on a stop token"
    with pytest.raises(RenderError, match=r"must close an assistant message with a token.*So it is with every turn"):
        render_turn(tokenizer_of(source), [user(), assistant("3")], 1)


@pytest.mark.parametrize(
    ("end", "bottom", "text"),
    [
        ("<|im_end|>\\n", "", "It is 3.<|im_end|>"),
        ("", "", "It is 3.<|im_start|>"),
        ("\\n", "", "It is 3.<|im_start|>"),
        ("<|end|>\\n", "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}", "It is 3.<|end|>"),
    ],
)
def test_a_turn_ends_on_one_stop_token(end: str, bottom: str, text: str) -> None:
    source = small(end=end, bottom=bottom)
    tokenizer = tokenizer_of(source)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    messages = [user(), assistant("Hm."), user("And?"), assistant("It is 3.")]
    turn = render_turn(tokenizer, messages, 3)
    assert tokenizer.decode(turn.target_ids) == text
    context = ChatTemplate(source, tokenizer.special_tokens_map).render(messages[:3], generation_prompt=True)
    assert tokenizer.decode(turn.context_ids) == context


def test_the_switch_of_thinking_is_found_and_chosen_for_each_turn() -> None:
    prompt = "{%- if add_generation_prompt and not enable_thinking -%}<think></think>{%- endif -%}"
    unwritten = "{%- if m.role == 'assistant' and not m.reasoning_content -%}<think></think>{%- endif -%}"
    source = small(thinking=THINKING + unwritten) + prompt
    assert facts_of(source).switch == "enable_thinking"
    assert facts_of(source.replace("enable_thinking", "thinking")).switch == "thinking"
    messages = [user(), assistant("3", thinking="1 + 2"), user(), assistant("4"), user(), assistant("5", thinking=" ")]
    tokenizer = tokenizer_of(source)
    _, counts = ConversationRenderer(tokenizer, RenderOptions(on_error="skip")).render(messages)
    assert counts.variables == {"enable_thinking=True": 1, "enable_thinking=False": 1} and counts.turns >= 2
    turn = render_turn(tokenizer, messages, 3)
    assert tokenizer.decode(turn.context_ids).endswith("<|im_start|>assistant\n<think></think>")
    assert tokenizer.decode(turn.target_ids) == "4<|im_end|>"
    fixed = RenderOptions(chat_template_kwargs={"enable_thinking": True})
    assert ConversationRenderer(tokenizer, fixed).render(messages[:2])[1].variables == {}


# Turn by turn.

LONG = "x" * 40
LOSES_BY_CONTENT = small(
    content="m.content | replace('secret', '***')",
    thinking="{%- if m.reasoning_content -%}<think>{{ m.reasoning_content[:30] }}</think>{%- endif -%}",
    calls=CALLS.replace("c.function.arguments | tojson", "(c.function.arguments | tojson)[:40]"),
)


@pytest.mark.parametrize(
    ("turn", "part", "looked_for"),
    [
        (assistant("a secret"), "text", "'a secret'"),
        (assistant("a", thinking=LONG), "thinking", repr(LONG)),
        (assistant("", call(a="1", b=LONG)), "call", f"the argument '{LONG}'"),
        (assistant("", call(a=1), call(2, b=["1", {"c": LONG}])), "call", f"the argument '{LONG}'"),
        (assistant("", call(**{"1" * 50: 1})), "call", "the argument '1111"),
    ],
)
def test_what_one_turn_loses_is_refused_for_that_turn(turn: dict[str, Any], part: str, looked_for: str) -> None:
    tokenizer = tokenizer_of(LOSES_BY_CONTENT)
    assert probe_chat_template(tokenizer).verdict == "exact"
    messages = [user(), assistant("fine"), user(), turn, user(), assistant("fine", call(a="1"), thinking="Hm.")]
    reason = f"the chat template does not write the {part} of the turn"
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions(on_error="skip")).render(
        messages, TOOLS, place="row 7, "
    )
    assert [kept.index for kept in tokens.turns] == [1, 5] and counts.turns == 2
    assert counts.skipped == {reason: 1}
    assert counts.examples[reason].startswith("row 7, message 3: ")
    assert f"looked for {looked_for}" in counts.examples[reason]
    with pytest.raises(RenderError) as caught:
        ConversationRenderer(tokenizer, RenderOptions()).render(messages, TOOLS, place="row 7, ")
    assert caught.value.reason == reason
    assert 'row 7, message 3; on_error="skip" leaves such turns out and counts them' in str(caught.value)
    assert ('thinking="drop"' in str(caught.value)) == (part == "thinking")


def test_a_call_that_is_written_once_of_two_is_lost() -> None:
    tokenizer = tokenizer_of(small(calls=FIRST_CALL))
    messages = [user(), assistant("", call(a="1"), call(2, a="1")), user(), assistant("", call(a="1"))]
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions(on_error="skip")).render(messages, TOOLS)
    assert [turn.index for turn in tokens.turns] == [3]
    assert counts.examples == {
        "the chat template does not write the call of the turn": "message 1: looked for 'add', 2 times"
    }


def test_only_the_first_example_of_a_reason_is_kept() -> None:
    messages = [user(), assistant("secret 1"), user(), assistant("secret 2")]
    renderer = ConversationRenderer(tokenizer_of(LOSES_BY_CONTENT), RenderOptions(on_error="skip"))
    tokens, counts = renderer.render(messages)
    assert list(tokens.turns) == [] and counts.turns == 0
    assert list(counts.skipped.values()) == [2]
    assert list(counts.examples.values()) == ["message 1: looked for 'secret 1'"]


def test_arguments_arrive_as_text_or_as_json() -> None:
    value = 'a "b"\n\té\\'
    messages = [user(), assistant("", call(**{"k\n": [value, {"é": value}], "n": 1.5, "z": None}))]
    for arguments in ("c.function.arguments | tojson", "c.function.arguments | tojson(ensure_ascii=true)"):
        tokenizer = tokenizer_of(small(calls=CALLS.replace("c.function.arguments | tojson", arguments)))
        assert len(ConversationRenderer(tokenizer, RenderOptions()).render(messages, TOOLS)[0].turns) == 1


def test_a_lossy_template_refuses_turns_with_the_part_and_takes_the_others() -> None:
    tokenizer = tokenizer_of(source_of("llama3_1"))
    messages = [user(), assistant("", call(a="1")), result(), assistant("3", thinking="1 + 2")]
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions(on_error="skip")).render(messages, TOOLS)
    assert [turn.index for turn in tokens.turns] == [1]
    assert counts.skipped == {"the chat template does not write the thinking of the turn": 1}
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions(thinking="drop")).render(messages, TOOLS)
    assert [turn.index for turn in tokens.turns] == [1, 3] and counts.skipped == {}
    parallel = [user(), assistant("", call(a="1"), call(2, a="2"))]
    _, counts = ConversationRenderer(tokenizer, RenderOptions(on_error="skip")).render(parallel, TOOLS)
    assert counts.skipped == {"the chat template raised an error": 1}
    assert "single tool-calls" in counts.examples["the chat template raised an error"]


def test_a_call_under_a_template_without_calls_is_refused_with_the_probes_reason() -> None:
    tokenizer = tokenizer_of(source_of("phi3"))
    with pytest.raises(RenderError, match=r"does not write the call of the turn: the template does not write it"):
        render_turn(tokenizer, [user(), assistant("", call(a="1"))], 1, tools=TOOLS)


def test_what_contexts_lack_is_counted_by_turn() -> None:
    source = small(messages="messages if m.role != 'tool'", top="")
    messages = [
        {"role": "system", "content": "Be brief."},
        user(),
        assistant("", call(a="1")),
        result(),
        assistant("3"),
        user(),
        assistant("", call(a="1"), call(2, a="2")),
        result(),
        result("4", 2),
        assistant("7"),
    ]
    tokenizer = tokenizer_of(source)
    _, counts = ConversationRenderer(tokenizer, RenderOptions()).render(messages, TOOLS)
    assert counts.context_losses == {"tools": 4, "tool result": 3, "parallel calls": 1}
    _, counts = ConversationRenderer(tokenizer, RenderOptions()).render(messages)
    assert counts.context_losses == {"tool result": 3, "parallel calls": 1}
    _, counts = ConversationRenderer(tokenizer_of(small()), RenderOptions()).render(messages, TOOLS)
    assert counts.context_losses == {}


def test_images_in_a_context_are_a_loss_under_any_template() -> None:
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    facts = facts_of(source_of("qwen3"))
    assert context_parts([user(), image, assistant("A cat."), user()], None, facts) == [
        set(),
        set(),
        {"images"},
        {"images"},
    ]


# Final answers that change what came before them.


def test_gptoss_final_answers_follow_the_thinking_that_the_model_saw() -> None:
    source = source_of("gptoss")
    tokenizer = tokenizer_of(source)
    messages = [
        user(),
        assistant("", call(a="1"), thinking="Use the tool."),
        result(),
        assistant("It is 3.", thinking="So it is."),
        user("And 4?"),
        assistant("4"),
    ]
    template = ChatTemplate(source, tokenizer.special_tokens_map)
    prepared = [{**message, "thinking": message.get("reasoning_content")} for message in messages]
    context = template.render(prepared[:3], TOOLS, generation_prompt=True)
    assert not template.render(prepared[:4], TOOLS).startswith(context)  # the thinking is gone
    assert "Use the tool." in context
    turn = render_turn(tokenizer, messages, 3, tools=TOOLS)
    assert tokenizer.decode(turn.context_ids) == context
    assert tokenizer.decode(turn.target_ids) == (
        "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"
    )
    last = render_turn(tokenizer, messages, 5, tools=TOOLS)
    assert "Use the tool." not in tokenizer.decode(last.context_ids)
    assert tokenizer.decode(last.target_ids) == "<|channel|>final<|message|>4<|return|>"


def test_a_turn_that_reads_differently_in_its_place_is_not_spliced() -> None:
    """The head changes with the answer, and so does the answer with its place: nothing says what the model wrote."""
    changing = "{{- '!' if messages | selectattr('role', 'equalto', 'assistant') | list | length > 1 else '' -}}"
    tokenizer = tokenizer_of(small(top=changing, content="(loop.index ~ m.content)"))
    assert len(render_turn(tokenizer, [user(), assistant("a")], 1).target_ids) == 3
    with pytest.raises(RenderError, match="does not continue its own generation prompt") as caught:
        render_turn(tokenizer, [user(), assistant("a"), user(), assistant("b")], 3)
    assert "the context ends in" in caught.value.detail


# Control tokens.

SPEAKS_CONTROL = [
    user("What does <|im_end|> do? And <|im_start|>user<|im_end|>?"),
    assistant("<|im_end|", call(**{"a": "<tool_call>"}), thinking="</think>"),
    result("<|im_end|>\n<|im_start|>assistant\n<|im_ <|im_end|>"),
    assistant("It ends a turn."),
]


def test_control_tokens_in_plain_text_are_counted_and_stay_as_the_server_had_them() -> None:
    tokenizer = tokenizer_of(small())
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions()).render(SPEAKS_CONTROL, TOOLS)
    assert counts.control_tokens == 8
    whole = tokenizer.apply_chat_template(SPEAKS_CONTROL[:3], TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokens.turn(1).context_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_neutralised_control_tokens_are_ordinary_text() -> None:
    tokenizer = tokenizer_of(small())
    renderer = ConversationRenderer(tokenizer, RenderOptions(control_tokens="neutralize"))
    tokens, counts = renderer.render(SPEAKS_CONTROL, TOOLS)
    assert counts.control_tokens == 8
    spoken = tokenizer.apply_chat_template(SPEAKS_CONTROL[:3], TOOLS, tokenize=False, add_generation_prompt=True)
    ids = tokens.turn(1).context_ids
    assert tokenizer.decode(ids) == spoken
    assert ids == ordinary_ids(tokenizer, SPEAKS_CONTROL[:3])
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(ends) == 3  # of the three messages
    assert tokens.turn(0).target_ids.count(ends) == 1 and tokens.turn(0).target_ids[-1] == ends
    assert tokenizer.decode(tokens.turn(0).target_ids) == (
        '<think></think></think><|im_end|<tool_call>add {"a": "<tool_call>"}</tool_call><|im_end|>'
    )


def ordinary_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = TOOLS) -> list[int]:
    """Ids of a context, with control tokens in the messages as ordinary text: written as signs, then replaced."""
    signs = {text: chr(0xE000 + number) for number, text in enumerate(CONTROL)}

    def signed(value: Any) -> Any:
        if isinstance(value, str):
            for text, sign in signs.items():
                value = value.replace(text, sign)
            return value
        if isinstance(value, dict):
            return {key: signed(item) for key, item in value.items()}
        return [signed(item) for item in value] if isinstance(value, list) else value

    text = tokenizer.apply_chat_template(signed(messages), tools, tokenize=False, add_generation_prompt=True)
    letters = {sign: list(control) for control, sign in signs.items()}  # no ordinary token is longer than a letter
    ids: list[int] = []
    for piece in re.split("([\ue000-\uf8ff])", text):
        for part in letters.get(piece, [piece]):
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    return ids


def test_the_mark_is_a_character_that_the_conversation_lacks() -> None:
    assert unused_character(SPEAKS_CONTROL) == "\U0010fffd"
    assert unused_character([{"\U0010fffd": "a"}, ["\U0010fffc\U0010fffa"], None]) == "\U0010fffb"
    tokenizer = tokenizer_of(small())
    said = "<\U0010fffd|im_end|><|im_end|>\U0010fffd"
    messages = [user(said), assistant(said)]
    tokens, counts = ConversationRenderer(tokenizer, RenderOptions(control_tokens="neutralize")).render(messages)
    turn = tokens.turn(0)
    assert counts.control_tokens == 2
    assert tokenizer.decode(turn.target_ids) == f"{said}<|im_end|>"
    assert tokenizer.decode(turn.context_ids) == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert turn.context_ids == ordinary_ids(tokenizer, messages[:1], tools=None)
    assert turn.target_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_values_are_marked_and_keys_are_counted_only() -> None:
    control = ControlTokens(tokenizer_of(small()), "")
    assert control.neutralize({"<|im_end|>": ["a<|im_end|>", None, 1]}, "_") == {
        "<|im_end|>": ["a<_|im_end|>", None, 1]
    }
    assert control.count({"<|im_end|>": ["a<|im_end|><|im_end|>", None, 1]}) == 3
    assert control.count("<|im_end| >") == 0


def test_ordinary_added_tokens_count_only_if_the_template_writes_them() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("<word>", special=False), AddedToken("  ")])
    assert ControlTokens(tokenizer, "<call>").count("<call><word>  <|im_end|>") == 2
    tokenizer.chat_template = small()
    assert ConversationRenderer(tokenizer, RenderOptions()).render([user("<call>  <word>")])[1].control_tokens == 0
    tokenizer.chat_template = small(calls=CALLS.replace("<tool_call>", "<call>"))
    assert ConversationRenderer(tokenizer, RenderOptions()).render([user("<call>  <word>")])[1].control_tokens == 1

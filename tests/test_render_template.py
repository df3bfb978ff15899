"""Chat templates: every text and every failure as the host's, in a sandbox no weaker than its own."""

from __future__ import annotations

import importlib.util
import pickle
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import pytest

from dagpack_hf.render.template import (
    ChatTemplate,
    RenderError,
    calls_of,
    prepare_messages,
    text_of,
    thought_of,
    without_surrogates,
)
from tests.toy import toy_tokenizer

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file, whatever its “encoding”.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where it is.", "enum": ["a", "b"]},
                    "lines": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                    "items": {"type": "object", "properties": {"keys": {"type": "number", "default": 0.5}}},
                },
                "required": ["path"],
            },
            "return": {"type": "string", "description": "Its text."},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any = "What is in a?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "It is empty.", *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **fields}


def call(name: str = "read", number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"id": f"abcdefg{number:02}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: Any = "nothing", number: int = 1, name: str = "read") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"abcdefg{number:02}", "name": name}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [user()],
    "an answer": [system(), user(), assistant()],
    "thinking of two turns": [
        user(),
        assistant(reasoning_content="Look.\n"),
        user("/no_think Sure?"),
        assistant("Yes", thinking="So it is."),
    ],
    "calls": [
        system(),
        user(),
        assistant("", call(path="a"), reasoning_content="Look."),
        tool("é\n"),
        assistant("Once more.", call(path="ä", lines=[1, 2], items={"keys": None, "values": True})),
        tool('{"text": 1}'),
        assistant(reasoning_content="Now I know."),
        user("Thanks."),
    ],
    "parallel calls": [
        user(),
        assistant("", call(path="a"), call("now", 2)),
        tool(),
        tool("12:00", 2, "now"),
        assistant(),
    ],
    "a call at the end": [user(), assistant("", call(path="a", items=[{}, []]), reasoning_content="Look.")],
    "arguments as text": [user(), assistant("", {"type": "function", "function": {"name": "now", "arguments": "{}"}})],
    "content is null": [
        user(),
        assistant(None, call("now", arguments={}), reasoning=None),
        tool(None),
        assistant("x"),
    ],
    "parts": [system(parts("Be brief.")), user(parts("one", " two")), assistant(parts("three")), user("four")],
    "an image": [user([{"type": "image"}, {"type": "text", "text": "What is it?"}]), assistant("A cat.")],
    "text that looks like structure": [
        user("<tool_response>\nno\n</tool_response>"),
        assistant("<think>a</think>\n\nb</think>c", call(path="</tool_call>")),
        tool("<|im_end|>\n<|im_start|>user"),
        assistant("x", reasoning_content="</think>"),
    ],
    "odd orders": [assistant(), tool(), user(), user("again"), system(), assistant("a"), assistant("b"), user("")],
    "names of methods": [user(), {**assistant(), "items": "x", "keys": 1, "get": None, "update": {}}, user()],
    "no role": [{"content": "x"}],
    "nothing": [{"role": "user"}, {"role": "assistant"}],
}


def host(source: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str | Exception:
    tokenizer = _tokenizer()
    options = {"add_generation_prompt": False, **options}
    try:
        return tokenizer.apply_chat_template(messages, tools, chat_template=source, tokenize=False, **options)
    except Exception as error:
        return error


def ours(source: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str | RenderError:
    options["generation_prompt"] = options.pop("add_generation_prompt", False)
    try:
        return ChatTemplate(source, _tokenizer().special_tokens_map).render(
            prepare_messages(messages), tools, **options
        )
    except RenderError as error:
        return error


def _tokenizer() -> Any:
    if not _cache:
        tokenizer = toy_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
        _cache.append(tokenizer)
    return _cache[0]


_cache: list[Any] = []


def assert_same(source: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str | RenderError:
    expected, found = host(source, messages, tools, **options), ours(source, messages, tools, **options)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert isinstance(found, RenderError), f"the host raises {expected!r}"
        assert type(found.__cause__) is type(expected)
        assert found.reason in ("the chat template raised an error", "the chat template cannot be compiled")
    return found


@pytest.mark.parametrize("stem", TEMPLATES)
def test_every_template_renders_and_fails_as_under_the_host(stem: str) -> None:
    source = (FOLDER / f"{stem}.jinja").read_text(encoding="utf-8")
    written = 0
    for messages in CONVERSATIONS.values():
        written += isinstance(assert_same(source, messages, add_generation_prompt=True, enable_thinking=False), str)
        assert_same(source, messages, TOOLS)
    assert written >= 2


ALLOWED = {
    "{% for m in messages %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.last }}{% endfor %}": "1aFalse2bTrue",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}": "two",
    "{% for m in messages %}{{ loop.previtem }}-{{ loop.nextitem.content }} {% break %}{% endfor %}": "-two ",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}": "3",
    "{% set ns = namespace(self=1) %}{{ ns.self }}{{ ns.other is defined }}": "1False",
    "{{ dict(a=1, b=2) | tojson }}{{ dict.fromkeys(['x']) }}": '{"a": 1, "b": 2}{\'x\': None}',
    "{{ messages[0].get('content') }}{{ messages[0]['nothing'] }}{{ messages[-1].content }}": "onetwo",
    "{{ messages[7] is defined }}{{ messages[0].nothing is defined }}": "FalseFalse",
    "{{ messages[0].items() | list }}": "[('role', 'user'), ('content', 'one')]",
    "{{ {'é<': [1, none]} | tojson }}{{ [1] | tojson(indent=1) }}": '{"é<": [1, null]}[\n 1\n]',
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}": '{"a":2,"b":1}',
    "{{ cycler('a', 'b').next() }}{{ joiner(',')() }}{{ range(3) | list }}": "a[0, 1, 2]",
    "{{ 'a {} b'.format(messages[0].role) }}{{ '%s' | format('x') }}": "a user bx",
    "{{ messages[0].content.upper() }}{{ messages[1].content[::-1] }}": "ONEowt",
    "{% generation %}{{ messages[0].content }}{% generation %}!{% endgeneration %}{% endgeneration %}": "one!",
    "{%- macro m(x) -%}{{ x.content }}{%- endmacro -%}{{ m(messages[0]) }}": "one",
    "{% set a = 1 %}\n    {% if a %}\nx\n    {% endif %}\ny": "x\ny",
    "{{ eos_token }}{{ nothing }}{{ documents is none }}{{ tools is none }}": "<|im_end|>TrueTrue",
}


@pytest.mark.parametrize("source", ALLOWED)
def test_the_templates_language(source: str) -> None:
    messages = [user("one"), assistant("two")]
    assert assert_same(source, messages) == ALLOWED[source]


FORBIDDEN = [
    "{{ messages.__class__ }}",
    "{{ messages[0].__class__.__mro__ }}",
    "{{ messages[0]['__class__'] }}",
    "{{ messages[0]['__init__']() }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | attr('append') }}{{ messages.append(1) }}",
    "{{ messages | map(attribute='__class__') | map('string') | join }}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0]['popitem']() }}",
    "{% set messages[0].role = 'x' %}",
    "{% set loop_ = namespace() %}{% set loop_.__class__ = 1 %}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace({'_x': 1}) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% set ns = namespace() %}{{ ns.__class__ }}",
    "{% set ns = namespace() %}{{ ns._Namespace__attrs }}",
    "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterable }}{% endfor %}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle.__func__ }}{% endfor %}",
    "{{ 'x{0.__class__}'.format(messages) }}",
    "{{ 'x{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
    "{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "{{ ('{0.__cla' ~ 'ss__}').format(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler('a').__class__ }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ dict.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (messages | groupby('role'))[0].__class__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% generation %}{{ caller.__globals__ }}{% endgeneration %}",
    "{{ range(10 ** 9) | length }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{{ open('/etc/hostname') }}",
]


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_sandbox_gives_nothing_away(source: str) -> None:
    messages = [user("one")]
    before = pickle.dumps(messages)
    found = assert_same(source, messages)
    assert pickle.dumps(messages) == before
    if isinstance(found, str):  # an undefined value, written as nothing
        assert "<" not in found.replace("<built-in method append", "") and "globals" not in found
    else:
        assert isinstance(found.__cause__, (jinja2.TemplateError, TypeError, OverflowError))


def test_prepared_messages_cannot_be_changed_by_a_template() -> None:
    messages = prepare_messages([user("one")])
    for method in ("clear()", "update(a=1)", "pop('role')", "popitem()", "setdefault('a', 1)"):
        with pytest.raises(RenderError) as caught:
            ChatTemplate(f"{{{{ messages[0].{method} }}}}").render(messages)
        assert isinstance(caught.value.__cause__, jinja2.exceptions.SecurityError)
    assert messages == [user("one")]


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x' | no_such_filter }}", "{% generation %}", "{% nothing %}"])
def test_a_text_that_is_no_template(source: str) -> None:
    with pytest.raises(RenderError, match=r"cannot be compiled: Template\w+Error"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("{{ raise_exception('Only for cats') }}", "Only for cats"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.encode('nonsense') }}", "unknown encoding"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ['a'] | tojson(indent=messages) }}", ""),
    ],
)
def test_a_failing_template_is_an_error_of_ours(source: str, detail: str) -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate(source).render([user("x")])
    assert caught.value.reason == "the chat template raised an error"
    assert detail in caught.value.detail and caught.value.detail


def test_the_clock_is_the_sessions() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y %H:%M') }}")
    date = datetime(2026, 1, 31, 7, 5, tzinfo=timezone.utc)
    assert template.render([user()], date=date) == "31 January 2026 07:05"
    assert template.render([user()], date=datetime(1999, 12, 31)) == "31 December 1999 00:00"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([user()]) >= "2024"


def test_variables_of_one_rendering_win_over_the_templates_own() -> None:
    template = ChatTemplate("{{ a }}{{ b }}{{ add_generation_prompt }}", {"a": 1, "b": 2})
    assert template.render([]) == "12False"
    assert template.render([], generation_prompt=True, b=3) == "13True"
    assert template.render([]) == "12False"


def test_names_and_literals() -> None:
    template = ChatTemplate(
        "A{% for m in messages %}<x>{{ m['y'] + '</x>' ~ eos_token }}{% endfor %}{% set z = 1 %}{{ z }}"
    )
    assert template.names == {"messages", "eos_token"}
    assert template.literals.split("\0") == ["</x>", "<x>", "A", "y"]


def test_templates_and_errors_travel_between_processes() -> None:
    template = pickle.loads(pickle.dumps(ChatTemplate("{{ messages[0].content }}{{ a }}", {"a": 1})))
    assert template.render([user("x")]) == "x1"
    assert (template.source, template.variables) == ("{{ messages[0].content }}{{ a }}", {"a": 1})
    error = pickle.loads(pickle.dumps(RenderError("reason", "what was found")))
    assert (error.reason, error.detail, str(error)) == ("reason", "what was found", "reason: what was found")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_has_each_of_its_names(name: str) -> None:
    message = assistant("a", **{name: "hm"})
    (prepared,) = prepare_messages([message])
    assert prepared == {**message, "thinking": "hm", "reasoning_content": "hm"}
    assert thought_of(prepared) == "hm"
    assert prepare_messages([message], thinking=False) == [assistant("a")]
    assert message == assistant("a", **{name: "hm"})


def test_the_first_name_of_thinking_wins_and_the_second_stays() -> None:
    prepared = prepare_messages([assistant("a", reasoning="c", thinking="b", reasoning_content=None)])
    assert prepared == [assistant("a", reasoning="c", thinking="b", reasoning_content="b")]
    prepared = prepare_messages([assistant("a", thinking="b", reasoning_content="")])
    assert prepared == [assistant("a", thinking="b", reasoning_content="")]


def test_null_keys_are_left_out_but_nulls_inside_are_kept() -> None:
    message = {**assistant(None, call(path=None)), "name": None}
    assert prepare_messages([message]) == [{"role": "assistant", "tool_calls": [call(path=None)]}]


def test_lone_surrogates_are_removed_and_pairs_are_not_made_of_them() -> None:
    message = assistant(
        "a\ud83d\udc00b😀", {"function": {"name": "f", "arguments": {"k\udfff": ["\ud800x", 1, None]}}}
    )
    (prepared,) = prepare_messages([message])
    assert prepared["content"] == "ab😀"
    assert calls_of(prepared) == [{"name": "f", "arguments": {"k": ["x", 1, None]}}]
    assert without_surrogates(parts("\udead")) == parts("")
    assert without_surrogates(None) is None


@pytest.mark.parametrize("message", ["text", None, [], 3])
def test_messages_must_be_dictionaries(message: Any) -> None:
    with pytest.raises(TypeError, match="messages must be dictionaries"):
        prepare_messages([message])


def test_what_a_message_holds() -> None:
    assert text_of(assistant(parts("a", "b"))) == "a\nb"
    assert (
        text_of(assistant([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": None}])) == "a"
    )
    assert text_of({"role": "user"}) == text_of(user(7)) == ""
    assert thought_of(assistant("a")) == thought_of(assistant("a", reasoning_content=["x"])) == ""
    assert calls_of(assistant("", call(path="a"), {"name": "f", "arguments": {}}, "odd")) == [
        {"name": "read", "arguments": {"path": "a"}},
        {"name": "f", "arguments": {}},
    ]
    assert calls_of({"tool_calls": None}) == calls_of({"tool_calls": "x"}) == []

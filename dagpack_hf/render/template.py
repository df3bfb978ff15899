"""Chat templates: message lists to text, as the host renders them, without copying the messages each time.

Design. The template runs in a sandbox of the host's kind (immutable, the same filters and functions), with two
differences. Attributes of plain dictionaries and loop variables are looked up directly, where the sandbox asks a dozen
questions first that have one answer for these types; and the clock is the session's, so that a template that prints a
date prints the one the model saw. Messages are brought into the form that the host gives them once for each
conversation, not once for each turn.

Cost. About 12 us for a message of an agent session; nothing is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry their thinking; templates read the first or the second."""

_DICT_ATTRIBUTES = frozenset(dir(dict))
_SURROGATE = re.compile("[\ud800-\udfff]")

# A template is a program: on values that it does not expect, arguments that are null say, it fails as one.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class RenderError(ValueError):
    """A turn that cannot be rendered as at inference.

    Attributes:
        reason: short, and the same for turns that fail alike.
        detail: what was found, and what can be done.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RenderError], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class ChatTemplate:
    """A chat template and the variables that do not change.

    Args:
        source: the Jinja text.
        variables: what the template can name besides messages and tools: special tokens, options of the template.

    Raises:
        RenderError: the text is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.variables = dict(variables or {})
        try:
            self._template = _compile(source)
        except (SyntaxError, *_TEMPLATE_ERRORS) as error:
            raise RenderError("the chat template cannot be compiled", f"{type(error).__name__}: {error}") from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, Any]]]:
        return type(self), (self.source, self.variables)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        generation_prompt: bool = False,
        date: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Render messages that `prepare_messages` has prepared.

        Args:
            messages: the conversation.
            tools: JSON schemas of the tools that were offered.
            generation_prompt: end with what asks the model for its turn.
            date: what the template's clock shows; now if not given.
            **variables: more variables of the template.

        Raises:
            RenderError: the template fails on these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self.variables, **variables},
                **({} if date is None else {"strftime_now": date.strftime}),
            )
        except _TEMPLATE_ERRORS as error:
            raise RenderError("the chat template raised an error", str(error) or type(error).__name__) from error

    @property
    def names(self) -> frozenset[str]:
        """Variables that the template reads and does not set."""
        return frozenset(jinja2.meta.find_undeclared_variables(self._syntax))

    @property
    def literals(self) -> str:
        """The template's own text: all its text and strings, separated by null characters."""
        texts = {node.data for node in self._syntax.find_all(jinja2.nodes.TemplateData)}
        texts |= {node.value for node in self._syntax.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return "\0".join(sorted(texts))

    @property
    def _syntax(self) -> jinja2.nodes.Template:
        return _environment().parse(self.source)


def prepare_messages(messages: Sequence[Mapping[str, Any]], *, thinking: bool = True) -> list[Message]:
    """Bring messages into the form that the host gives to templates.

    Keys with null are left out, thinking is given under each of its names, and lone surrogates, which no tokenizer
    takes, are removed.

    Args:
        messages: messages as a data set has them.
        thinking: whether to keep the thinking.

    Raises:
        TypeError: a message is not a mapping.
    """
    prepared = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"messages must be dictionaries, got {message!r:.80}")
        message = {key: value for key, value in message.items() if value is not None}
        thought = next((message[key] for key in _REASONING if key in message), None)
        if not thinking:
            message = {key: value for key, value in message.items() if key not in _REASONING}
        elif thought is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        prepared.append(without_surrogates(message))
    return prepared


def without_surrogates(value: Any) -> Any:
    """Remove lone surrogates from all strings of a JSON value, and count nothing: they carry no text."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("", value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value


def thought_of(message: Message) -> str:
    """Thinking of a prepared message, '' if there is none."""
    thought = message.get("reasoning_content")
    return thought if isinstance(thought, str) else ""


def text_of(message: Message) -> str:
    """Text of a message; the text parts of a list of parts are joined with line breaks."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def calls_of(message: Message) -> list[dict[str, Any]]:
    """Called functions of a message: each with `name` and `arguments`."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    return [call.get("function", call) for call in calls if isinstance(call, dict)]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with its answers for plain dictionaries, strings and loop variables known beforehand."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif (kind is LoopContext or kind is _Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        kind = type(obj)
        if (kind is dict and type(argument) is str) or (kind is list and type(argument) is int):
            try:
                return obj[argument]
            except LookupError:
                pass
        return super().getitem(obj, argument)


class _Namespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name that the template sets
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}, which begins with '_'")


class _Dictionary:
    """`dict()` and `dict.fromkeys()`, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark assistant text for the host's masks, rendered as they are."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        namespace=_Namespace,
        dict=_Dictionary(),
    )
    return environment


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)

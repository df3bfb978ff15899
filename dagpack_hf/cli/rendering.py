"""Options of the commands that render sessions: the chat template, thinking, and control tokens in text."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dagpack_hf.cli.arguments import UsageError

_NAMES = ("template", "chat_template_kwargs", "thinking", "loss_on_thinking", "control_tokens", "date", "on_error")


def add_rendering(parser: argparse.ArgumentParser, *, on_error: str) -> None:
    """Add the options.

    Args:
        parser: The command's parser.
        on_error: Default of `--on-error`.
    """
    group = parser.add_argument_group("how turns are rendered")
    group.add_argument(
        "--template",
        metavar="NAME|FILE",
        help="chat template: 'original' (the tokenizer's own, as a server uses it), 'training' (TRL's variant that "
        "keeps earlier turns as they were), or a .jinja file (default: original)",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="variables of the template, such as '{\"enable_thinking\": true}' (default: thinking is switched on for "
        "turns that have it)",
    )
    group.add_argument(
        "--thinking",
        choices=["keep", "drop"],
        help="whether turns keep their thinking; templates that cannot write it need 'drop' (default: keep)",
    )
    group.add_argument(
        "--no-loss-on-thinking",
        dest="loss_on_thinking",
        action="store_const",
        const=False,
        help="thinking is context, not a target",
    )
    group.add_argument(
        "--control-tokens",
        choices=["keep", "neutralize"],
        help="control tokens in plain text: as a server takes them, or as ordinary tokens (default: keep)",
    )
    group.add_argument(
        "--date", metavar="DATE", help="date that the template shows, if it shows one (default: the session's)"
    )
    group.add_argument(
        "--on-error",
        choices=["raise", "skip"],
        default=on_error,
        help=f"what to do with turns that the chat template cannot render as at inference (default: {on_error})",
    )


def rendering_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `tokenize_conversations` that were given.

    Raises:
        UsageError: If a value is not what it should be.
    """
    from dagpack_hf.render import RenderOptions

    given = {name: getattr(options, name) for name in _NAMES if getattr(options, name) is not None}
    try:
        RenderOptions(**given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return given


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object, such as '{\"enable_thinking\": true}'")
    return value

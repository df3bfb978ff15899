"""The model of a request, and how pi writes requests for it: as files show, the caller says, or pi does by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagpack_hf.pi.context import Context, block_text, blocks, content_text, mapping
from dagpack_hf.pi.options import ReadOptions, legacy_version
from dagpack_hf.pi.tree import EntryTree

_NO_IMAGES_NOTE = "[Current model does not support images"


@dataclass(frozen=True, eq=False)
class RequestModel:
    """The model of a request, and how pi writes requests for it; one object for each model of a session.

    Attributes:
        provider: Provider name, as in the session.
        api: API name, as in the session.
        name: Model id, as in the session.
        images: Whether it takes images; otherwise it reads placeholders.
        parts: Whether a user message of several parts stays a list; otherwise texts are joined by newlines.
        system_updates: Whether later system messages are sent in place instead of folded into the first one.
        legacy: Whether the request was made by pi before 1.x: it sent other models' thinking as text, kept empty text
            parts, and had no text of its own for an empty tool result.
    """

    provider: str
    api: str
    name: str
    images: bool = True
    parts: bool = True
    system_updates: bool = False
    legacy: bool = False

    key: tuple[str, str, str] = field(init=False)
    """Provider, API and model, which all must be equal for a message to be the model's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.provider, self.api, self.name))


class RequestModels:
    """The request model of each assistant message.

    Args:
        options: What the caller says about models.
        tree: The entries, which show what models cannot take.
    """

    def __init__(self, options: ReadOptions, tree: EntryTree) -> None:
        self._keep = options.images != "placeholder"
        self._text_only = {*options.text_only_models, *(_text_only_models(tree) if self._keep else ())}
        self._system_updates = set(options.system_update_models)
        self._legacy = None if options.pi_version is None else legacy_version(options.pi_version)
        self._known: dict[tuple[tuple[str, str, str], bool], RequestModel] = {}

    def of(self, message: Mapping[str, Any], context: Context | None) -> RequestModel:
        """Return the model of an assistant message whose request has a context."""
        legacy = self._legacy
        if legacy is None:
            recorded = context is not None and bool(context.system.entries)
            legacy = not recorded and "durationMs" not in message
        key = model_key(message)
        model = self._known.get((key, legacy))
        if model is None:
            names = {key[2], f"{key[0]}/{key[2]}"}
            model = self._known[key, legacy] = RequestModel(
                *key,
                images=self._keep and not names & self._text_only,
                parts=self._keep,
                system_updates=bool(names & self._system_updates),
                legacy=legacy,
            )
        return model


def model_key(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return provider, API and model of an assistant message, empty where it has none."""
    return block_text(message, "provider"), block_text(message, "api"), block_text(message, "model")


def _text_only_models(tree: EntryTree) -> set[str]:
    """Return the models that a tool result of the file shows to take no images.

    pi 1.x records the model beside an image that it could not take; before, it added a note to the result, for the
    model whose call it answers.
    """
    models = set()
    for index, entry in enumerate(tree.entries):
        message = entry.get("message")
        if entry["type"] != "message" or not isinstance(message, dict) or message["role"] != "toolResult":
            continue
        named = mapping(message.get("details")).get("imageUnsupportedByModel")
        if isinstance(named, str):
            above = _model_above(tree, index)
            models.add(above if above.endswith(f"/{named}") else named)
        elif _NO_IMAGES_NOTE in content_text(message.get("content")) and _has_image(message):
            models.add(_model_above(tree, index))
    return models - {""}


def _has_image(message: dict[str, Any]) -> bool:
    return any(block.get("type") == "image" for block in blocks(message.get("content")))


def _model_above(tree: EntryTree, index: int) -> str:
    """Return `provider/model` of the nearest assistant entry above an entry, empty if there is none."""
    while (index := tree.parents[index]) >= 0:
        entry = tree.entries[index]
        if entry["type"] == "message" and entry["message"]["role"] == "assistant":
            provider, name = (block_text(entry["message"], key) for key in ("provider", "model"))
            return f"{provider}/{name}"
    return ""

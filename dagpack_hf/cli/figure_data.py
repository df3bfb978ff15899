"""Where the data of a figure comes from: sessions, episodes, documents, or the example that comes with the package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagpack_hf.cli.arguments import Printer, UsageError, load_tokenizer, session_paths, show_progress
from dagpack_hf.cli.reading import loading_options
from dagpack_hf.cli.rendering import rendering_options

if TYPE_CHECKING:
    from dagpack_hf.graph import TransitionGraph
    from dagpack_hf.trie import TokenForest

KINDS = {
    **dict.fromkeys(("chains", "graph", "window"), ("sessions", "episodes")),
    **dict.fromkeys(("waste", "cross-document"), ("sessions", "documents")),
    "crossing-pairs": (),
}
"""What each figure can be drawn of."""


@dataclass(frozen=True)
class FigureData:
    """Where the data of a figure comes from.

    Args:
        options: the command line.
        kind: `"sessions"`, `"episodes"`, `"documents"`, or empty for the built-in example.
        what: the same in words.
    """

    options: argparse.Namespace
    kind: str
    what: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> FigureData:
        """Find out what was given.

        Raises:
            UsageError: several kinds of data, or one that the figure is not made of.
        """
        given = {kind: getattr(options, kind, None) for kind in ("sessions", "episodes", "documents")}
        kinds = [kind for kind, value in given.items() if value]
        if len(kinds) > 1:
            raise UsageError(f"give {' or '.join(kinds)}, not both")
        kind = kinds[0] if kinds else ""
        possible = KINDS[options.figure]
        if kind and kind not in possible:
            what = f"it takes {' or '.join(possible)}" if possible else "it takes --lengths"
            raise UsageError(f"--figure {options.figure}: is not drawn of {kind}; {what}")
        value = given.get(kind)
        return cls(options, kind, ("; ".join(value) if isinstance(value, list) else value) or "the built-in example")

    def __str__(self) -> str:
        return self.what

    @property
    def theme(self) -> str:
        """The colours that were asked for."""
        return self.options.theme or "light"

    @property
    def windows(self) -> list[int]:
        """The window lengths that were given, one or several, in ascending order."""
        given = self.options.max_length or []
        return sorted({given} if isinstance(given, int) else set(given))

    @property
    def stretches(self) -> bool:
        """Whether stretches without a branch are drawn as one box."""
        return self.kind == "sessions" or self.options.stretches

    def conversations(self) -> Any:
        """The sessions, as a conversational data set."""
        from dagpack_hf import load_sessions

        loaded = load_sessions(session_paths(self.options.sessions), **loading_options(self.options))
        if not len(loaded):
            raise UsageError(f"{self.what}: no turn to train, so there is nothing to draw")
        return loaded

    def trees(self, tokenizer: Any) -> Any:
        """The sessions, as token trees."""
        from dagpack_hf import tokenize_conversations

        return tokenize_conversations(self.conversations(), tokenizer, **rendering_options(self.options))

    def forest(self) -> TokenForest:
        """The sessions, as tokens that are merged."""
        from dagpack_hf import TokenForest
        from dagpack_hf.packing import iter_trees

        return TokenForest.from_trees(iter_trees(self.trees(self.tokenizer())))

    def tokenizer(self) -> Any:
        """The tokenizer that was asked for."""
        return load_tokenizer(self.options.tokenizer, needs_template=self.options.template is None)

    def episodes(self) -> tuple[list[Any], Callable[[Any], str], Callable[[Any], str]]:
        """Episodes, and the labels of states and actions; messages of sessions are states without actions."""
        if self.kind == "sessions":
            messages = [[_message(each) for each in row["messages"]] for row in self.conversations()]
            return [(each, [""] * (len(each) - 1)) for each in messages], _message_name, str
        if self.kind == "episodes":
            from dagpack_hf.graph import load_episodes

            found, report = load_episodes(self.options.episodes, progress=show_progress())
            Printer(json_output=True)(str(report))
            if not found:
                raise UsageError(f"{self.what}: no episode to draw")
            return list(found), str, str
        from dagpack_hf.view.example import action_name, example_episodes, state_name

        return list(example_episodes()), state_name, action_name

    def graph(self, episodes: list[Any]) -> TransitionGraph:
        """The episodes, merged."""
        from dagpack_hf.graph import TransitionGraph

        merge = "prefix" if self.kind == "sessions" else self.options.merge or "state"
        return TransitionGraph.from_episodes(episodes, merge, progress=show_progress())


def _message(message: dict[str, Any]) -> tuple[str, str, str]:
    """Role, text and JSON of a message, to compare and to label."""
    from dagpack_hf.conversations import dumps

    content = message.get("content")
    return str(message.get("role", "")), content if isinstance(content, str) else "", dumps(message)


def _message_name(message: tuple[str, str, str]) -> str:
    """Role of a message, and where its text begins."""
    role, text, _ = message
    return f"{role}\n{' '.join(text[:60].split())}".strip()

"""Conversations to token trees for a page, with what tells later which tokens are whose.

`tokenize_conversations` does the same for training and keeps the trees alone; here the conversations are rendered in
this process and their chunks stay in memory. The trees are the same.

Cost: that of rendering, in one process, and the distinct text of the conversations in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dagpack_hf.render import RenderOptions, RenderReport
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.encoder import ChunkEncoder
from dagpack_hf.render.progress import TurnProgress, count_turn
from dagpack_hf.render.tree import ConversationTokens
from dagpack_hf.trie import TokenForest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_COUNTERS = ("skipped", "variables", "context_losses")


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation.

    Args:
        session: Path of its session file.
        messages: Its messages, in chat form.
        entries: For each message the id of its entry, `None` if it comes from no single one.
        trained: For each message whether it is a target.
        tokens: Its turns in their contexts.
        encoder: The tokenizer with its memory of chunks.
    """

    session: str
    messages: list[dict[str, Any]]
    entries: list[str | None]
    trained: list[bool]
    tokens: ConversationTokens
    encoder: ChunkEncoder

    def rendered_turns(self) -> Iterable[str | None]:
        """Entries of the turns that could be rendered."""
        return [self.entries[turn.index] for turn in self.tokens.turns]


@dataclass(frozen=True)
class Rendered:
    """All conversations.

    Args:
        conversations: One for each row of the data set.
        forest: Their tokens, merged.
        report: What happened to the turns.
    """

    conversations: list[Conversation]
    forest: TokenForest
    report: RenderReport


def render_conversations(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> Rendered:
    """Render what `load_sessions` returned.

    Args:
        dataset: The conversations.
        tokenizer: A tokenizer with a chat template.
        options: Fields of `RenderOptions`.

    Raises:
        RenderError: A turn cannot be rendered, and `on_error` is `"raise"`.
    """
    renderer = ConversationRenderer(tokenizer, RenderOptions(**(options or {})))
    report = RenderReport()
    conversations = []
    with TurnProgress(sum(map(sum, dataset["trained"])) if len(dataset) else 0):
        for number, row in enumerate(dataset):
            tokens, counts = renderer.render(
                row["messages"],
                row["tools"] or None,
                row["trained"],
                timestamp=row["timestamp"],
                place=f"conversation {number}, ",
                progress=count_turn,
            )
            found = asdict(counts) | {name: dict(getattr(counts, name)) for name in _COUNTERS}
            report.add({**found, "templates": [str(renderer.facts(bool(row["tools"])))]})
            conversations.append(
                Conversation(
                    row["session"], row["messages"], row["entry_ids"], row["trained"], tokens, renderer.encoder
                )
            )
    forest = TokenForest.from_trees(each.tokens.tree() for each in conversations if each.tokens.turns)
    return Rendered(conversations, forest, report)

"""Every turn of the pi corpus and of a public session, against the host's rendering and tokenizing of whole texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagpack_hf import TokenTree, load_sessions
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.options import RenderOptions
from tests.naive_rendering import (
    CannotRender,
    Conversation,
    NaiveIds,
    NaiveTurn,
    clock,
    conversations,
    lost_parts,
    naive_turn,
    stop_of,
    tokenizer_of,
)
from tests.real_tokenizers import NAMES

PI = Path(__file__).parents[1] / ".." / "shared" / "pi"

pytestmark = pytest.mark.skipif(not PI.exists(), reason="needs the pi sessions in ../shared/pi")

NO_THINKING = "the chat template does not write the thinking of the turn"
NO_CALL = "the chat template does not write the call of the turn"
NO_TEXT = "the chat template does not write the text of the turn"
RAISES = "the chat template raised an error"
NO_PROMPT = "the chat template does not continue its own generation prompt"

REFUSED: dict[tuple[str, str | None, str, str], dict[str, int]] = {
    ("qwen3", None, "qwen3", "keep"): {},
    ("qwen3", None, "qwen3_training", "keep"): {},
    ("qwen3", None, "qwen2_5", "keep"): {NO_THINKING: 51},
    ("qwen3", None, "qwen2_5", "drop"): {},
    ("qwen3", None, "qwen3_instruct_2507", "keep"): {NO_THINKING: 51},
    ("qwen3", None, "qwen3_instruct_2507", "drop"): {},
    ("qwen3", None, "qwen3_5_think", "keep"): {},
    ("qwen3", None, "qwen3_6", "keep"): {},
    ("qwen3", None, "qwen3_8", "keep"): {},
    ("qwen3", None, "qwen3_vl", "keep"): {NO_THINKING: 51},
    ("qwen3", None, "qwen3_vl", "drop"): {},
    ("qwen3", None, "nemotron_3_nano", "keep"): {},
    ("qwen3", None, "nemotron_3_5_lightning", "keep"): {},
    ("qwen3", "glm", "glm4moe", "keep"): {},
    ("qwen3", "glm", "glm4moe_training", "keep"): {},
    ("qwen3", "lfm2", "lfm2_2_5", "keep"): {},
    ("llama3_1", None, "llama3_1", "keep"): {RAISES: 97, NO_THINKING: 32},
    ("llama3_1", None, "llama3_1", "drop"): {RAISES: 97},
    ("llama3_1", None, "llama3", "keep"): {NO_CALL: 127, NO_THINKING: 10},
    ("llama3_1", None, "llama3", "drop"): {NO_CALL: 127},
    ("llama3_1", "chatml", "qwen3_6", "keep"): {},
    ("gptoss", None, "gptoss", "keep"): {RAISES: 28, NO_CALL: 11},
    ("gemma3", None, "gemma3", "keep"): {NO_CALL: 127, RAISES: 136},
    ("gemma3", "gemma4", "gemma4_v5", "keep"): {NO_PROMPT: 10},
    ("gemma3", "chatml", "qwen3", "keep"): {},
    ("deepseek_v3", None, "deepseekv3", "keep"): {NO_CALL: 127, RAISES: 133, NO_PROMPT: 11},
    ("deepseek_v3", None, "deepseekv3_training", "keep"): {NO_PROMPT: 185, NO_THINKING: 2},
    ("deepseek_v3", None, "deepseekv3_training", "drop"): {NO_PROMPT: 185},
    ("deepseek_v3", "chatml", "qwen3_5_think", "keep"): {},
    ("deepseek_v3", "muse", "muse_glimmer", "keep"): {NO_TEXT: 12},
    ("deepseek_v3", "cohere", "cohere2", "keep"): {NO_CALL: 127, RAISES: 134},
    ("llama2", "phi3", "phi3", "keep"): {NO_CALL: 127, NO_THINKING: 10},
    ("llama2", "phi3", "phi3", "drop"): {NO_CALL: 127},
    ("llama2", "chatml", "qwen3_training", "keep"): {},
    ("llama2_first", "chatml", "qwen3", "keep"): {},
    ("llama2", "glm", "glm4moe", "keep"): {},
}
"""Turns of the corpus, of 271, that are refused, by vocabulary, control tokens added to it, template and thinking."""


@lru_cache(maxsize=1)
def corpus() -> list[Conversation]:
    """The rows, a year before they were recorded: templates that show a date must not show today's."""
    rows = conversations(load_sessions(PI / "corpus" / "sessions"))
    return [replace(row, timestamp=f"{int(row.timestamp[:4]) - 1}{row.timestamp[4:]}") for row in rows]


@lru_cache(maxsize=1)
def public_session() -> Conversation:
    """The session of 1,018 entries; its pi stored no prompt and tools, so that it gets those of a session like it."""
    truth = json.loads((PI / "corpus" / "ground_truth" / "0.74.2" / "b_tree.json").read_text("utf-8"))
    prompt = truth["messages"][truth["requests"][0]["messages"][0]]["content"]
    (session,) = conversations(
        load_sessions(PI / "public", system_prompt=prompt, tools=next(iter(truth["tools"].values())))
    )
    return session


@lru_cache(maxsize=1)
def naive_ids(vocabulary: str, added: str | None) -> NaiveIds:
    """Templates for one vocabulary come one after the other and share many texts."""
    return NaiveIds(tokenizer_of(vocabulary, added, "qwen3"))


def test_the_pairs_cover_six_tokenizers_and_ten_families() -> None:
    assert {vocabulary for vocabulary, *_ in REFUSED} == {*NAMES, "llama2_first"} and len(NAMES) == 6
    families = {template.split("_")[0].rstrip("0123456789") for _, _, template, _ in REFUSED}
    assert families == {
        *("qwen", "nemotron", "glm4moe", "lfm", "muse", "llama", "gptoss", "gemma", "deepseekv", "cohere", "phi")
    }


@pytest.mark.parametrize(("vocabulary", "added", "template", "thinking"), REFUSED)
def test_every_turn_of_the_corpus(vocabulary: str, added: str | None, template: str, thinking: str) -> None:
    """Windows or not: ids are the naive ones, and refused is exactly what the naive rendering raises on or loses."""
    tokenizer = tokenizer_of(vocabulary, added, template)
    ids = naive_ids(vocabulary, added)
    renderers = [
        ConversationRenderer(tokenizer, RenderOptions(on_error="skip", thinking=thinking, windows=windows))
        for windows in (True, False)
    ]
    refused: Counter[str] = Counter()
    compared = windowed = 0
    for row in corpus():
        naive = dict(_naive_turns(tokenizer, template, row if thinking == "keep" else row.without_thinking()))
        expected = dict(zip(naive, ids.turns(list(naive.values())), strict=True))
        for renderer in renderers:
            tokens, counts = renderer.render(row.messages, row.tools, row.trained, timestamp=row.timestamp)
            assert [turn.index for turn in tokens.turns] == list(expected)
            assert counts.turns + counts.skipped.total() == len(row.targets)
            assert counts.fallbacks == 0
            for number, turn in enumerate(tokens.turns):
                found, (context, target) = tokens.turn(number), expected[turn.index]
                np.testing.assert_array_equal(found.context_ids, context)
                np.testing.assert_array_equal(found.target_ids, target)
                assert (turn.variables, turn.spliced) == (naive[turn.index].variables, naive[turn.index].spliced)
            if renderer is renderers[0]:
                windowed += counts.windowed
            else:
                refused.update(counts.skipped)
                compared += counts.turns
    assert dict(refused) == REFUSED[vocabulary, added, template, thinking]
    assert compared == 271 - refused.total()
    assert windowed > 0 or refused


def _naive_turns(tokenizer: Any, template: str, row: Conversation) -> Iterator[tuple[int, NaiveTurn]]:
    """The turns of a conversation that the template can express."""
    with clock(row.timestamp):
        for index in row.targets:
            try:
                turn = naive_turn(tokenizer, stop_of(template), row.messages, index, row.tools)
            except CannotRender:
                continue
            if not lost_parts(turn.text, row.messages[index]):
                yield index, turn


def test_the_corpus_has_every_kind_of_turn() -> None:
    kinds = Counter(
        (len(row.messages[index].get("tool_calls") or ()), "reasoning_content" in row.messages[index])
        for row in corpus()
        for index in row.targets
    )
    assert kinds == {
        (0, False): 134,
        (0, True): 10,
        (1, False): 71,
        (1, True): 37,
        (2, False): 13,
        (2, True): 4,
        (3, False): 2,
    }


@dataclass(frozen=True)
class Case:
    """How the session is compared under one template.

    Attributes:
        whole: of how many turns the context of one is tokenised as a whole, 1 for all; others message by message. The
            turn itself is tokenised with all of its context for every 8th turn of those, else with its last message.
        opening: control token that opens a message.
        refused: turns that cannot be rendered.
        tokens: tokens of all turns in their contexts, of all leaves, of the tree, and targets.
    """

    vocabulary: str
    added: str | None
    template: str
    thinking: str
    whole: int
    opening: str
    refused: dict[str, int]
    tokens: tuple[int, int, int, int]


SESSION = [
    Case("qwen3", None, "qwen3", "keep", 1, "<|im_start|>", {}, (38_247_251, 38_157_453, 213_403, 65_955)),
    Case("qwen3", None, "qwen3_training", "keep", 43, "<|im_start|>", {}, (38_623_927, 147_528, 147_528, 65_951)),
    Case("qwen3", None, "qwen2_5", "drop", 43, "<|im_start|>", {}, (38_245_495, 145_776, 145_776, 65_919)),
    Case("gptoss", None, "gptoss", "keep", 8, "<|start|>", {NO_CALL: 3}, (40_599_455, 6_786_654, 264_986, 63_420)),
    Case("llama3_1", "chatml", "qwen3_6", "keep", 8, "<|im_start|>", {}, (37_031_825, 7_411_381, 271_382, 61_679)),
    Case("llama3_1", None, "llama3_1", "keep", 8, "<|start_header_id|>", {RAISES: 431}, (0, 0, 0, 0)),
    Case(
        "deepseek_v3",
        None,
        "deepseekv3_training",
        "drop",
        8,
        "<｜User｜>",
        {NO_PROMPT: 372},
        (5_709_960, 140_899, 140_899, 6_324),
    ),
]


@pytest.mark.parametrize("case", SESSION, ids=lambda case: f"{case.vocabulary}-{case.template}")
def test_every_turn_of_the_public_session(case: Case) -> None:
    """Ids of every turn, and the tree as large as a brute-force trie of the naive ids."""
    session = public_session()
    assert len(session.targets) == 431
    tokenizer = tokenizer_of(case.vocabulary, case.added, case.template)
    renderer = ConversationRenderer(tokenizer, RenderOptions(on_error="skip", thinking=case.thinking))
    tokens, counts = renderer.render(session.messages, session.tools, session.trained, timestamp=session.timestamp)
    row = session if case.thinking == "keep" else session.without_thinking()
    whole, pieces = NaiveIds(tokenizer, keep=False), NaiveIds(tokenizer)
    sequences, targets = [], 0
    for number, (index, turn) in enumerate(_naive_turns(tokenizer, case.template, row)):
        last_message = NaiveTurn(turn.context[turn.context.rindex(case.opening) :], turn.text)
        if number % case.whole:
            context = np.concatenate(pieces.of(_cut_before(turn.context, case.opening)))
            ((_, target),) = pieces.turns([last_message])
        elif number % (8 * case.whole):
            (context,) = whole.of([turn.context])
            ((_, target),) = pieces.turns([last_message])
        else:
            ((context, target),) = whole.turns([turn])
        assert tokens.turns[number].index == index
        found = tokens.turn(number)
        np.testing.assert_array_equal(found.context_ids, context)
        np.testing.assert_array_equal(found.target_ids, target)
        sequences.append(np.concatenate([context, target]))
        targets += len(target)
    assert dict(counts.skipped) == case.refused
    assert len(sequences) == len(tokens.turns) == counts.turns == 431 - sum(case.refused.values())
    tree = tokens.tree()
    found_tokens = tree.logical_tokens, _leaf_tokens(tree), len(tree.input_ids), int(tree.target_count.sum())
    assert found_tokens == (*_brute_force(sequences), targets) == case.tokens


def _cut_before(text: str, token: str) -> list[str]:
    first, *rest = text.split(token)
    return [*([first] if first else []), *(token + part for part in rest)]


def _brute_force(sequences: list[np.ndarray]) -> tuple[int, int, int]:
    """Tokens of sequences, of the leaves of their trie, and of the trie, from the sequences in sorted order."""
    ordered = sorted(sequence.astype(">i4").tobytes() for sequence in sequences)
    leaves = unique = 0
    before = b""
    for sequence, after in zip(ordered, [*ordered[1:], b""], strict=False):
        leaves += 0 if after.startswith(sequence) else len(sequence) // 4
        unique += len(sequence) // 4 - _common_tokens(before, sequence)
        before = sequence
    return sum(map(len, sequences)), leaves, unique


def _common_tokens(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    differ = np.frombuffer(a[:size], ">i4") != np.frombuffer(b[:size], ">i4")
    return int(differ.argmax()) if differ.any() else size // 4


def _leaf_tokens(tree: TokenTree) -> int:
    """Tokens on the paths to all tokens that none follows."""
    depth = np.zeros(len(tree.input_ids), np.int64)
    inner = np.zeros(len(depth), bool)
    start = 0
    for length, parent in zip(tree.node_length, tree.node_parent, strict=True):
        inner[start : start + length - 1] = True
        above = 0
        if parent >= 0:
            inner[parent] = True
            above = depth[parent]
        depth[start : start + length] = above + 1 + np.arange(length)
        start += length
    return int(depth[~inner].sum())


def test_brute_force() -> None:
    assert _brute_force([]) == (0, 0, 0)
    assert _brute_force([np.array(ids) for ids in ([1, 2], [1, 2, 3], [1, 4], [1, 4], [5])]) == (10, 6, 5)

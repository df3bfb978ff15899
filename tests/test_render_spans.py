"""Trained spans: exactly what the model writes, up to one stop token; and the table of how TRL's masks differ."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dagpack_hf import load_sessions
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.options import RenderOptions
from dagpack_hf.sample import sample_sessions
from tests.naive_rendering import (
    STOPS,
    Conversation,
    NaiveIds,
    Stop,
    conversations,
    lost_parts,
    naive_turn,
    stop_of,
    tokenizer_of,
)
from tests.real_tokenizers import NAMES

ROOT = Path(__file__).parents[1]

OPENINGS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "<|assistant|>", "<|system|>", "[gMASK]"),
    *(
        "<｜Assistant｜>",
        "<｜User｜>",
        "<|START_OF_TURN_TOKEN|>",
        "<tool_response>",
        "<|tool_response_start|>",
        "<bos>",
    ),
    *("<|startoftext|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<|start|>"),
)
"""Control tokens that open messages, tool results or texts."""

WRITTEN_BY_THE_MODEL = {"gptoss": "<|end|><|start|>assistant", "muse_glimmer": "<|eom|><|start|>assistant"}
"""In some families a turn is several messages, of which the model opens all but the first."""

FAMILIES = [
    ("qwen3", None, "qwen3"),
    ("qwen3", None, "qwen3_training"),
    ("qwen3", None, "qwen3_6"),
    ("qwen3", None, "qwen2_5"),
    ("qwen3", None, "nemotron_3_nano"),
    ("qwen3", "glm", "glm4moe"),
    ("qwen3", "glm", "glm4moe_training"),
    ("qwen3", "lfm2", "lfm2_2_5"),
    ("llama3_1", None, "llama3_1"),
    ("gptoss", None, "gptoss"),
    ("gemma3", None, "gemma3"),
    ("gemma3", "gemma4", "gemma4_v5"),
    ("deepseek_v3", None, "deepseekv3_training"),
    ("deepseek_v3", "muse", "muse_glimmer"),
    ("llama2", "phi3", "phi3"),
]


WRAPPED = {"gptoss": "<|channel|>final<|message|>{}", "muse_glimmer": "to=user<|message|>{}"}
"""What a turn of text alone is, where it is more than the text."""


@lru_cache(maxsize=1)
def sample() -> list[Conversation]:
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "What is it?"},
        {"role": "user", "content": "Nothing."},
        {"role": "assistant", "content": "All right."},
    ]
    plain = Conversation(chat, None, [False, True, False, True], "2026-01-31T00:00:00Z")
    return [plain, *conversations(load_sessions(sample_sessions()))]


@pytest.mark.parametrize(("vocabulary", "added", "template"), FAMILIES)
def test_a_turn_ends_on_its_only_stop_token_and_has_no_scaffold(
    vocabulary: str, added: str | None, template: str
) -> None:
    """All turns of a chat and of the bundled sessions, without thinking under templates that never write it."""
    tokenizer = tokenizer_of(vocabulary, added, template)
    drop = template in ("qwen2_5", "llama3_1")
    renderer = ConversationRenderer(tokenizer, RenderOptions(on_error="skip", thinking="drop" if drop else "keep"))
    stop = stop_of(template)
    stops = {tokenizer.convert_tokens_to_ids(text) for text in (stop.text, stop.call)}
    assert stops <= set(tokenizer.added_tokens_decoder)
    turns = 0
    for row in sample():
        tokens, _ = renderer.render(row.messages, row.tools, row.trained, timestamp=row.timestamp)
        messages = row.without_thinking().messages if drop else row.messages
        for number, turn in enumerate(tokens.turns):
            found, message = tokens.turn(number), messages[turn.index]
            assert found.target_ids[-1] == tokenizer.convert_tokens_to_ids(stop.of(message))
            assert not stops & set(found.target_ids[:-1])
            assert found.first_target == 0
            prompt = generation_prompt(tokenizer, turn.variables)
            check_scaffold(template, message, tokenizer.decode(found.target_ids), stop.of(message), prompt)
            turns += 1
    assert turns >= 2


def generation_prompt(tokenizer: Any, variables: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    bare, asking = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables)
        for prompt in (False, True)
    )
    end = next((at for at, (a, b) in enumerate(zip(bare, asking, strict=False)) if a != b), len(bare))
    assert asking[end:]
    return asking[end:]


def check_scaffold(template: str, message: dict[str, Any], text: str, stop: str, prompt: str) -> None:
    """All of the message is there, and nothing that the server writes; a text alone is that text."""
    assert text.endswith(stop)
    inside = text[: -len(stop)]
    own = inside.replace(WRITTEN_BY_THE_MODEL.get(template, "\0"), "")
    assert not [token for token in OPENINGS if token in own]
    assert not lost_parts(text, message)
    assert not text.startswith(prompt)
    thinking, content = (message.get("reasoning_content") or "").strip(), message["content"].strip()
    if not thinking:
        assert "think>" not in inside
    if content and not thinking and not message.get("tool_calls"):
        assert inside.strip() == WRAPPED.get(template, "{}").format(content)


@pytest.mark.parametrize("vocabulary", [*NAMES, "llama2_first"])
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_5_think"])
def test_turns_that_would_melt_into_their_prompt(vocabulary: str, template: str) -> None:
    """A server has fed the prompt's own tokens by then: they stay, and the turn has the tokens behind them."""
    tokenizer = tokenizer_of(vocabulary, "chatml", template)
    renderer = ConversationRenderer(tokenizer, RenderOptions(on_error="skip"))
    ids = NaiveIds(tokenizer)
    melted = compared = 0
    for start in STARTS:
        for thinking in (None, "", f"{start}So."):
            if thinking and template == "qwen2_5":
                continue
            turn = {"role": "assistant", "content": f"{start}Hello"}
            turn |= {} if thinking is None else {"reasoning_content": thinking}
            messages = [{"role": "user", "content": "Hi"}, turn]
            naive = naive_turn(tokenizer, stop_of(template), messages, 1, None)
            if lost_parts(naive.text, turn):
                continue
            tokens, _ = renderer.render(messages, None, [False, True])
            found, ((context, target),) = tokens.turn(0), ids.turns([naive])
            assert found.context_ids == context.tolist()
            assert found.target_ids == target.tolist(), (start, thinking)
            whole = ids.of([naive.context + naive.text])[0].tolist()
            melted += whole != found.context_ids + found.target_ids
            compared += 1
    assert compared > 10
    if template == "qwen2_5" and not vocabulary.startswith("llama2"):
        assert melted > 0


STARTS = (
    "",
    " ",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "\r\n",
    "\u0301",
    "\u2028",
    "\u00a0",
    "\n ",
    " \n",
    "\ufeff",
    "\u200d",
    "'s",
)
"""Beginnings that tokenizers join with a line break before them, or treat in their own way."""


def test_stops_are_by_the_longest_name() -> None:
    assert stop_of("gemma3_training") is STOPS["gemma"] and stop_of("gemma4_v5") is STOPS["gemma4"]
    assert stop_of("glm4moe") == Stop("<|user|>", "<|observation|>", written=False)


# The table of differences to TRL's masks


@pytest.fixture(scope="module")
def spans() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("spans_benchmark", ROOT / "benchmarks" / "spans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setitem(sys.modules, "spans_benchmark", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def differences(spans: ModuleType) -> dict[str, dict[str, Any]]:
    return {name: spans.family_differences(name) for name in spans.FAMILIES}


def test_the_page_shows_the_differences(spans: ModuleType, differences: dict[str, dict[str, Any]]) -> None:
    assert spans.PAGE.read_text(encoding="utf-8") == spans.page(differences)


def test_a_mask_differs_by_what_no_model_writes(spans: ModuleType, differences: dict[str, dict[str, Any]]) -> None:
    """Some rows of the table by hand."""
    qwen3, gptoss, gemma = (differences[name] for name in ("qwen3", "gptoss", "diffusion_gemma"))
    assert qwen3["thinking, text"] == spans.Difference(masked=(("\n", "behind"),))
    assert qwen3["text"] == spans.Difference(masked=(("<think>\n\n</think>\n\n", "before"), ("\n", "behind")))
    assert gptoss["thinking, call"] == spans.Difference(masked=(("<|start|>assistant", "before"),))
    assert gptoss["two calls"].note == "refused: the chat template does not write the call of the turn"
    assert gemma["call"] == spans.Difference(turn=(("<|tool_response>", "behind"),))


@pytest.mark.parametrize(
    ("name", "vocabulary", "added"),
    [
        ("qwen3", "qwen3", None),
        ("qwen3_6", "llama3_1", "chatml"),
        ("glm4moe", "qwen3", "glm"),
        ("gptoss", "gptoss", None),
        ("diffusion_gemma", "gemma3", "gemma4"),
        ("llama3", "llama3_1", None),
        ("gemma3", "gemma3", None),
        ("muse_glimmer", "deepseek_v3", "muse"),
    ],
)
def test_real_tokenizers_differ_alike(
    spans: ModuleType, differences: dict[str, dict[str, Any]], name: str, vocabulary: str, added: str | None
) -> None:
    tokenizer = tokenizer_of(vocabulary, added, name)
    assert spans.family_differences(name, tokenizer) == differences[name]


def test_differences_are_told_by_their_place(spans: ModuleType) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    def compare(masked: str, turn: str) -> Any:
        return spans.compare(Letters(), list(map(ord, masked)), list(map(ord, turn)))

    assert compare("abc", "abc") == spans.Difference()
    assert compare("xabcy", "abc") == spans.Difference(masked=(("x", "before"), ("y", "behind")))
    assert compare("abc", "xabcy") == spans.Difference(turn=(("x", "before"), ("y", "behind")))
    assert compare("abxc", "abc") == spans.Difference(masked=(("x", "inside"),))
    assert spans.table({"a": {"one": compare("a|\n", "a"), "two": compare("a|\n", "a")}}).splitlines()[-1] == (
        r"| a | all | `\|\n` behind | nothing |"
    )


def test_the_benchmark_runs(spans: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    spans.main(["--quick"])
    *table, figures = capsys.readouterr().out.splitlines()
    found = json.loads(figures)
    assert found["benchmark"] == "spans" and set(found["families"]) == set(spans.QUICK)
    assert sum(line.startswith("| qwen3 |") for line in table) == 2
    assert found["families"]["qwen3"] == {"same": 0, "more_masked": 6, "more_here": 0, "not_compared": 0}
    for counts in found["families"].values():
        assert counts["not_compared"] + counts["same"] + np.maximum(counts["more_masked"], counts["more_here"]) == 6

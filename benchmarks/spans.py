r"""What is trained of a turn, beside TRL's masks: the differences by family of chat templates, as a table.

    python benchmarks/spans.py [--quick] [--write]

A mask of TRL (`assistant_only_loss`) covers what stands in the `{% generation %}` blocks of its training template. A
turn here is what the model writes at inference: behind the generation prompt of the family's own template, up to and
including the token at which the server stops. Both are rendered for turns of six kinds after a question, and the
texts of the trained tokens compared. The table does not depend on the vocabulary: a small tokenizer with the control
tokens of all families is enough. `--write` puts the table into `docs/spans.md`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from measure import print_figures

from dagpack_hf.render import RenderError, RenderOptions
from dagpack_hf.render.conversation import ConversationRenderer
from dagpack_hf.render.options import template_source
from dagpack_hf.sample import sample_tokenizer

_TEXT = """\
# What is trained of a turn

The trained span of a turn is what the model writes at inference: the text behind the generation prompt, up to and
including one stop token. TRL's `assistant_only_loss` trains what stands between `{% generation %}` and
`{% endgeneration %}` in a training variant of the chat template. The table shows, for turns of six kinds (text, calls,
both, with and without thinking) after a question, which text is trained in one of the two ways alone.

Three kinds of text are trained by masks though no model ever writes them:

* what follows the stop token, a line break mostly: the server has stopped before it;
* the part of the generation prompt that the server writes: the role (`<|start|>assistant`), an opening `<think>`, the
  empty thought that tells a model not to think;
* the end-of-text token of a conversation.

And some masks lack the token that the model stops with. *Refused* are turns that the family's own template cannot
express; such turns are counted and named, or raise an error.

Made by `python benchmarks/spans.py --write`.
"""

PAGE = Path(__file__).parents[1] / "docs" / "spans.md"

FAMILIES = {
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
    "qwen3_8": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
    "nemotron_3_5_lightning": "<|im_end|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "lfm2_v2": "<|im_end|>",
    "muse_glimmer": "<|eot|>",
    "diffusion_gemma": "<turn|>",
    "llama3": "<|eot_id|>",
    "phi3": "<|endoftext|>",
    "gemma3": "<end_of_turn>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
}
"""Templates with a training variant, and their `eos_token`."""

QUICK = ("qwen3", "gptoss", "llama3")

BOS = {
    "deepseekv3": "<｜begin▁of▁sentence｜>",
    "gemma3": "<bos>",
    "diffusion_gemma": "<bos>",
    "llama3": "<|begin_of_text|>",
}

CONTROL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>", "[gMASK]", "<sop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|end|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>"),
    *("<|tool_response_start|>", "<|tool_response_end|>", "<|startoftext|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>"),
    *("<channel|>", '<|"|>', "<|think|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"),
    *(
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁sep｜>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "The file."}}},
    },
}


def _call(path: str, number: int) -> dict[str, Any]:
    return {"id": f"callcall{number}", "type": "function", "function": {"name": "read", "arguments": {"path": path}}}


KINDS: dict[str, dict[str, Any]] = {
    "text": {"content": "It is blue."},
    "thinking, text": {"content": "It is blue.", "reasoning_content": "Light scatters."},
    "call": {"content": "", "tool_calls": [_call("a.txt", 1)]},
    "thinking, call": {"content": "", "reasoning_content": "I must look.", "tool_calls": [_call("a.txt", 1)]},
    "text, call": {"content": "I look.", "tool_calls": [_call("a.txt", 1)]},
    "two calls": {"content": "", "tool_calls": [_call("a.txt", 1), _call("b.txt", 2)]},
}
"""The turn that follows the question."""


@dataclass(frozen=True)
class Difference:
    """What one way trains and the other does not.

    Args:
        masked: what the mask covers beyond the turn: texts, each with where it stands.
        turn: what the turn has beyond the mask, likewise.
        note: why there is nothing to compare, if so.
    """

    masked: tuple[tuple[str, str], ...] = ()
    turn: tuple[tuple[str, str], ...] = ()
    note: str = ""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    differences = {name: family_differences(name) for name in (QUICK if options.quick else FAMILIES)}
    print(table(differences))
    if options.write:
        PAGE.write_text(page(differences), encoding="utf-8")
    print_figures("spans", vars(options), {"families": figures(differences)})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three families")
    parser.add_argument("--write", action="store_true", help="write docs/spans.md")
    options = parser.parse_args(arguments)
    if options.quick and options.write:
        parser.error("docs/spans.md has all families; leave out --quick")
    return options


# The two ways, on one conversation


def family_tokenizer(name: str) -> Any:
    """A small tokenizer with the control tokens of all families and the template of one."""
    tokenizer = sample_tokenizer()
    tokenizer.add_tokens([token for token in CONTROL if token not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.eos_token, tokenizer.bos_token = FAMILIES[name], BOS.get(name)
    tokenizer.chat_template = template_source(tokenizer, str(_template_file(name)), False)
    return tokenizer


def family_differences(name: str, tokenizer: Any = None) -> dict[str, Difference]:
    """Differences for each kind of turn; `tokenizer` in place of the small one, with the family's own template."""
    tokenizer = tokenizer or family_tokenizer(name)
    training = template_source(tokenizer, str(_template_file(f"{name}_training")), False)
    renderer = ConversationRenderer(tokenizer, RenderOptions(on_error="raise"))
    return {kind: _difference(tokenizer, training, renderer, turn) for kind, turn in KINDS.items()}


def _difference(tokenizer: Any, training: str, renderer: ConversationRenderer, turn: dict[str, Any]) -> Difference:
    messages = [{"role": "user", "content": "What colour is the sky?"}, {"role": "assistant", **turn}]
    tools = [_TOOL] if "tool_calls" in turn else None
    try:
        tokens, _ = renderer.render(messages, tools, [False, True])
    except RenderError as error:
        return Difference(note=f"refused: {error.reason}")
    target = tokens.turn(0).target_ids
    masked = masked_ids(tokenizer, training, messages, tools)
    if not masked:
        return Difference(note="the mask is empty")
    return compare(tokenizer, masked, target)


def masked_ids(tokenizer: Any, training: str, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    """Tokens that TRL's template marks, of a conversation with one turn."""
    out = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=training,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]


def compare(tokenizer: Any, masked: list[int], target: list[int]) -> Difference:
    """Texts of the tokens that one list has and the other has not."""

    def alone(ids: list[int], start: int, stop: int) -> tuple[tuple[str, str], ...]:
        where = "before" if start == 0 else "behind" if stop == len(ids) else "inside"
        return ((tokenizer.decode(ids[start:stop]), where),) if stop > start else ()

    only_masked: tuple[tuple[str, str], ...] = ()
    only_turn: tuple[tuple[str, str], ...] = ()
    for tag, a, b, c, d in SequenceMatcher(None, masked, target, autojunk=False).get_opcodes():
        if tag != "equal":
            only_masked += alone(masked, a, b)
            only_turn += alone(target, c, d)
    return Difference(only_masked, only_turn)


def _template_file(name: str) -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"


# The table


def table(differences: dict[str, dict[str, Difference]]) -> str:
    """Markdown: one line for all kinds of turns of a family that differ alike."""
    lines = [
        "| template | turns | trained by the mask alone | trained here alone |",
        "| --- | --- | --- | --- |",
    ]
    for name, kinds in differences.items():
        alike: dict[Difference, list[str]] = {}
        for kind, difference in kinds.items():
            alike.setdefault(difference, []).append(kind)
        for difference, members in alike.items():
            which = "all" if len(members) == len(kinds) else "; ".join(members)
            if difference.note:
                lines.append(f"| {name} | {which} | {difference.note} | |")
            else:
                lines.append(f"| {name} | {which} | {_cell(difference.masked)} | {_cell(difference.turn)} |")
    return "\n".join(lines)


def _cell(texts: tuple[tuple[str, str], ...]) -> str:
    """Texts as code; the column of a table ends at a bar that is not escaped."""
    written = [(text.replace("\n", "\\n").replace("|", "\\|"), where) for text, where in texts]
    return ", ".join(f"`{text}` {where}" for text, where in written) or "nothing"


def figures(differences: dict[str, dict[str, Difference]]) -> dict[str, dict[str, int]]:
    """For each family how many kinds of turns are the same, have more in the mask, more here, are refused."""
    found = {}
    for name, kinds in differences.items():
        counts: Counter[str] = Counter({"same": 0, "more_masked": 0, "more_here": 0, "not_compared": 0})
        for difference in kinds.values():
            if difference.note:
                counts["not_compared"] += 1
            elif difference == Difference():
                counts["same"] += 1
            else:
                counts["more_masked"] += bool(difference.masked)
                counts["more_here"] += bool(difference.turn)
        found[name] = dict(counts)
    return found


def page(differences: dict[str, dict[str, Difference]]) -> str:
    return f"{_TEXT}\n{table(differences)}\n"


if __name__ == "__main__":
    main()

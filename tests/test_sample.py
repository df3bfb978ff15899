"""The bundled sessions are what they are said to be, and the tokenizer and its template keep every text."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf.pi import load_sessions
from dagpack_hf.sample import sample_sessions, sample_tokenizer

MAKE_SAMPLE = Path(__file__).parents[1] / "benchmarks" / "make_sample"
TOKENIZER = sample_tokenizer()
SESSIONS = {
    path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    for path in sorted(sample_sessions().glob("*.jsonl"))
}
ENTRIES = {name: lines[1:] for name, lines in SESSIONS.items()}


def of_role(entries: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry.get("message", {}).get("role") == role]


def of_type(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["type"] == kind]


def path_to(entries: list[dict[str, Any]], leaf: str) -> list[str]:
    parents = {entry["id"]: entry["parentId"] for entry in entries}
    path = [leaf]
    while parents[path[-1]] is not None:
        path.append(parents[path[-1]])
    return path[::-1]


# --- sessions


def test_the_sample_is_small():
    folder = sample_sessions().parent
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert 300_000 < size < 2_000_000


def test_no_path_of_the_recording_machine():
    for path in sample_sessions().glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        absolute = set(re.findall(r"(?<![\w.\-~])/(?:[\w.@-]+/)+[\w.@-]*", text))
        assert absolute
        assert {name for name in absolute if not name.startswith("/home/user/")} == set()
        assert "127.0.0.1" not in text and "localhost" not in text


def test_headers_and_trees_are_whole():
    for name, (header, *entries) in SESSIONS.items():
        assert (header["type"], header["version"], header["cwd"]) == ("session", 3, "/home/user/projects/ledger")
        assert name == f"{re.sub('[:.]', '-', header['timestamp'])}_{header['id']}.jsonl"
        seen: set[str] = set()
        for entry in entries:
            assert re.fullmatch("[0-9a-f]{8}", entry["id"]) and entry["id"] not in seen
            assert entry["parentId"] in seen or entry["parentId"] is None
            seen.add(entry["id"])


def test_one_model_one_system_prompt_one_tool_set():
    prompts = Counter()
    for entries in ENTRIES.values():
        for entry in of_role(entries, "assistant"):
            assert (entry["message"]["provider"], entry["message"]["model"]) == ("local", "scripted-coder")
        for entry in of_role(entries, "system"):
            prompts[json.dumps([entry["message"]["sections"], entry["message"]["toolsAdded"]])] += 1
    assert list(prompts.values()) == [len(SESSIONS)] and len(SESSIONS) == 13


def test_branches_from_one_exploration():
    entries = next(iter(ENTRIES.values()))
    children = Counter(entry["parentId"] for entry in entries)
    (explored,) = [parent for parent, count in children.items() if count > 1]
    begins = [entry for entry in entries if entry["parentId"] == explored]
    assert [entry["type"] for entry in begins] == ["message", "message", "message", "branch_summary"]
    assert len(of_role(begins, "user")) == 3
    assert len(of_role([e for e in entries if e["id"] in path_to(entries, explored)], "assistant")) == 7
    assert explored in path_to(entries, begins[3]["fromId"])
    assert begins[3]["summary"].startswith("The user explored a different conversation branch")


def test_a_branch_that_branches_again():
    entries = list(ENTRIES.values())[1]
    branching = [entry["id"] for entry in entries if sum(e["parentId"] == entry["id"] for e in entries) > 1]
    assert len(branching) == 2 and branching[0] in path_to(entries, branching[1])


def test_forks_share_entries_and_go_on_differently():
    origin = {name: lines[0]["parentSession"] for name, lines in SESSIONS.items() if "parentSession" in lines[0]}
    forks = {name: parent.removeprefix("/home/user/.pi/agent/sessions/") for name, parent in origin.items()}
    assert len(forks) == 2
    parents = set(forks.values())
    assert len(parents) == 1 and parents <= set(SESSIONS)
    files = [{entry["id"]: entry for entry in ENTRIES[name]} for name in [*parents, *forks]]
    shared = set.intersection(*map(set, files))
    assert len(of_role([files[0][key] for key in shared], "assistant")) == 6
    assert all(file[key] == files[0][key] for key in shared for file in files)
    for file in files:
        own = [entry for key, entry in file.items() if key not in shared]
        assert len(of_role(own, "assistant")) >= 4
        assert not any(entry["id"] in other for entry in own for other in files if other is not file)


def test_a_compaction_in_a_long_session():
    (entries,) = [entries for entries in ENTRIES.values() if of_type(entries, "compaction")]
    (compaction,) = of_type(entries, "compaction")
    at = entries.index(compaction)
    kept = [entry["id"] for entry in entries].index(compaction["firstKeptEntryId"])
    assert path_to(entries, entries[-1]["id"]) == [entry["id"] for entry in entries]
    assert len(of_role(entries[:kept], "assistant")) >= 5 and len(of_role(entries[kept:at], "assistant")) >= 1
    assert len(of_role(entries[at:], "assistant")) >= 8


def test_independent_sessions():
    counts = Counter(entry["id"] for entries in ENTRIES.values() for entry in entries)
    alone = [entries for entries in ENTRIES.values() if all(counts[entry["id"]] == 1 for entry in entries)]
    assert sum(len(of_role(entries, "assistant")) <= 5 for entries in alone) == 6


def test_what_goes_wrong_is_recorded_too():
    entries = list(ENTRIES.values())[-1]
    stops = Counter(entry["message"]["stopReason"] for entry in of_role(entries, "assistant"))
    assert stops["error"] == stops["aborted"] == 1
    (failed,) = [e for e in of_role(entries, "assistant") if e["message"]["stopReason"] == "error"]
    (edit,) = of_type(entries, "context_edit")
    assert (edit["targetId"], edit["replacement"]) == (failed["id"], None)
    assert len(of_role(entries, "bashExecution")) == 1
    assert any(entry["message"]["isError"] for entry in of_role(entries, "toolResult"))


def test_how_much_there_is_to_train_on():
    turns = {e["id"]: e["message"] for entries in ENTRIES.values() for e in of_role(entries, "assistant")}
    trained = [message for message in turns.values() if message["stopReason"] in ("stop", "toolUse")]
    assert len(trained) == 125
    kinds = Counter(part["type"] for message in trained for part in message["content"])
    assert min(kinds["thinking"], kinds["text"], kinds["toolCall"]) >= 40
    tools = {part.get("name") for message in trained for part in message["content"]} - {None}
    assert tools == {"read", "bash", "edit", "write"}


def test_every_turn_is_loaded():
    dataset = load_sessions(sample_sessions())
    assert sum(sum(trained) for trained in dataset["trained"]) == 125


# --- tokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
@settings(max_examples=300, deadline=None)
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "text", ["", " a  b ", " , .", "e\u0301 \u00e9 ﬁ", "\r\n\t\0", "x <|end|> y", "🧪\ufeff食費", "it 's n't"]
)
def test_awkward_texts_come_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_vocabulary():
    template = TOKENIZER.chat_template
    controls = set(re.findall(r"<\|/?\w+\|>", template)) | {"<|pad|>"}
    added = TOKENIZER.added_tokens_decoder
    assert {token.content for token in added.values()} == controls
    for token in added.values():
        assert token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    assert len(TOKENIZER) == 2048 and sorted(TOKENIZER.get_vocab().values()) == list(range(2048))
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|end|>", "<|pad|>")
    assert TOKENIZER.bos_token is None and TOKENIZER.unk_token is None
    assert TOKENIZER.backend_tokenizer.normalizer is None


def test_auto_tokenizer_loads_the_folder():
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(sample_sessions().parent / "tokenizer")
    assert loaded.get_vocab() == TOKENIZER.get_vocab() and loaded.chat_template == TOKENIZER.chat_template


def test_the_tokenizer_is_the_one_of_these_sessions():
    spec = importlib.util.spec_from_file_location("train_tokenizer", MAKE_SAMPLE / "train_tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trained = module.train(module.session_texts(sample_sessions()), vocab_size=2048)
    assert json.loads(trained.to_str())["model"] == json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]


# --- chat template


def function(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "call_1", "function": {"name": name, "arguments": arguments}}


def render(messages, tools=None, **kwargs) -> str:
    return TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)


SCHEMA = {"name": "read", "description": "Read <b>é</b>.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
DECLARED = '<|tools|>{"name": "read", "description": "Read <b>é</b>.", "parameters": {"type": "object"}}\n'
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One"},
    {"role": "user", "content": [{"type": "text", "text": "Tw"}, {"type": "text", "text": "o\n"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look.\n",
        "tool_calls": [function("read", {"path": "é<>&'"}), function("bash", '{"command":"ls"}')],
    },
    {"role": "tool", "content": "x = 1\n", "tool_call_id": "call_1", "name": "read"},
    {"role": "tool", "content": "", "tool_call_id": "call_2"},
    {"role": "assistant", "content": " done ", "reasoning_content": None, "tool_calls": None},
    {"role": "assistant", "content": None},
]


def test_a_conversation_written_out():
    assert render(TALK, [TOOL]) == (
        f"<|system|>Be brief.{DECLARED}<|end|>"
        "<|user|>One<|end|><|user|>Two\n<|end|>"
        '<|assistant|><|think|>Look.\n<|/think|><|call|>{"name": "read", "arguments": {"path": "é<>&\'"}}'
        '<|call|>{"name": "bash", "arguments": {"command":"ls"}}<|end|>'
        "<|tool|>x = 1\n<|end|><|tool|><|end|>"
        "<|assistant|> done <|end|><|assistant|><|end|>"
    )


def test_system_message_and_tools_are_optional():
    user = [{"role": "user", "content": "Hi"}]
    assert render(user) == render(user, []) == "<|user|>Hi<|end|>"
    assert render(user, [TOOL]) == f"<|system|>{DECLARED}<|end|><|user|>Hi<|end|>"
    assert render([TALK[0], *user]) == "<|system|>Be brief.<|end|><|user|>Hi<|end|>"
    assert render([*user, TALK[0]], [TOOL]).count("<|tools|>") == 1
    assert render(user, add_generation_prompt=True) == "<|user|>Hi<|end|><|assistant|>"


def test_trl_trains_with_this_template():
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    assert is_chat_template_prefix_preserving(TOKENIZER)
    assert get_training_chat_template(TOKENIZER) is None


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "critic", "content": "no"}, "critic"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "image"),
    ],
)
def test_what_cannot_be_rendered_is_refused(message, names):
    with pytest.raises(jinja2.exceptions.TemplateError, match=names):
        render([message])


scalars = st.none() | st.booleans() | st.integers() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2))
calls = st.lists(st.builds(function, texts, st.dictionaries(texts, values, max_size=2)), max_size=2)
contexts = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": texts})
turns = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts, "reasoning_content": texts, "tool_calls": calls}
)


@given(contexts, st.lists(contexts | turns, max_size=5), st.sampled_from([None, [TOOL]]))
@settings(max_examples=150, deadline=None)
def test_turns_continue_their_context_and_the_mask_marks_them(first, others, tools):
    messages = [first, *others]
    encoded = TOKENIZER.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, expected = encoded["input_ids"], [0] * len(encoded["input_ids"])
    assert ids == TOKENIZER.encode(render(messages, tools), add_special_tokens=False)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        context = render(messages[:index], tools, add_generation_prompt=True)
        through = render(messages[: index + 1], tools)
        assert through.startswith(context)
        assert through[len(context) :].count("<|end|>") == 1 and through.endswith("<|end|>")
        start, stop = (len(TOKENIZER.encode(text, add_special_tokens=False)) for text in (context, through))
        assert ids[start - 1] == TOKENIZER.convert_tokens_to_ids("<|assistant|>")
        assert ids[stop - 1] == TOKENIZER.eos_token_id
        expected[start:stop] = [1] * (stop - start)
    assert encoded["assistant_masks"] == expected

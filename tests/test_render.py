"""Rendering: each trained turn in the context the model is fed at inference, as token trees."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import trl
from datasets import Dataset

from dagpack_hf import TokenForest, TokenTree, load_sessions, pack_dataset, tokenize_conversations
from dagpack_hf.packing import TREE_COLUMNS, iter_trees
from dagpack_hf.render import RenderError, render_turn
from dagpack_hf.render.tokenize import TREE_FEATURES
from dagpack_hf.render.tree import forest_tree
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from tests.corpora import prefix_counts
from tests.toy import toy_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 2}}}
MESSAGES = [
    {"role": "user", "content": "Add 2 and 2."},
    {"role": "assistant", "content": "", "reasoning_content": "Use the tool.", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Done."},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7", "reasoning_content": "Easy."},
]


def qwen3_tokenizer():
    """The toy tokenizer with Qwen3's own template, which strips thinking before the last user message."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer


def conversations(*rows, **columns) -> Dataset:
    """Messages as JSON text, exact; other columns as they are."""
    return Dataset(pa.table({"messages": [json.dumps(row) for row in rows], **columns}))


def text(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_turn_is_what_the_model_is_fed_and_what_it_writes():
    tokenizer = toy_tokenizer()
    turn = render_turn(tokenizer, MESSAGES, 1, tools=TOOLS)
    assert text(tokenizer, turn.context_ids) == (
        f"<|im_start|>tools\n{json.dumps(TOOLS[0])}\n<|im_end|>\n"
        "<|im_start|>user\nAdd 2 and 2.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(tokenizer, turn.target_ids) == (
        '<think>Use the tool.</think><call>add {"b": 2, "a": 2}</call><|im_end|>'
    )
    assert turn.target_ids[-1] == tokenizer.eos_token_id
    assert turn.target_ids.count(tokenizer.eos_token_id) == 1


def test_earlier_thinking_is_in_the_context_exactly_when_the_template_keeps_it():
    tokenizer = qwen3_tokenizer()
    third, last = (render_turn(tokenizer, MESSAGES, turn) for turn in (3, 5))
    assert "Use the tool." in text(tokenizer, third.context_ids), "kept while no user message follows"
    assert "Use the tool." not in text(tokenizer, last.context_ids)
    assert text(tokenizer, last.target_ids) == "<think>\nEasy.\n</think>\n\n7<|im_end|>"
    prompt = tokenizer.apply_chat_template(MESSAGES[:5], add_generation_prompt=True, tokenize=False)
    assert text(tokenizer, last.context_ids) == prompt


@pytest.mark.parametrize("make_tokenizer", [toy_tokenizer, qwen3_tokenizer])
def test_the_tree_of_a_conversation_holds_the_turns_of_naive_rendering(make_tokenizer):
    """Independent of the trie: every turn by the tokenizer's own apply_chat_template, and a dictionary of prefixes."""
    tokenizer = make_tokenizer()
    trees = tokenize_conversations(conversations(MESSAGES), tokenizer)
    sequences, labels = [], []
    for turn in (1, 3, 5):
        prompt = tokenizer.apply_chat_template(MESSAGES[:turn], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(MESSAGES[: turn + 1])["input_ids"]
        assert whole[: len(prompt)] == prompt
        end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
        sequences.append(whole[:end])
        labels.append([-100] * len(prompt) + whole[len(prompt) : end])
    (tree,) = iter_trees(trees)
    assert trees.features == TREE_FEATURES
    assert tree.logical_tokens == sum(map(len, sequences))
    expected = prefix_counts(sequences, labels)
    assert len(tree.input_ids) == len(expected)
    found, prefixes = {}, []
    owner = np.repeat(tree.node_parent, tree.node_length)
    starts = set((np.cumsum(tree.node_length) - tree.node_length).tolist())
    for at, token in enumerate(tree.input_ids.tolist()):
        parent = int(owner[at]) if at in starts else at - 1
        prefixes.append((*(prefixes[parent] if parent >= 0 else ()), token))
        found[prefixes[-1]] = int(tree.target_count[at])
    assert found == expected


def test_stripped_thinking_makes_branches_not_copies():
    kept, stripped = (
        TokenForest.from_trees(iter_trees(tokenize_conversations(conversations(MESSAGES), make())))
        for make in (toy_tokenizer, qwen3_tokenizer)
    )
    assert kept.num_nodes == 1, "a template that keeps everything makes one path"
    assert stripped.num_nodes > 1


def test_only_trained_messages_are_targets():
    tokenizer = toy_tokenizer()
    trained = [False, False, False, True, False, False]
    (tree,) = iter_trees(tokenize_conversations(conversations(MESSAGES, trained=[trained]), tokenizer))
    targets = text(tokenizer, tree.input_ids[tree.target_count > 0])
    assert targets == "<think>Done.</think>It is 4.<|im_end|>"


def test_arguments_and_schemas_reach_the_template_as_they_were():
    """Integers beyond 64 bits, null, key order: Arrow would change them, JSON text does not."""
    arguments = {"z": 2**70, "a": None, "f": -0.0, "n": [None, {"k": None}]}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = toy_tokenizer()
    (tree,) = iter_trees(tokenize_conversations(conversations(messages, tools=[json.dumps(TOOLS)]), tokenizer))
    assert f"<call>add {json.dumps(arguments)}</call>" in text(tokenizer, tree.input_ids)


def test_turns_count_as_much_as_their_weights_say():
    tokenizer = toy_tokenizer()
    weights = [[0, 0.5, 0, 2.0, 0, 0.0]]
    trees = tokenize_conversations(conversations(MESSAGES, weights=weights), tokenizer)
    (tree,) = iter_trees(trees)
    at = np.flatnonzero(tree.target_count)
    spans = [text(tokenizer, tree.input_ids[at[tree.target_weight[at] == weight]]) for weight in (0.5, 2.0, 0.0)]
    assert spans == [
        '<think>Use the tool.</think><call>add {"b": 2, "a": 2}</call><|im_end|>',
        "<think>Done.</think>It is 4.<|im_end|>",
        "<think>Easy.</think>7<|im_end|>",
    ]
    rows, report = pack_dataset(trees, 512, loss_weighting="paths", progress=False)
    assert report.loss_weight == 0.5 * len(spans[0].replace("<|im_end|>", "!")) + 2 * len(
        spans[1].replace("<|im_end|>", "!")
    )
    assert report.loss_tokens == int(np.count_nonzero(rows[0]["loss_weight"])) < len(at)
    without = conversations(MESSAGES, MESSAGES, weights=[weights[0], None])
    assert tokenize_conversations(without, tokenizer)[1]["target_weight"] == tree.target_count.tolist()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "conversation 0, 6 messages but 1 values in `weights`"),
        ([1, 1, 1, -1, 1, 1], "conversation 0, message 3: its weight is -1"),
        ([1, 1, 1, 1, 1, float("nan")], "conversation 0, message 5: its weight is nan"),
        ([1, None, 1, 1, 1, 1], "conversation 0, message 1: its weight is None"),
    ],
)
def test_weights_that_are_none_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        tokenize_conversations(conversations(MESSAGES, weights=[weights]), toy_tokenizer())


def test_thinking_can_be_context():
    tokenizer = qwen3_tokenizer()
    (tree,) = iter_trees(tokenize_conversations(conversations(MESSAGES[:4]), tokenizer, loss_on_thinking=False))
    trained = text(tokenizer, tree.input_ids[tree.target_count > 0])
    call = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 2}}\n</tool_call>'
    assert trained == f"\n</think>\n\n{call}<|im_end|>\n</think>\n\nIt is 4.<|im_end|>"
    assert "<think>\nUse the tool." in text(tokenizer, tree.input_ids)


def test_thinking_can_be_left_out():
    tokenizer = qwen3_tokenizer()
    trees, report = tokenize_conversations(conversations(MESSAGES), tokenizer, thinking="drop", return_report=True)
    assert "Use the tool." not in text(tokenizer, trees[0]["input_ids"])
    assert report.variables == {"enable_thinking=False": 3}
    (tree,) = iter_trees(trees)
    assert "think" not in text(tokenizer, tree.input_ids[tree.target_count > 0]), "the empty thought is scaffold"


def test_thinking_is_switched_for_each_turn():
    chat = [*MESSAGES, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    _, report = tokenize_conversations(conversations(chat), qwen3_tokenizer(), return_report=True)
    assert report.variables == {"enable_thinking=True": 3, "enable_thinking=False": 1}
    fixed = {"enable_thinking": True}
    _, report = tokenize_conversations(
        conversations(chat), qwen3_tokenizer(), chat_template_kwargs=fixed, return_report=True
    )
    assert report.variables == {}
    rows = conversations(chat, chat_template_kwargs=[json.dumps(fixed)])
    _, report = tokenize_conversations(rows, qwen3_tokenizer(), return_report=True)
    assert report.variables == {}, "a row can set it too"


@pytest.mark.parametrize("windows", [True, False])
def test_messages_of_other_roles_can_be_trained_where_they_stand(windows):
    tokenizer = qwen3_tokenizer()
    trees = tokenize_conversations(
        conversations(MESSAGES), tokenizer, loss_roles=["tool", "user"], windows=windows, chat_template_kwargs={}
    )
    (tree,) = iter_trees(trees)
    trained = text(tokenizer, tree.input_ids[tree.target_count > 0])
    assert trained == (
        # the first token of a sequence is no target
        "im_start|>user\nAdd 2 and 2.<|im_end|>\n"[len("im_start|>") :]
        + "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        + "<|im_start|>user\nAnd 3 more?<|im_end|>\n"
    )
    both = tokenize_conversations(conversations(MESSAGES), tokenizer, loss_roles=["tool", "assistant"])
    assert sum(map(bool, both[0]["target_count"])) > sum(map(bool, trees[0]["target_count"]))


@pytest.mark.parametrize("form", ["conversations", "from/value", "prompt and completion"])
def test_every_conversational_form_is_read(form):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = {
        "conversations": {"conversations": [chat]},
        "from/value": {"conversations": [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]]},
        "prompt and completion": {"prompt": [chat[:1]], "completion": [chat[1:]]},
    }[form]
    tokenizer = toy_tokenizer()
    expected = tokenize_conversations(conversations(chat), tokenizer)
    assert tokenize_conversations(Dataset.from_dict(rows), tokenizer)[:] == expected[:]


def test_a_date_is_that_of_the_session():
    tokenizer = toy_tokenizer()
    template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    rows = conversations(MESSAGES[:2], timestamp=["2025-03-04T05:06:07.890Z"])
    (tree,) = iter_trees(tokenize_conversations(rows, tokenizer, template=template))
    assert text(tokenizer, tree.input_ids).startswith("04 Mar 2025<|im_start|>user")
    (tree,) = iter_trees(tokenize_conversations(rows, tokenizer, template=template, date="2024-12-31"))
    assert text(tokenizer, tree.input_ids).startswith("31 Dec 2024<|im_start|>user")


def test_a_template_can_be_a_file_or_trls_training_variant(tmp_path):
    tokenizer = qwen3_tokenizer()
    file = tmp_path / "chat.jinja"
    file.write_text(toy_tokenizer().chat_template)
    rows = conversations(MESSAGES)
    from_file = tokenize_conversations(rows, tokenizer, template=str(file))
    assert from_file[:] == tokenize_conversations(rows, toy_tokenizer())[:]
    training = trl.chat_template_utils.get_training_chat_template(tokenizer)
    assert (
        tokenize_conversations(rows, tokenizer, template="training")[:]
        == (tokenize_conversations(rows, tokenizer, template=training)[:])
    )
    with pytest.raises(ValueError, match=r"template='nowhere\.jinja' is neither"):
        tokenize_conversations(rows, tokenizer, template="nowhere.jinja")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="The tokenizer has no chat template"):
        tokenize_conversations(rows, tokenizer)


def test_results_are_cached_by_all_that_they_depend_on(tmp_path):
    path = tmp_path / "rows"
    conversations(MESSAGES).save_to_disk(path)
    rows = Dataset.load_from_disk(path)

    def file(tokenizer=None, **options) -> str:
        trees = tokenize_conversations(rows, tokenizer or qwen3_tokenizer(), **options)
        (cached,) = trees.cache_files
        return cached["filename"]

    first = file()
    assert file() == first
    tokenizer = qwen3_tokenizer()
    tokenizer("what a call of the tokenizer leaves behind", truncation=True, max_length=2, padding="max_length")
    assert file(tokenizer) == first
    other = qwen3_tokenizer()
    other.add_tokens("new")
    kinds = [
        file(other),
        file(toy_tokenizer()),
        file(thinking="drop"),
        file(chat_template_kwargs={"enable_thinking": True}),
        file(template="training"),
    ]
    assert len({first, *kinds}) == 6


def test_a_bar_over_turns_counts_those_of_all_processes(capfd):
    rows = conversations(*[MESSAGES] * 4, trained=[[message["role"] == "assistant" for message in MESSAGES]] * 4)
    for processes in (None, 2):
        tokenize_conversations(rows, toy_tokenizer(), num_proc=processes)
        assert "12/12" in capfd.readouterr().err


def test_nested_columns_of_other_data_sets_are_read_without_arrows_fillers():
    rows = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]]
    tokenizer = toy_tokenizer()
    nested = tokenize_conversations(Dataset.from_dict({"messages": rows}), tokenizer)
    assert nested[:] == tokenize_conversations(conversations(*rows), tokenizer)[:]


def test_several_processes_give_the_same_trees():
    rows = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "ok"}] for i in range(40)]
    one, two = (tokenize_conversations(conversations(*rows), toy_tokenizer(), num_proc=n) for n in (None, 2))
    assert one[:] == two[:] and len(one) == 40


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no tools here') }}", "the chat template raised an error"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "the chat template does not continue its own generation prompt",
        ),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "the turn does not end on a stop token"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>end{% endfor %}", "the turn does not end on a stop token"),
    ],
)
def test_a_template_that_cannot_express_a_turn_is_named_or_counted(template, reason, caplog):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 3
    rows = conversations(chat[:2], chat)
    with pytest.raises(RenderError, match=rf"{reason}: .*conversation 0, message 1; on_error=") as error:
        tokenize_conversations(rows, toy_tokenizer(), template=template)
    assert error.value.reason == reason
    trees, report = tokenize_conversations(
        rows, toy_tokenizer(), template=template, on_error="skip", return_report=True
    )
    assert len(trees) == 0 and trees.column_names == list(TREE_COLUMNS)
    assert (report.turns, report.skipped) == (0, {reason: 4})
    assert report.examples[reason].startswith("conversation 0, message 1: ")
    assert f"4 skipped: {reason}" in caplog.text


def test_template_variables_are_passed_on():
    tokenizer = toy_tokenizer()
    template = "{{ mood }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    rows = conversations([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    trees = tokenize_conversations(rows, tokenizer, template=template, chat_template_kwargs={"mood": "glad "})
    assert text(tokenizer, trees[0]["input_ids"]) == "glad a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": ["a"]}, {}, "needs a messages column; the data set has text"),
        ({"messages": ["[]"]}, {"on_error": "ignore"}, "on_error must be 'raise' or 'skip'"),
        ({"messages": [json.dumps(MESSAGES)], "trained": [[True]]}, {}, "conversation 0, 6 messages but 1 values"),
    ],
)
def test_bad_arguments_are_named(columns, options, message):
    with pytest.raises(ValueError, match=message):
        tokenize_conversations(Dataset(pa.table(columns)), toy_tokenizer(), **options)


def test_a_tree_counts_up_to_its_limit():
    tree = forest_tree(TokenForest.from_sequences([[1, 2]] * 65535, [[-100, 2]] * 65535))
    assert tree.target_count.tolist() == [0, 65535] and tree.target_count.dtype == np.uint16
    with pytest.raises(ValueError, match="65536 sequences of one conversation share a target"):
        forest_tree(TokenForest.from_sequences([[1, 2]] * 65536, [[-100, 2]] * 65536))


def test_the_sample_from_session_files_to_rows():
    """The main line, with the figures of the bundled sample."""
    conversation_rows, loaded = load_sessions(sample_sessions(), return_report=True)
    tokenizer = sample_tokenizer()
    trees, report = tokenize_conversations(conversation_rows, tokenizer, return_report=True)
    assert report.turns == loaded.targets == sum(map(sum, conversation_rows["trained"])) == 125
    assert not report.skipped
    rows, packed = pack_dataset(trees, 8192, loss_weighting="paths", progress=False)
    assert packed.logical_tokens == sum(trees["logical_tokens"])
    assert packed.reuse_ratio > 15 and packed.gap <= 0.35
    forest = TokenForest.from_trees(iter_trees(trees))
    assert packed.loss_weight == forest.num_source_targets
    stops = sum(row["shift_labels"].count(tokenizer.eos_token_id) for row in rows)
    assert stops <= report.turns, "at most one stop token is trained for each turn"
    assert all(isinstance(tree, TokenTree) for tree in iter_trees(trees))


def test_arguments_a_template_cannot_walk_are_a_reason_not_a_crash() -> None:
    call = {"type": "function", "function": {"name": "read", "arguments": None}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{% for key in messages[1].tool_calls[0].function.arguments %}{% endfor %}"
    dataset = Dataset.from_list([{"messages": json.dumps(chat)}])
    trees, report = tokenize_conversations(
        dataset, sample_tokenizer(), template=template, on_error="skip", return_report=True
    )
    assert len(trees) == 0
    assert report.skipped == {"the chat template raised an error": 1}

"""Training on conversations whose earlier thinking is stripped: the model sees what it is fed at inference.

The reference knows nothing of the package: the host's own rendering of each turn's prompt, and one forward pass of the
model's own eager attention for each turn.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset, tokenize_conversations
from dagpack_hf.attention import DagVisibility, enable, ordinary_attention
from dagpack_hf.collator import DagCollator
from dagpack_hf.packing import TREE_COLUMNS
from dagpack_hf.render import RenderError
from tests.corpora import row_prefixes
from tests.toy import tiny_llama, toy_tokenizer

WORDS = ["red", "blue", "seven", "walk", "file", "tests", "pass", "why", "now", "the", "open", "line"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def qwen3_tokenizer():
    """The toy tokenizer with a template that strips thinking before the last user message."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer


def conversation(rng: np.random.Generator) -> list[dict]:
    def say(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    messages: list[dict] = [{"role": "system", "content": "Be brief."}]
    for _ in range(3):
        messages.append({"role": "user", "content": say(3)})
        for _ in range(int(rng.integers(0, 3))):
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": say(1)}}}
            messages.append({"role": "assistant", "content": "", "reasoning_content": say(4), "tool_calls": [call]})
            messages.append({"role": "tool", "content": say(2)})
        messages.append({"role": "assistant", "content": say(2), "reasoning_content": say(3)})
    return messages


def conversations(count: int = 3) -> list[list[dict]]:
    rng = np.random.default_rng(0)
    return [conversation(rng) for _ in range(count)]


def naive_turns(tokenizer, messages):
    """Prompt and target ids of every assistant message, by the host alone."""
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"]
            whole = tokenizer.apply_chat_template(messages[: turn + 1])["input_ids"]
            assert whole[: len(prompt)] == prompt
            stop = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
            yield prompt, whole[len(prompt) : stop]


def as_dataset(rows: list[list[dict]], **columns) -> Dataset:
    return Dataset(pa.table({"messages": [json.dumps(row) for row in rows], **columns}))


def test_logits_at_every_trained_token_are_those_of_the_prompt_at_inference():
    tokenizer, rows = qwen3_tokenizer(), conversations()
    model = tiny_llama(vocab_size=len(tokenizer)).eval()
    model.config.max_position_embeddings = 4096
    enable(model)
    packed, report = pack_dataset(
        tokenize_conversations(as_dataset(rows), tokenizer), 1024, loss_weighting="paths", progress=False
    )
    assert report.windows > 1 and report.reuse_ratio > 2
    batch = DagCollator(max_length=1024)(list(packed))
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            dag_visibility=DagVisibility(batch["subtree_end"], batch["position_ids"], "dense"),
            use_cache=False,
        ).logits
    trained = {}
    for row, prefixes in enumerate(map(row_prefixes, packed)):
        for at, prefix in enumerate(prefixes):
            if batch["shift_labels"][row, at] >= 0:
                trained[(*prefix, int(batch["shift_labels"][row, at]))] = logits[row, at]

    compared, worst = 0, 0.0
    with ordinary_attention(model, "eager"), torch.no_grad():
        for messages in rows:
            for prompt, target in naive_turns(tokenizer, messages):
                ids = prompt + target
                reference = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                for at in range(len(prompt), len(ids)):
                    difference = (trained[tuple(ids[: at + 1])] - reference[at - 1]).abs().max()
                    worst = max(worst, (difference / reference[at - 1].abs().max()).item())
                    compared += 1
    assert compared == report.loss_weight, "every trained token of the corpus was compared"
    assert worst <= 1e-5  # float32: the same sums in another order


def trainer(tmp_path, dataset, tokenizer, **options) -> DagSFTTrainer:
    options = {"max_length": 1024, "max_steps": 1, "save_strategy": "no", **options}
    args = DagSFTConfig(str(tmp_path), report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, **options)
    model = tiny_llama(vocab_size=len(tokenizer))
    return DagSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)


def test_chat_data_are_rendered_turn_by_turn_when_asked(tmp_path):
    tokenizer, rows = qwen3_tokenizer(), conversations()
    ours = trainer(tmp_path, Dataset.from_list([{"messages": row} for row in rows]), tokenizer, per_turn=True)
    expected, report = pack_dataset(tokenize_conversations(as_dataset(rows), tokenizer), 1024, seed=42, progress=False)
    assert ours.pack_reports["train"] == report
    assert ours.train_dataset.select(range(len(expected)))[:] == expected[:]
    turns = sum(message["role"] == "assistant" for row in rows for message in row)
    assert ours.render_reports["train"].turns == turns
    ours.train()


def test_without_it_the_tokens_are_those_of_sft_trainer(tmp_path):
    """Under a template that keeps its prefixes, both hold the same tokens; only the labels of a turn differ."""
    tokenizer, rows = toy_tokenizer(), conversations()
    dataset = Dataset.from_list([{"messages": row} for row in rows])
    theirs = SFTTrainer(
        model=tiny_llama(vocab_size=len(tokenizer)),
        args=SFTConfig(
            str(tmp_path), max_length=2048, assistant_only_loss=True, report_to=[], bf16=False, use_cpu=True
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    ).train_dataset
    plain = trainer(tmp_path, dataset, tokenizer, per_turn=False, assistant_only_loss=True, loss_weighting="paths")
    expected, report = pack_dataset(theirs, 1024, loss_weighting="paths", seed=42, progress=False)
    assert plain.pack_reports["train"] == report
    assert plain.train_dataset.select(range(len(expected)))[:] == expected[:]
    assert not plain.render_reports

    trees, whole = tokenize_conversations(as_dataset(rows), tokenizer), theirs["input_ids"]
    for tree, ids, labels in zip(trees, whole, theirs["labels"], strict=True):
        assert tree["node_length"] == [len(tree["input_ids"])], "one path"
        assert tree["input_ids"] == ids[: len(tree["input_ids"])]
        targets = [
            token if count else -100 for token, count in zip(tree["input_ids"], tree["target_count"], strict=True)
        ]
        assert targets == labels[: len(targets)]
        assert set(labels[len(targets) :]) <= {-100}


def test_of_prompt_and_completion_the_completion_is_trained(tmp_path):
    tokenizer, (row, *_) = qwen3_tokenizer(), conversations()
    last = max(index for index, message in enumerate(row) if message["role"] == "user") + 1
    dataset = Dataset.from_list([{"prompt": row[:last], "completion": row[last:]}])
    ours = trainer(tmp_path, dataset, tokenizer, per_turn=True, packing_scope="batch")
    trained = [index >= last for index in range(len(row))]
    expected = tokenize_conversations(as_dataset([row], trained=[trained]), tokenizer)
    assert ours.train_dataset[:] == expected[:]
    ours.train()


def test_a_stream_of_conversations_is_rendered_as_it_is_read(tmp_path):
    tokenizer, rows = qwen3_tokenizer(), conversations(6)
    stream = Dataset.from_list([{"messages": row} for row in rows]).to_iterable_dataset()
    ours = trainer(
        tmp_path, stream, tokenizer, per_turn=True, packing_scope="batch", per_device_train_batch_size=3, max_steps=2
    )
    assert isinstance(ours.train_dataset, IterableDataset)
    ours.train()
    trees, report = tokenize_conversations(as_dataset(rows), tokenizer, return_report=True)
    streamed = [{name: np.asarray(values).tolist() for name, values in tree.items()} for tree in ours.train_dataset]
    assert list(streamed[0]) == list(TREE_COLUMNS)
    assert streamed == list(trees)
    assert ours.render_reports["train"].turns >= report.turns


def test_options_of_rendering_reach_it(tmp_path):
    tokenizer, rows = qwen3_tokenizer(), conversations()
    dataset = as_dataset(rows)
    kwargs = {"thinking": "drop", "template": "training"}
    ours = trainer(tmp_path, dataset, tokenizer, per_turn=True, per_turn_kwargs=kwargs)
    _, report = pack_dataset(tokenize_conversations(dataset, tokenizer, **kwargs), 1024, seed=42, progress=False)
    assert ours.pack_reports["train"] == report
    parsed = DagSFTConfig(str(tmp_path), per_turn_kwargs='{"thinking": "drop"}', bf16=False, use_cpu=True)
    assert parsed.per_turn_kwargs == {"thinking": "drop"}


def test_a_turn_that_cannot_be_rendered_names_the_remedy(tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<think>{{ message.reasoning_content }}</think>", "")
    with pytest.raises(RenderError, match=r"write the thinking of the turn.*thinking=\"drop\".*per_turn_kwargs"):
        trainer(tmp_path, as_dataset(conversations()), tokenizer, per_turn=True)
    ours = trainer(
        tmp_path, as_dataset(conversations()), tokenizer, per_turn=True, per_turn_kwargs={"thinking": "drop"}
    )
    assert ours.render_reports["train"].turns > 5


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": ["a b"]}, {"per_turn": True}, "per_turn=True needs conversational data"),
        ({"prompt": ["a"], "completion": ["b"]}, {"per_turn": True}, "per_turn=True needs conversational data"),
        ({"input_ids": [[1, 2]]}, {"per_turn": True}, "per_turn=True needs conversational data"),
    ],
)
def test_data_without_turns_are_refused(tmp_path, columns, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, Dataset.from_dict(columns), toy_tokenizer(), **options)


def test_options_without_per_turn_are_refused(tmp_path):
    with pytest.raises(ValueError, match="per_turn_kwargs are options of per_turn"):
        DagSFTConfig(str(tmp_path), per_turn=False, per_turn_kwargs={"thinking": "drop"}, bf16=False, use_cpu=True)

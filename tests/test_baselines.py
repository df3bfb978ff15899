"""Baseline layouts as rows: against plain Python, TRL's packing, and ordinary training."""

from __future__ import annotations

import doctest
import importlib
import json
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trl
from datasets import Dataset, DatasetDict, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from dagpack_hf.attention import DagVisibility, enable, ordinary_attention
from dagpack_hf.baselines import baseline_rows, place, rows
from dagpack_hf.collator import DagCollator
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.stats import lognormal_lengths
from tests.reference_layouts import reference_rows
from tests.tiny_models import VOCABULARY, tiny_model
from tests.toy import tiny_llama, toy_tokenizer

LAYOUTS = ("padded", "concatenated", "concatenated_masked", "best_fit")
EOS = 2


def documents_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


def reference(documents, labels, max_length, layout, eos):
    """The five vectors of each row, position by position.

    Best fit has a choice between rows that are equally full, so there the documents of each row are those of `place`;
    that these are a best fit is checked on its own.
    """
    documents, labels = [list(each) for each in documents], [list(each) for each in labels]
    for document, label in zip(documents, labels, strict=True):
        if eos is not None and document and document[-1] != eos:
            label.append(eos if label[-1] != -100 else -100)
            document.append(eos)
    written = []
    lengths = list(map(len, documents))
    placed = reference_rows(lengths, max_length, layout.removesuffix("_masked"))
    if layout == "best_fit":
        placement = place(lengths, max_length, "best_fit")
        chosen: list[list[tuple[int, int]]] = [[] for _ in range(placement.rows)]
        for document, row in zip(placement.document.tolist(), placement.row.tolist(), strict=True):
            chosen[row] += [(document, at) for at in range(min(lengths[document], max_length))]
        assert sorted(map(len, chosen)) == sorted(map(len, placed))
        assert sorted(chain.from_iterable(chosen)) == sorted(chain.from_iterable(placed))
        placed = chosen
    for row in placed:
        n = len(row)
        same = [[layout == "concatenated" or row[i][0] == row[j][0] for j in range(n)] for i in range(n)]
        ids = [documents[document][at] for document, at in row]
        targets = [labels[row[i + 1][0]][row[i + 1][1]] if i + 1 < n and same[i][i + 1] else -100 for i in range(n)]
        begin = [same[i].index(True) for i in range(n)]
        end = [max(j for j in range(n) if same[i][j]) + 1 for i in range(n)]
        position_ids = [i - begin[i] for i in range(n)]
        weights = [float(target != -100) for target in targets]
        written.append((ids, targets, position_ids, end, weights))
    return written


@st.composite
def corpora(draw):
    documents = draw(st.lists(st.lists(st.integers(0, 4), max_size=9), max_size=9))
    masks = [draw(st.lists(st.booleans(), min_size=len(each), max_size=len(each))) for each in documents]
    labels = [[t if m else -100 for t, m in zip(*pair, strict=True)] for pair in zip(documents, masks, strict=True)]
    return documents, labels


@settings(max_examples=80, deadline=None)
@given(corpora(), st.integers(1, 12), st.sampled_from(LAYOUTS), st.sampled_from([None, EOS]))
def test_rows_are_those_written_position_by_position(corpus, max_length, layout, eos):
    documents, labels = corpus
    dataset, report = baseline_rows(
        documents, max_length, layout=layout, labels=labels, eos_token_id=eos, overflow="truncate"
    )
    got = [tuple(row[name] for name in ROW_COLUMNS) for row in dataset]
    expected = reference(documents, labels, max_length, layout, eos)
    assert got == expected

    ended = [[*each, EOS] if eos and each and each[-1] != EOS else each for each in documents]
    ended_labels = [
        [*label, EOS if label[-1] != -100 else -100] if len(each) > len(label) else label
        for each, label in zip(ended, labels, strict=True)
    ]
    tokens = sum(len(ids) for ids, *_ in expected)
    targets = sum(target != -100 for _, row_targets, *_ in expected for target in row_targets)
    source = sum(label != -100 for each in ended_labels for label in each[1:])
    assert (report.rows, report.tokens, report.targets) == (len(expected), tokens, targets)
    assert report.padding_tokens == len(expected) * max_length - tokens
    assert (report.source_targets, report.lost_tokens) == (source, sum(map(len, ended)) - tokens)
    assert report.lost_targets == source - (targets - report.crossing_targets)
    assert report.empty_documents == documents.count([]) and report.documents == len(documents) - documents.count([])
    if layout == "concatenated":
        masked = reference(documents, labels, max_length, "concatenated_masked", eos)
        within = sum(target != -100 for _, row_targets, *_ in masked for target in row_targets)
        assert report.crossing_targets == targets - within
    else:
        assert report.crossing_targets == 0


@pytest.mark.parametrize("positions", [1, 7, 40])
def test_rows_do_not_depend_on_the_portions_in_which_they_are_written(monkeypatch, positions):
    documents = documents_of(lognormal_lengths(60, median=6, seed=1))
    for layout in LAYOUTS:
        whole, report = baseline_rows(documents, 16, layout=layout, overflow="truncate")
        with monkeypatch.context() as patch:
            patch.setattr(rows, "PORTION", positions)
            parts, same = baseline_rows(documents, 16, layout=layout, overflow="truncate")
        assert parts[:] == whole[:] and same == report


# TRL


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_fills_rows_as_trl_does(seed):
    lengths = lognormal_lengths(400, median=40, seed=seed)
    dataset = Dataset.from_dict({"input_ids": documents_of(lengths, seed)})
    theirs = trl.pack_dataset(dataset, 128, "bfd", map_kwargs={"batch_size": len(dataset)})
    placement = place(lengths, 128, "best_fit")
    assert sorted(map(sum, theirs["seq_lengths"])) == sorted(np.diff(placement.row_offsets).tolist())
    assert sorted(chain.from_iterable(theirs["seq_lengths"])) == sorted(placement.length.tolist())
    assert placement.rows == len(theirs) > 20


def test_concatenated_rows_are_those_of_trl():
    dataset = Dataset.from_dict({"input_ids": documents_of(lognormal_lengths(300, median=40))})
    theirs = trl.pack_dataset(dataset, 128, "wrapped", map_kwargs={"batch_size": len(dataset)})
    ours, _ = baseline_rows(dataset, 128, layout="concatenated")
    assert list(ours["input_ids"]) == list(theirs["input_ids"])


# Training


def sequence_loss(model, sequence, label):
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=-100, reduction="sum")


def rows_loss(model, dataset, max_length):
    batch = DagCollator(max_length=max_length)(list(dataset))
    visibility = DagVisibility(batch["subtree_end"], batch["position_ids"])
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], dag_visibility=visibility, use_cache=False
    ).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="none")
    return (losses * batch["loss_weight"].flatten().to(losses.dtype)).sum()


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.fixture(scope="module")
def corpus():
    """Documents that fill windows of 24 tokens one behind the other without being cut, and masks."""
    documents = documents_of([9, 15, 24, 7, 8, 9, 20])
    rng = np.random.default_rng(1)
    labels = [[token if rng.random() < 0.7 else -100 for token in document] for document in documents]
    return documents, labels


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_what_ordinary_training_does(corpus, layout):
    """Documents each on its own; without a document mask the concatenation, row by row, as plain text."""
    documents, labels = corpus
    model = tiny_model("gpt2", torch.float64)
    enable(model)
    dataset, report = baseline_rows(documents, 24, layout=layout, labels=labels)
    assert report.lost_targets == 0
    whole = documents, labels
    if layout == "concatenated":
        streams = [list(chain.from_iterable(each)) for each in whole]
        whole = tuple([stream[low : low + 24] for low in range(0, len(stream), 24)] for stream in streams)
        assert report.crossing_targets > 0
    with ordinary_attention(model, "eager"):
        reference = sum(sequence_loss(model, *each) for each in zip(*whole, strict=True))
        expected = gradients(model, reference)
    loss = rows_loss(model, dataset, 24)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-12)
    assert (gradients(model, loss) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trainer_takes_the_rows(tmp_path, corpus, layout):
    documents, labels = corpus
    dataset, report = baseline_rows(Dataset.from_dict({"input_ids": documents, "labels": labels}), 24, layout=layout)
    model = tiny_llama()
    enable(model)
    expected = rows_loss(model, dataset, 24).item() / report.targets
    arguments = DagSFTConfig(
        output_dir=str(tmp_path), max_length=24, max_steps=1, per_device_train_batch_size=1, use_cpu=True, bf16=False,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = DagSFTTrainer(
        model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset, processing_class=toy_tokenizer()
    )
    assert trainer.train_dataset[:] == dataset[:] and trainer._total_weight == report.targets
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()


# Input


@pytest.mark.parametrize("name", ["placement", "rows"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"dagpack_hf.baselines.{name}"))
    assert result.failed == 0 and result.attempted > 0


def test_data_sets_of_any_form_give_the_same_rows():
    documents = documents_of([5, 0, 12, 3, 8])
    plain = Dataset.from_dict({"input_ids": documents})
    whole, report = baseline_rows(documents, 12, layout="best_fit")
    in_parts = concatenate_datasets([plain.select([0, 1]), plain.select([2, 3, 4])])
    turned = Dataset.from_dict({"input_ids": documents[::-1], "labels": documents[::-1]}).select(range(4, -1, -1))
    arrays = [np.array(each, np.int64) for each in documents]
    for same in (plain, in_parts, turned, arrays):
        assert baseline_rows(same, 12, layout="best_fit")[0][:] == whole[:]
    assert report.empty_documents == 1 and report.documents == 4


def test_too_long_documents_are_refused_truncated_or_dropped():
    documents = documents_of([3, 9, 5, 7])
    with pytest.raises(
        ValueError, match=r"2 of 4 documents are longer than max_length=6 tokens \(the longest has 9\)"
    ):
        baseline_rows(documents, 6)
    cut, report = baseline_rows(documents, 6, overflow="truncate")
    assert [len(row) for row in cut["input_ids"]] == [3, 6, 5, 6]
    assert (report.cut_documents, report.dropped_documents, report.lost_tokens, report.lost_targets) == (2, 0, 4, 4)
    dropped, report = baseline_rows(documents, 6, overflow="drop")
    assert [len(row) for row in dropped["input_ids"]] == [3, 5]
    assert (report.cut_documents, report.dropped_documents, report.lost_tokens, report.lost_targets) == (0, 2, 16, 14)
    _, report = baseline_rows(documents, 6, layout="concatenated_masked")
    assert (report.cut_documents, report.lost_tokens, report.lost_targets) == (2, 0, 2)
    with pytest.raises(ValueError, match="1 of 1 documents are longer"):
        baseline_rows([[5] * 6], 6, eos_token_id=EOS)


def test_the_report_is_text_and_json():
    _, report = baseline_rows(documents_of([3, 9]), 6, layout="concatenated")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    text = str(report)
    assert text.startswith("concatenated, windows of 6\n") and len(text.splitlines()) == 13
    assert text.splitlines()[-1].split() == ["lost", "tokens", "0"]


@pytest.mark.parametrize(
    ("documents", "options", "error", "message"),
    [
        ([[1]], {"layout": "tight"}, ValueError, "layout must be one of 'padded'"),
        ([[1]], {"overflow": "cut"}, ValueError, "overflow must be one of"),
        ([[1]], {"max_length": 0}, ValueError, "max_length must be at least 1"),
        ([[1]], {"eos_token_id": -1}, ValueError, "eos_token_id must be a token id, got -1"),
        ([[1], [-3]], {}, ValueError, "Sequence 1: token id -3"),
        ([[1, 2]], {"labels": [[1, 3]]}, ValueError, "Sequence 0: label 3 at position 1 differs"),
        (Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 3]]}), {}, ValueError, "Sequence 0: label 3"),
        (Dataset.from_dict({"input_ids": [[1, -2]]}), {}, ValueError, "Sequence 0: token id -2"),
        (Dataset.from_dict({"input_ids": [[1]]}), {"labels": [[1]]}, ValueError, "its column `labels`"),
        (Dataset.from_dict({"text": ["a"]}), {}, ValueError, "needs an input_ids column"),
        (DatasetDict(), {}, TypeError, "Give it one split"),
    ],
)
def test_what_is_wrong_is_named(documents, options, error, message):
    with pytest.raises(error, match=message):
        baseline_rows(documents, **{"max_length": 4, **options})


def test_token_trees_are_refused_by_name():
    trees = Dataset.from_dict(
        {"input_ids": [[1]], "target_count": [[1]], "node_length": [[1]], "node_parent": [[-1]], "logical_tokens": [1]}
    )
    with pytest.raises(ValueError, match="token trees, whose sequences are not written out"):
        baseline_rows(trees, 4)

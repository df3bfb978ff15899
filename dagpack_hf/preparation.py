"""What the trainer needs to do what TRL does with a data set: rendering, sequences before packing, packing, and rows.

Cost: that of rendering and packing, and vectorised passes over the labels; nothing is copied but the rows that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from dagpack_hf.collator import EMPTY_ROW, DagCollator
from dagpack_hf.columns import OPTIONAL_TREE_COLUMNS, TREE_COLUMNS, is_tree_dataset, iter_trees, row_features
from dagpack_hf.config import DagSFTConfig
from dagpack_hf.layout import COUNT_COLUMN, ROW_COLUMNS
from dagpack_hf.pack_report import PackReport
from dagpack_hf.packing import pack_dataset
from dagpack_hf.render import RenderError, RenderReport, tokenize_conversations
from dagpack_hf.sequence_counts import UncountedError, count_tree_sequences
from dagpack_hf.trie import IGNORE_INDEX, TokenForest

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNATURE_COLUMNS = [*ROW_COLUMNS, COUNT_COLUMN, "labels", *TREE_COLUMNS[1:], *OPTIONAL_TREE_COLUMNS]
"""Columns that reach the collator: those of rows, of plain sequences and of token trees."""


def count_targets(dataset: Dataset, max_length: int) -> np.ndarray:
    """Labelled tokens of each plain sequence within the window, `int64[n]`. The first token is never a target."""
    labels = dataset.select_columns(["labels"]).with_format("arrow")[:]["labels"].combine_chunks()
    if not len(labels):
        return np.zeros(0, np.int64)
    offsets = labels.offsets.to_numpy().astype(np.int64)
    values = labels.values.to_numpy(zero_copy_only=False)
    running = np.concatenate([[0], np.cumsum(values != IGNORE_INDEX)])
    first = np.minimum(offsets[:-1] + 1, offsets[1:])
    last = np.maximum(np.minimum(offsets[1:], offsets[:-1] + max_length), first)
    return running[last] - running[first]


def source_targets(dataset: Dataset, max_length: int) -> float:
    """Labelled tokens of all sequences, or of all sequences of token trees, each with its weight under `"paths"`."""
    if not is_tree_dataset(dataset.column_names):
        return float(count_targets(dataset, max_length).sum())
    weights = (tree.target_count if tree.target_weight is None else tree.target_weight for tree in iter_trees(dataset))
    return float(sum(weight.sum(dtype=np.float64) for weight in weights))


def keep_trainable(dataset: Dataset) -> Dataset:
    """Leave out the sequences without a target, and say how many."""
    has_targets = count_targets(dataset, np.iinfo(np.int32).max) > 0
    if has_targets.all():
        return dataset
    logger.warning("%d sequences without a labelled token are left out.", int((~has_targets).sum()))
    return dataset.select(np.flatnonzero(has_targets))


def limit_sequences(dataset: Dataset, max_length: int, overflow: str) -> Dataset:
    """Apply `overflow` to plain sequences that are packed batch by batch, and say what is lost."""
    lengths = np.fromiter(map(len, dataset["input_ids"]), np.int64, len(dataset))
    too_long = lengths > max_length
    if not too_long.any():
        return dataset
    count = f"{int(too_long.sum())} of {len(lengths)} sequences are longer than max_length={max_length} tokens"
    if overflow == "error":
        raise ValueError(
            f"{count} (the longest has {lengths.max()}). Choose a larger max_length, or overflow='truncate' or 'drop'."
        )
    whole = count_targets(dataset, int(lengths.max()))
    kept = count_targets(dataset, max_length)
    lost = int(whole[too_long].sum()) if overflow == "drop" else int((whole - kept).sum())
    action = "left out" if overflow == "drop" else "cut short"
    logger.warning("%s and are %s; %d labelled tokens are not trained.", count, action, lost)
    return dataset.select(np.flatnonzero(~too_long)) if overflow == "drop" else dataset


def is_per_turn(columns: list[str], args: DagSFTConfig) -> bool:
    """Whether a data set with these conversational columns is rendered turn by turn.

    Raises:
        ValueError: it is to be, and has none.
    """
    if args.per_turn and not columns:
        raise ValueError(
            "per_turn=True needs conversational data (messages, conversations, or prompt and completion as lists "
            "of messages) that are not tokenised yet."
        )
    return bool(args.per_turn) if args.per_turn is not None else {"messages", "trained"} <= set(columns)


def render_per_turn(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DagSFTConfig
) -> tuple[Any, RenderReport]:
    """Token trees with every turn in its own context, and what rendering did.

    Raises:
        RenderError: the template cannot write them; the remedies are named as options of the trainer.
    """
    options = {"num_proc": args.dataset_num_proc, **cast(dict[str, Any], args.per_turn_kwargs or {})}
    try:
        return tokenize_conversations(dataset, tokenizer, return_report=True, **options)
    except RenderError as error:
        remedy = "Options of rendering go into per_turn_kwargs of DagSFTConfig."
        raise RenderError(error.reason, f"{error.detail}. {remedy}") from error


def make_collator(args: DagSFTConfig, tokenizer: PreTrainedTokenizerBase, count_sequences: bool) -> DagCollator:
    """The collator that the options of the trainer ask for.

    Batches have one width where kernels are compiled for it, and where one process reads those of all.
    """
    on_cuda = args.device.type == "cuda"
    one_width = args.packing_scope == "dataset" and (on_cuda or args.loading.dispatch_batches)
    return DagCollator(
        max_length=cast(int, args.max_length),  # DagSFTConfig refuses None
        pad_token_id=tokenizer.pad_token_id or 0,
        packing_scope=args.packing_scope,
        loss_weighting=args.loss_weighting,
        overflow=args.overflow,
        padding="max_length" if one_width else "longest",
        pad_to_multiple_of=int(args.pad_to_multiple_of or (128 if on_cuda else 1)),
        count_sequences=count_sequences,
    )


def as_rows(dataset: Dataset) -> Dataset:
    """The vectors of rows that were packed beforehand, in the types of rows."""
    counted = COUNT_COLUMN in dataset.column_names
    features = row_features(counted)
    return dataset.select_columns(list(features)).cast(features)


def is_counted(examples: Dataset | IterableDataset) -> bool:
    """Whether examples that are packed batch by batch say how many sequences pass through a token.

    Plain sequences do, and token trees if all of them do together. A stream of them is not read for that.
    """
    if not is_tree_dataset(examples.column_names or ()):
        return True
    if isinstance(examples, IterableDataset):
        return False
    try:
        count_tree_sequences(TokenForest.from_trees(iter_trees(examples)))
    except UncountedError as error:
        logger.warning("%s", error)
        return False
    return True


def pack_as_whole(
    dataset: Dataset, args: DagSFTConfig, training: bool, count_sequences: bool
) -> tuple[Dataset, PackReport]:
    """Pack a data set as the options of the trainer say, into the same rows in every process.

    Evaluation data count as `"paths"`, and are in one bucket: windows that are less correlated help in training only.
    Sequences are counted if they can be.
    """
    try:
        return _packed_as_whole(dataset, args, training, count_sequences)
    except UncountedError as error:
        logger.warning("%s", error)
        return _packed_as_whole(dataset, args, training, False)


def _packed_as_whole(
    dataset: Dataset, args: DagSFTConfig, training: bool, count_sequences: bool
) -> tuple[Dataset, PackReport]:
    pack = partial(
        pack_dataset,
        dataset,
        cast(int, args.max_length),  # DagSFTConfig refuses None
        loss_weighting=args.loss_weighting if training else "paths",
        overflow=args.overflow,
        strategy=args.window_strategy,
        effort=args.window_effort,
        bucket_size=args.bucket_size if training else None,
        seed=args.seed if args.data_seed is None else args.data_seed,
        count_sequences=count_sequences,
        progress=not args.disable_tqdm,
    )
    return _of_first_process(pack) if args.window_effort else pack()


def _of_first_process(make: Callable[[], T]) -> T:
    """What the first process makes, for all: a search that ends by the clock finds something else in each of them.

    What is sent of a data set on disk is where it is.
    """
    made = [make() if PartialState().is_main_process else None]
    return cast(T, broadcast_object_list(made)[0])


def fill_up(rows: Dataset, multiple: int) -> Dataset:
    """Append empty rows, so that no rank gets a repeated row and none is dropped."""
    missing = -len(rows) % multiple
    if not missing:
        return rows
    empty = {name: [EMPTY_ROW[name]] * missing for name in rows.column_names}
    return concatenate_datasets([rows, Dataset.from_dict(empty, features=rows.features)])

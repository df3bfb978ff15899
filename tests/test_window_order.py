"""How windows are shuffled and dealt to processes."""

from __future__ import annotations

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from dagpack_hf import DagSFTConfig, DagSFTTrainer, pack_dataset
from dagpack_hf.preparation import fill_up
from dagpack_hf.window_order import POOL_ROUNDS, Rounds, WindowSampler, attention_pairs, balanced_order
from tests.toy import shared_dataset, tiny_llama, toy_tokenizer


def waits(order: np.ndarray, cost: np.ndarray, shape: Rounds) -> float:
    """Time that processes wait for the slowest, as a share of all time, if they meet after each optimizer step."""
    loads = cost[order].reshape(-1, shape.processes, shape.batch_size).sum(-1)
    steps = [loads[low : low + shape.rounds].sum(0) for low in range(0, len(loads), shape.rounds)]
    slowest = sum(step.max() for step in steps)
    return 1 - sum(step.mean() for step in steps) / slowest


def steps_of(order: np.ndarray, shape: Rounds) -> list[set[int]]:
    size = shape.windows * shape.rounds
    return [set(order[low : low + size].tolist()) for low in range(0, len(order), size)]


def test_pairs_are_those_of_the_mask():
    rows, _ = pack_dataset(shared_dataset(40), 90, progress=False)
    rows = fill_up(rows, 8)
    expected = []
    for row in rows:
        i = np.arange(len(row["input_ids"]))
        expected.append(int(((i[None] <= i[:, None]) & (i[:, None] < np.array(row["subtree_end"])[None])).sum()))
    assert attention_pairs(rows).tolist() == expected and expected[-1] == 0 < expected[0]
    assert attention_pairs(rows.select([3, 0])).tolist() == [expected[3], expected[0]]
    assert attention_pairs(rows.select([])).tolist() == []


@given(
    st.integers(0, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["step", "epoch"]),
    st.integers(-5, 2**40),
)  # fmt: skip
def test_every_window_is_there_once(count, processes, batch_size, rounds, extent, seed):
    rng = np.random.default_rng(count)
    order, pairs = rng.permutation(count), rng.integers(0, 5, count)
    shape = Rounds(processes, batch_size, rounds)
    dealt = balanced_order(order, pairs, shape, extent, seed)
    assert sorted(dealt.tolist()) == list(range(count))
    assert dealt.tolist() == balanced_order(order, pairs, shape, extent, seed).tolist()
    if extent == "step":
        assert steps_of(dealt, shape) == steps_of(order, shape), "windows stay in their step"


@pytest.mark.parametrize("shape", [Rounds(4, 1, 8), Rounds(8, 2, 4), Rounds(2, 4, 1)], ids=str)
def test_within_a_step_processes_wait_for_little(shape):
    rng = np.random.default_rng(0)
    cost = rng.lognormal(0, 1, 512).astype(np.int64) * 1000 + rng.integers(1, 1000, 512)
    order = rng.permutation(512)
    before = waits(order, cost, shape)
    after = waits(balanced_order(order, cost, shape, "step", 0), cost, shape)
    assert after < 0.5 * before, (before, after)


def test_of_one_window_for_each_process_a_whole_epoch_is_balanced():
    rng = np.random.default_rng(1)
    cost, shape = rng.integers(100, 10_000, 1024), Rounds(8, 1, 1)
    order = rng.permutation(1024)
    assert waits(balanced_order(order, cost, shape, "step", 0), cost, shape) == waits(order, cost, shape) > 0.3
    balanced = balanced_order(order, cost, shape, "epoch", 0)
    assert waits(balanced, cost, shape) < 0.03
    pool = POOL_ROUNDS * shape.windows
    assert [set(balanced[low : low + pool]) for low in range(0, 1024, pool)] == [
        set(order[low : low + pool]) for low in range(0, 1024, pool)
    ]
    sizes = cost[balanced].reshape(-1, 8).mean(-1)[:POOL_ROUNDS]
    assert not (np.diff(sizes) <= 0).all(), "rounds are shuffled again"


def test_empty_windows_do_not_meet_in_one_step():
    cost = np.concatenate([np.full(57, 100), np.zeros(7, np.int64)]) + np.arange(64) * (np.arange(64) < 57)
    empty = {*range(57, 64)}
    most = []
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(64)
        balanced = balanced_order(order, cost, Rounds(8, 1, 1), "epoch", seed)
        most.append(max(len(empty & set(balanced[low : low + 8].tolist())) for low in range(0, 64, 8)))
    assert np.mean(most) < 4


# The sampler


def test_the_shuffle_is_that_of_accelerate():
    data = range(50)
    ours, theirs = WindowSampler(data, 7), SeedableRandomSampler(data, data_seed=7)
    assert list(ours) == list(theirs)
    ours.set_epoch(3), theirs.set_epoch(3)
    third = list(theirs)
    assert list(ours) == third != list(WindowSampler(data, 7)) and len(ours) == 50


def test_processes_share_an_epoch_without_repeating_a_window():
    pairs = np.random.default_rng(0).integers(1, 100, 24)
    shape = Rounds(3, 2, 2)
    seen: list[int] = []
    for rank in range(3):
        sampler = WindowSampler(range(24), 5, pairs, shape, "step")
        batches = list(BatchSamplerShard(BatchSampler(sampler, 2, False), 3, rank))
        assert len(batches) == 4
        seen += [window for batch in batches for window in batch]
    assert sorted(seen) == list(range(24))


def trainer_for(tmp_path, dataset: Dataset, **options) -> DagSFTTrainer:
    defaults = {"max_length": 90, "report_to": [], "bf16": False, "use_cpu": True, "per_device_train_batch_size": 1}
    args = DagSFTConfig(output_dir=str(tmp_path), **{**defaults, **options})
    return DagSFTTrainer(model=tiny_llama(), args=args, train_dataset=dataset, processing_class=toy_tokenizer())


def test_a_single_process_only_shuffles(tmp_path):
    trainer = trainer_for(tmp_path, shared_dataset(60), rank_balance="epoch", data_seed=3)
    count = len(trainer.train_dataset)
    assert list(trainer._get_train_sampler()) == list(SeedableRandomSampler(range(count), data_seed=3))
    for strategy in ("sequential", "group_by_length"):
        other = trainer_for(tmp_path, shared_dataset(60), train_sampling_strategy=strategy)
        assert not isinstance(other._get_train_sampler(), WindowSampler)


def test_options_of_loading(tmp_path):
    with pytest.raises(ValueError, match="rank_balance must be"):
        trainer_for(tmp_path, shared_dataset(), rank_balance="all")
    with pytest.raises(ValueError, match=r"dispatch_batches=True is not supported with packing_scope='batch'"):
        trainer_for(tmp_path, shared_dataset(), packing_scope="batch", accelerator_config={"dispatch_batches": True})
    dispatched = trainer_for(tmp_path, shared_dataset(), accelerator_config={"dispatch_batches": True})
    assert dispatched.data_collator.padding == "max_length"

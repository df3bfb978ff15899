"""The order in which windows are trained: shuffled, and dealt to processes so that none waits for another.

Processes that train together wait for the slowest at every step, and the time of a window depends on its attention
pairs: a bushy window of short paths has a fraction of those of a single long one. So windows trade places: those that
processes compute at the same time get similar numbers of pairs, and what is left of the difference is made up for in
the next round. Two extents: within an optimizer step, which changes nothing but who computes what; or over many steps,
which also makes up the steps of windows of similar cost, for steps of one window for each process.

The order depends on the seed, the epoch and the windows, so every process finds the same one, and so does a run that
is resumed. Beneath it lies the shuffle of accelerate, which is that of an ordinary run with the same seed.

Cost: one pass over the depths when the data loader is made, and a sort for each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dagpack_hf.columns import is_row_dataset

if TYPE_CHECKING:
    from dagpack_hf.config import DagSFTConfig

RANK_BALANCES = ("none", "step", "epoch")

POOL_ROUNDS = 32
"""Rounds of which windows trade places when a whole epoch is balanced. In each round all processes compute a batch."""


def attention_pairs(rows: Dataset) -> npt.NDArray[np.int64]:
    """Pairs of a query and a key that it sees, of each window, `int64[n]`.

    A position sees its ancestors and itself, so that is its depth and one.
    """
    pairs = [np.zeros(0, np.int64)]
    for table in rows.select_columns(["position_ids"]).with_format("arrow").iter(batch_size=256):
        depths = table["position_ids"].combine_chunks()
        length = pc.list_value_length(depths).to_numpy(zero_copy_only=False).astype(np.int64)
        running = np.concatenate([[0], np.cumsum(depths.flatten().to_numpy(zero_copy_only=False), dtype=np.int64)])
        end = np.cumsum(length)
        pairs.append(running[end] - running[end - length] + length)
    return np.concatenate(pairs)


@dataclass(frozen=True)
class Rounds:
    """How an order of windows is spread over processes and time.

    Args:
        processes: that train together.
        batch_size: windows that a process computes at a time.
        rounds: batches that a process computes for one optimizer step.
    """

    processes: int
    batch_size: int
    rounds: int

    @property
    def windows(self) -> int:
        """Windows of a round, over all processes."""
        return self.processes * self.batch_size


def balanced_order(
    order: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64], shape: Rounds, extent: str, seed: int
) -> npt.NDArray[np.int64]:
    """Let windows trade places so that the processes of a round have similar numbers of pairs.

    Args:
        order: `int64[n]`, the windows in the order of the shuffle.
        pairs: `int64[...]`, attention pairs of each window.
        shape: how the order is spread. The batches of a round follow each other, one for each process.
        extent: `"step"`: windows stay in their optimizer step. `"epoch"`: they trade places with those of
            `POOL_ROUNDS` rounds, and rounds are shuffled again.
        seed: of that shuffle.

    Returns:
        `int64[n]`, the same windows. Those of a last round that is not full stay where they are.
    """
    rng = np.random.default_rng(seed % 2**64)  # torch takes negative seeds too
    cost = _with_borrowed_costs(pairs, rng)
    whole = len(order) // shape.windows * shape.windows
    size = shape.windows * (shape.rounds if extent == "step" else POOL_ROUNDS)
    parts = []
    for low in range(0, whole, size):
        pool = order[low : min(low + size, whole)]
        rounds = pool[np.argsort(-cost[pool], kind="stable")].reshape(-1, shape.windows)
        if extent == "epoch":
            rounds = rng.permutation(rounds)
        parts.append(rounds)
    dealt, load = [], np.zeros(shape.processes)
    for index, windows in enumerate(np.concatenate(parts) if parts else ()):
        if index % shape.rounds == 0:
            load[:] = 0
        dealt.append(_deal(windows, cost, shape, load))
    return np.concatenate([*dealt, order[whole:]])


def _with_borrowed_costs(pairs: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Costs in which an empty window has that of another one, drawn at random.

    Otherwise all empty windows would meet in one round, and an optimizer step would have next to no targets.
    """
    cost = pairs.astype(np.float64)
    empty = np.flatnonzero(pairs == 0)
    if 0 < len(empty) < len(pairs):
        cost[empty] = rng.choice(cost[pairs > 0], len(empty))
    return cost


def _deal(
    windows: npt.NDArray[np.int64],
    cost: npt.NDArray[np.float64],
    shape: Rounds,
    load: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Deal the windows of a round, the costly ones first, each to the process with the least load that has room."""
    batches: list[list[int]] = [[] for _ in range(shape.processes)]
    for window in windows[np.argsort(-cost[windows], kind="stable")].tolist():
        room = [rank for rank, batch in enumerate(batches) if len(batch) < shape.batch_size]
        rank = min(room, key=lambda rank: load[rank])
        batches[rank].append(window)
        load[rank] += cost[window]
    return np.array(batches, np.int64).reshape(-1)


class WindowSampler(Sampler[int]):
    """The shuffle of accelerate, the same in every process and after a resumption, with balanced processes.

    Args:
        dataset: what is sampled from.
        data_seed: seed of the shuffle; by default that of torch.
        pairs: attention pairs of each window; without it there is nothing to balance.
        shape: how the order is spread over processes.
        extent: as in `balanced_order`.
    """

    def __init__(
        self,
        dataset: Sized,
        data_seed: int | None = None,
        pairs: npt.NDArray[np.int64] | None = None,
        shape: Rounds | None = None,
        extent: str = "none",
    ) -> None:
        self._shuffle = SeedableRandomSampler(dataset, data_seed=data_seed)
        self._pairs, self._shape, self._extent = pairs, shape, extent

    def __len__(self) -> int:
        return len(self._shuffle)

    def __iter__(self) -> Iterator[int]:
        seed = self._shuffle.initial_seed + self._shuffle.epoch
        order = list(self._shuffle)
        if self._pairs is None or self._shape is None or self._extent == "none":
            return iter(order)
        return iter(balanced_order(np.array(order, np.int64), self._pairs, self._shape, self._extent, seed).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._shuffle.set_epoch(epoch)


def window_sampler(dataset: Dataset, args: DagSFTConfig, rounds: Rounds) -> WindowSampler:
    """The sampler of a data set; what is not packed yet, and a single process, is only shuffled."""
    extent = args.rank_balance
    if rounds.processes == 1 or not is_row_dataset(dataset.column_names):
        extent = "none"
    pairs = None if extent == "none" else attention_pairs(dataset)
    return WindowSampler(dataset, args.data_seed, pairs, rounds, extent)


class EpochSetter(TrainerCallback):
    """Tells the sampler the epoch that begins.

    The data loader does so too, but not where several processes resume within an epoch: the sampler is then too deep
    in its wrappers.
    """

    sampler: Any = None

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch; a resumed one is as far as it had come."""
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch or 0))

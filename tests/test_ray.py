"""Packing on a Ray cluster: the same bytes as in one process, from two nodes that have little memory for objects."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

import dagpack_hf
from dagpack_hf import pack_dataset
from dagpack_hf.columns import packing_columns
from dagpack_hf.external import distributed, packing
from dagpack_hf.external.branches import Extent
from dagpack_hf.external.cluster import Cluster
from dagpack_hf.external.packing import Block, measure_dataset, pack_partitioned, sample_splitters
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.pack_options import PackOptions
from dagpack_hf.pack_report import PackReport
from tests.corpora import random_tree

ray = pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
cluster_utils = pytest.importorskip("ray.cluster_utils")

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"

OBJECT_STORE = 80 * 1024**2
"""Bytes for objects on each node; Ray asks for 75 MiB at least, and takes a file if /dev/shm has less."""


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[None]:
    """A cluster of two nodes with a worker each, which sends nothing anywhere."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since sockets are in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        (Path(folder) / "ray").mkdir()
        node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE}
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        nodes.add_node(**node)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def sequences(count: int = 240, seed: int = 0) -> tuple[list[list[int]], list[list[bool]]]:
    """Sequences that share a trunk or leave it early, and which of their tokens are targets."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 50, 60).tolist()
    tokens = [
        trunk[: int(rng.integers(0, 61))] + rng.integers(0, 50, int(rng.integers(1, 40))).tolist()
        for _ in range(count)
    ]
    return tokens, [(rng.random(len(each)) < 0.7).tolist() for each in tokens]


def plain() -> Dataset:
    tokens, masks = sequences()
    labels = [[t if m else -100 for t, m in zip(*pair, strict=True)] for pair in zip(tokens, masks, strict=True)]
    return Dataset.from_dict({"input_ids": tokens, "labels": labels, "source": ["somewhere"] * len(tokens)})


def trees() -> Dataset:
    """Trees of one to five sequences, two of three with weights."""
    rng = np.random.default_rng(1)
    tokens, masks = sequences()
    rows, low = [], 0
    while low < len(tokens):
        high = low + int(rng.integers(1, 6))
        tree = random_tree(rng, tokens[low:high], masks[low:high])
        names = ("input_ids", "target_count", "node_length", "node_parent", "logical_tokens")
        row = {name: np.asarray(getattr(tree, name)).tolist() for name in names}
        row["target_weight"] = None if len(rows) % 3 == 0 else [0.5 * count for count in row["target_count"]]
        rows.append(row)
        low = high
    return Dataset.from_list(rows)


def in_one_process(dataset: Dataset, partitions: int, options: PackOptions) -> tuple[pa.Table, PackReport]:
    columns = dataset.select_columns(packing_columns(dataset.column_names))
    blocks = measure_dataset(columns, options.max_length)
    splitters = sample_splitters(columns, options, blocks, partitions)
    tables: list[pa.Table] = []
    report = pack_partitioned(columns, options, tables.append, blocks=blocks, splitters=splitters)
    return pa.concat_tables(tables), report


def on_ray(dataset, max_length: int, **options) -> tuple[pa.Table, PackReport]:
    rows, report = dagpack_hf.pack_ray_dataset(dataset, max_length, progress=False, **options)
    return pa.concat_tables(ray.get(rows.to_arrow_refs())), report


def contents(table: pa.Table) -> dict[str, tuple[str, bytes, bytes]]:
    """Type, lengths of the lists, and their values, of each column, byte for byte."""
    assert table.column_names == list(ROW_COLUMNS)
    found = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        lengths = np.diff(column.offsets.to_numpy())
        found[name] = (str(column.type), lengths.tobytes(), column.flatten().to_numpy().tobytes())
    return found


def assert_same(one: tuple[pa.Table, PackReport], other: tuple[pa.Table, PackReport]) -> None:
    assert one[1].to_dict() == other[1].to_dict()
    assert contents(one[0]) == contents(other[0])


# Equal to one process


@pytest.mark.parametrize(
    ("make", "max_length", "overflow"),
    [
        (plain, 128, "error"),
        (plain, 60, "truncate"),
        (trees, 128, "error"),
        (trees, 60, "truncate"),
        (trees, 60, "drop"),
    ],
)
@pytest.mark.parametrize("weighting", ["once", "paths"])
def test_rows_and_report_are_those_of_one_process(make, max_length, overflow, weighting):
    dataset = make()
    options = PackOptions(max_length, weighting, overflow, seed=3)
    expected = in_one_process(dataset, 4, options)
    assert expected[1].partitions == 4 and bool(expected[1].overflow) == (overflow != "error")
    blocks = ray.data.from_arrow(dataset.data.table).repartition(5)
    found = on_ray(blocks, max_length, loss_weighting=weighting, overflow=overflow, seed=3, partitions=4)
    assert_same(found, expected)


@pytest.mark.parametrize("blocks", [1, 3, 300])
def test_blocks_make_no_difference(blocks, monkeypatch):
    monkeypatch.setattr(distributed, "GROUP_TOKENS", 3000)
    monkeypatch.setattr(packing, "SAMPLES", 10)  # so that not all paths are sampled
    dataset = plain()
    expected = in_one_process(dataset, 3, PackOptions(128))
    step = -(-len(dataset) // blocks)
    parts = [dataset.data.table.slice(low * step, step) for low in range(blocks)]
    assert (parts[-1].num_rows == 0) == (blocks == 300)
    assert_same(on_ray(ray.data.from_arrow(parts), 128, seed=None, partitions=3), expected)


def test_a_data_set_of_datasets_in_the_partitions_that_memory_demands():
    """The same as `pack_dataset`, and to the driver come sizes, samples and summaries only."""
    dataset = plain()
    rows, report = pack_dataset(dataset, 128, max_memory="300kB", progress=False)
    assert report.partitions is not None and report.partitions > 2
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        get = Cluster.get
        patch.setattr(Cluster, "get", lambda self, each: seen.append(get(self, each)) or seen[-1])
        found = on_ray(dataset, 128, max_memory="300kB")
    assert_same(found, (rows.data.table, report))
    assert {type(each).__name__ for each in seen} == {"Extent", "list", "Summary", "Outcome"}


def test_more_than_the_object_store_holds():
    """Rows of each partition in several portions, all of them larger than the object stores of both nodes."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 30_000, (420, 20_000), np.int32)
    tokens[:, :5000] = tokens[0, :5000]
    dataset = Dataset(pa.table({"input_ids": pa.array(list(tokens), pa.list_(pa.int32()))}))
    options = PackOptions(65_536, strategy="dfs", seed=0)
    table, report = in_one_process(dataset, 2, options)
    assert report.executed_tokens * 20 > 0.7 * OBJECT_STORE * 2
    rows, on_cluster = dagpack_hf.pack_ray_dataset(dataset, 65_536, strategy="dfs", partitions=2, progress=False)
    assert rows.num_blocks() > 4
    assert on_cluster.to_dict() == report.to_dict()
    low = 0
    for batch in rows.iter_batches(batch_size=16, batch_format="pyarrow"):
        assert contents(batch) == contents(table.slice(low, batch.num_rows))
        low += batch.num_rows
    assert low == report.windows


# What it reads and writes


def test_parquet_in_and_out(tmp_path):
    dataset = trees()
    (tmp_path / "trees").mkdir()
    for index in range(3):
        pq.write_table(dataset.shard(3, index, contiguous=True).data.table, tmp_path / "trees" / f"{index}.parquet")
    rows, report = dagpack_hf.pack_ray_dataset(
        ray.data.read_parquet(str(tmp_path / "trees")), 128, loss_weighting="paths", partitions=3, progress=False
    )
    rows.write_parquet(str(tmp_path / "rows"))
    expected, in_one = in_one_process(dataset, 3, PackOptions(128, "paths", seed=0))
    assert report.to_dict() == in_one.to_dict()
    written = Dataset.from_parquet([str(path) for path in sorted((tmp_path / "rows").iterdir())])
    assert sorted(map(repr, written)) == sorted(map(repr, Dataset(expected)))


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "trees").mkdir()
    trees().to_parquet(tmp_path / "trees" / "0.parquet")
    monkeypatch.setattr(ray, "init", lambda: None)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    exec(compile(code.replace("/data/", f"{tmp_path}/"), PAGE.name, "exec"), {"__name__": "page"})
    assert "windows" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "rows").column_names == list(ROW_COLUMNS)


def test_tensors_of_ray_data_are_read_as_lists():
    dataset = plain().select_columns(["input_ids", "labels"])
    blocks = ray.data.from_arrow(dataset.data.table)
    as_arrays = blocks.map_batches(lambda batch: {name: np.array(lists, object) for name, lists in batch.items()})
    assert "Tensor" in str(as_arrays.schema())
    assert_same(on_ray(as_arrays, 128, partitions=2), on_ray(blocks, 128, partitions=2))
    of_one_length = ray.data.from_numpy(np.arange(12).reshape(3, 4)).rename_columns({"data": "input_ids"})
    assert on_ray(of_one_length, 8)[1].logical_tokens == 12
    with_pixels = ray.data.from_items([{"input_ids": [1, 2, 3], "pixels": np.zeros((2, 2))}])
    assert on_ray(with_pixels, 8)[1].logical_tokens == 3
    matrices = ray.data.from_numpy(np.arange(12).reshape(3, 2, 2)).rename_columns({"data": "input_ids"})
    with pytest.raises(ValueError, match=r"input_ids has the type .*lists of integers"):
        on_ray(matrices, 8)


def test_nothing_gives_no_rows():
    empty = plain().select([])
    table, report = on_ray(empty, 16)
    assert table.num_rows == 0 and table.column_names == list(ROW_COLUMNS) and report.windows == 0


def test_the_order_that_ray_data_keeps_is_an_option_of_the_user():
    blocks = ray.data.from_arrow(plain().data.table)
    on_ray(blocks, 128)
    assert blocks.context.execution_options.preserve_order is False


# What it refuses


def test_too_long_paths_are_refused_before_anything_is_scattered(monkeypatch):
    dataset = plain()
    monkeypatch.setattr(distributed, "scatter_tables", None)
    with pytest.raises(ValueError) as error:
        on_ray(dataset, 60)
    with pytest.raises(ValueError) as other:
        in_one_process(dataset, 2, PackOptions(60))
    assert str(error.value) == str(other.value)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("input_ids", None, "From example 80 of the data set on: The column input_ids has no value in example 20"),
        ("labels", [1], "From example 80 of the data set on: .*20"),
    ],
)
def test_a_wrong_example_is_named(column, value, message):
    table = plain().data.table.combine_chunks()
    lists = table[column].to_pylist()
    lists[100] = value
    table = table.set_column(table.column_names.index(column), column, pa.array(lists, table[column].type))
    with pytest.raises(ValueError, match=message):
        on_ray(ray.data.from_arrow([table.slice(low, 80) for low in (0, 80, 160)]), 128, partitions=2)


def test_what_cannot_be_packed_is_refused():
    dataset = plain()
    with pytest.raises(TypeError, match="got DatasetDict"):
        on_ray(DatasetDict(train=dataset), 128)
    with pytest.raises(ValueError, match="partitions must be at least 1, or None, got 0"):
        on_ray(dataset, 128, partitions=0)
    with pytest.raises(ValueError, match="max_memory must be"):
        on_ray(dataset, 128, max_memory="much")
    with pytest.raises(ValueError, match="strategy must be"):
        on_ray(dataset, 128, strategy="worst")
    with pytest.raises(ValueError, match="the data set has id"):
        on_ray(ray.data.range(3), 128)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"dagpack-hf\[ray\]"):
        dagpack_hf.pack_ray_dataset(plain(), 128)


# How it is shared out


def test_groups_of_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    blocks = [Block(0, Extent(examples=1, tokens=int(tokens))) for tokens in rng.integers(0, 100, 200)]
    total = sum(block.extent.tokens for block in blocks)

    def groups(partitions, cores, group_tokens, most_pieces=10**6):
        monkeypatch.setattr(distributed, "GROUP_TOKENS", group_tokens)
        monkeypatch.setattr(distributed, "MOST_PIECES", most_pieces)
        found = list(distributed._groups(blocks, partitions, cores))
        assert [low for low, _ in found] == [0, *(high for _, high in found[:-1])] and found[-1][1] == len(blocks)
        return [sum(block.extent.tokens for block in blocks[low:high]) for low, high in found]

    assert all(each <= 500 for each in groups(2, 2, 500))
    assert len(groups(2, 2, 500)) < 2.5 * total / 500
    assert len(groups(2, 8, 10**9)) >= 8
    assert len(groups(100, 2, 100, most_pieces=1000)) <= 2 * 1000 / 100


def test_partitions_follow_memory_and_cores():
    nodes = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 2.0, "memory": 2e9}, {"memory": 1e9}]
    assert Cluster(ray, nodes, progress=False).cores == 6
    assert Cluster(ray, nodes, progress=False).memory_of_core == 10**9


def test_a_task_gets_no_more_memory_than_a_node_has():
    """Ray would wait for such a node forever."""
    task = Cluster.connect(progress=False).task(lambda: 7, memory=10**12)
    assert ray.get(task.remote(), timeout=30) == 7

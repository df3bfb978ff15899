"""The arithmetic of packing against dense masks and plain Python, and the figures that it is known by."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagpack_hf import TokenForest, pack_forest
from dagpack_hf.stats import (
    LAYOUTS,
    LayoutCost,
    attention,
    cost_series,
    cost_table,
    costs,
    dag_cost,
    layout_costs,
    lognormal_lengths,
    mean_costs,
    sequence_costs,
)
from tests.reference_layouts import count_blocks, dense_mask, reference_rows

BLOCK = 4
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    before, attention.BLOCK = attention.BLOCK, BLOCK
    yield
    attention.BLOCK = before


def reference_cost(lengths, max_length, layout, separator, pad_to) -> dict:
    """Figures of a layout, counted on dense masks."""
    separator = separator if layout == "concatenated" else 0
    placed = [length + separator if length else 0 for length in lengths]
    rows = reference_rows(placed, max_length, layout)
    positions = [position for row in rows for position in row]
    width = max_length
    if layout == "padded" and pad_to == "longest":
        width = max(map(len, rows), default=0)
    causal = [dense_mask(row, width, False) for row in rows]
    document = [dense_mask(row, width, True) for row in rows]
    of_tokens = sum(1 for number, at in positions if at < lengths[number])
    in_rows = [
        len({index for index, row in enumerate(rows) for number, _ in row if number == each})
        for each in range(len(lengths))
    ]
    held = [sum(1 for number, _ in positions if number == each) for each in range(len(lengths))]
    return {
        "rows": len(rows),
        "width": width,
        "tokens": of_tokens,
        "separators": len(positions) - of_tokens,
        "cut_documents": sum(n > 1 or kept < whole for n, kept, whole in zip(in_rows, held, placed, strict=True)),
        "cut_tokens": sum(lengths) - of_tokens,
        "causal_pairs": sum(int(mask[: len(row)].sum()) for mask, row in zip(causal, rows, strict=True)),
        "document_pairs": sum(int(mask.sum()) for mask in document),
        "causal_blocks": sum(count_blocks(mask, BLOCK) for mask in causal),
        "document_blocks": sum(count_blocks(mask, BLOCK) for mask in document),
    }


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 15), max_size=12),
    max_length=st.integers(1, 17),
    layout=st.sampled_from(["padded", "concatenated", "best_fit"]),
    separator=st.integers(0, 2),
    pad_to=st.sampled_from(["max_length", "longest"]),
)
def test_costs_are_those_counted_on_dense_masks(lengths, max_length, layout, separator, pad_to):
    (cost,) = layout_costs(lengths, max_length, layouts=[layout], separator_tokens=separator, pad_to=pad_to)
    expected = reference_cost(lengths, max_length, layout, separator, pad_to)
    assert {name: getattr(cost, name) for name in expected} == expected
    empty = cost.positions - expected["tokens"]
    assert cost.waste == pytest.approx(empty / cost.positions if cost.positions else 0, abs=1e-15)
    crossing = expected["causal_pairs"] - expected["document_pairs"]
    assert cost.cross_document_share == pytest.approx(crossing / max(expected["causal_pairs"], 1), abs=1e-15)
    if layout == "best_fit":
        assert (cost.rows - 1) * max_length < 2 * expected["tokens"] and cost.lower_bound <= cost.rows


def prefixes(sequences) -> set[tuple[int, ...]]:
    return {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}


@settings(max_examples=100, deadline=None)
@given(SEQUENCES, st.integers(2, 12))
def test_repeated_tokens_are_those_beyond_the_distinct_prefixes(sequences, max_length):
    by_layout = {cost.layout: cost for cost in sequence_costs(sequences, max_length)}
    truncated = [sequence[:max_length] for sequence in sequences]
    for layout in ("padded", "best_fit"):
        assert by_layout[layout].repeated_tokens == sum(map(len, truncated)) - len(prefixes(truncated))
    assert by_layout["concatenated"].repeated_tokens == sum(map(len, sequences)) - len(prefixes(sequences))
    dag = by_layout["dag"]
    assert dag.tokens - dag.repeated_tokens == len(prefixes(truncated))


@settings(max_examples=100, deadline=None)
@given(SEQUENCES, st.integers(9, 20))
def test_tree_pairs_and_blocks_are_those_of_the_dense_mask(sequences, max_length):
    rows, report = pack_forest(TokenForest.from_sequences(sequences), max_length)
    pairs = blocks = 0
    for row in rows:
        index = np.arange(len(row["subtree_end"]))
        mask = (index[:, None] >= index) & (index[:, None] < row["subtree_end"])
        pairs += int(mask.sum())
        blocks += count_blocks(mask, BLOCK)
    cost = dag_cost([rows], report)
    assert (cost.tree_pairs, cost.tree_blocks) == (pairs, blocks)
    assert (cost.rows, cost.tokens) == (report.windows, sum(len(row["input_ids"]) for row in rows))
    assert cost.waste == pytest.approx(report.padding_tokens / max(cost.positions, 1))
    assert cost.lower_bound == report.lower_bound <= cost.rows
    assert cost.cross_document_share is None


def test_rows_of_dag_may_come_in_portions(monkeypatch):
    sequences = [[1, 2, number % 5, number] for number in range(40)]
    whole = sequence_costs(sequences, 16)
    monkeypatch.setattr(costs, "PORTION", 20)
    assert sequence_costs(sequences, 16) == whole


def test_lengths_alone_are_documents_that_share_nothing():
    lengths = lognormal_lengths(200, median=30, seed=3)
    *_, dag = layout_costs(lengths, 64)
    unrelated = [[1000 + number, *[7] * (length - 1)] for number, length in enumerate(lengths.tolist())]
    *_, known = sequence_costs(unrelated, 64)
    assert dag.repeated_tokens is None and known.repeated_tokens == 0
    assert {**dag.to_dict(), "repeated_tokens": 0} == known.to_dict()
    assert (
        dag.tokens == np.minimum(lengths, 64).sum() and dag.tree_pairs == layout_costs(lengths, 64)[0].document_pairs
    )


def test_dag_needs_no_more_rows_than_best_fit_where_nothing_is_shared():
    for seed in range(5):
        _, _, best_fit, dag = layout_costs(lognormal_lengths(300, median=200, seed=seed), 1024)
        assert dag.lower_bound == best_fit.lower_bound <= dag.rows <= best_fit.rows


@pytest.mark.parametrize(
    ("median", "expected"),
    [
        (120, {"padded": {"waste": (0.90, 0.92)}, "concatenated": {"waste": (0, 0.012), "cross": (0.79, 0.81)}}),
        (1200, {"concatenated": {"cross": (0.27, 0.29)}}),
    ],
)
def test_log_normal_documents_give_the_known_figures(median, expected):
    draws = [layout_costs(lognormal_lengths(median=median, seed=seed), 2048) for seed in range(20)]
    mean = {cost.layout: cost.mean for cost in mean_costs(draws)}
    for layout, ranges in expected.items():
        for name, (low, high) in ranges.items():
            assert low <= mean[layout]["cross_document_share" if name == "cross" else name] <= high


def test_drawn_lengths_are_log_normal():
    lengths = lognormal_lengths(100_000, median=120, sigma=0.5, seed=1)
    assert lengths.dtype == np.int64 and lengths.min() >= 1
    assert np.median(lengths) == pytest.approx(120, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.01)
    assert (lognormal_lengths(5, seed=1) == lengths[:5]).all() or not (
        lognormal_lengths(5, seed=2) == lengths[:5]
    ).all()
    assert lognormal_lengths(3, median=0.01, sigma=0).tolist() == [1, 1, 1]
    assert lognormal_lengths(3, median=7, sigma=0).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": -1}, "count must be at least 0"),
        ({"median": 0}, "median must be a number of tokens above 0"),
        ({"median": float("nan")}, "median must be"),
        ({"sigma": -1}, "sigma must be"),
        ({"median": 1e12}, "documents of more than 2147483647 tokens"),
    ],
)
def test_draws_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lognormal_lengths(**options)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1, -2], {}, "Document 1 has a length of -2"),
        ([1.5], {}, "flat list of integers, got float64"),
        ([[1]], {}, "flat list of integers"),
        ([1], {"max_length": 0}, "max_length must be at least 1"),
        (
            [1],
            {"layouts": ["tight"]},
            "layout must be one of 'padded', 'concatenated', 'best_fit', 'dag', got 'tight'",
        ),
        ([1], {"pad_to": "batch"}, "pad_to must be 'max_length' or 'longest'"),
        ([1], {"separator_tokens": -1}, "separator_tokens must be at least 0"),
    ],
)
def test_costs_name_what_is_wrong(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        layout_costs(lengths, **{"max_length": 8, **options})


def test_nothing_costs_nothing():
    for cost in layout_costs([0, 0], 8):
        assert (cost.rows, cost.positions, cost.tokens, cost.waste) == (0, 0, 0, 0.0)
        assert cost.cross_document_share in (0.0, None)


def cost(layout: str, max_length: int, rows: int, **figures) -> LayoutCost:
    return LayoutCost(layout=layout, max_length=max_length, rows=rows, width=max_length, **figures)


def test_means_are_over_draws_and_shares_are_averaged_as_shares():
    draws = [
        [cost("concatenated", 10, 1, tokens=5, causal_pairs=10, document_pairs=5)],
        [cost("concatenated", 10, 3, tokens=30, causal_pairs=30, document_pairs=30)],
    ]
    (mean,) = mean_costs(draws)
    assert (mean.layout, mean.max_length, mean.draws) == ("concatenated", 10, 2)
    assert mean.mean["rows"] == 2 and mean.mean["waste"] == 0.25 and mean.mean["cross_document_share"] == 0.25
    assert mean.deviation["rows"] == pytest.approx(2**0.5) and mean.deviation["waste"] == pytest.approx(0.5**0.5 / 2)
    assert mean.mean["tree_pairs"] is None and mean.deviation["tree_pairs"] is None
    assert mean_costs([draws[0]])[0].deviation["rows"] == 0.0
    assert mean_costs([]) == []
    with pytest.raises(ValueError, match="same layouts and windows"):
        mean_costs([draws[0], []])


def test_the_table_has_a_line_for_each_layout_and_no_empty_column():
    figures = {"document_pairs": 40, "causal_blocks": 1, "document_blocks": 1}
    table = cost_table(
        [
            cost("concatenated", 100, 2, tokens=150, separators=4, causal_pairs=50, **figures),
            cost("dag", 100, 1, tokens=99, tree_pairs=12345, tree_blocks=7),
            *mean_costs([[cost("dag", 1000, rows, tokens=99, tree_pairs=1, tree_blocks=1)] for rows in (1, 2)]),
        ]
    )
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "window 100",
        "layout rows wasted cross-document causal pairs masked pairs causal blocks masked blocks cut off",
        "concatenated 2 25.00% 20.00% 50 40 1 1 0",
        "dag 1 1.00% - - 12,345 - 7 0",
        "",
        "window 1,000",
        "layout rows wasted masked pairs masked blocks cut off",
        "dag 1.5 92.58% 1 1 0",
    ]


def test_columns_of_the_table_are_aligned():
    lines = cost_table(layout_costs(lognormal_lengths(100), 1024)).splitlines()[1:]
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert [line[: len("concatenated")].strip() for line in lines[1:]] == ["padded", "concatenated", "best fit", "dag"]


def test_series_are_in_the_order_of_the_windows():
    given_costs = [each for window in (16, 4, 8) for each in layout_costs([3, 4, 2], window)]
    windows, waste = cost_series(given_costs)
    assert windows.tolist() == [4, 8, 16] and list(waste) == list(LAYOUTS)
    assert waste["padded"].tolist() == [0.25, 0.625, 0.8125]
    assert list(cost_series(given_costs, "cross_document_share")[1]) == ["padded", "concatenated", "best_fit"]
    with pytest.raises(ValueError, match="no figure 'x'"):
        cost_series(given_costs, "x")
    with pytest.raises(ValueError, match="'padded' is not there once for each window"):
        cost_series(given_costs[1:])


@pytest.mark.parametrize("name", ["stats.costs", "stats.documents", "stats.summary"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"dagpack_hf.{name}"))
    assert result.failed == 0 and result.attempted > 0


def test_torch_is_not_imported():
    code = (
        "import sys; from dagpack_hf.stats import layout_costs; layout_costs([3], 4); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

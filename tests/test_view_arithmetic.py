"""Figures of the arithmetic: what they show, that they are the same each time, and how they are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="figures need matplotlib, the extra `plot`")

from matplotlib.colors import to_hex, to_rgb

from dagpack_hf.stats import cost_series, layout_costs
from dagpack_hf.view import arithmetic
from dagpack_hf.view.arithmetic import cross_document_figure, crossing_pairs_figure, waste_figure
from dagpack_hf.view.theme import THEMES, save_figure, themed

WINDOWS = [128, 512, 2048]
WASTE = {"padded": [0.5, 0.8, 0.9], "best_fit": [0.01, 0.0, 0.02], "dag": [0.01, 0.0, 0.02]}


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("theme", THEMES)
def test_waste_is_drawn_as_it_is_given_but_for_the_floor(theme):
    (axes,) = (figure := waste_figure(WINDOWS, WASTE, theme=theme, least=1e-4)).axes
    assert to_hex(figure.get_facecolor()) == to_hex(axes.get_facecolor()) == THEMES[theme].paper
    lines = axes.lines
    assert [line.get_xdata().tolist() for line in lines] == [WINDOWS] * 3
    assert [line.get_ydata().tolist() for line in lines] == [[0.5, 0.8, 0.9], [0.01, 1e-4, 0.02], [0.01, 1e-4, 0.02]]
    colors = [getattr(THEMES[theme], name) for name in ("orange", "blue", "green")]
    assert [line.get_color() for line in lines] == colors
    assert lines[1].get_linewidth() > lines[2].get_linewidth() == lines[0].get_linewidth(), "what is beneath is seen"
    assert texts(figure) == ["of all positions", "padded  90 %", "best fit  2 %", "dag  2 %"]
    assert [text.get_color() for text in axes.texts[1:]] == colors
    beneath, above = (text.xy[1] for text in axes.texts[2:])
    assert above - beneath >= arithmetic._LABEL_GAP - 1e-9, "equal shares have labels side by side"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "512", "2,048"]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylim()) == ("log", "log", (1e-4, 1.0))


def test_shares_are_drawn_on_a_whole_axis():
    figure = cross_document_figure(WINDOWS, {"median 120": [0.2, 0.5, 0.8], "median 1200": [0, 0.1, 0.2834]})
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_ylim()) == ("linear", (0, 1))
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.2, 0.5, 0.8], [0, 0.1, 0.2834]]
    assert texts(figure)[1:] == ["median 120  80 %", "median 1200  28.3 %"]
    assert len({line.get_color() for line in axes.lines}) == 2


def test_series_of_costs_can_be_drawn():
    costs = [cost for window in WINDOWS for cost in layout_costs([30, 100, 400], window)]
    assert len(waste_figure(*cost_series(costs)).axes[0].lines) == 4
    assert len(cross_document_figure(*cost_series(costs, "cross_document_share")).axes[0].lines) == 3


def shaded(axes, color) -> set[tuple[int, int]]:
    """Pairs (query, key) whose cells have a colour."""
    pairs = set()
    for collection in axes.collections:
        if to_hex(collection.get_facecolor()[0]) == color:
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices.min(0), path.vertices.max(0)
                pairs |= {(q, k) for q in range(round(top), round(bottom)) for k in range(round(left), round(right))}
    return pairs


@pytest.mark.parametrize("lengths", [(9, 8, 7), (1,), (2, 1, 3, 4)])
def test_the_shaded_cells_are_the_pairs(lengths):
    document = np.repeat(np.arange(len(lengths)), lengths)
    causal = {(q, k) for q in range(len(document)) for k in range(q + 1)}
    same = {(q, k) for q, k in causal if document[q] == document[k]}
    colors = THEMES["light"]
    left, right = (figure := crossing_pairs_figure(lengths)).axes
    assert shaded(left, colors.blue) == shaded(right, colors.blue) == same
    assert shaded(left, colors.orange) == causal - same and not shaded(right, colors.orange)
    share = 100 * len(causal - same) / len(causal)
    assert left.get_title("left") == (
        f"causal mask: {len(causal)} pairs\n{len(causal - same)} cross a boundary ({share:.3g} %)"
    )
    assert right.get_title("left") == f"document mask: {len(same)} pairs\nnone crosses a boundary"
    assert texts(figure) == ["crosses a boundary", "same document", "same document"]
    assert [label.get_text() for label in left.get_xticklabels()] == [f"doc {n + 1}" for n in range(len(lengths))]


def test_the_default_row_has_24_tokens():
    assert crossing_pairs_figure().axes[0].get_xlim() == (0, 24)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_labels_do_not_touch_and_keep_their_order(heights):
    placed = arithmetic._spread(heights)
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    gaps = np.diff([placed[index] for index in order])
    assert (gaps >= arithmetic._LABEL_GAP - 1e-9).all()
    assert np.mean(placed) == pytest.approx(np.mean(heights))
    if (np.diff(sorted(heights)) >= arithmetic._LABEL_GAP).all():
        assert placed == pytest.approx(heights)


FIGURES = {
    "waste": lambda theme: waste_figure(WINDOWS, WASTE, theme=theme),
    "cross": lambda theme: cross_document_figure(WINDOWS, WASTE, theme=theme),
    "pairs": lambda theme: crossing_pairs_figure(theme=theme),
}


@pytest.mark.parametrize("name", FIGURES)
def test_files_are_the_same_each_time_and_800_pixels_wide(tmp_path, name):
    for theme in THEMES:
        for copy in ("a", "b"):
            save_figure(FIGURES[name](theme), tmp_path / f"{copy}.svg")
            save_figure(FIGURES[name](theme), tmp_path / f"{copy}.png")
        first = (tmp_path / "a.svg").read_bytes()
        assert first == (tmp_path / "b.svg").read_bytes()
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
        assert b"<svg" in first and b'width="576pt"' in first and b"date" not in first and b"<text" not in first
        assert THEMES[theme].paper.encode() in first
        assert int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big") == 1600


def test_another_process_writes_the_same_bytes(tmp_path):
    code = (
        "import sys; from dagpack_hf.view.arithmetic import crossing_pairs_figure as figure;"
        "from dagpack_hf.view.theme import save_figure; save_figure(figure(), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other.svg")], check=True, timeout=120)
    save_figure(crossing_pairs_figure(), tmp_path / "here.svg")
    assert (tmp_path / "other.svg").read_bytes() == (tmp_path / "here.svg").read_bytes()


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2)."""
    luminance = []
    for color in (one, other):
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
        luminance.append(float(np.dot(linear, (0.2126, 0.7152, 0.0722))) + 0.05)
    return max(luminance) / min(luminance)


@pytest.mark.parametrize("name", THEMES)
def test_text_and_data_stand_out_from_the_paper(name):
    theme = THEMES[name]
    assert contrast(theme.ink, theme.paper) > 7 and contrast(theme.quiet, theme.paper) > 4.5
    for layout, color in arithmetic._LAYOUTS.items():
        assert contrast(getattr(theme, color), theme.paper) > 3, layout
    assert len(set(theme.colors)) == 6


def test_settings_of_matplotlib_are_left_as_they_were():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with themed("dark"):
        pass
    waste_figure(WINDOWS, WASTE, theme="dark")
    assert dict(matplotlib.rcParams) == before and "matplotlib.pyplot" not in vars(arithmetic)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: waste_figure([], {}), "windows must be a flat list"),
        (lambda: waste_figure(WINDOWS, {}), "nothing to draw"),
        (
            lambda: waste_figure(WINDOWS, {"padded": [0.5]}),
            "padded: there must be a share from 0 to 1 for each of the 3",
        ),
        (lambda: cross_document_figure([8], {"mine": [50]}), "mine: there must be a share from 0 to 1"),
        (lambda: waste_figure(WINDOWS, WASTE, theme="grey"), "theme must be 'light' or 'dark', got 'grey'"),
        (lambda: crossing_pairs_figure([]), "lengths must be 1 or more"),
        (lambda: crossing_pairs_figure([3, 0]), "lengths must be 1 or more"),
        (lambda: crossing_pairs_figure([60, 5]), "at most 64 together"),
        (lambda: save_figure(crossing_pairs_figure(), "figure.pdf"), r"figure.pdf: .* \.svg or \.png, not as \.pdf"),
    ],
)
def test_what_is_wrong_is_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "dagpack-hf\[plot\]"'):
        crossing_pairs_figure()


def test_matplotlib_is_imported_by_the_first_figure_only():
    code = "import sys; import dagpack_hf.view.arithmetic; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], timeout=120).returncode == 0

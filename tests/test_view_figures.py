"""Figures of chains, graphs and windows: what they show is what the data says, the same each time, and safe."""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="figures need matplotlib, the extra `plot`")

from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from dagpack_hf import TokenForest, pack_forest
from dagpack_hf.cli import figures
from dagpack_hf.cli.arguments import SAMPLE, UsageError, add_json, add_sessions
from dagpack_hf.cli.reading import add_reading
from dagpack_hf.cli.rendering import add_rendering
from dagpack_hf.graph import TransitionGraph
from dagpack_hf.sample import sample_sessions
from dagpack_hf.stats import cost_series
from dagpack_hf.view import graph as graph_view
from dagpack_hf.view.boxes import fitted, printable, tint
from dagpack_hf.view.chains import ROWS, Chains, chains_figure
from dagpack_hf.view.example import action_name, example_episodes, state_name
from dagpack_hf.view.graph import drawn_graph, graph_figure
from dagpack_hf.view.graph_layout import Drawn, spread
from dagpack_hf.view.row_cells import copies, parents, row_cells, token_namer
from dagpack_hf.view.theme import THEMES, save_figure
from dagpack_hf.view.window import CELLS, window_figure

COLORS = THEMES["light"]
TINTS = {name: tint(getattr(COLORS, name), COLORS.paper) for name in ("blue", "green", "purple")}
EPISODES = example_episodes()
STATES, ACTIONS = [each.states for each in EPISODES], [each.actions for each in EPISODES]

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure) -> list[tuple[float, float, str, str]]:
    """Left, top, fill and border of the boxes, the swatches of the legend not among them."""
    found = [each for each in figure.axes[0].patches if isinstance(each, FancyBboxPatch) and each.get_height() > 15]
    found = [each for each in found if each.get_facecolor()[3] > 0]
    return [(each.get_x(), each.get_y(), to_hex(each.get_facecolor()), to_hex(each.get_edgecolor())) for each in found]


# Chains


@given(sequences)
def test_what_sequences_share_is_what_their_beginnings_say(sequences):
    chains = Chains.of(sequences, None)
    beginnings = [[tuple(each[: at + 1]) for at in range(len(each))] for each in sequences]
    for path, expected in zip(chains.prefix, beginnings, strict=True):
        for number, beginning in zip(path, expected, strict=True):
            users = [each for each in sequences if tuple(each[: len(beginning)]) == beginning]
            following = {each[len(beginning)] for each in users if len(each) > len(beginning)}
            assert chains.shared[number] == (len(users) > 1)
            assert chains.parts[number] == (len(following) > 1)
    assert len(chains.shared) == len({each for one in beginnings for each in one})
    assert not any(chains.met)


@given(sequences)
def test_stretches_of_chains_have_all_elements(sequences):
    chains = Chains.of(sequences, None)
    labels, condensed, _ = chains.condensed([[f"{each}\nrest" for each in sequence] for sequence in sequences])
    for sequence, shown, kept, path in zip(sequences, labels, condensed.prefix, chains.prefix, strict=True):
        more = [int(label.split("\n")[0].partition("+")[2] or 0) for label in shown]
        assert sum(more) + len(shown) == len(sequence)
        assert kept[-1] == path[-1] and all(chains.parts[number] for number in path if number not in kept[:-1]) <= 1
        begins = np.cumsum([0, *(each + 1 for each in more)])[:-1]
        assert [label.split("\n")[0].split(" ")[0] for label in shown] == [str(sequence[at]) for at in begins]
        assert [number for number in path if chains.parts[number] and number != path[-1]] == [
            number for number in kept[:-1] if chains.parts[number]
        ]


def test_episodes_as_chains():
    figure = chains_figure(STATES, ACTIONS, name=state_name, action_name=action_name)
    drawn = boxes(figure)
    assert len(drawn) == sum(map(len, STATES))
    fills = [fill for _, _, fill, _ in drawn]
    blue, green, plain = TINTS["blue"], TINTS["green"], COLORS.shade
    assert fills == [blue] * 3 + [green] * 3 + [blue] * 3 + [green] * 3 + [blue] * 3 + [green] * 2 + [plain] + (
        [blue] * 3 + [green] * 2
    )
    parting = [at for at, (_, _, _, edge) in enumerate(drawn) if edge == COLORS.orange]
    assert parting == [0, 2, 6, 8, 12, 14, 18, 20], "the start, and the state with the key"
    bars = [each for each in figure.axes[0].patches if isinstance(each, Rectangle)]
    assert len(bars) == 4 and {to_hex(each.get_facecolor()) for each in bars} == {COLORS.green}
    assert len({top for _, top, _, _ in drawn}) == 4 and len({left for left, _, _, _ in drawn}) == 6
    arrows = [each for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch)]
    assert len(arrows) == sum(map(len, ACTIONS)) == 19
    shown = texts(figure)
    assert shown[0] == "4 episodes: 19 transitions, of which merging by prefix leaves 15, by state 10"
    steps = [text for text in shown if text in "↑↓←→"]
    assert steps == [action_name(action) for actions in ACTIONS for action in actions]
    graph = TransitionGraph.from_episodes(EPISODES, progress=False)
    assert (graph.num_steps, graph.num_prefixes, graph.num_transitions) == (19, 15, 10), "as the title says"


def test_what_does_not_fit_is_counted():
    figure = chains_figure([list(range(50))] * 3 + [[1]] * ROWS)
    assert len(boxes(figure)) == 3 * 22 + ROWS - 3
    assert texts(figure).count("+ 28") == 3 and "and 3 more sequences" in texts(figure)
    episodes = chains_figure([list(range(30))], [["go"] * 29])
    assert f"+ {30 - len(boxes(episodes))}" in texts(episodes)
    assert max(left for left, _, _, _ in boxes(episodes)) < 750


def test_nothing_shared_says_so():
    assert "nothing is shared" in texts(chains_figure([[1, 2], [3]]))


# Graphs


def edges_of(graph: Drawn) -> list[tuple[int, int]]:
    return [(source, target) for source, target, _ in graph.edges]


graphs = st.integers(1, 9).flatmap(
    lambda count: st.builds(
        lambda pairs: Drawn([str(each) for each in range(count)], [0], [(one, other, "") for one, other in pairs]),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=16),
    )
)


@settings(max_examples=200)
@given(graphs)
def test_columns_are_distances_and_no_boxes_overlap(graph):
    distance = {0: 0}
    while True:
        more = {
            target: distance[source] + 1
            for source, target in edges_of(graph)
            if source in distance and distance[source] + 1 < distance.get(target, 99)
        }
        if not more:
            break
        distance |= more
    assert graph.column == [distance.get(vertex, 0) for vertex in range(len(graph.labels))]
    for column in set(graph.column):
        rows = sorted(row for row, other in zip(graph.row, graph.column, strict=True) if other == column)
        assert all(high - low >= 1 - 1e-9 for low, high in pairwise(rows)) and rows[0] >= 0
    assert min(graph.row) == 0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_heights_are_spread_as_little_as_it_takes(heights):
    placed = spread(heights)
    assert all(high - low >= 1 - 1e-9 for low, high in pairwise(placed))
    assert np.mean(placed) == pytest.approx(np.mean(heights), abs=1e-9) or len(heights) > 1
    if all(high - low >= 1 for low, high in pairwise(heights)):
        assert placed == pytest.approx(heights)
    if len(set(heights)) == 1:
        assert placed == pytest.approx([heights[0] + at - (len(heights) - 1) / 2 for at in range(len(heights))])


def test_a_path_is_level():
    graph = Drawn(list("abcd"), [0], [(0, 1, ""), (0, 2, ""), (2, 3, "")])
    assert graph.row[3] == graph.row[2] and abs(graph.row[1] - graph.row[2]) == 1


@settings(max_examples=200)
@given(graphs)
def test_condensed_graphs_keep_branches_and_count_the_rest(graph):
    condensed = graph.condensed()
    more = sum(int(label.partition("+")[2] or 0) for label in condensed.labels)
    assert len(condensed.labels) + more == len(graph.labels)
    assert len(condensed.edges) == len(graph.edges) - more
    for vertex in range(len(condensed.labels)):
        source = [target for one, target in edges_of(condensed) if one == vertex]
        if len(source) == 1 and source[0] != vertex and condensed.column[source[0]]:
            assert (
                condensed.incoming()[source[0]] != 1
                or (source[0], source[0]) in edges_of(condensed)
                or ((vertex, vertex) in edges_of(condensed))
            )


@pytest.mark.parametrize("merge", ["state", "prefix"])
def test_the_graph_has_a_box_for_each_state_and_an_arrow_for_each_transition(merge):
    graph = TransitionGraph.from_episodes(EPISODES, merge, progress=False)
    figure = graph_figure(graph, name=state_name, action_name=action_name)
    steps = {
        (states[at], action, states[at + 1], *((states[:at], actions[:at]) if merge == "prefix" else ()))
        for states, actions in ((tuple(each.states), tuple(each.actions)) for each in EPISODES)
        for at, action in enumerate(actions)
    }
    entering = Counter(step[2] for step in steps)
    states = {state for each in EPISODES for state in each.states}
    drawn = boxes(figure)
    assert len(drawn) == (len(states) if merge == "state" else 16) and len(steps) == graph.num_transitions
    arrows = [each for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch)]
    assert len(arrows) == len(steps)
    joins = sum(count > 1 for count in entering.values()) if merge == "state" else 0
    assert sum(fill == TINTS["green"] for _, _, fill, _ in drawn) == joins == (merge == "state")
    assert sum(to_hex(each.get_edgecolor()) == COLORS.green for each in arrows) == 2 * joins
    labels = Counter(text for text in texts(figure) if text in "↑↓←→")
    assert labels == Counter(action_name(step[1]) for step in steps)
    assert sum(edge == COLORS.orange for _, _, _, edge in drawn) == (2 if merge == "state" else 3)
    assert texts(figure)[0].startswith(f"Merged by {merge}: 10 states, {len(steps)} transitions")


def test_loops_parallel_edges_and_ways_back_are_all_drawn():
    graph = TransitionGraph.from_episodes(
        [("aabab", "1232"), ("aba", "45"), ("abcdba", "46789"), ("aa", "0")], progress=False
    )
    figure = graph_figure(graph)
    arrows = [each for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch)]
    assert len(arrows) == graph.num_transitions == 10
    assert sorted(text for text in texts(figure) if text.isdigit()) == sorted("0123456789")
    ends = [frozenset(map(tuple, each._posA_posB)) for each in arrows]
    assert len(set(ends)) == len(ends), "no edge lies on another, in either direction"
    places = [text.get_position() for text in figure.axes[0].texts if text.get_text().isdigit()]
    assert all(0 < x < 800 and 60 < y < figure.get_figheight() * 100 for x, y in places)


def test_there_and_back_are_two_lines():
    figure = graph_figure(TransitionGraph.from_episodes([("aba", "12")], progress=False))
    there, back = (each._posA_posB for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch))
    assert there[0][1] != back[1][1] and there[1][1] != back[0][1]


def test_a_loop_is_no_meeting_of_paths():
    graph = TransitionGraph.from_episodes([("abbb", "wxy")], progress=False)
    figure = graph_figure(graph)
    assert not [fill for _, _, fill, _ in boxes(figure) if fill == TINTS["green"]]
    assert len(boxes(figure)) == 2 and "a +1" not in texts(graph_figure(graph, stretches=True))


def test_labels_of_states_are_those_of_the_vertices():
    graph = TransitionGraph.from_episodes(EPISODES, "prefix", progress=False)
    drawn = drawn_graph(graph, lambda state: state, lambda action: action)
    walks = set()
    for states, actions in EPISODES:
        at = drawn.starts[0]
        walks.add(at)
        assert drawn.labels[at] == states[0]
        for action, state in zip(actions, states[1:], strict=True):
            (at,) = (t for s, t, label in drawn.edges if s == at and label == action and drawn.labels[t] == state)
            walks.add(at)
    assert walks == set(range(len(drawn.labels)))


# Windows


@st.composite
def packed(draw):
    """Rows of a forest of sequences, some tokens context."""
    given = draw(sequences)
    labels = [[token if draw(st.booleans()) or at == 0 else -100 for at, token in enumerate(each)] for each in given]
    forest = TokenForest.from_sequences(given, labels)
    longest = max(map(len, given)) + draw(st.integers(1, 12))
    return pack_forest(forest, longest, seed=draw(st.sampled_from([None, 0])))


def dense(row) -> np.ndarray:
    """The mask by its definition."""
    end, count = row["subtree_end"], len(row["input_ids"])
    return np.array([[j <= i < end[j] for j in range(count)] for i in range(count)], bool).reshape(count, count)


def parent_of(row, position: int) -> int:
    """The last position before that is seen, -1 for none."""
    return max((key for key in range(position) if row["subtree_end"][key] > position), default=-1)


@settings(max_examples=150)
@given(packed())
def test_copies_and_replay_are_what_the_report_counts(packing):
    rows, report = packing
    repeated = 0
    for index in range(len(rows)):
        row, cells = rows[index], row_cells(rows, index)
        above = [parent_of(row, position) for position in range(len(cells))]
        assert parents(row["subtree_end"]).tolist() == above
        siblings = Counter(zip(above, row["input_ids"].tolist(), strict=True))
        alike = [siblings[one] > 1 for one in zip(above, row["input_ids"].tolist(), strict=True)]
        assert cells.is_copy.tolist() == copies(row["input_ids"], row["subtree_end"]).tolist() == alike
        own = Counter(
            one
            for one, is_replayed in zip(
                zip(above, row["input_ids"].tolist(), strict=True), cells.is_replayed, strict=True
            )
            if not is_replayed
        )
        repeated += int(cells.is_replayed.sum()) + sum(count - 1 for count in own.values())
        targets = [str(label) if label != -100 else "" for label in row["shift_labels"].tolist()]
        assert cells.targets == targets and cells.inputs == [str(each) for each in row["input_ids"].tolist()]
        assert cells.depth.tolist() == row["position_ids"].tolist()
    assert repeated == report.replay_tokens


@settings(max_examples=150)
@given(packed())
def test_stretches_say_the_same_mask_and_targets(packing):
    rows, _ = packing
    for index in range(len(rows)):
        row, every = rows[index], row_cells(rows, index)
        cells = row_cells(rows, index, stretches=True)
        assert cells.length.sum() == len(every) and (cells.length >= 1).all()
        of_position = np.repeat(np.arange(len(cells)), cells.length)
        query, key = of_position[:, None], of_position[None, :]
        seen = (key <= query) & (query < cells.end[key])
        causal = np.tril(np.ones((len(every), len(every)), bool))
        assert (seen & causal == dense(row)).all()
        for vector in (every.is_copy, every.is_replayed, np.array([bool(each) for each in every.targets])):
            assert all(len(set(vector[of_position == cell].tolist())) == 1 for cell in range(len(cells)))


def test_stretches_are_as_long_as_they_can_be():
    forest = TokenForest.from_sequences(
        [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8]], [[-100, -100, 3, 4, 5, 6], [-100] * 3 + [7, 8]]
    )
    rows, _ = pack_forest(forest, 16)
    cells = row_cells(rows, stretches=True)
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 3, 7, 8]
    assert cells.inputs == ["1", "2", "3", "4 … 2 ids", "6", "3", "7", "8"]
    assert cells.targets == ["", "3", "4", "5 … 2 ids", "", "7", "8", ""]
    assert cells.end.tolist() == [8, 8, 5, 5, 5, 8, 8, 8] and cells.depth.tolist() == [0, 1, 2, 3, 5, 2, 3, 4]


def mask_of(figure, count: int) -> tuple[np.ndarray, list[str]]:
    """The cells that are filled in the mask, and the colour of each key."""
    found = [each for each in figure.axes[0].patches if isinstance(each, Rectangle)]
    seen = [each for each in found if to_hex(each.get_facecolor()) != COLORS.shade]
    left, top = min(each.get_x() for each in seen), min(each.get_y() for each in seen)
    width = seen[0].get_width()
    height = (max(each.get_y() + each.get_height() for each in seen) - top) / count
    mask, color = np.zeros((count, count), bool), [""] * count
    for each in seen:
        key, begin = round((each.get_x() - left) / width), round((each.get_y() - top) / height)
        mask[begin : begin + round(each.get_height() / height), key] = True
        color[key] = to_hex(each.get_facecolor())
    shaded = sum(each.get_height() / height for each in found if to_hex(each.get_facecolor()) == COLORS.shade)
    assert round(shaded) == count * (count + 1) // 2 - mask.sum()
    return mask, color


def test_the_window_shows_the_vectors_of_its_row():
    graph = TransitionGraph.from_episodes(EPISODES, progress=False)
    rows, _ = pack_forest(graph.to_forest(), 16)
    (row,) = rows
    figure = window_figure(rows)
    mask, color = mask_of(figure, 13)
    assert (mask == dense(row)).all()
    copied = [0, 2, 6, 10]
    assert [key for key in range(13) if color[key] == COLORS.orange] == copied
    assert {color[key] for key in range(13) if key not in copied} == {COLORS.blue}
    shown = texts(figure)
    assert shown[0] == "A packed window: 13 positions, 10 targets"
    vectors = shown[shown.index("position") + 1 :][: 3 * 13]
    assert vectors[0::3] == [str(each) for each in row["input_ids"]]
    assert vectors[1::3] == [str(each) if each != -100 else "–" for each in row["shift_labels"]]
    assert vectors[2::3] == [str(each) for each in row["position_ids"]]
    assert "query sees key: itself or an ancestor (45)" in shown and "hidden: on another branch (46)" in shown
    inputs = [edge for _, top, _, edge in boxes(figure) if top == min(each[1] for each in boxes(figure))]
    assert [at for at, edge in enumerate(inputs) if edge == COLORS.orange] == copied


def test_repeated_context_is_marked_where_the_other_windows_are_there():
    graph = TransitionGraph.from_episodes(EPISODES, progress=False)
    rows, _ = pack_forest(graph.to_forest(), 8)
    assert rows[1]["shift_labels"].tolist()[:2] == [-100, -100]
    mask, color = mask_of(window_figure(rows, 1), 6)
    assert color == [COLORS.purple] * 3 + [COLORS.blue] * 3 and (mask == dense(rows[1])).all()
    other_way_round = mask_of(window_figure([rows[1], rows[0]]), 6)[1]
    assert other_way_round == [COLORS.blue] + [COLORS.purple] * 2 + [COLORS.blue] * 3, "the later row trains the steps"
    alone = window_figure([rows[1]])
    assert set(mask_of(alone, 6)[1]) == {COLORS.blue}
    fills = [fill for _, _, fill, _ in boxes(window_figure(rows, 1))]
    assert fills.count(TINTS["purple"]) == 3 and fills.count(TINTS["blue"]) == 3


def test_tokens_are_shown_as_text():
    name = token_namer(lambda ids: "".join(" ab\n"[each] for each in ids))
    assert [name([each]) for each in range(4)] == ["␣", "a", "b", "↵"] and name([1, 0, 3, 2]) == "a  b"
    rows, _ = pack_forest(TokenForest.from_sequences([[1, 0, 2], [1, 0, 3]]), 8)
    shown = texts(window_figure(rows, name=name))
    assert shown.count("␣") == 2 + 1 + 2 and "↵" in shown, "X twice, Y once, and beside the mask"


def test_long_windows_are_drawn_in_stretches():
    one = [1] * 40
    rows, _ = pack_forest(TokenForest.from_sequences([[*one, *range(2, 2000)], [*one, *range(3000, 3100)]]), 4000)
    with pytest.raises(ValueError, match=r"room for 48 cells, and row 0 has 2,139 positions. Draw stretches"):
        window_figure(rows)
    figure = window_figure(rows, stretches=True)
    assert texts(figure)[0] == "A packed window: 2,139 positions, 2,137 targets, in 7 stretches"
    assert {"1,997", "39", "2,037"} <= set(texts(figure))
    many = TokenForest.from_sequences([[7, each] for each in range(CELLS)])
    with pytest.raises(ValueError, match=r"has 96 stretches. Pack into shorter windows"):
        window_figure(pack_forest(many, 256)[0], stretches=True)


# All of them


def every_figure(theme: str) -> dict:
    graph = TransitionGraph.from_episodes(EPISODES, progress=False)
    rows, _ = pack_forest(graph.to_forest(), 16)
    return {
        "chains": chains_figure(STATES, ACTIONS, name=state_name, action_name=action_name, theme=theme),
        "graph": graph_figure(graph, name=state_name, action_name=action_name, theme=theme),
        "window": window_figure(rows, name=lambda ids: state_name(graph.nodes(ids)[0].state), theme=theme),
    }


@pytest.mark.parametrize("theme", THEMES)
def test_files_are_the_same_each_time_and_800_pixels_wide(tmp_path, theme):
    first, second = every_figure(theme), every_figure(theme)
    for name in first:
        save_figure(first[name], tmp_path / "a.svg")
        save_figure(second[name], tmp_path / "b.svg")
        data = (tmp_path / "a.svg").read_bytes()
        assert data == (tmp_path / "b.svg").read_bytes()
        assert b'width="576pt"' in data and b"<text" not in data and b"date" not in data
        assert THEMES[theme].paper.encode() in data
        save_figure(first[name], tmp_path / "a.png")
        assert int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big") == 1600


def test_labels_stay_within_their_boxes():
    for figure in every_figure("light").values():
        figure.draw_without_rendering()
        placed = [each.get_window_extent() for each in figure.axes[0].patches if isinstance(each, FancyBboxPatch)]
        for text in figure.axes[0].texts:
            extent = text.get_window_extent()
            middle = ((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2)
            for box in placed:
                if box.contains(*middle):
                    assert box.x0 - 1 <= extent.x0 and extent.x1 <= box.x1 + 1, text.get_text()


def test_labels_from_files_do_no_harm(tmp_path):
    odd = ["$\\frac{1}{0}$", "漢字\x1b[31m", "\u202eback", "a\nb\nc", "x" * 500, "", "\ud800"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (
            chains_figure([odd, odd[:3]], [odd[:-1], odd[:2]]),
            graph_figure(TransitionGraph.from_episodes([(odd, odd[:-1])], progress=False)),
            window_figure(
                pack_forest(TokenForest.from_sequences([[0, 1, 2], [0, 3, 4, 5, 6]]), 12)[0],
                name=lambda ids: odd[ids[0]],
            ),
        ):
            save_figure(figure, tmp_path / "a.svg")
            assert not [text.get_text() for text in figure.axes[0].texts if text.get_parse_math()]
    assert printable("漢é\x1b\u202e$") == "□é$"


@pytest.mark.parametrize(("text", "width"), [("short", 200), ("a longer label", 60), ("x" * 100, 30), ("", 10)])
def test_labels_are_made_smaller_then_cut(text, width):
    shown, size = fitted(text, width, 13)
    assert len(shown) * 0.602 * size <= width + 1e-6 and 9.5 <= size <= 13
    assert shown == text or (size == 9.5 and shown.endswith("…"))


GRAPH = TransitionGraph.from_episodes([(range(40), [0] * 39)], progress=False)
ROW = {"input_ids": [1, 2], "shift_labels": [2, -100], "position_ids": [0, 1], "subtree_end": [2, 2]}


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: chains_figure([]), "nothing to draw"),
        (lambda: chains_figure([[1], []]), "none that is empty"),
        (lambda: chains_figure([[1, 2]], [[1], [2]]), "1 sequences of states and 2 of actions"),
        (lambda: chains_figure([[1, 2]], [[1, 2]]), "Episode 0 has 2 states and 2 actions"),
        (lambda: chains_figure([[1, 2]], [[1]], stretches=True), "draw the graph of these episodes"),
        (lambda: chains_figure([[1]], theme="grey"), "theme must be 'light' or 'dark'"),
        (
            lambda: graph_figure(GRAPH),
            r"room for 80 boxes in 14 columns, .* merged by state has 40 in 40. .*stretches",
        ),
        (lambda: graph_figure(TransitionGraph.from_episodes([], progress=False)), "the graph has no state"),
        (lambda: window_figure([{**ROW, "subtree_end": [2, 1]}]), "Row 0: subtree_end must lie behind each position"),
        (lambda: window_figure([{**ROW, "shift_labels": [2]}]), r"Row 0: shift_labels has shape \(1,\)"),
        (lambda: window_figure([{"input_ids": [1]}]), "Row 0 has no"),
        (lambda: window_figure([{name: [] for name in ROW}]), "row 0 is empty"),
    ],
)
def test_what_is_wrong_is_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(IndexError, match="no row 1; there are 1, counted from 0"):
        window_figure([ROW], 1)


def test_a_long_path_fits_as_one_stretch():
    assert len(boxes(graph_figure(GRAPH, stretches=True))) == 1
    assert graph_view.STATES >= 40


# The command


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sessions(parser)
    parser.add_argument("--tokenizer", default=SAMPLE)
    parser.add_argument("--html")
    figures.add_arguments(parser)
    add_rendering(parser, on_error="skip")
    add_reading(parser)
    add_json(parser)
    return parser.parse_args(arguments)


FILE = str(sorted(sample_sessions().glob("*.jsonl"))[0])


@pytest.mark.parametrize("name", figures.FIGURES)
@pytest.mark.parametrize("theme", THEMES)
def test_every_figure_of_the_built_in_example(tmp_path, capsys, name, theme, monkeypatch):
    monkeypatch.setattr(figures, "_DRAWS", 1)
    out = tmp_path / "figure.svg"
    assert figures.draw(parse("--figure", name, "--out", str(out), "--theme", theme)) == 0
    assert THEMES[theme].paper.encode() in out.read_bytes()
    out_text, err = capsys.readouterr()
    assert out_text == "" and err.strip() == f"{out}: {name} of the built-in example"


@pytest.mark.parametrize("name", ["chains", "graph", "window", "waste", "cross-document"])
def test_figures_of_sessions(tmp_path, name):
    assert figures.draw(parse(FILE, "--figure", name, "--out", str(tmp_path / "figure.svg"))) == 0
    assert (tmp_path / "figure.svg").stat().st_size > 5000


def figure_of(monkeypatch, *arguments: str):
    """The figure that a command line draws."""
    drawn = []
    monkeypatch.setattr("dagpack_hf.view.theme.save_figure", lambda figure, path: drawn.append(figure))
    assert figures.draw(parse(*arguments, "--out", "x.svg")) == 0
    return drawn[0]


def test_sessions_become_chains_of_messages(monkeypatch):
    shown = texts(figure_of(monkeypatch, FILE, "--figure", "chains"))
    assert shown[0] == "4 sequences: 110 elements, of which merging by prefix leaves 56"
    assert shown.count("system +17") == 4, "one exploration, then four tasks"
    graph = figure_of(monkeypatch, FILE, "--figure", "graph")
    assert len(boxes(graph)) == 5 and "system +17" in texts(graph)
    window = texts(figure_of(monkeypatch, FILE, "--figure", "window", "--row", "1"))
    assert "context repeated from another window" in window


def test_costs_are_those_of_the_documents(tmp_path, monkeypatch):
    path = tmp_path / "documents.jsonl"
    path.write_text("[1, 2, 3]\n[1, 2, 4, 5]\n")
    figure = figure_of(monkeypatch, "--figure", "waste", "--documents", str(path), "--window", "8", "16", "8")
    from dagpack_hf.stats import sequence_costs

    windows, series = cost_series(
        [cost for window in (8, 16) for cost in sequence_costs([[1, 2, 3], [1, 2, 4, 5]], window)]
    )
    lines = {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {tuple(np.maximum(each, 1e-3)) for each in series.values()}
    assert [line.get_xdata().tolist() for line in figure.axes[0].lines] == [windows.tolist()] * 4
    crossing = figure_of(monkeypatch, "--figure", "cross-document", "--documents", str(path), "--window", "8")
    assert len(crossing.axes[0].lines) == 2, "concatenated and best fit"
    pairs = figure_of(monkeypatch, "--figure", "crossing-pairs", "--lengths", "2", "3")
    assert pairs.axes[0].get_xlim() == (0, 5)


def test_episodes_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "episodes.jsonl"
    lines = [{"states": list("abz"), "actions": [1, 2]}, {"states": list("acz"), "actions": [3, 2]}]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    for merge, count in (("state", 4), ("prefix", 5)):
        graph = figure_of(monkeypatch, "--figure", "graph", "--episodes", str(path), "--merge", merge)
        assert len(boxes(graph)) == count
    assert len(boxes(figure_of(monkeypatch, "--figure", "chains", "--episodes", str(path)))) == 6
    short = figure_of(monkeypatch, "--figure", "graph", "--episodes", str(path), "--merge", "prefix", "--stretches")
    assert len(boxes(short)) == 3 and texts(short).count("b +1") == 1
    window = texts(figure_of(monkeypatch, "--figure", "window", "--episodes", str(path)))
    assert window[0] == "A packed window: 6 positions, 4 targets"


def test_how_sessions_are_read_is_the_commands(monkeypatch):
    shown = texts(figure_of(monkeypatch, FILE, "--figure", "chains", "--until", "2026-03-02T09:01:00Z"))
    assert shown[0] != "4 sequences: 110 elements, of which merging by prefix leaves 56"
    with pytest.raises(UsageError, match="no turn to train"):
        figure_of(monkeypatch, FILE, "--figure", "chains", "--model", "nobody")


def test_json_says_where_the_figure_is(tmp_path, capsys):
    out = str(tmp_path / "figure.svg")
    figures.draw(parse("--figure", "chains", "--out", out, "--json"))
    assert json.loads(capsys.readouterr().out) == {"figure": "chains", "file": out, "data": "the built-in example"}


def test_a_figure_is_asked_for_or_not():
    assert figures.is_asked_for(parse("--figure", "chains")) and not figures.is_asked_for(parse(FILE))
    with pytest.raises(UsageError, match="--out, --row: only for a figure; add --figure NAME"):
        figures.is_asked_for(parse("--out", "x.svg", "--row", "1"))
    with pytest.raises(UsageError, match="one at a time"):
        figures.is_asked_for(parse("--figure", "chains", "--html", "x.html"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "graph"], "give its file with --out, ending in .svg or .png"),
        (["--figure", "graph", "--out", "x.pdf"], "ending in .svg or .png"),
        ([FILE, "--figure", "graph", "--out", "x.svg", "--episodes", "y"], "sessions or episodes, not both"),
        (
            ["--figure", "waste", "--out", "x.svg", "--episodes", "y"],
            "not drawn of episodes; it takes sessions or documents",
        ),
        ([FILE, "--figure", "crossing-pairs", "--out", "x.svg"], "it takes --lengths"),
        (["--figure", "window", "--out", "x.svg", "--row", "7"], "--row 7: there are 1 windows"),
    ],
)
def test_command_lines_that_are_wrong(arguments, message):
    with pytest.raises(UsageError, match=message):
        figures.draw(parse(*arguments))


def test_options_that_a_command_has_are_left_to_it():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="mine")
    parser.add_argument("--max-length", "--window", type=int)
    figures.add_arguments(parser, without={"--out", "--max-length"})
    options = parser.parse_args(["--figure", "graph", "--window", "3"])
    assert (options.max_length, options.out) == (3, "mine")


def test_one_window_length_or_several(monkeypatch):
    for window, count in ((["--window", "8", "64", "8"], 6), (["--window", "16"], 13)):
        shown = texts(figure_of(monkeypatch, "--figure", "window", *window, *(["--row", "1"] if count == 6 else [])))
        assert shown[0].startswith(f"A packed window: {count} positions")
    options = parse("--figure", "window", "--out", "x.svg")
    options.max_length = 5
    with pytest.raises(ValueError, match="max_length"):
        figures.draw(options)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'pip install "dagpack-hf\[plot\]"'):
        figures.draw(parse("--figure", "chains", "--out", "x.svg"))

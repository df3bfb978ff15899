"""The data of the viewer's page: every token has its place, every turn its status, and no text acts."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagpack_hf import TokenForest, load_sessions, pack_forest, tokenize_conversations
from dagpack_hf.conversations import loads
from dagpack_hf.overflow import limit_paths
from dagpack_hf.packing import iter_trees
from dagpack_hf.pi import iter_turns
from dagpack_hf.pi.reader import read_session
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from dagpack_hf.view.page import build_page, page_html, write_page
from dagpack_hf.view.page.blocks import cut_blocks
from dagpack_hf.view.page.marks import MARK, visible
from dagpack_hf.view.page.messages import MessageFinder, Piece
from dagpack_hf.view.page.model import Page
from dagpack_hf.view.page.parts import entry_parts
from dagpack_hf.view.page.plan import plan_windows
from dagpack_hf.view.page.texts import Texts
from dagpack_hf.view.page.walk import START, ForestWalk, take
from dagpack_hf.view.page.write import SCRIPTS, json_block
from tests.pi_sessions import SessionBuilder, call, thinking
from tests.viewer_sessions import HOSTILE, hostile_session

SAMPLE = sorted(sample_sessions().glob("*.jsonl"))


@pytest.fixture(scope="module")
def tokenizer():
    return sample_tokenizer()


@pytest.fixture(scope="module")
def sample(tokenizer):
    return build_page(sample_sessions(), tokenizer, tokenizer_name="of the sample", max_length=4096).page


@pytest.fixture(scope="module")
def forest(tokenizer):
    return TokenForest.from_trees(iter_trees(tokenize_conversations(load_sessions(sample_sessions()), tokenizer)))


def own(page: Page, number: int) -> list[int]:
    return [block for low, high in page.entries[number].blocks for block in range(low, high)]


# Tokens


def test_blocks_are_the_token_tree(sample, forest):
    assert [(n.parent, n.depth, n.length) for n in sample.nodes] == list(
        zip(forest.parent.tolist(), forest.depth.tolist(), forest.length.tolist(), strict=True)
    )
    at = 0
    for block in sample.blocks:
        node = sample.nodes[block.node]
        assert block.position == node.depth + at - forest.start[block.node] and block.length > 0
        span = np.arange(at, at + block.length)
        assert (forest.tally.is_target(span) == block.target).all(), "a block is target or context throughout"
        at += block.length
    assert at == forest.num_tokens


def test_windows_are_those_of_the_packing(sample, forest):
    rows, report = pack_forest(forest, 4096)
    assert [window.size for window in sample.windows] == [len(row["input_ids"]) for row in rows]
    assert [window.trained for window in sample.windows] == [int((row["loss_weight"] > 0).sum()) for row in rows]
    assert sum(window.replay for window in sample.windows) == report.replay_tokens
    assert sum(block.length for block in sample.blocks if block.target) == report.loss_tokens
    for number, row in enumerate(rows):
        held = [block for block in sample.blocks if number in sample.window_sets[block.windows]]
        starts = np.concatenate([forest.start, [forest.num_tokens]])
        tokens = []
        for block in held:
            first = starts[block.node] + block.position - sample.nodes[block.node].depth
            tokens += forest.tokens[first : first + block.length].tolist()
        # Copies of branch points are positions of the row, but no further tokens of the tree.
        copies = len(row["input_ids"]) - len(tokens)
        assert 0 <= copies < 40
        unique, counts = np.unique(row["input_ids"], return_counts=True)
        mine = dict(zip(*np.unique(tokens, return_counts=True), strict=True))
        assert sum(counts[i] - mine.get(token, 0) for i, token in enumerate(unique)) == copies
    figures = sample.figures
    assert (figures["logical"], figures["unique"]) == (report.logical_tokens, report.unique_tokens)
    assert (figures["windows"], figures["bound"]) == (report.windows, report.lower_bound)
    assert all(block.window == sample.window_sets[block.windows][0] for block in sample.blocks)
    assert all(list(windows) == sorted(set(windows)) for windows in sample.window_sets)


def test_a_turn_has_exactly_its_own_tokens_as_targets(sample, tokenizer, forest):
    """The tokens of each trained turn, decoded, are its text, thinking and calls, and nothing else."""
    texts = {(turn.session, turn.entry): turn.reply for turn in iter_turns(sample_sessions()) if turn.trained}
    tokens = forest.tokens
    checked = 0
    for number, entry in enumerate(sample.entries):
        reply = texts.get((str(SAMPLE[entry.file]), entry.id))
        if reply is None:
            assert entry.status != "trained"
            continue
        targets = [sample.blocks[block] for block in own(sample, number) if sample.blocks[block].target]
        ids: list[int] = []
        for block in sorted(targets, key=lambda block: block.position):
            first = forest.start[block.node] + block.position - forest.depth[block.node]
            ids += tokens[first : first + block.length].tolist()
        said = tokenizer.decode(ids)
        assert entry.status == "trained" and entry.targets == len(ids)
        assert (reply.get("content") or "") in said and said.endswith("<|end|>")
        assert said.count("<|end|>") == 1 and said.count("<|call|>") == len(reply.get("tool_calls") or ())
        checked += 1
    assert checked == 125


def test_context_belongs_to_the_entry_whose_text_it_is(sample, tokenizer, forest):
    """Decoded, the tokens of users, tool results and prompts hold their text; together entries have all tokens."""
    tokens = forest.tokens
    for number, entry in enumerate(sample.entries):
        if entry.kind not in ("user", "tool", "summary"):
            continue
        ids: list[int] = []
        for block in sorted((sample.blocks[each] for each in own(sample, number)), key=lambda block: block.position):
            first = forest.start[block.node] + block.position - forest.depth[block.node]
            ids += tokens[first : first + block.length].tolist()
        said = tokenizer.decode(ids)
        # What a compaction keeps stands in the tree twice.
        assert said.count(entry.parts[0].text.strip()[:300]) == said.count("<|user|>") + said.count("<|tool|>") > 0
    assert all(block.entry >= 0 for block in sample.blocks)
    covered = {block for number in range(len(sample.entries)) for block in own(sample, number)}
    assert covered == set(range(len(sample.blocks)))


def test_files_share_what_they_have_in_common(sample, tokenizer):
    """Against token trees of single files."""
    paths = []
    for path in SAMPLE:
        rows = load_sessions(path)
        alone = TokenForest.from_trees(iter_trees(tokenize_conversations(rows, tokenizer)))
        paths.append({tuple(alone.path(leaf).tolist()) for leaf in alone.leaves.tolist()})
    prefixes = [{path[:end] for path in found for end in range(1, len(path) + 1)} for found in paths[:3]]
    assert sample.files[0].tokens == len(prefixes[0])
    assert sample.files[1].tokens == len(prefixes[1])
    both = [block.length for block in sample.blocks if {0, 1} <= set(sample.file_sets[block.files])]
    assert sum(both) == len(prefixes[0] & prefixes[1])
    assert all(len(files) for files in sample.file_sets)


def test_lanes_nest(sample):
    leaves = len(sample.nodes) - len({node.parent for node in sample.nodes if node.parent >= 0})
    for number, node in enumerate(sample.nodes):
        below = [each for each in sample.nodes if each.parent == number]
        lanes = sorted((each.top, each.top + each.lanes) for each in below)
        if lanes:
            assert lanes[0][0] == node.top and lanes[-1][1] == node.top + node.lanes
            assert all(a[1] == b[0] for a, b in pairwise(lanes))
        else:
            assert node.lanes == 1
    assert sum(node.lanes for node in sample.nodes if node.parent < 0) == leaves


def test_branches_stand_in_the_order_of_their_sessions(sample):
    first = [min(block.entry for block in sample.blocks if block.node == node) for node in range(len(sample.nodes))]
    for node in reversed(range(len(sample.nodes))):
        if sample.nodes[node].parent >= 0:
            first[sample.nodes[node].parent] = min(first[sample.nodes[node].parent], first[node])
    for number in range(len(sample.nodes)):
        below = [each for each, node in enumerate(sample.nodes) if node.parent == number]
        entries = [first[each] for each in sorted(below, key=lambda each: sample.nodes[each].top)]
        assert entries == sorted(entries)


def test_thinking_that_is_not_trained_is_context(tokenizer, tmp_path):
    session = SessionBuilder()
    session.user("question")
    session.assistant(thinking("a thought of its own"), "answer")
    path = session.write(tmp_path / "s.jsonl")
    page = build_page(path, tokenizer, rendering={"loss_on_thinking": False}).page
    ids = tokenizer.encode("<|/think|>answer<|end|>")
    assert sum(block.length for block in page.blocks if block.target) == len(ids) == page.entries[1].targets
    assert page.entries[1].targets < build_page(path, tokenizer).page.entries[1].targets


def test_paths_beyond_the_window_are_cut_and_said(tokenizer, forest):
    page = build_page(sample_sessions(), tokenizer, max_length=2000).page
    report = pack_forest(forest, 2000, overflow="truncate")[1]
    assert sum(block.length for block in page.blocks) == report.unique_tokens < forest.num_tokens
    assert page.figures["lost"] == report.overflow["lost_targets"] > 0
    assert any("beyond the window of 2,000" in note for note in page.notes)
    assert any(entry.status == "trained" and not entry.tokens for entry in page.entries)


def prefixes_of(row: dict[str, np.ndarray]) -> set[tuple[int, ...]]:
    """The prefixes that a window holds: for each position the tokens of all positions it sees."""
    ids, end = row["input_ids"].tolist(), row["subtree_end"].tolist()
    return {tuple(ids[j] for j in range(i + 1) if end[j] > i) for i in range(len(ids))}


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=12))
def test_windows_of_blocks_by_brute_force(sequences):
    forest = TokenForest.from_sequences(sequences)
    found = cut_blocks(plan_windows(forest, 8), {}, {})
    rows, _ = pack_forest(forest, 8)
    windows = [prefixes_of(row) for row in rows]
    for block in found.blocks:
        path = forest.path(block.node).tolist()
        for end in range(block.position + 1, block.position + block.length + 1):
            held = tuple(w for w, prefixes in enumerate(windows) if tuple(path[:end]) in prefixes)
            assert found.window_sets[block.windows] == held and block.window == held[0]


# Sessions


def test_entries_turns_and_branches_are_those_of_the_files(sample):
    _, report = load_sessions(sample_sessions(), return_report=True)
    sessions = [read_session(path) for path in SAMPLE]
    assert [file.count for file in sample.files] == [len(session.entries) for session in sessions]
    assert sum(file.turns for file in sample.files) == report.turns == sample.figures["turns"]
    assert sum(file.trained for file in sample.files) == report.targets
    statuses = [entry.status for entry in sample.entries if entry.status]
    assert len(statuses) == report.turns
    assert statuses.count("repeats a turn that is trained elsewhere") == sum(report.duplicate_turns.values())
    assert statuses.count("stop reason aborted") == report.untrained_turns["stop reason aborted"] == 1
    for file, session in zip(sample.files, sessions, strict=True):
        for entry, stored in zip(sample.entries[file.first :], session.entries, strict=False):
            above = sample.entries[entry.parent].id if entry.parent >= 0 else None
            assert (entry.id, above) == (stored["id"], stored["parentId"])


def test_turns_without_a_row_say_why(tokenizer, tmp_path):
    session = SessionBuilder()
    session.system("You are a test.")
    question = session.user("question")
    session.assistant("good")
    session.assistant("cut", parent=question, stop="length")
    session.entry("label", targetId=question, label="here")
    built = build_page(session.write(tmp_path / "s.jsonl"), tokenizer)
    turns = {entry.caption.split()[-1]: entry for entry in built.page.entries if entry.status}
    assert turns["good"].status == "trained" and turns["good"].kind == "trained"
    assert turns["cut"].status == "stop reason length" and turns["cut"].kind == "untrained"
    assert turns["cut"].tokens == 0 and turns["good"].targets > 0
    assert [entry.label for entry in built.page.entries if entry.label] == ["here"]


def test_a_template_that_strips_thinking_leads_to_copies_of_a_turn(tokenizer, tmp_path):
    """The turn as it was trained, and as later contexts have it; both are the turn's."""
    template = tokenizer.chat_template
    source = (
        "{%- for m in messages %}<|{{ m.role }}|>"
        "{%- if m.reasoning_content and loop.index0 > messages|map(attribute='role')|list|length - 2 %}"
        "<|think|>{{ m.reasoning_content }}<|/think|>{%- endif %}{{ m.content }}<|end|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    session = SessionBuilder()
    session.system("You are a test.")
    session.user("first question")
    turn = session.assistant(thinking("a thought of its own"), "the first answer of several words")
    session.user("second question")
    session.assistant("the second answer")
    page = build_page(
        session.write(tmp_path / "s.jsonl"), tokenizer, rendering={"template": source, "on_error": "skip"}
    ).page
    assert tokenizer.chat_template == template
    entry = next(entry for entry in page.entries if entry.id == turn)
    blocks = [page.blocks[each] for low, high in entry.blocks for each in range(low, high)]
    assert len({block.node for block in blocks}) > 1, "it stands in two branches"
    assert {block.target for block in blocks} == {True, False}
    assert entry.targets < entry.tokens


def test_no_session_no_tokens(tokenizer, tmp_path):
    session = SessionBuilder()
    session.user("nothing was answered")
    page = build_page(session.write(tmp_path / "s.jsonl"), tokenizer).page
    assert (len(page.entries), page.nodes, page.blocks, page.windows) == (1, (), (), ())
    assert "0 targets" in page.notes[0]
    (tmp_path / "empty").mkdir()
    page = build_page(tmp_path / "empty", tokenizer).page
    assert page.files == () and page_html(page)


# Where messages begin


def test_messages_in_chunks():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " ok "},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": {}}}]},
        {"role": "tool", "content": 'say "hi"'},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "Done with all of that now."},
        {"role": "user", "content": "thanks"},
    ]
    finder = MessageFinder(messages, {"<a>"})
    assert finder.pieces("<s>Be brief.", -1, 6) == [Piece(0, 0)]
    assert finder.pieces("<u>ok", 0, 6) == [Piece(0, 1)]
    assert finder.pieces("<e>", 1, 6) == [Piece(0, 1)], "what has no text goes to the message before"
    assert finder.pieces("<a>", 1, 6) == [Piece(0, 2)], "a generation prompt begins the next turn"
    assert finder.pieces('<c>{"name": "read"}', 1, 6) == [Piece(0, 2)]
    assert finder.pieces('<t>"say \\"hi\\""', 2, 6) == [Piece(0, 3)], "text that the template writes as JSON"
    assert finder.pieces("<a>Done with all of that now.", 3, 6) == [Piece(0, 5)], "an empty message is passed over"
    assert finder.pieces("<u>thanks", 5, 6) == [Piece(0, 5)], "not beyond the context"
    assert finder.pieces("<a>Done with all of that now.", 2, 6) == [Piece(0, 5)], "nor is one that is left out missed"
    assert finder.pieces("<u>ok", -1, 6) == [Piece(0, 0)], "but a short text proves nothing then"
    whole = '<s>Be brief.<u>ok<c>read<t>say "hi"<a>Done with all of that now.'
    assert finder.pieces(whole, -1, 6) == [
        Piece(0, 0),
        Piece(whole.index("ok"), 1),
        Piece(whole.index("read"), 2),
        Piece(whole.index("say"), 3),
        Piece(whole.index("Done"), 5),
    ]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8), st.integers(1, 8))
def test_walks_find_every_sequence(sequences, step):
    forest = TokenForest.from_sequences(sequences)
    walk = ForestWalk(forest)
    for sequence in sequences:
        place, found = START, []
        for at in range(0, len(sequence), step):
            ranges, place = walk.go(place, sequence[at : at + step])
            found += ranges
        assert [token for low, high in found for token in forest.tokens[low:high].tolist()] == sequence
        inner = take(found, 1, len(sequence) - 1)
        assert [token for low, high in inner for token in forest.tokens[low:high].tolist()] == sequence[1:-1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=9), min_size=1, max_size=8))
def test_walks_end_where_paths_were_cut(sequences):
    forest, _ = limit_paths(TokenForest.from_sequences(sequences), 4, "truncate")
    walk = ForestWalk(forest)
    for sequence in sequences:
        ranges, place = walk.go(START, sequence)
        assert place is None and walk.go(place, [0]) == ([], None)
        assert [token for low, high in ranges for token in forest.tokens[low:high].tolist()] == sequence[:4]


# Texts


def test_every_character_that_acts_or_hides_is_marked():
    drawn = {"Arabic number sign": 0x600}
    kept = {0x09, 0x0A, *range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *drawn.values()}
    kept |= set(range(0x13430, 0x13460))  # signs of their scripts, which are drawn
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and code not in kept:
            assert MARK.fullmatch(visible(character)), f"{code:x} {category}"
        elif category not in ("Cn", "Mn", "Me"):
            assert visible(character) == character, f"{code:x} {category}"


@given(st.text())
def test_marks_are_stable_and_lose_nothing_else(text):
    shown = visible(text)
    assert visible(shown) == shown
    if not set("⟨\u200c\u200d") & set(text):
        assert list(MARK.sub("", shown)) == [c for c in text.replace("\r\n", "\n") if visible("é" + c) == "é" + c]


def test_joiners_stay_where_scripts_need_them():
    family = "\U0001f468\u200d\U0001f469"
    assert visible(family) == family and visible("a\u200db") == "a⟨U+200D⟩b" and visible("\u200cx") == "⟨U+200C⟩x"
    assert visible("a\r\nb\rc") == "a\nb⟨CR⟩c"


def test_texts_are_redacted_whole_and_then_cut():
    texts = Texts(lambda text: text.replace("secret", "<S>"), limit=8)
    assert texts.whole("12345 secret 67890") == ("12345 <S", 7)
    assert texts.whole("short") == ("short", 0)
    assert (texts.cut_texts, texts.cut_characters) == (1, 7)
    assert texts.line(" a\n\tb  secret ") == "a b <S>"
    assert texts.line("x" * 1000) == "x" * 159 + "…"
    with pytest.raises(ValueError, match="limit=0"):
        Texts(limit=0)


def test_redaction_reaches_every_text(tokenizer, tmp_path):
    session = SessionBuilder(cwd="/home/mira/x")
    session.entry("session_info", name="for mira")
    session.system("mira", sections={"mira": "mira"}, toolsAdded=[{"name": "mira", "description": "mira"}])
    user = session.user("I am mira")
    session.assistant(thinking("mira asks"), "hello mira", call("c", "mira", path="/home/mira"))
    session.result("c", "mira was here", name="mira")
    session.entry("label", targetId=user, label="mira")
    session.entry("custom", customType="mira", data={"mira": "mira"})
    (tmp_path / "mira").mkdir()
    path = session.write(tmp_path / "mira" / "mira.jsonl")
    seen: list[str] = []
    page = build_page(
        path, tokenizer, tokenizer_name="mira", redact=lambda text: seen.append(text) or text.replace("mira", "X")
    ).page
    assert "mira" not in page_html(page) and seen


def test_parts_of_an_entry(tmp_path):
    session = SessionBuilder()
    session.assistant(thinking("hm"), "text", call("c", "edit", path="a.py", new="one\ntwo", n=1))
    session.message("bashExecution", None, command="ls", output="a", exitCode=2)
    session.message("user", [{"type": "image", "data": "aGk=", "mimeType": "image/png"}])
    entries = read_session(session.write(tmp_path / "s.jsonl")).entries
    found = [[(part.kind, part.title, part.text) for part in entry_parts(entry, Texts())] for entry in entries]
    assert found == [
        [("thinking", "", "hm"), ("text", "", "text"), ("call", "edit", "path: a.py\nnew:\n  one\n  two\nn: 1")],
        [("call", "shell", "$ ls"), ("result", "exit code 2", "a")],
        [("image", "image/png", "3 bytes, not shown")],
    ]


# The file


def test_nothing_in_the_file_is_markup_but_its_own(tokenizer, tmp_path):
    html = page_html(build_page(hostile_session(tmp_path), tokenizer).page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029\x1b\u202e") & set(data)
    assert html.count("<script") == html.count("</script>") == 2
    assert loads(data)["entries"][1]["parts"][0]["text"].startswith("</script><script>document.title")
    assert HOSTILE.split("\x1b")[0] in json.loads(data)["entries"][1]["parts"][0]["text"]


def test_the_policy_names_exactly_what_is_in_the_file(sample):
    import base64
    import hashlib

    html = page_html(sample)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#x27;", "'")
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    for text, name in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=\"|\son\w+=\"", script)
    assert not re.search(r"\son\w+=|style=|https?:", html.split("<script type")[0].replace("http-equiv", ""))


def test_all_scripts_are_in_the_package():
    folder = Path(importlib.import_module("dagpack_hf.view.page").__file__).parent / "assets"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)


def test_the_same_sessions_give_the_same_bytes(sample, tokenizer, tmp_path):
    again = build_page(sample_sessions(), tokenizer, tokenizer_name="of the sample", max_length=4096).page
    assert json_block(again) == json_block(sample)
    size = write_page(sample, tmp_path / "a.html")
    assert size == (tmp_path / "a.html").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(OSError, match="nowhere"):
        write_page(sample, tmp_path / "nowhere" / "a.html")


@pytest.mark.parametrize("name", ["marks", "parts", "walk"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"dagpack_hf.view.page.{name}"))
    assert result.failed == 0 and result.attempted > 0


def test_options_are_checked_as_elsewhere(tokenizer):
    with pytest.raises(ValueError, match="on_error"):
        build_page(sample_sessions(), tokenizer, rendering={"on_error": "maybe"})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_page("nowhere", tokenizer)

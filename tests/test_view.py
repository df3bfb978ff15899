"""The picture of a session: complete, well-formed, and safe whatever a file holds."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dagpack_hf.pi.reader import read_session
from dagpack_hf.sample import sample_sessions
from dagpack_hf.view import session_svg
from dagpack_hf.view.lanes import tree_rows
from dagpack_hf.view.text import cells, clean, cut, xml

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "</svg><script>alert(1)</script> & \"quoted\" 'single' \u202eevil\u202c \u2066x\u2069 a\u200bb \x00\x07\x1b[31m "
    "\ud800 \ufffe\uffff ]]> <!-- \u2028 line"
)


def write(path: Path, entries: list[dict]) -> Path:
    header = {"type": "session", "version": 3, "id": "s", "timestamp": "", "cwd": "/"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *entries]), encoding="utf-8")
    return path


def message(entry: str, parent: str | None, role: str, content: object, **values: object) -> dict:
    body = {"role": role, "content": content, **values}
    return {"type": "message", "id": entry, "parentId": parent, "timestamp": "", "message": body}


def nodes(svg: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("class") == "entry"]


def kinds(svg: str) -> list[str]:
    return [next(iter(node)).get("class") or "" for node in nodes(svg)]


@pytest.mark.parametrize("path", sorted(sample_sessions().glob("*.jsonl")), ids=lambda path: path.name[:19])
def test_every_entry_of_the_sample_is_drawn(path):
    session = read_session(path)
    svg = session_svg(path)
    assert len(nodes(svg)) == len(session.entries)
    turns = [e["message"] for e in session.entries if e["type"] == "message" and e["message"]["role"] == "assistant"]
    ended = sum(turn["stopReason"] in ("stop", "toolUse") for turn in turns)
    assert kinds(svg).count("trained") == ended and kinds(svg).count("untrained") == len(turns) - ended
    edges = [path for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("class") == "edge"]
    assert len(edges) == len(session.entries) - 1
    assert svg == session_svg(session), "the same file gives the same bytes"


def test_texts_stay_inside(tmp_path):
    """In a font of fixed width no text runs over the edge, or into the tokens."""
    for path in sample_sessions().glob("*.jsonl"):
        ids = [entry["id"] for entry in read_session(path).entries]
        for node in nodes(session_svg(path, tokens=dict.fromkeys(ids, 123_456))):
            texts = {text.get("class"): text for text in node.iter(f"{SVG}text")}
            if "said" in texts:
                end = float(texts["said"].get("x")) + 7.23 * cells(texts["said"].text)
                assert end < 900 - 18 - 7 * 7.23
            assert texts["count"].text == "123,456" and texts["count"].get("text-anchor") == "end"


def test_hostile_texts_are_harmless(tmp_path):
    entries = [
        message("a", None, "user", HOSTILE),
        message("b", "a", "assistant", [{"type": "text", "text": HOSTILE}], stopReason=HOSTILE),
        message("c", "b", "toolResult", [{"type": "text", "text": HOSTILE}], toolName=HOSTILE, isError=True),
        message("d", "c", "system", HOSTILE, sections={HOSTILE: HOSTILE}),
        message("e", "d", HOSTILE, HOSTILE),
        {"type": HOSTILE, "id": HOSTILE, "parentId": "e"},
        {"type": "label", "id": "f", "parentId": "e", "targetId": "a", "label": HOSTILE},
        {"type": "compaction", "id": "g", "parentId": "f", "summary": HOSTILE},
        {"type": "session_info", "id": "h", "parentId": "g", "name": HOSTILE},
        message("i", "h", "assistant", [{"type": "toolCall", "name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}]),
        message("j", "i", "bashExecution", None, command=HOSTILE),
    ]
    svg = session_svg(write(tmp_path / "a<b>&\u202e.jsonl", entries))
    svg.encode("utf-8")
    root = ElementTree.fromstring(svg)
    assert len(nodes(svg)) == len(entries)
    allowed = {f"{SVG}{tag}" for tag in ("svg", "title", "style", "rect", "text", "path", "circle", "g")}
    assert {element.tag for element in root.iter()} <= allowed
    assert not any(name.startswith("on") or "href" in name for element in root.iter() for name in element.attrib)
    for element in root.iter():
        for text in (element.text or "", *element.attrib.values()):
            bad = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Cn", "Co") and c != "\n"]
            assert not bad, (element.tag, bad)
    said = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "said"]
    assert any(text.startswith('</svg><script>alert(1)</script> & "quoted"') for text in said), "shown as text"


@pytest.mark.parametrize("value", [None, 3, True, [], {}, [None], [{"type": "text", "text": 3}], {"a": [1]}])
def test_values_of_the_wrong_type_are_drawn_too(tmp_path, value):
    entries = [
        message("a", None, "user", value),
        message("b", "a", "assistant", value, stopReason=value),
        message("c", "b", "toolResult", value, toolName=value, isError=value),
        message("d", "c", "system", value, sections=value, toolsAdded=value),
        message("e", "d", "bashExecution", value, command=value),
        message("f", "e", "assistant", [{"type": "toolCall", "name": value, "arguments": value}]),
        {"type": "label", "id": "g", "parentId": "f", "targetId": value, "label": value},
        {"type": "compaction", "id": "h", "parentId": "g", "summary": value},
        {"type": "custom_message", "id": "i", "parentId": "h", "customType": value, "content": value},
    ]
    assert len(nodes(session_svg(write(tmp_path / "s.jsonl", entries)))) == len(entries)


def test_labels_tokens_and_trained_turns(tmp_path):
    entries = [
        message("a", None, "user", "Hi"),
        message("b", "a", "assistant", [{"type": "text", "text": "One"}], stopReason="stop"),
        message("c", "a", "assistant", [{"type": "text", "text": "Two"}], stopReason="stop"),
        {"type": "label", "id": "d", "parentId": "c", "targetId": "b", "label": "first"},
        {"type": "label", "id": "e", "parentId": "d", "targetId": "b", "label": "better"},
        {"type": "label", "id": "f", "parentId": "e", "targetId": "c", "label": "gone"},
        {"type": "label", "id": "g", "parentId": "f", "targetId": "c"},
    ]
    svg = session_svg(write(tmp_path / "s.jsonl", entries), tokens={"a": 1200}, trained=["c"])
    texts = [[text.text for text in node.iter(f"{SVG}text")] for node in nodes(svg)]
    assert texts[:3] == [["user", "Hi", "1,200"], ["assistant", "better", "One"], ["assistant", "Two"]]
    assert kinds(svg)[:3] == ["user", "untrained", "trained"]
    assert "7 entries, 2 branches, 2 turns, 1 of them trained" in svg


@pytest.mark.parametrize("shape", ["chain", "comb", "star", "random", "roots"])
def test_large_sessions(tmp_path, shape):
    count = 2000
    rng = random.Random(0)
    parents = {
        "chain": lambda i: i - 1,
        "comb": lambda i: i - 1 if i % 2 else i - 2,
        "star": lambda i: 0,
        "random": lambda i: rng.randrange(i),
        "roots": lambda i: -1,
    }[shape]
    above = [-1] + [max(parents(i), -1) for i in range(1, count)]
    rows = tree_rows(above)
    assert sorted(row.entry for row in rows) == list(range(count))
    assert max(row.lane for row in rows) <= math.log2(count)
    for at, row in enumerate(rows):
        assert (row.parent < at) and above[row.entry] == (-1 if row.parent < 0 else rows[row.parent].entry)
    entries = [message(f"{i}", f"{above[i]}" if above[i] >= 0 else None, "user", "x" * 10_000) for i in range(count)]
    svg = session_svg(write(tmp_path / "s.jsonl", entries), max_entries=500)
    assert len(nodes(svg)) == 500 and "1,500 more entries" in svg and len(svg) < 500 * 800


def test_no_line_runs_through_another_branch():
    """Between an entry and its child in the same lane, only lanes further right are used."""
    rng = random.Random(1)
    for _ in range(200):
        parents = [-1] + [rng.randrange(i) for i in range(1, rng.randrange(2, 25))]
        rows = tree_rows(parents)
        for at, row in enumerate(rows):
            if row.parent >= 0:
                assert row.lane - rows[row.parent].lane in (0, 1)
                assert all(between.lane > rows[row.parent].lane for between in rows[row.parent + 1 : at])


def test_options_that_leave_nothing_are_refused():
    path = next(sample_sessions().glob("*.jsonl"))
    with pytest.raises(ValueError, match="width=100 pixels is too narrow"):
        session_svg(path, width=100)
    with pytest.raises(ValueError, match="max_entries=0"):
        session_svg(path, max_entries=0)


def test_clean_and_cut():
    assert clean("a\n\t b\u2028c\x00d\u202ee\u200b") == "a b cde"
    assert clean("e" + "\u0301" * 50) == "e\u0301\u0301"
    assert len(clean("x" * 10_000)) <= 400
    assert (cut("abcdef", 6), cut("abcdef", 5), cut("漢字漢字", 5), cut("abc", 0)) == ("abcdef", "abcd…", "漢字…", "")
    for width in range(10):
        assert cells(cut("漢字a漢b字", width)) <= max(width, 0)
    assert xml("<a href=\"x\" b='y'>&") == "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;"


def test_light_and_dark_have_a_colour_for_every_kind():
    svg = session_svg(next(sample_sessions().glob("*.jsonl")))
    light, dark = re.search(r"<style>(.*?)@media \(prefers-color-scheme: dark\)(.*?)</style>", svg, re.S).groups()
    kinds = ("trained", "untrained", "user", "tool", "shell", "system", "summary", "other", "edge", "paper", "tag")
    assert all(f".{kind} {{" in half for half in (light, dark) for kind in kinds)

"""The page of `dagpack show --html` in a browser: complete, silent, quick, and harmless whatever a session holds.

Needs Playwright's Python package and a Chromium that the system has; without either the tests are skipped. With
`VIEWER_SCREENSHOTS=folder` the screenshots of the documentation are written there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from dagpack_hf import load_sessions
from dagpack_hf.sample import sample_sessions, sample_tokenizer
from dagpack_hf.view.page import build_page, write_page
from tests.viewer_sessions import SEEN, hostile_session, long_session

LARGE = Path(__file__).parents[1] / ".." / "shared" / "pi" / "public" / "pi-mono-large-session.jsonl"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT = 100.0
"""Milliseconds that an interaction may take, the next frame included."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs Playwright: pip install playwright"
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def make_page(tmp_path_factory):
    """Writes the page of some sessions once."""
    tokenizer, made = sample_tokenizer(), {}

    def make(sessions: Path) -> Path:
        if sessions not in made:
            made[sessions] = tmp_path_factory.mktemp("pages") / "page.html"
            built = build_page(sessions, tokenizer, tokenizer_name="of the sample", approximate=True)
            write_page(built.page, made[sessions])
        return made[sessions]

    return make


class Opened:
    """A page, with everything it complained about and asked for."""

    def __init__(self, browser, path: Path, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500
        )
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.answers: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("response", lambda response: self.answers.append(response.url))
        self.url = path.as_uri()
        self.page.goto(self.url)
        self.settle()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.context.close()

    def settle(self) -> None:
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def detail(self) -> str:
        return self.page.inner_text("#detail")

    def entry(self) -> str:
        """Id of the entry that is shown."""
        return self.page.evaluate(
            "[...document.querySelectorAll('#detail dt')].find((dt) => dt.textContent === 'entry')"
            "?.nextSibling.textContent ?? ''"
        )

    def rows(self, selector: str) -> list[int]:
        """Indices of all rows that hold something, wherever one has to scroll."""
        return self.page.evaluate(
            """async (selector) => {
              const box = document.getElementById("tree"), found = new Set();
              for (let top = 0; ; top += 200) {
                box.scrollTop = top;
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                for (const mark of box.querySelectorAll(`.row:not([hidden]) ${selector}`)) {
                  found.add(Number(mark.closest(".row").dataset.index));
                }
                if (top > box.scrollHeight) break;
              }
              box.scrollTop = 0;
              return [...found];
            }""",
            selector,
        )


def entries_of(paths) -> list[dict]:
    return [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _word(text: str) -> str | None:
    return next((word for word in text.split() if word.isalpha() and len(word) > 6), None)


@pytest.fixture(params=["sample", "large"])
def sessions(request) -> Path:
    if request.param == "sample":
        return sample_sessions()
    if not LARGE.exists():
        pytest.skip("needs ../shared/pi/public")
    return LARGE


def test_the_page_of_recorded_sessions(browser, make_page, sessions):
    _, report = load_sessions(sessions, return_report=True)
    files = sorted(sessions.glob("*.jsonl")) if sessions.is_dir() else [sessions]
    answered = [
        entry
        for entry in entries_of(files)
        if entry["type"] == "message"
        and entry["message"]["role"] == "assistant"
        and any(block["type"] == "text" and _word(block["text"]) for block in entry["message"]["content"])
    ]
    with Opened(browser, make_page(sessions)) as opened:
        assert len(opened.rows(".glyph.trained, .glyph.untrained")) == report.turns, "the turns that the loader counts"

        wanted = answered[0]
        said = next(block["text"] for block in wanted["message"]["content"] if block["type"] == "text")
        opened.page.click(f"#tree .row:has-text({json.dumps(' '.join(said.split())[:20])})")
        opened.page.locator("#detail").get_by_text(said.split("\n")[0][:40]).first.wait_for()  # a busy machine is late
        assert said.split("\n")[0] in opened.detail() and wanted["message"]["model"] in opened.detail()

        word = _word(said)
        opened.press("/")
        opened.page.keyboard.type(word)
        opened.press("Enter")
        assert opened.page.inner_text("#hits") and "nothing" not in opened.page.inner_text("#hits")
        assert opened.page.inner_text("#detail mark >> nth=0").lower() == word.lower()
        opened.page.fill("#query", "no such words anywhere")
        opened.settle()
        assert opened.page.inner_text("#hits") == "nothing"

        assert opened.complaints == [] and opened.requests == [opened.url]


def test_the_keyboard_walks_the_branches(browser, make_page):
    """Along the first file of the sample, in which four tasks branch from one exploration."""
    file = sorted(sample_sessions().glob("*.jsonl"))[0]
    entries = {entry["id"]: entry for entry in entries_of([file]) if entry["type"] != "session"}
    children: dict[str, list[str]] = {}
    for entry in entries.values():
        children.setdefault(entry.get("parentId"), []).append(entry["id"])
    fork = next(parent for parent, below in children.items() if len(below) > 1)
    with Opened(browser, make_page(sample_sessions())) as opened:
        opened.page.focus("#tree")
        for _ in range(len(entries)):
            if opened.entry() == fork:
                break
            before = opened.entry()
            opened.press("ArrowRight")
            assert entries[opened.entry()]["parentId"] == before, "right goes down the branch"
        assert opened.entry() == fork
        opened.press("ArrowRight")
        assert opened.entry() == children[fork][0]
        for branch in [*children[fork][1:], children[fork][0]]:
            opened.press("]")
            assert opened.entry() == branch
        opened.press("[")
        assert opened.entry() == children[fork][-1]
        opened.press("ArrowLeft")
        assert opened.entry() == fork, "left goes up"
        opened.press("Home", "ArrowDown", "ArrowDown")
        assert opened.page.get_attribute("#tree .row.selected", "data-index") == "2"
        selected = opened.page.get_attribute("#tree", "aria-activedescendant")
        assert opened.page.get_attribute(f"#{selected}", "aria-selected") == "true"
        opened.press("Enter")
        assert opened.page.evaluate("document.activeElement.id") == "detail"
        opened.press("Escape")
        assert opened.page.evaluate("document.activeElement.id") == "tree"
        assert opened.complaints == []


def test_windows_files_and_hovering(browser, make_page):
    with Opened(browser, make_page(sample_sessions())) as opened:
        assert opened.page.locator("#windows .window:not([hidden])").count() == 3
        opened.press("w")
        assert opened.page.inner_text("#windows .window.selected .name") == "Window 1"
        assert "replayed here" in opened.page.inner_text("#legend")
        opened.press("Escape")
        assert opened.page.locator("#windows .window.selected").count() == 0
        opened.page.click("[data-mode=files]")
        opened.settle()
        assert "shared by several files" in opened.page.inner_text("#legend")
        box = opened.page.locator("#icicle").bounding_box()
        opened.page.mouse.move(box["x"] + 20, box["y"] + box["height"] / 2)
        opened.settle()
        tip = opened.page.inner_text("#tip")
        assert "system" in tip and "shared by 13 files" in tip and "replayed in 2, 3" in tip
        opened.page.mouse.click(box["x"] + 20, box["y"] + box["height"] / 2)
        opened.settle()
        assert "You are a coding assistant" in opened.detail()
        opened.page.click("#tree .row.file >> nth=0")
        opened.settle()
        assert "1,303 of them shared" in opened.detail()
        assert opened.detail().count("1,303 tokens") == 12, "the prompt, with each other file"
        assert opened.complaints == []


def test_hostile_text_is_text(browser, make_page, tmp_path):
    sessions = hostile_session(tmp_path)
    with Opened(browser, make_page(sessions)) as opened:
        for start in ("user", "answer", "result", "done"):
            opened.page.click(f"#tree .row .caption:text-matches('^(\\\\[error\\\\] )?{start} ')")
            opened.settle()
            shown = opened.page.evaluate("document.getElementById('detail').textContent")
            assert all(part in shown for part in SEEN), start
        whole = opened.page.evaluate("document.documentElement.textContent")
        # Some of the hostile characters are layout in HTML; the others must be nowhere, the data included.
        assert not set("\x1b\x07\x00\x9b\u202e\u202c\u2066\u2069\u200b\u2028\u2029") & set(whole)
        assert opened.page.title().startswith("</script>") and opened.page.title() != "owned"
        assert opened.page.locator("img, b:has-text('bold')").count() == 0
        assert opened.page.locator("script").count() == 2
        assert opened.complaints == [] and opened.requests == [opened.url]


def test_the_policy_lets_nothing_in_or_out(browser, make_page):
    with Opened(browser, make_page(sample_sessions())) as opened:
        outcome = opened.page.evaluate(
            """async () => {
              const outcome = {};
              const broken = [];
              document.addEventListener("securitypolicyviolation", (event) => broken.push(event.effectiveDirective));
              const attempt = async (name, act) => {
                try { await act(); } catch (error) { outcome[name] = error.name; }
              };
              await attempt("html", () => document.body.insertAdjacentHTML("beforeend", "<b>x</b>"));
              await attempt("fetch", () => fetch("https://example.invalid/"));
              document.body.append(Object.assign(new Image(), { src: "https://example.invalid/x.png" }));
              const inline = document.createElement("div");
              await attempt("handler", () => inline.setAttribute("onclick", "document.title = 'owned'"));
              document.body.append(inline);
              inline.click();
              await new Promise((done) => setTimeout(done, 100));
              return { ...outcome, title: document.title, broken };
            }"""
        )
        assert [outcome[each] for each in ("html", "fetch", "handler")] == ["TypeError"] * 3
        assert outcome["title"] != "owned"
        assert {"connect-src", "img-src", "require-trusted-types-for"} <= set(outcome["broken"])
        assert opened.answers == [opened.url]


MEASURE = """async (rounds) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const tree = document.getElementById("tree"), query = document.getElementById("query");
  const press = (key) => tree.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const canvas = document.querySelectorAll("#icicle canvas")[1], box = canvas.getBoundingClientRect();
  const point = (name, x, y) => canvas.dispatchEvent(new PointerEvent(name, {
    bubbles: true, pointerId: 1, pointerType: "mouse",
    clientX: box.x + x * box.width, clientY: box.y + y * box.height }));
  const words = ["needle", "answer 19", "aside", "needle7", "line"];
  const acts = {
    "arrow": () => press("ArrowDown"),
    "page": () => press("PageDown"),
    "end": (round) => press(round % 2 ? "End" : "Home"),
    "click": (round) => tree.querySelectorAll(".row:not([hidden])")[round % 9].click(),
    "hover": (round) => point("pointermove", (round % 17) / 17, 0.5),
    "scroll": (round) => { tree.scrollTop = (round * 7919) % tree.scrollHeight; },
    "search": (round) => { query.value = words[round % words.length]; query.dispatchEvent(new Event("input")); },
    "next hit": () => { query.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", cancelable: true })); },
    "zoom": (round) => canvas.dispatchEvent(new WheelEvent("wheel", {
      deltaY: round % 2 ? 300 : -300, clientX: box.x + box.width / 2, clientY: box.y + 60, cancelable: true })),
    "window": () => press("w"),
    "theme": () => press("t"),
    "filter": (round) => {
      const select = document.getElementById("filter");
      select.selectedIndex = round % 5;
      select.dispatchEvent(new Event("change"));
    },
  };
  const times = {};
  for (const name in acts) {
    times[name] = [];
    for (let round = 0; round < rounds; round++) {
      await frame();
      const start = performance.now();
      acts[name](round);
      await frame();
      times[name].push(performance.now() - start);
    }
  }
  return times;
}"""


def test_interaction_is_quick_with_2000_turns(browser, make_page, tmp_path_factory):
    sessions = long_session(tmp_path_factory.mktemp("long"), 2000)
    with Opened(browser, make_page(sessions)) as opened:
        assert opened.page.inner_text("#figures .figure >> nth=0").startswith("turns\n2,030")
        assert opened.page.locator(".row").count() < 80, "only the rows in sight exist"
        times = opened.page.evaluate(MEASURE, 5)
        medians = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
        print("median milliseconds of an interaction with 2,030 turns, next frame included:")
        print(", ".join(f"{name} {median:.0f}" for name, median in medians.items()))
        assert max(medians.values()) < LIMIT, medians
        assert opened.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(browser, make_page, tmp_path, width, scheme):
    folder = Path(os.environ.get("VIEWER_SCREENSHOTS", tmp_path))
    with Opened(browser, make_page(sample_sessions()), width, 800 if width > 500 else 844, scheme) as opened:
        ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(9, 12, 16)") == (scheme == "dark")
        assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if width < 500:
            panes = {}
            for tab in ("message", "session", "tokens"):
                opened.page.click(f".tabs [data-tab={tab}]")
                opened.settle()
                panes[tab] = opened.page.locator(f"section.{tab}").bounding_box()
            assert all(box["width"] == 390 and box["height"] > 400 for box in panes.values())
        opened.page.screenshot(path=folder / f"viewer-{width}-{scheme}.png")
        opened.page.click("#theme")
        opened.settle()
        assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
        assert opened.complaints == []

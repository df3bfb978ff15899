r"""Synthetic pi sessions in the shape of real ones, for measuring how fast and in how much memory they are read.

    python benchmarks/session_corpus.py FOLDER [--megabytes N] [--images] [--seed S] [--processes P]

Folders of projects hold session files of mixed size: most of 0.3 to 3 MB, a few of 20 to 50 MB. Lengths of prompts,
replies, arguments and tool results, and the mix of tools, are those measured on a real session of a thousand entries;
system prompt and tools are stored as pi >= 0.86 does and shared by all sessions of a project. Some sessions branch,
contexts that outgrow the window are compacted, some replies are aborted, one text in 25 is not ASCII, and each tenth
session has a fork: a file that repeats the entries of a path and goes on by itself.

With images, user messages and tool results carry inline base64 of 0.2 to 3 MB, 85 % of all bytes, and one file, three
tenths of the corpus, holds one image every few entries: hundreds in a corpus of 1 GB. Images are stretches of one
random text, no two alike. A small corpus has the same shape with the largest files and images cut down to it.

The same arguments give the same bytes, whatever the number of processes. No text holds U+2028 or its like: the trace
loader of `datasets` breaks lines there.

Cost: about 20 s of one core per GB, half of it with images; each process holds the file it makes.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

MB = 1_000_000
PROJECTS = 6
WINDOW = 600_000
"""Characters of context at which a session is compacted (about 150,000 tokens)."""
IMAGE_CONTEXT = 6_000
"""What an image counts for."""
KEPT = 80_000
"""Characters that a compaction keeps as they are."""
TURNS = 5
"""Mean number of turns that one user message starts."""
BRANCHING = 0.3
"""Part of the sessions that branch; in these, part of the user messages that go back to an earlier point:"""
BRANCH = 0.04
FORK_EACH = 10
ABORTED = 0.03
"""Part of the user messages whose last reply is aborted."""
NOT_ASCII = 0.04
LARGE = 0.15
"""Part of a corpus in files of 20 to 50 MB."""
GALLERY = 0.3
"""Part of a corpus with images in the one file that is full of them."""
IMAGE_BYTES = 0.85
"""Part of the bytes that are images."""

QUANTILES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
LENGTHS = {
    "user": (1, 8, 33, 74, 111, 204, 293, 1791, 2500),
    "text": (7, 26, 45, 95, 230, 530, 714, 1365, 2100),
    "thinking": (20, 60, 110, 200, 400, 900, 1500, 3000, 9000),
    "command": (15, 69, 83, 86, 96, 111, 124, 611, 1489),
    "bash": (7, 11, 26, 85, 423, 1039, 1592, 3557, 49000),
    "read": (155, 545, 1102, 1557, 2686, 6568, 6894, 14564, 49000),
    "diff": (194, 278, 375, 506, 849, 1645, 2065, 2386, 7705),
    "edited": (40, 90, 180, 280, 520, 1050, 1150, 1900, 4700),
    "written": (1000, 1200, 2000, 3000, 3500, 5000, 7000, 12000, 30000),
}
"""Characters of each kind of text at these quantiles."""
TOOLS = ("bash", "edit", "read", "write")
TOOL_SHARES = (0.51, 0.34, 0.14, 0.01)

_IMAGE = re.compile(rb'"type":"image","data":"([^"]*)"')
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class CorpusStats:
    """What a corpus, or a part of it, holds; sizes in bytes.

    Attributes:
        files: Session files.
        forks: Files among them that repeat entries of another one.
        lines: Lines, headers included.
        bytes: Bytes of all files.
        images: Inline images.
        image_bytes: Bytes of their base64 text.
        turns: Assistant entries.
        branches: Entries that hang below an entry that others hang below already.
        compactions: Compaction entries.
        largest_file: Bytes of the largest file.
        most_images: Images in the file with most of them.
        longest_line: Bytes of the longest line.
    """

    files: int = 0
    forks: int = 0
    lines: int = 0
    bytes: int = 0
    images: int = 0
    image_bytes: int = 0
    turns: int = 0
    branches: int = 0
    compactions: int = 0
    largest_file: int = 0
    most_images: int = 0
    longest_line: int = 0

    @classmethod
    def total(cls, parts: Iterable[CorpusStats]) -> CorpusStats:
        """Return the counts of several parts together."""
        columns = zip(*(asdict(part).items() for part in parts), strict=True)
        largest = ("largest_file", "most_images", "longest_line")
        return cls(
            **{
                name: (max if name in largest else sum)(value for _, value in column)
                for column in columns
                for name in [column[0][0]]
            }
        )


@dataclass(frozen=True)
class Plan:
    """What one session of a corpus is to be.

    Attributes:
        folder: Folder of the corpus.
        seed: Seed of the corpus.
        index: Place of the session in the corpus.
        size: Bytes to make; the file ends with the user message that reaches them.
        image_rate: Part of the user messages and tool results that carry an image.
        image_limit: Largest image, in bytes.
        forked: Whether there is a fork of it.
    """

    folder: str
    seed: int
    index: int
    size: int
    image_rate: float = 0.0
    image_limit: int = 3 * MB
    forked: bool = False


def write_corpus(folder: str | Path, megabytes: float, images: bool, seed: int = 0, processes: int = 1) -> CorpusStats:
    """Write a corpus.

    Args:
        folder: Where to put it; project folders are made below it.
        megabytes: Size, in millions of bytes; forks, a twentieth or so, come on top.
        images: Whether it has images.
        seed: Decides all of the content.
        processes: Processes that write.

    Returns:
        What was written.
    """
    plans = list(plan_corpus(str(folder), megabytes, images, seed))
    if processes == 1:
        return CorpusStats.total(map(write_session, plans))
    with ProcessPoolExecutor(processes) as pool:
        return CorpusStats.total(pool.map(write_session, plans))


def plan_corpus(folder: str, megabytes: float, images: bool, seed: int) -> Iterator[Plan]:
    """Yield the sessions of a corpus, the large ones first."""
    rng = random.Random(f"{seed} plan")
    left = total = round(megabytes * MB)
    image_limit = min(3 * MB, total // 10) if images else 0
    sizes = []
    if images:
        sizes.append(round(total * GALLERY))
    while sum(sizes[images:]) < LARGE * total:
        sizes.append(min(round(rng.uniform(20, 50) * MB), total // 6))
    left -= sum(sizes)
    large = len(sizes)
    while left > 0:
        size = min(max(rng.lognormvariate(math.log(0.9), 0.7), 0.3), 3.0) * MB * (3 if images else 1)
        sizes.append(min(round(size), total // 10, left))
        left -= sizes[-1]
    image = _mean_image(image_limit)
    usual = IMAGE_BYTES / (1 - IMAGE_BYTES) * 6_000 / image if images else 0.0
    for index, size in enumerate(sizes):
        rate = 0.25 if images and index == 0 else usual
        forked = index >= large and (index - large) % FORK_EACH == FORK_EACH // 2
        yield Plan(folder, seed, index, size, rate, image_limit, forked)


def write_session(plan: Plan) -> CorpusStats:
    """Write one session file, and its fork if it has one."""
    rng = random.Random(f"{plan.seed} {plan.index}")
    session = Session(rng, plan)
    session.grow(plan.size)
    stats = [session.write()]
    if plan.forked:
        fork = session.fork()
        fork.grow(fork.size + plan.size // 4)
        stats.append(fork.write())
    return CorpusStats.total(stats)


def write_straight_session(folder: str | Path, turns: int, seed: int = 0) -> Path:
    """Write one session without branches, compactions and images: a single growing context.

    Args:
        folder: Where to put it; a project folder is made below it.
        turns: Turns that were not aborted, at least; the session ends with the exchange that reaches them.
        seed: Decides all of the content.

    Returns:
        The file.
    """
    session = Session(random.Random(f"{seed} straight"), Plan(str(folder), seed, index=0, size=0))
    answered = seen = 0
    while answered < turns:
        session.exchange()
        answered += sum(map(_is_answer, session.lines[seen:]))
        seen = len(session.lines)
    session.write()
    return session.path


# Text


def _length(rng: random.Random, kind: str) -> int:
    """Draw a length: geometric between the quantiles."""
    place = rng.random()
    above = bisect_right(QUANTILES, place)
    low, high = QUANTILES[above - 1], QUANTILES[above]
    least, most = LENGTHS[kind][above - 1 : above + 1]
    return round(least * (most / least) ** ((place - low) / (high - low)))


def _text(rng: random.Random, kind: str) -> str:
    """Draw a text: a stretch of the code, or of the text that is not ASCII."""
    source = _pool("world" if rng.random() < NOT_ASCII else "code")
    length = _length(rng, kind)
    start = int(rng.random() * (len(source) - length))
    return source[start : start + length]


@cache
def _pool(kind: str) -> str:
    """A million characters that texts are stretches of; a newline, tab or quote each 20 characters."""
    rng = random.Random(kind)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(3000)]
    marks = ["", "", "", "", ",", ".", "()", " =", ":", ";", " {", " }", '"', "->"]
    if kind == "world":
        for first, last in ((0x430, 0x44F), (0x4E00, 0x9FA5), (0x3041, 0x3093), (0x621, 0x64A), (0xAC00, 0xD7A3)):
            words += ["".join(chr(rng.randint(first, last)) for _ in range(rng.randint(2, 6))) for _ in range(400)]
        marks += ["é", "ß", " ✓", " →", " ──", " 🧪", " 🚀", " 👩‍💻"]
    lines = []
    size = 0
    while size < MB:
        line = "\t" * rng.randint(0, 5) + " ".join(
            rng.choice(words) + rng.choice(marks) for _ in range(rng.randint(1, 12))
        )
        if rng.random() < 0.5:
            line += f' "{rng.choice(words)}",'
        lines.append(line)
        size += len(line) + 1
    return "\n".join(lines)


# Images


@cache
def _base64() -> str:
    return base64.b64encode(random.Random("image").randbytes(3 * MB)).decode()


def _image(rng: random.Random, limit: int) -> dict[str, str]:
    """An image block: the beginning of a PNG file and a stretch of random bytes."""
    length = _image_length(rng.random(), limit) // 4 * 4
    start = int(rng.random() * (len(_base64()) - length)) // 4 * 4
    data = "iVBORw0KGgoAAAANSUhEUgAA" + _base64()[start : start + length - 24]
    return {"type": "image", "data": data, "mimeType": "image/png"}


def _image_length(place: float, limit: int) -> int:
    """The length at a quantile, from 0.2 MB to 3 MB, the median at 0.77 MB."""
    return round(limit / 15 * 15**place)


def _mean_image(limit: int) -> float:
    return limit * 14 / 15 / math.log(15)


# Sessions


@dataclass
class Exchange:
    """A user message and what followed; `context` is the size of the context at its end."""

    user: str
    end: str
    context: int


@dataclass
class Session:
    """A session file while it is made: its lines, and where in the tree it stands."""

    rng: random.Random
    plan: Plan
    parent: Session | None = None
    lines: list[bytes] = field(default_factory=list)
    parents: dict[str, str | None] = field(default_factory=dict)
    leaf: str | None = None
    size: int = 0
    context: int = 0
    goal: int = 0

    def __post_init__(self) -> None:
        rng = self.rng
        self.cwd = f"/home/user/project-{self.plan.index % PROJECTS}"
        self.time = 1_790_000_000_000 + 3_600_000 * self.plan.index + rng.randrange(60_000)
        self.session_id = f"{self.time:012x}{rng.getrandbits(80):020x}"
        self.session_id = "-".join(self.session_id[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
        self.branching = rng.random() < BRANCHING
        self.api, self.provider, self.model = rng.choice(
            (("openai-completions", "local", "coder-large"), ("anthropic-messages", "hosted", "assistant-4"))
        )
        self.exchanges: list[Exchange] = []
        self.first_id = rng.getrandbits(32)
        header = {
            "type": "session",
            "version": 3,
            "id": self.session_id,
            "timestamp": self.timestamp(),
            "cwd": self.cwd,
            **({"parentSession": str(self.parent.path)} if self.parent else {}),
        }
        self._append(header)
        if self.parent is None:
            self.add("model_change", provider=self.provider, modelId=self.model)
            self.add("thinking_level_change", thinkingLevel="medium")
            self.message("system", **system_prompt(self.cwd))

    @property
    def path(self) -> Path:
        """The file."""
        stamp = self.timestamp(self.plan.index).replace(":", "-").replace(".", "-")
        name = f"{stamp}_{self.session_id}.jsonl"
        return Path(self.plan.folder) / f"--{self.cwd[1:].replace('/', '-')}--" / name

    def timestamp(self, start: int | None = None) -> str:
        """The time of the session, or of its start, as pi writes it."""
        time = self.time if start is None else 1_790_000_000_000 + 3_600_000 * start
        text = datetime.fromtimestamp(time / 1000, timezone.utc).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")

    def write(self) -> CorpusStats:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "wb") as file:
            file.writelines(self.lines)
        images = [len(image[1]) for line in self.lines for image in _IMAGE.finditer(line)]
        return CorpusStats(
            files=1,
            forks=int(self.parent is not None),
            lines=len(self.lines),
            bytes=self.size,
            images=len(images),
            image_bytes=sum(images),
            turns=sum(map(_is_turn, self.lines)),
            branches=len(self.parents) - len(set(self.parents.values())),
            compactions=sum(line.startswith(b'{"type":"compaction"') for line in self.lines),
            largest_file=self.size,
            most_images=len(images),
            longest_line=max(map(len, self.lines)),
        )

    def fork(self) -> Session:
        """Return a new session that begins with the entries from the root to the middle of this one."""
        fork = Session(self.rng, self.plan, parent=self)
        fork.first_id = self.first_id + len(self.lines)
        ids = list(self.parents)
        leaf: str | None = self.exchanges[len(self.exchanges) // 2].end if self.exchanges else ids[-1]
        fork.leaf, path = leaf, []
        while leaf is not None:
            path.append(leaf)
            leaf = self.parents[leaf]
        places = {entry: place for place, entry in enumerate(ids, 1)}
        for entry in reversed(path):
            line = self.lines[places[entry]]
            fork.parents[entry] = self.parents[entry]
            fork.lines.append(line)
            fork.size += len(line)
        return fork

    def grow(self, size: int) -> None:
        """Go on until the file has this many bytes."""
        self.goal = size
        while self.size < size:
            if self.context > WINDOW and len(self.exchanges) > 2:
                self.compact()
            if self.branching and len(self.exchanges) > 2 and self.rng.random() < BRANCH:
                self.go_back()
            self.exchange()

    def exchange(self) -> None:
        """Add a user message and the turns it starts."""
        rng = self.rng
        user = self.message("user", content=self._content("user", self.plan.image_rate))
        while rng.random() < 1 - 1 / TURNS:
            calls = [self._call() for _ in range(1 if rng.random() < 0.95 else rng.randint(2, 6))]
            self.assistant(calls, "toolUse")
            for call in calls:
                self.result(call)
        self.assistant([], "aborted" if rng.random() < ABORTED else "stop")
        assert self.leaf is not None
        self.exchanges.append(Exchange(user, self.leaf, self.context))

    def go_back(self) -> None:
        """Go on from an earlier exchange, with a summary of what is left behind or without."""
        left, chosen = self.leaf, self.rng.randrange(len(self.exchanges) - 1)
        del self.exchanges[chosen + 1 :]
        self.leaf, self.context = self.exchanges[-1].end, self.exchanges[-1].context
        if self.rng.random() < 0.5:
            self.add("branch_summary", fromId=left, summary=_text(self.rng, "written"), usage=self._usage(500))

    def compact(self) -> None:
        """Replace all but the last exchanges by a summary."""
        first = next(i for i, e in enumerate(self.exchanges) if e.context > self.context - KEPT)
        kept = self.exchanges[max(1, first) :] or self.exchanges[-1:]
        before = self.context
        self.context -= self.exchanges[max(1, first) - 1].context
        self.exchanges = [Exchange(e.user, e.end, e.context - before + self.context) for e in kept]
        self.add(
            "compaction",
            summary=_text(self.rng, "written"),
            firstKeptEntryId=kept[0].user,
            tokensBefore=before // 4,
            details={"readFiles": ["src/main.py"], "modifiedFiles": []},
            usage=self._usage(700),
            fromHook=False,
            systemMessage={"role": "system", **system_prompt(self.cwd), "timestamp": self.time},
        )

    def assistant(self, calls: list[dict[str, Any]], stop_reason: str) -> None:
        """Add a turn."""
        rng = self.rng
        content: list[dict[str, Any]] = []
        if rng.random() < 0.4:
            thinking = _text(rng, "thinking")
            content.append({"type": "thinking", "thinking": thinking, "thinkingSignature": "reasoning_content"})
        if not calls or rng.random() < 0.5:
            content.append({"type": "text", "text": _text(rng, "text")})
        content += calls
        duration = rng.randrange(500, 20_000)
        self.message(
            "assistant",
            content=content,
            api=self.api,
            provider=self.provider,
            model=self.model,
            usage=self._usage(100 + rng.randrange(900)),
            stopReason=stop_reason,
            responseId=f"chatcmpl-{rng.getrandbits(64):016x}",
            **({"errorMessage": "Request was aborted"} if stop_reason == "aborted" else {}),
            rawStopReason="tool_calls" if calls else "stop",
            durationMs=duration,
            thinkingLevel="medium",
        )
        self.time += duration

    def result(self, call: dict[str, Any]) -> None:
        """Add the result of a tool call."""
        tool = call["name"]
        details = {}
        if tool in ("bash", "read"):
            content = self._content(tool, self.plan.image_rate)
        else:
            content = [{"type": "text", "text": f"Changed 1 block of {call['arguments']['path']}."}]
            details = {"details": {"diff": _text(self.rng, "diff"), "firstChangedLine": self.rng.randrange(900)}}
        self.message(
            "toolResult",
            toolCallId=call["id"],
            toolName=tool,
            content=content,
            **details,
            isError=self.rng.random() < 0.05,
            durationMs=self.rng.randrange(2000),
        )

    def message(self, role: str, **fields: Any) -> str:
        """Add a message entry and return its id."""
        self.time += 7
        return self.add("message", message={"role": role, **fields, "timestamp": self.time - 3})

    def add(self, kind: str, **fields: Any) -> str:
        """Add an entry below the one before and return its id."""
        entry = f"{(self.first_id + len(self.lines)) * 2_654_435_761 % 2**32:08x}"
        self._append({"type": kind, "id": entry, "parentId": self.leaf, "timestamp": self.timestamp(), **fields})
        self.parents[entry] = self.leaf
        self.leaf = entry
        return entry

    def _append(self, line: dict[str, Any]) -> None:
        encoded = _encode(line).encode() + b"\n"
        self.lines.append(encoded)
        self.size += len(encoded)
        self.context += len(encoded)

    def _content(self, kind: str, image_rate: float) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": _text(self.rng, kind)}]
        if self.rng.random() < image_rate:
            image = _image(self.rng, self.plan.image_limit)
            if self.size + len(image["data"]) < self.goal:
                content.append(image)
                self.context += IMAGE_CONTEXT - len(image["data"])
        return content

    def _call(self) -> dict[str, Any]:
        rng = self.rng
        tool = rng.choices(TOOLS, TOOL_SHARES)[0]
        path = f"src/part{rng.randrange(50)}/module{rng.randrange(50)}.ts"
        arguments: dict[str, Any]
        if tool == "bash":
            arguments = {"command": _text(rng, "command"), "timeout": rng.choice((10, 30, 120))}
        elif tool == "read":
            arguments = {"path": path, "offset": rng.randrange(1, 2000), "limit": 100}
        elif tool == "edit":
            arguments = {"path": path, "edits": [{"oldText": _text(rng, "edited"), "newText": _text(rng, "edited")}]}
        else:
            arguments = {"path": path, "content": _text(rng, "written")}
        return {"type": "toolCall", "id": f"call_{rng.getrandbits(96):024x}", "name": tool, "arguments": arguments}

    def _usage(self, output: int) -> dict[str, Any]:
        read, new = self.context // 4, self.rng.randrange(3000)
        cost = {"input": new * 3e-06, "output": output * 1.5e-05, "cacheRead": read * 3e-07, "cacheWrite": 0}
        return {
            "input": new,
            "output": output,
            "cacheRead": read,
            "cacheWrite": 0,
            "reasoning": output // 3,
            "totalTokens": read + new + output,
            "cost": {**cost, "total": sum(cost.values()), "totalFromProvider": False},
        }


def _is_turn(line: bytes) -> bool:
    return b'"message":{"role":"assistant"' in line[:200]


def _is_answer(line: bytes) -> bool:
    return _is_turn(line) and b'"stopReason":"aborted"' not in line


@cache
def system_prompt(cwd: str) -> dict[str, Any]:
    """System prompt and tools of all sessions of a project, as fields of a system message."""
    rng = random.Random(cwd)
    context = "".join(_text(rng, "read") for _ in range(3))

    def section(name: str, text: str) -> str:
        return f"<{name}>\n{text}\n</{name}>"

    return {
        "content": "",
        "sections": {
            "preamble": "You are a coding assistant. Read files, run commands and change code.",
            "tools": section("tools", "\n".join(f"- {name}: {about}" for name, (about, _) in _TOOLS.items())),
            "rules": section("rules", "\n".join(f"- {_text(rng, 'command')}" for _ in range(12))),
            "docs": section("docs", _text(rng, "written")),
            "project_context": section("project_context", context),
            "skills": section("skills", "\n".join(_text(rng, "command") for _ in range(8))),
            "cwd": section("cwd", cwd),
        },
        "toolsAdded": [
            {
                "name": name,
                "description": about + " " + _text(rng, "text"),
                "parameters": {"type": "object", "required": list(parameters)[:1], "properties": parameters},
                "constrainedSampling": {"type": "json_schema", "strict": "prefer"},
            }
            for name, (about, parameters) in _TOOLS.items()
        ],
    }


def _string(about: str) -> dict[str, Any]:
    return {"type": "string", "description": about}


def _number(about: str) -> dict[str, Any]:
    return {"type": "number", "description": about}


_EDIT = {"type": "object", "required": ["oldText", "newText"]}
_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "read": (
        "Read a file.",
        {"path": _string("The file"), "offset": _number("First line"), "limit": _number("Most lines")},
    ),
    "bash": ("Run a shell command.", {"command": _string("The command"), "timeout": _number("Seconds")}),
    "edit": (
        "Replace stretches of a file.",
        {
            "path": _string("The file"),
            "edits": {
                "type": "array",
                "items": {**_EDIT, "properties": {"oldText": _string("Text to replace"), "newText": _string("By")}},
            },
        },
    ),
    "write": ("Write a file.", {"path": _string("The file"), "content": _string("The whole content")}),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="where to put the corpus")
    parser.add_argument("--megabytes", type=float, default=1000, help="size in millions of bytes (default 1000)")
    parser.add_argument("--images", action="store_true", help="with inline images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="processes that write (default 2)")
    options = parser.parse_args(arguments)
    stats = write_corpus(options.folder, options.megabytes, options.images, options.seed, options.processes)
    print(json.dumps(asdict(stats)))


if __name__ == "__main__":
    main()

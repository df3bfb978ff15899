r"""Rendering and tokenising every turn of a long session, beside doing so turn by turn.

    python benchmarks/render.py [--quick] [--session FILE] [--tokenizer FILE] [--template NAME] [--rounds R]

Three sessions, each one growing context: *session*, a recorded one (`--session`) or a synthetic one of 430 turns,
*long*, a synthetic one of 2,000, and *part*, the first 500 of these. Synthetic sessions have the lengths and the
mix of tools of a recorded one (`session_corpus.py`) and thinking in 40 % of the turns. Three ways through each:

*naive*: for every trained turn `apply_chat_template` on the messages before it with the generation prompt, and again
on the same with the turn, both tokenised; it takes both to know the turn's own tokens. *full*: `ConversationRenderer`
with `windows=False`, every context rendered by the template from its beginning. *windowed*: the default. The last two
end in the token tree and begin with an empty memory of chunks; what conversations share, the compiled template and its
probe, is made beforehand and reported as *build*.

Naive is run on a sample of evenly spaced turns, since its cost per turn is linear in the context, and its seconds are
those of the sample over the sample's share of all characters. The ids of every turn in the sample are compared with
ours, and the trees of both other ways with each other: the benchmark fails if one differs. All ways use one tokenizer,
warm, and one thread. Seconds are processor time, so that what else the machine does hardly shows.

*tokenised* are the characters that went through the tokenizer, *distinct* those of a character trie of all contexts
and turns, counted here on their texts. *Cost per turn* is the best of several rounds of the windowed way. *Memory* is
the growth of a fresh process's resident memory from the loaded session and the built renderer to the finished tree, at
its peak (10^6 bytes, Linux only).

Tokenizer and template are by default the bundled sample tokenizer with ChatML's control tokens and TRL's copy of the
Qwen3 template, which strips earlier thinking. A tokenizer's own template is taken with `--template original`. Turns
that the template cannot render as at inference are left out of every way, and counted.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import interleave, medians, peak_memory, print_figures
from session_corpus import write_straight_session
from tqdm import tqdm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dagpack_hf.render.conversation import ConversationRenderer, RenderCounts
    from dagpack_hf.render.tree import ConversationTokens, TurnTokens
    from dagpack_hf.trie import TokenTree

NAIVE, FULL, WINDOWED = "naive", "full", "windowed"
SPEEDUP_TARGETS = {FULL: 25, WINDOWED: 40}
CHARACTERS_TARGET = 1.2
COST_TARGET = 1.5
MEMORY_TARGET_MB = 200
CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
MIB, MB = 1 << 20, 1_000_000


@dataclass(frozen=True)
class Conversation:
    """A conversation of which every turn with `trained` is a target."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    trained: list[bool]

    @property
    def turns(self) -> int:
        """Number of targets."""
        return sum(self.trained)

    @property
    def size(self) -> int:
        """Bytes of its JSON text, with the thinking under one name."""
        messages = [{key: value for key, value in message.items() if key != "thinking"} for message in self.messages]
        return len(json.dumps([messages, self.tools], ensure_ascii=False).encode(errors="replace"))

    def first(self, turns: int) -> Conversation:
        """The beginning that ends with this many targets."""
        end = 1 + list(accumulate(self.trained)).index(turns)
        return Conversation(self.messages[:end], self.tools, self.trained[:end])


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    if options.conversation:
        print(json.dumps(measure_memory(options)))
        return
    tokenizer = load_tokenizer(options)
    conversations = load_conversations(options)
    figures = {}
    for name, conversation in conversations.items():
        recorded = name == "session"
        share = options.session_share if recorded else options.long_share
        figures[name] = measure(name, tokenizer, conversation, share, options.rounds if recorded else 1)
        if name != "part":
            figures[name]["memory_mb"] = memory_of(conversation, arguments if arguments is not None else sys.argv[1:])
        print_session(name, figures[name])
    cost = cost_per_turn(
        tokenizer,
        {name: (conversations[name], figures[name]["turns"]) for name in ("long", "part")},
        options.cost_rounds,
    )
    found = targets(figures, cost)
    print_targets(cost, found)
    shown = {name: value for name, value in vars(options).items() if name != "conversation"}
    print_figures("render", shown, {"sessions": figures, "cost_per_turn": cost, "targets": found})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--session",
        help="session file, or folder of them, of which the conversation with the most turns is taken (default: a "
        "synthetic one)",
    )
    parser.add_argument(
        "--tokenizer",
        help="tokenizer.json, or the folder of a tokenizer (default: the bundled one with ChatML's control tokens)",
    )
    parser.add_argument(
        "--template",
        default="qwen3",
        help="chat template: a file, the name of one that comes with TRL, or 'original' (default qwen3)",
    )
    parser.add_argument("--turns", type=int, default=430, help="turns of the synthetic *session* (default 430)")
    parser.add_argument("--long-turns", type=int, default=2000, help="turns of *long* (default 2000)")
    parser.add_argument("--part-turns", type=int, default=500, help="turns of *part* (default 500)")
    parser.add_argument(
        "--session-share", type=int, default=8, help="naive renders one of so many turns of *session* (default 8)"
    )
    parser.add_argument("--long-share", type=int, default=64, help="the same for *long* and *part* (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds on *session* (default 3)")
    parser.add_argument(
        "--cost-rounds", type=int, default=5, help="interleaved rounds for the cost per turn (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the synthetic content (default 0)")
    parser.add_argument("--quick", action="store_true", help="same shape; 120, 400 and 100 turns, fewer rounds")
    parser.add_argument("--conversation", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.turns, options.long_turns, options.part_turns = 120, 400, 100
        options.session_share, options.long_share = 16, 64
        options.rounds, options.cost_rounds = 1, 3
    if not 0 < options.part_turns <= options.long_turns:
        parser.error(f"--part-turns {options.part_turns} must be from 1 to --long-turns {options.long_turns}")
    return options


# What is rendered


def load_tokenizer(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

    from dagpack_hf.sample import sample_tokenizer

    if options.tokenizer is None:
        tokenizer = sample_tokenizer()
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in CHATML])
    elif Path(options.tokenizer).is_file():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=options.tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    if options.template != "original":
        path = Path(options.template)
        if not path.is_file():
            spec = importlib.util.find_spec("trl")
            assert spec is not None and spec.submodule_search_locations
            path = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{options.template}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def load_conversations(options: argparse.Namespace) -> dict[str, Conversation]:
    with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
        session = options.session or write_straight_session(f"{folder}/session", options.turns, options.seed)
        long = write_straight_session(f"{folder}/long", options.long_turns, options.seed + 1)
        found = {"session": load_conversation(session, folder), "long": load_conversation(long, folder)}
    if options.session is None or options.quick:
        found["session"] = found["session"].first(min(options.turns, found["session"].turns))
    found["long"] = found["long"].first(options.long_turns)
    return {**found, "part": found["long"].first(options.part_turns)}


def load_conversation(session: str | Path, cache: str) -> Conversation:
    """The conversation of a session with the most trained turns, its thinking under every name that templates read."""
    import datasets

    from dagpack_hf.pi import load_sessions
    from dagpack_hf.render.template import prepare_messages

    datasets.disable_progress_bars()
    rows = load_sessions(session, cache_dir=cache)
    row = max(rows, key=lambda row: sum(row["trained"]))
    return Conversation(prepare_messages(row["messages"]), row["tools"] or None, row["trained"])


# The ways through a conversation


def build(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, way: str) -> ConversationRenderer:
    """A renderer that has done all that conversations share, and remembers no text."""
    from dagpack_hf.render.conversation import ConversationRenderer
    from dagpack_hf.render.options import RenderOptions

    renderer = ConversationRenderer(tokenizer, RenderOptions(windows=way == WINDOWED, on_error="skip"))
    renderer.facts(bool(conversation.tools))
    renderer.encoder.pattern("")
    return renderer


def render(
    renderer: ConversationRenderer, conversation: Conversation, title: str = ""
) -> tuple[ConversationTokens, RenderCounts, TokenTree]:
    """Tokens of all turns, what happened to them, and the token tree."""
    with tqdm(total=conversation.turns, desc=title, unit="turn", leave=False, disable=None) as bar:
        tokens, counts = renderer.render(
            conversation.messages, conversation.tools, conversation.trained, progress=bar.update
        )
        return tokens, counts, tokens.tree()


def naive_turn(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, index: int, variables: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Ids of the context of a message, and of the context and the message."""
    options = {"tools": conversation.tools, "tokenize": True, "return_dict": False, **variables}
    messages = conversation.messages
    context = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **options)
    return context, tokenizer.apply_chat_template(messages[: index + 1], **options)


def naive(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    tokens: ConversationTokens,
    sample: Sequence[int],
    title: str = "",
) -> tuple[float, int]:
    """Render the sampled turns, with the template's variables that were chosen for each, and compare their ids.

    Returns:
        The seconds of rendering and tokenising, and the number of turns of which not only the context was compared.
    """
    seconds, compared = 0.0, 0
    for number in tqdm(sample, desc=title, unit="turn", leave=False, disable=None):
        turn = tokens.turns[number]
        start = time.process_time()
        context, whole = naive_turn(tokenizer, conversation, turn.index, turn.variables)
        seconds += time.process_time() - start
        compared += check(tokens.turn(number), context, whole, f"turn {number} (message {turn.index})")
    return seconds, compared


def check(turn: TurnTokens, context: list[int], whole: list[int], place: str) -> bool:
    """Compare a turn with its naive renderings.

    Behind the turn's own tokens there may be what the template writes after a turn. The stop token is missing where
    the template lets the next message write it.

    Returns:
        Whether the turn was compared and not the context alone, which is no beginning of the rendering with the turn
        where the two melt into one token, or where the template changes the context.
    """
    assert turn.context_ids == context, f"{place}: the context differs from its naive rendering"
    if whole[: len(context)] != context:
        return False
    own = whole[len(context) : len(context) + len(turn.target_ids)]
    assert len(own) >= len(turn.target_ids) - 1, f"{place}: it is longer than its naive rendering"
    assert turn.target_ids[: len(own)] == own, f"{place}: the turn differs from its naive rendering"
    return True


# Texts


def turn_texts(tokens: ConversationTokens) -> Iterator[str]:
    """Each context with its turn, written out."""
    trie = tokens.trie
    for turn in tokens.turns:
        path = []
        node = turn.context
        while node >= 0:
            path.append(trie.chunks[trie.chunk[node]])
            node = trie.parent[node]
        yield "".join([*reversed(path), turn.text])


def count_distinct(texts: Iterable[str]) -> tuple[int, list[int]]:
    """Count the characters of a character trie.

    Args:
        texts: the texts.

    Returns:
        The number of nodes below the root of a trie with a node for each character, and the length of each text.
    """
    root: dict[str, list[Any]] = {}  # first character -> [text of the edge, edges below it]
    lengths = []
    distinct = 0
    for text in texts:
        lengths.append(len(text))
        at, edges = 0, root
        while at < len(text):
            edge = edges.get(text[at])
            if edge is None:
                edges[text[at]] = [text[at:], {}]
                distinct += len(text) - at
                break
            label, below = edge
            if not text.startswith(label, at):
                common = common_prefix(label, text[at : at + len(label)])
                edge[:] = label[:common], {label[common]: [label[common:], below]}
            at += len(edge[0])
            edges = edge[1]
    return distinct, lengths


def common_prefix(first: str, second: str) -> int:
    """Length of the common beginning, found by bisection."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Measurement


def measure(
    name: str, tokenizer: PreTrainedTokenizerBase, conversation: Conversation, share: int, rounds: int
) -> dict[str, Any]:
    """Figures of one conversation."""
    builds: list[float] = []
    compared = 0
    start = time.process_time()
    renderer = build(tokenizer, conversation, WINDOWED)
    builds.append(time.process_time() - start)
    tokens, counts, tree = render(renderer, conversation, name)
    tokenized = renderer.encoder.tokenized
    if not tokens.turns:
        raise SystemExit(f"{name}: the template renders no turn: {dict(counts.skipped)}")
    distinct, lengths = count_distinct(turn_texts(tokens))
    step = min(share, len(lengths))
    sample = range(step // 2, len(lengths), step)
    naive_share = sum(lengths[number] for number in sample) / sum(lengths)

    def by_hand() -> float:
        nonlocal compared
        gc.collect()
        seconds, compared = naive(tokenizer, conversation, tokens, sample, f"{name}, {NAIVE}")
        return seconds / naive_share

    def rendered(way: str) -> float:
        gc.collect()
        start = time.process_time()
        renderer = build(tokenizer, conversation, way)
        built = time.process_time()
        _, _, found = render(renderer, conversation, f"{name}, {way}")
        seconds = time.process_time() - built
        builds.append(built - start)
        assert same(found, tree), f"{name}: the tree of {way} differs"
        return seconds

    ways = {NAIVE: by_hand, **{way: partial(rendered, way) for way in (FULL, WINDOWED)}}
    seconds = interleave(ways, rounds, warm_up=False)
    median = medians(seconds)
    return {
        "turns": len(lengths),
        "skipped": dict(counts.skipped),
        "messages": len(conversation.messages),
        "session_bytes": conversation.size,
        "characters": sum(lengths),
        "distinct_characters": distinct,
        "tokenized_characters": tokenized,
        "tokenized_over_distinct": tokenized / distinct,
        "sequence_tokens": tree.logical_tokens,
        "tree_tokens": len(tree.input_ids),
        "windowed": counts.windowed,
        "checked": counts.checked,
        "fallbacks": counts.fallbacks,
        "naive_turns": len(sample),
        "compared_turns": compared,
        "naive_share": naive_share,
        "build_s": min(builds),
        "median_s": median,
        "seconds": seconds,
        "speedup": {way: median[NAIVE] / median[way] for way in SPEEDUP_TARGETS},
    }


def same(tree: TokenTree, other: TokenTree) -> bool:
    """Whether two trees hold the same sequences and targets."""
    return all(np.array_equal(value, asdict(other)[name]) for name, value in asdict(tree).items())


def cost_per_turn(
    tokenizer: PreTrainedTokenizerBase, conversations: dict[str, tuple[Conversation, int]], rounds: int
) -> dict[str, Any]:
    """Best seconds per turn of the windowed way on *long* and *part*, each with its number of rendered turns."""

    def rendered(name: str) -> float:
        renderer = build(tokenizer, conversations[name][0], WINDOWED)
        gc.collect()
        start = time.process_time()
        render(renderer, conversations[name][0], f"{name}, cost per turn")
        return time.process_time() - start

    seconds = interleave({name: partial(rendered, name) for name in conversations}, rounds, warm_up=False)
    best = {name: 1000 * min(values) / conversations[name][1] for name, values in seconds.items()}
    return {"per_turn_ms": best, "ratio": best["long"] / best["part"], "seconds": seconds}


def memory_of(conversation: Conversation, arguments: list[str]) -> float | None:
    """Peak growth of memory in MB, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="conversation-") as folder:
        path = Path(folder) / "conversation.json"
        path.write_text(json.dumps([conversation.messages, conversation.tools, conversation.trained]))
        command = [sys.executable, __file__, *arguments, "--conversation", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(options: argparse.Namespace) -> float | None:
    tokenizer = load_tokenizer(options)
    with open(options.conversation, encoding="utf-8") as file:
        conversation = Conversation(*json.load(file))
    renderer = build(tokenizer, conversation, WINDOWED)
    growth = peak_memory(lambda: render(renderer, conversation))
    return None if growth is None else growth * MIB / MB


def targets(figures: dict[str, Any], cost: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target with what was measured and whether it is met; `None` where it could not be measured."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float | None, limit: float, *, least: bool = False) -> None:
        met = None if value is None else value >= limit if least else value <= limit
        found[name] = {"value": value, "limit": limit, "met": met}

    for session in ("session", "long"):
        case = figures[session]
        for way, limit in SPEEDUP_TARGETS.items():
            add(f"{session}: speedup, {way}", case["speedup"][way], limit, least=True)
        add(f"{session}: tokenised / distinct characters", case["tokenized_over_distinct"], CHARACTERS_TARGET)
        add(f"{session}: memory, MB", case["memory_mb"], MEMORY_TARGET_MB)
    add("cost per turn, long / part", cost["ratio"], COST_TARGET)
    return found


# Output


def print_session(name: str, figures: dict[str, Any]) -> None:
    millions = {key: figures[key] / MB for key in figures if key.endswith(("_tokens", "characters", "_bytes"))}
    print(f"{name}: {figures['turns']:,} turns, {figures['messages']:,} messages, ", end="")
    print(f"{millions['session_bytes']:.2f} MB; M tokens: {millions['sequence_tokens']:,.2f} in turns, ", end="")
    print(f"{millions['tree_tokens']:,.3f} in the tree")
    for reason, number in figures["skipped"].items():
        print(f"  {number:,} turns left out: {reason}")
    print(f"  M characters: {millions['characters']:,.1f} in turns, ", end="")
    print(f"{millions['distinct_characters']:,.3f} distinct, {millions['tokenized_characters']:,.3f} tokenised")
    print(f"  {figures['windowed']:,} contexts in windows, {figures['checked']:,} of them compared in full; ", end="")
    alone = figures["naive_turns"] - figures["compared_turns"]
    print(f"{figures['compared_turns']:,} turns and {alone:,} contexts alone compared with naive, none differs")
    print(f"  {'':<10}{'seconds':>10}{'per turn':>12}{'speedup':>10}  all rounds, s")
    for way, spent in figures["median_s"].items():
        speedup = figures["median_s"][NAIVE] / spent
        rounds = " ".join(f"{value:.2f}" for value in figures["seconds"][way])
        print(f"  {way:<10}{spent:>10,.2f}{1000 * spent / figures['turns']:>9,.2f} ms{speedup:>10,.1f}  {rounds}")
    print(f"  naive ran {figures['naive_share']:.1%} of the characters; build {figures['build_s']:.2f} s", flush=True)


def print_targets(cost: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    per_turn = ", ".join(f"{value:.2f} ms in {name}" for name, value in cost["per_turn_ms"].items())
    print(f"cost per turn, windowed: {per_turn}")
    for name, target in found.items():
        value = "-" if target["value"] is None else f"{target['value']:,.2f}"
        word = {True: "met", False: "missed", None: "not measured"}[target["met"]]
        print(f"  {name:<42}{value:>10}  target {target['limit']:>5,}  {word}", flush=True)


if __name__ == "__main__":
    main()

"""Chunks of text: cuts change no token ids, on real tokenizers and on made-up ones with odd added tokens."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagpack_hf.render.chunks import ChunkPath, ChunkTrie
from dagpack_hf.render.encoder import ChunkEncoder
from dagpack_hf.render.safe import safe_tokens
from dagpack_hf.render.template import without_surrogates
from tests.real_tokenizers import NAMES, borrowed_tokenizer, real_tokenizer

# Real tokenizers: hostile text.

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
BORROWED = {"llama2": CHATML}

CONTROL = (
    *CHATML,
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<unused1>", "<pad>", "[multimodal]"),
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>"),
    *("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<<SYS>>", "[CLS]"),
)
WORDS = ("Hello", "ünïcode", "naïve", "the_quick", "BROWN", "don't", "I'LL", "x", "0123456789", "3.14159", "1,000,000")
SPACES = (" ", "  ", " " * 17, "\t", "\t\t", "\n", "\n\n", "\n" * 9, "\r\n", "\r", "\v", "\f", "\x85")
SPACES += ("\u00a0", "\u2028", "\u2029", "\u200b", "\ufeff", "\u3000", "\u2009", " \n ", "\n \n", "\t\r\n ")
MARKS = (
    "\u0301",
    "e\u0301",
    "\u0338",
    "\u20d2",
    "\ufe0f",
    "\u0345",
    "\u1160",
    "\u0f71\u0f72",
    "Å",
    "\u212b",
    "\ufb01",
)
SCRIPTS = ("你好，世界", "日本語の", "カﾞ", "한국어", "\u1112\u1161\u11ab", "שלום", "\u202eمرحبا\u202c", "ไทย", "हिन्दी")
EMOJI = ("👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪", "\u200d", "\u200c", "🤷🏻‍♂️")
ODD = ("\x00", "\x01\x02", "\x1b[31m", "\x7f", "\x1c", "\ud83d", "\udc00", "\ufffd", "\uffff", "\U000e0001", "▁", "▁▁")
ODD += ("Ġ", "Ċ", "Ġthe", "##ing", "</w>", "<0x0A>", "@@")
CODE = (
    "def f(x):\n    return x\n",
    "a->b && c||d;",
    '{"k": "v\\n\\u00e9\\ud83d"}',
    "\\\\n",
    "<br/><b>",
    "</div>\n",
    "<",
)
CODE += (
    "```py\n",
    "<|",
    "|>",
    "<|im_",
    "_end|>",
    "im_start",
    "<｜",
    "｜>",
    "</",
    "<<",
    ">>",
    "[",
    "]",
    "<|<|",
    "|>|>",
)
PIECES = (WORDS, SPACES, MARKS, SCRIPTS, EMOJI, ODD, CODE)


def hostile_texts(seed: int, control: Sequence[str], count: int = 2000) -> list[str]:
    """Texts of odd pieces and control tokens, whole and in parts, glued without spaces."""
    draw = random.Random(seed)

    def piece() -> str:
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(control)
        if kind < 0.5:
            token = draw.choice(control)
            start, stop = sorted(draw.choices(range(len(token) + 1), k=2))
            return token[start:stop]
        if kind < 0.53:
            return draw.choice("a =-\n▁0é你🤷\u0301<") * draw.randint(20, 400)
        if kind < 0.56:
            return "".join(chr(draw.randrange(0xF0000)) for _ in range(draw.randint(1, 4)))
        return draw.choice(draw.choice(PIECES))

    texts = ["".join(piece() for _ in range(draw.randint(1, 14))) for _ in range(count)]
    return [without_surrogates(text) for text in texts]


@pytest.mark.parametrize("name", [*NAMES, *(f"{name} with others" for name in BORROWED)])
def test_cut_text_has_the_ids_of_the_whole(name: str) -> None:
    family, _, borrowed = name.partition(" ")
    tokenizer = borrowed_tokenizer(family, *BORROWED[family]) if borrowed else real_tokenizer(family)
    encoder = ChunkEncoder(tokenizer)
    draw = random.Random(name)
    own = draw.sample(sorted(tokenizer.get_added_vocab()), min(40, len(tokenizer.get_added_vocab())))
    texts = hostile_texts(draw.randrange(1 << 30), [*own, *CONTROL])
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    few = [token for token in encoder.safe if token in CONTROL][::2]
    for tokens, chunks_per_text in ((encoder.safe, 1.3), (few, 1.02)):
        trie = ChunkTrie(encoder.pattern("\0".join(tokens)))
        split = [trie.split(text) for text in texts]
        ids = iter(encoder.encode([chunk for chunks in split for chunk in chunks]))
        cut = [[int(i) for item in islice(ids, len(chunks)) for i in item] for chunks in split]
        different = [chunks for chunks, left, right in zip(split, cut, whole, strict=True) if left != right]
        assert not different, f"{len(different)} texts, among them {min(different, key=lambda item: len(str(item)))}"
        assert sum(map(len, split)) > chunks_per_text * len(texts)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "<think>", "</think>"]),
        ("llama3_1", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
        ("gptoss", ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]),
        ("gemma3", ["<bos>", "<start_of_turn>", "<end_of_turn>"]),
        ("deepseek_v3", ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"]),
        ("llama2", ["<s>", "</s>"]),
    ],
)
def test_the_control_tokens_of_chat_templates_are_safe(name: str, tokens: list[str]) -> None:
    assert set(tokens) <= set(ChunkEncoder(real_tokenizer(name)).safe)


def test_runs_of_white_space_are_not_safe() -> None:
    safe = ChunkEncoder(real_tokenizer("gemma3")).safe
    assert not {"\n", "\n\n", "▁▁", "▁▁▁"} & set(safe)
    assert len(safe) > 6000


# Made-up tokenizers. Their models join any two characters, so that a wrong cut is seen.

ALPHABET = "ab<>|_ "


def joining_model() -> models.BPE:
    letters = ["[unk]", "▁", "Ġ", *ALPHABET]
    pairs = [(left, right) for right in letters[1:] for left in letters[1:]]
    vocabulary = {text: number for number, text in enumerate([*letters, *map("".join, pairs)])}
    return models.BPE(vocabulary, pairs, unk_token="[unk]")


def joining_words() -> models.WordPiece:
    letters = list(ALPHABET.strip())
    texts = ["[unk]", *letters, *(left + right for left in letters for right in letters)]
    texts += ["##" + text for text in texts[1:]]
    return models.WordPiece({text: number for number, text in enumerate(texts)}, unk_token="[unk]")


def joining_unigram() -> models.Unigram:
    letters = [*ALPHABET, "▁"]
    pairs = [left + right for left in letters for right in letters]
    scores = [(text, -1.0 - number / 97) for number, text in enumerate(pairs)]
    return models.Unigram([("[unk]", -50.0), *((text, -3.0) for text in letters), *scores], unk_id=0)


def made_up(
    model: Any,
    added: Sequence[AddedToken] = (),
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_level(prefix: bool, regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def metaspace(scheme: str, split: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)


def sentencepiece() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


KINDS: dict[str, Callable[[Sequence[AddedToken]], Tokenizer]] = {
    "plain": lambda added: made_up(joining_model(), added),
    "empty normalizer": lambda added: made_up(joining_model(), added, normalizers.Sequence([])),
    "bytes": lambda added: made_up(joining_model(), added, None, byte_level(False)),
    "bytes with a prefix space": lambda added: made_up(joining_model(), added, None, byte_level(True, True)),
    "metaspace at first": lambda added: made_up(joining_model(), added, None, metaspace("first")),
    "metaspace always": lambda added: made_up(joining_model(), added, None, metaspace("always", True)),
    "prepend": lambda added: made_up(joining_model(), added, sentencepiece()),
    # A token that its normalizer leaves nothing of is found without end.
    "unigram": lambda added: made_up(
        joining_unigram(),
        [token for token in added if not token.content.isspace()],
        normalizers.Strip(),
        metaspace("always", True),
    ),
    "lower case words": lambda added: made_up(
        joining_words(), added, normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    ),
}

TRICKY = (
    "<a>",
    "a><",
    "<a",
    "a>",
    "a",
    "<",
    ">",
    "<a><",
    "<<a",
    "a<a",
    "<|a|>",
    "|>",
    "<|",
    "<A>",
    " ",
    "a ",
    " <",
    "_a",
)
contents = st.one_of(st.sampled_from(TRICKY), st.text(ALPHABET + "A", min_size=1, max_size=4))
rare = st.sampled_from([False, False, False, True])
added_token = st.builds(
    AddedToken,
    contents,
    single_word=rare,
    lstrip=rare,
    rstrip=rare,
    normalized=st.booleans(),
    special=st.booleans(),
)
# The library panics where white space taken to the right meets white space taken to the left.
added_tokens = st.lists(
    added_token.filter(lambda token: not (token.lstrip and token.content[0] == " ")), min_size=1, max_size=4
)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), added=added_tokens, split_special=rare)
def test_any_text_can_be_cut_before_safe_tokens(
    kind: str, data: st.DataObject, added: list[AddedToken], split_special: bool
) -> None:
    tokenizer = KINDS[kind](added)
    tokenizer.encode_special_tokens = split_special
    safe = safe_tokens(tokenizer)
    texts = [token.content for token in added]
    parts = [
        text[start:stop] for text in texts for start in range(len(text)) for stop in range(start + 1, len(text) + 1)
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*texts, *safe, *parts, *ALPHABET]), min_size=1, max_size=8)))
    whole = ids(tokenizer, text)
    for token in safe:
        for match in re.finditer(f"(?={re.escape(token)})", text):
            left, right = text[: match.start()], text[match.start() :]
            assert ids(tokenizer, left) + ids(tokenizer, right) == whole, (left, right)


RAW = {"normalized": False}
WORD = AddedToken("abb", single_word=True, **RAW)
# Rule -> kind of tokenizer, added tokens (the first is the one that is not safe), and a text, cut before that token.
UNSAFE: dict[str, tuple[str, list[AddedToken], str, str]] = {
    "takes white space": ("plain", [AddedToken("<a>", lstrip=True, **RAW)], "b ", "<a>"),
    "asks for words": ("plain", [WORD], "b", "abb"),
    "begins with white space": (
        "plain",
        [AddedToken(" b", normalized=True), AddedToken("<a>", rstrip=True, **RAW)],
        "<a>",
        " bb",
    ),
    "ends with white space": (
        "plain",
        [AddedToken("a ", normalized=True), AddedToken("<b>", lstrip=True, **RAW)],
        "b",
        "a <b>",
    ),
    "lies in another": ("plain", [AddedToken("a", **RAW), AddedToken("<a>", **RAW)], "<", "a>"),
    "begins as another ends": ("plain", [AddedToken(">b", **RAW), AddedToken("<a>", **RAW)], "<a", ">b"),
    "begins as it ends": ("plain", [AddedToken("a<a", **RAW)], "a<", "a<a"),
    "is normalised": ("prepend", [AddedToken("<a>", normalized=True)], "b", "<a>"),
    "holds a raw one": ("plain", [AddedToken("a<b>|", normalized=True), AddedToken("<b>", **RAW)], "b", "a<b>|"),
    "ends as a raw one begins": ("plain", [AddedToken("a<", normalized=True), AddedToken("<b>", **RAW)], "b", "a<b>"),
    "begins with a letter": ("plain", [AddedToken("a>", **RAW), WORD], "abb", "a>"),
    "begins with an underscore": ("plain", [AddedToken("_>", **RAW), WORD], "abb", "_>"),
    "begins with a mark": ("plain", [AddedToken("\u0301>", **RAW), WORD], "abb", "\u0301>"),
    "begins with a tie": ("plain", [AddedToken("\u203f>", **RAW), WORD], "abb", "\u203f>"),
    "begins with a joiner": ("plain", [AddedToken("\u200d>", **RAW), WORD], "abb", "\u200d>"),
    "begins with a circled letter": ("plain", [AddedToken("\u24d0>", **RAW), WORD], "abb", "\u24d0>"),
}


@pytest.mark.parametrize("rule", UNSAFE)
def test_each_rule_is_needed(rule: str) -> None:
    kind, added, left, right = UNSAFE[rule]
    tokenizer = KINDS[kind](added)
    token = added[0].content
    assert right.startswith(token)
    assert ids(tokenizer, left) + ids(tokenizer, right) != ids(tokenizer, left + right)
    assert token not in safe_tokens(tokenizer)


@pytest.mark.parametrize(
    ("kind", "added", "safe"),
    [
        ("plain", [AddedToken("<a>", **RAW), AddedToken("a<b>", normalized=True)], ["<a>", "a<b>"]),
        (
            "empty normalizer",
            [AddedToken("<a>", normalized=True), AddedToken("<b>", rstrip=True, **RAW)],
            ["<a>", "<b>"],
        ),
        ("prepend", [AddedToken("<a>", **RAW), AddedToken("<b>", normalized=True)], ["<a>"]),
        # The longest is found, so the beginning of a token can be a token, and not the other way round.
        ("plain", [AddedToken("<a", **RAW), AddedToken("<a>", **RAW)], ["<a>"]),
        ("plain", [AddedToken("<a>", **RAW), WORD], ["<a>"]),
        ("plain", [AddedToken("a>", **RAW)], ["a>"]),
    ],
)
def test_rules_exclude_no_more_than_they_must(kind: str, added: list[AddedToken], safe: list[str]) -> None:
    assert safe_tokens(KINDS[kind](added)) == safe


def test_random_or_split_tokens_are_not_safe() -> None:
    tokenizer = KINDS["plain"]([AddedToken("a<", special=True, normalized=False)])
    assert safe_tokens(tokenizer) == ["a<"]
    tokenizer.encode_special_tokens = True
    assert ids(tokenizer, "b") + ids(tokenizer, "a<") != ids(tokenizer, "ba<")
    assert safe_tokens(tokenizer) == []
    tokenizer.encode_special_tokens = False
    tokenizer.model.dropout = 0.5
    assert safe_tokens(tokenizer) == []
    for alpha, safe in ((None, ["<a>"]), (0.1, [])):
        model = models.Unigram([("[unk]", -9.0), ("a", -1.0)], unk_id=0, alpha=alpha)
        assert safe_tokens(made_up(model, [AddedToken("<a>", **RAW)])) == safe


# Paths.

TOKENS = ("<a>", "<b>", "<|ab|>")
CUTS = re.compile("|".join(map(re.escape, TOKENS)))
path_texts = st.lists(st.sampled_from([*TOKENS, "<", "a>", "<|a", "b|>", "|>", "a", " ", "é"]), max_size=6).map(
    "".join
)


@pytest.mark.parametrize("cuts", [CUTS, None], ids=["cut", "not cut"])
@settings(max_examples=250, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 40), path_texts), max_size=6))
@example(steps=[(0, "x<a>y<b>"), (5, "<b>z"), (2, "a>"), (4, "")])
def test_a_path_is_its_text_split_anew(cuts: re.Pattern[str] | None, steps: list[tuple[int, str]]) -> None:
    trie = ChunkTrie(cuts)
    path = ChunkPath(trie)
    text = ""
    nodes: dict[tuple[str, ...], int] = {(): -1}
    for number, end in steps:
        keep = number % (len(text) + 1)
        path.replace(keep, end)
        text = text[:keep] + end
        chunks = trie.split(text)
        assert path.text() == text == "".join(chunks)
        assert path.length == len(text)
        assert [trie.chunks[trie.chunk[node]] for node in path.nodes] == chunks
        assert path.starts == [len("".join(chunks[:index])) for index in range(len(chunks))]
        assert path.last == (chunks[-1] if chunks else "")
        assert path.node == (path.nodes[-1] if chunks else -1)
        # One node for each beginning, however often it comes back.
        for index, node in enumerate(path.nodes):
            assert trie.parent[node] == (path.nodes[index - 1] if index else -1)
            assert nodes.setdefault(tuple(chunks[: index + 1]), node) == node
    assert len(set(nodes.values())) == len(nodes)
    assert len(set(trie.chunks)) == len(trie.chunks)


@given(text=path_texts)
def test_split_cuts_before_each_token_and_nowhere_else(text: str) -> None:
    chunks = ChunkTrie(CUTS).split(text)
    assert "".join(chunks) == text
    assert all(chunks)
    assert all(chunk.startswith(TOKENS) for chunk in chunks[1:])
    assert not any(token in chunk[1:] for chunk in chunks for token in TOKENS)


def test_a_completed_token_is_cut_before() -> None:
    path = ChunkPath(ChunkTrie(CUTS))
    path.replace(0, "<a>one<|a")
    path.replace(9, "b|>two")
    assert [path.trie.chunks[path.trie.chunk[node]] for node in path.nodes] == ["<a>one", "<|ab|>two"]
    path.replace(8, "")
    assert path.last == "<a>one<|"
    path.replace(1, "b>")
    assert path.text() == path.last == "<b>"


def test_what_is_not_there_cannot_be_kept() -> None:
    path = ChunkPath(ChunkTrie(CUTS))
    path.replace(0, "<a>b")
    for keep in (5, -1):
        with pytest.raises(ValueError, match=f"cannot keep {keep} characters of a text of 4"):
            path.replace(keep, "")
    assert path.text() == "<a>b"


# The encoder.


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tokens(encoder: ChunkEncoder, ids: np.ndarray) -> list[str]:
    return [encoder.backend.id_to_token(int(number)) for number in ids]


@pytest.mark.parametrize("control", [["<a>"], []], ids=["control token", "none"])
@pytest.mark.parametrize(
    "kind", ["plain", "bytes", "bytes with a prefix space", "metaspace at first", "metaspace always", "prepend"]
)
def test_a_text_alone_gets_no_prefix_and_joins_nothing(kind: str, control: list[str]) -> None:
    model = models.BPE(
        {"a": 0, "b": 1, "Ġ": 2, "▁": 3, " ": 4, "\n": 5, "Ċ": 6, "ab": 7, "▁ab": 8, "Ġab": 9, ";": 10},
        [("a", "b"), ("▁", "ab"), ("Ġ", "ab")],
    )
    tokenizer = KINDS[kind]([])
    tokenizer.model = model
    tokenizer.add_tokens([AddedToken(text, **RAW) for text in control])
    encoder = ChunkEncoder(fast(tokenizer))
    space, *more = {"plain": " ", "bytes": "Ġ", "bytes with a prefix space": "Ġ+"}.get(kind, "▁+")
    first = [space + "ab"] if more else ["ab"]
    behind = [" ", "ab"] if space == " " else [space + "ab"]
    assert tokens(encoder, encoder.encode(["ab"])[0]) == first
    assert tokens(encoder, encoder.encode_alone("ab")) == ["ab"]
    assert tokens(encoder, encoder.encode_alone(" ab")) == behind
    assert encoder.encode_alone("").tolist() == []
    assert encoder.encode_alone("ab").dtype == np.int32


BREAK = "\U0010fffd"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_end_at_a_break_and_begin_where_starts_says(kind: str) -> None:
    encoder = ChunkEncoder(fast(KINDS[kind]([AddedToken("<a>", **RAW)])))
    (whole,) = encoder.encode([f"b{BREAK}a"])
    encoder.set_mark(BREAK)
    joined, broken = encoder.encode(["ba", f"b{BREAK}a"])
    assert broken.tolist() != whole.tolist(), "without a mark it is a character like any other"
    assert broken.tolist() == [*encoder.encode(["b"])[0], *encoder.encode_alone("a")]
    assert broken.tolist() != joined.tolist()
    assert encoder.starts(f"b{BREAK}a").tolist()[-2:] == [0, 2]
    assert encoder.starts(f"b{BREAK}a", alone=True).tolist() == [0, 2]
    assert encoder.starts("<a>b a<a>", alone=True).tolist()[:2] == [0, 3]


class Slow:
    """A tokenizer without a fast backend, whose tokens are characters."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        self.calls.append(texts)
        return {"input_ids": [[1] * add_special_tokens + [ord(character) for character in text] for text in texts]}


def slow_encoder(**options: int) -> tuple[ChunkEncoder, Slow]:
    tokenizer: Any = Slow()
    return ChunkEncoder(tokenizer, **options), tokenizer


def test_a_tokenizer_without_a_backend_works_without_cuts() -> None:
    encoder, tokenizer = slow_encoder()
    assert encoder.safe == []
    assert encoder.pattern("<a>") is None
    assert ChunkTrie(encoder.pattern("<a>")).split("x<a>y") == ["x<a>y"]
    assert [item.tolist() for item in encoder.encode(["ab", "", "é"])] == [[97, 98], [], [233]]
    assert encoder.encode_alone("ab").tolist() == [97, 98]
    assert tokenizer.calls[0] == ["ab", "", "é"]


def test_a_remembered_chunk_is_tokenized_once() -> None:
    encoder, tokenizer = slow_encoder()
    expected = [[97], [98, 98], [97], [97]]
    assert [item.tolist() for item in encoder.encode(["a", "bb", "a", "a"])] == expected
    assert [item.tolist() for item in encoder.encode(["a", "bb", "a", "a"])] == expected
    assert encoder.encode([]) == []
    assert [item.tolist() for item in encoder.encode(["c", "a"])] == [[99], [97]]
    assert [call for call in tokenizer.calls if call] == [["a", "bb"], ["c"]]
    assert encoder.tokenized == 4
    assert all(item.dtype == np.int32 for item in encoder.encode(["a", "d"]))


def test_memory_of_chunks_is_bounded() -> None:
    limit = 20_000
    encoder, _ = slow_encoder(cache_bytes=limit)
    draw = random.Random(0)
    words = [draw.choice("aé你🤷") * draw.choice([1, 5, 40, 4000]) for _ in range(300)]
    for _ in range(40):
        chunks = draw.choices(words, k=20)
        assert [item.tolist() for item in encoder.encode(chunks)] == [list(map(ord, chunk)) for chunk in chunks]
        cache = encoder._cache
        assert sum(sys.getsizeof(chunk) + sys.getsizeof(item) for chunk, item in cache.items()) <= limit
        assert 4 < len(cache) < 100
        assert max(map(len, cache)) < 4000


def test_the_chunk_used_last_is_remembered_longest() -> None:
    encoder, tokenizer = slow_encoder(cache_bytes=1500)
    for chunk in ("a", "b", "c", "a", "d", "e", "a"):
        encoder.encode([chunk])
    assert [call for call in tokenizer.calls if call] == [["a"], ["b"], ["c"], ["d"], ["e"]]
    encoder.encode(["b"])
    assert tokenizer.calls[-1] == ["b"]


def test_a_large_number_of_characters_goes_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagpack_hf.render.encoder._BATCH_CHARACTERS", 5)
    encoder, tokenizer = slow_encoder()
    chunks = ["abc", "de", "abc", "f", "ghijklm", "n"]
    assert [item.tolist() for item in encoder.encode(chunks)] == [list(map(ord, chunk)) for chunk in chunks]
    assert tokenizer.calls == [["abc", "de"], ["f", "ghijklm"], ["n"]]


def test_what_an_earlier_call_switched_on_is_off() -> None:
    backend = KINDS["plain"]([AddedToken("<a>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<a>")
    encoder = ChunkEncoder(tokenizer)
    text = "a|b|a|b|a|b|<a>b"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(whole) > 3
    options: dict[str, Any] = {"truncation": True, "max_length": 3, "padding": "max_length"}
    chunks = ChunkTrie(encoder.pattern("<a>")).split(text)
    for remembered in (0, 1 << 20):
        encoder = ChunkEncoder(tokenizer, cache_bytes=remembered)
        assert len(tokenizer([text, "a"], split_special_tokens=True, **options)["input_ids"][1]) == 3
        assert np.concatenate(encoder.encode(chunks)).tolist() == whole
        assert len(tokenizer([text, "a"], split_special_tokens=True, **options)["input_ids"][0]) == 3
        assert len(encoder.encode_alone("a|b|a|b|a|b|a|b")) > 3


def test_special_tokens_are_split_where_the_tokenizer_splits_them() -> None:
    backend = KINDS["plain"]([AddedToken("a<", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, split_special_tokens=True)
    encoder = ChunkEncoder(tokenizer)
    assert encoder.safe == []
    assert encoder.encode(["ba<"])[0].tolist() == tokenizer("ba<", add_special_tokens=False)["input_ids"]
    assert tokens(encoder, encoder.encode(["ba<"])[0]) == ["ba", "<"]

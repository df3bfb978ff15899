"""The FlexAttention backend: its tiles, what they cost, how often it compiles, and that layers share a mask.

FlexAttention has no backward pass on CPU. Where gradients are needed, `compute_by_tiles` stands for the kernel: it
reads the tables and the functions that the kernel gets, as the kernel does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask, create_mask

from dagpack_hf.attention import DagVisibility, dense, enable, flex, visible
from dagpack_hf.attention.interface import dag_attention_forward
from tests.tiny_models import VOCABULARY, WINDOW, tiny_model

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

LENGTH = 600
"""Positions of the rows below: four tiles and a part of one."""

SHAPES = {
    "star": [*range(200), *[depth for _ in range(10) for depth in range(200, 240)]],
    "comb": [*range(300), *range(300, 0, -1)],
    "chain": [*range(LENGTH)],
    "two levels": [
        *range(100),
        *[d for _ in range(5) for d in (*range(100, 140), *[e for _ in range(3) for e in range(140, 160)])],
    ],
    "documents": [depth for length in (1, 130, 7, 255, 64, 143) for depth in range(length)],
    "single tokens": [0] * LENGTH,
    "pairs": [0, 1] * (LENGTH // 2),
}

WINDOWS = (None, 1, 2, 100, 127, 128, 129, 300)


def bushy(seed: int, length: int, turn_back: float = 0.03) -> list[int]:
    random = np.random.default_rng(seed)
    depths = [0]
    while len(depths) < length:
        back = random.random() < turn_back
        depths.append(int(random.integers(0, depths[-1] + 1)) if back else depths[-1] + 1)
    return depths


def vectors(*walks: list[int], length: int | None = None) -> tuple[Tensor, Tensor]:
    """`subtree_end` and `position_ids` of one row for each walk, padded to a length."""
    length = length or max(map(len, walks))
    ends = np.tile(np.arange(1, length + 1), (len(walks), 1))
    depths = np.zeros((len(walks), length), int)
    for row, walk in enumerate(walks):
        depths[row, : len(walk)] = walk
        path: list[int] = []
        for position, depth in enumerate([*walk, 0]):
            ends[row, path[depth:]] = position
            del path[depth:]
            path.append(position)
    return torch.from_numpy(ends).int(), torch.from_numpy(depths).int()


def random_inputs(rows: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values of another size than keys, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 4, length, 16), (rows, 2, length, 16), (rows, 2, length, 8), (4,))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def test_vectors_on_a_walk_written_by_hand():
    subtree_end, position_ids = vectors([0, 1, 2, 1, 0], [0, 0], length=6)
    assert subtree_end.tolist() == [[4, 3, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert position_ids.tolist() == [[0, 1, 2, 1, 0, 0], [0] * 6]
    assert all(len(walk) <= LENGTH for walk in SHAPES.values())


# --- forward


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 40, 128, 300])
def test_forward_equals_dense(shape, window):
    """Grouped heads, two rows, one of them with padding, no multiple of a tile; plain, capped, with sinks.

    Eager FlexAttention reads the functions only; what the tables do is tested where it is compiled, and for gradients.
    """
    visibility = DagVisibility(*vectors(SHAPES[shape], bushy(0, LENGTH - 37), length=LENGTH))
    *inputs, sinks = random_inputs(2, LENGTH)
    for options in ({}, {"softcap": 0.7}, {"sinks_H": sinks}, {"softcap": 0.7, "sinks_H": sinks, "scaling": 0.9}):
        found = flex.attend(*inputs, visibility, window=window, **options)
        expected = dense.attend(*inputs, visibility, window=window, **options)
        assert found.shape == expected.shape and found.dtype == torch.float64
        # FlexAttention keeps its log-sum-exp in float32, and so the sinks' share.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if "sinks_H" in options else 1e-12)


def test_a_row_of_one_position():
    *inputs, _ = random_inputs(1, 1)
    assert torch.allclose(flex.attend(*inputs, DagVisibility(*vectors([0])))[0, ::2], inputs[2][0])


def test_autocast_casts(monkeypatch):
    """As models in float32 have it: rotation lifts queries and keys to float32, values are in bfloat16."""
    dtypes: list[torch.dtype] = []
    kernel = flex._kernel

    def observed(device: torch.device):
        return lambda *inputs, **options: dtypes.extend(x.dtype for x in inputs) or kernel(device)(*inputs, **options)

    monkeypatch.setattr(flex, "_kernel", observed)
    visibility = DagVisibility(*vectors(bushy(0, 150)))
    query, key, value, sinks = random_inputs(1, 150, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = flex.attend(query, key, value.bfloat16(), visibility, sinks_H=sinks)
    assert dtypes == [torch.bfloat16] * 3
    expected = flex.attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), visibility, sinks_H=sinks)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_kernel_options_are_passed_on(monkeypatch):
    given: list[dict | None] = []

    def kernel(*inputs: Tensor, **options) -> Tensor:
        given.append(options["kernel_options"])
        return inputs[2]

    monkeypatch.setattr(flex, "_kernel", lambda device: kernel)
    *inputs, _ = random_inputs(1, 3)
    for options in ({}, {"kernel_options": {"BLOCK_M": 64}}):
        flex.attend(*inputs, DagVisibility(*vectors([0, 1, 1])), **options)
    assert given == [None, {"BLOCK_M": 64}]


@pytest.mark.parametrize("backend", ["flex", "dense", "tile"])
def test_kernel_options_of_a_call_reach_flex_alone(monkeypatch, backend):
    given: list[dict | None] = []
    kernel = flex.flex_attention

    def noting(*inputs: Tensor, **options):
        given.append(options.pop("kernel_options"))
        return kernel(*inputs, **options)

    monkeypatch.setattr(flex, "_kernel", lambda device: noting)
    query, key, value, _ = random_inputs(1, 3)
    visibility = DagVisibility(*vectors([0, 1, 1]), backend=backend)
    with torch.no_grad():
        dag_attention_forward(
            torch.nn.Identity(), query, key, value, None, dag_visibility=visibility, kernel_options={"BLOCK_M": 64}
        )
    assert given == ([{"BLOCK_M": 64}] if backend == "flex" else [])


# --- tiles


def assert_same_tiles(found: BlockMask, expected: BlockMask) -> None:
    for table in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, table), getattr(expected, table)), table
    for table in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(found, table), getattr(expected, table)), table
    assert found.seq_lengths == expected.seq_lengths


@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_of_every_shape_equal_create_block_mask(window):
    walks = [*SHAPES.values(), bushy(1, 590), bushy(2, LENGTH, 0.2), []]
    subtree_end, position_ids = vectors(*walks, length=640)

    def sees(row, head, query, key):
        inside = (key <= query) & (query < subtree_end[row, key])
        return inside if window is None else inside & (position_ids[row, query] - position_ids[row, key] < window)

    expected = create_block_mask(sees, len(walks), None, 640, 640, device="cpu")
    assert_same_tiles(flex.block_mask_of(subtree_end, position_ids, window), expected)
    kinds = [tiles.sum() for tiles in (expected.kv_num_blocks, expected.full_kv_num_blocks)]
    assert kinds[0] > 0 and (kinds[1] > 0) == (window in (None, 300)), "the windows below two tiles have no full tile"


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_tiles_do_not_trust_the_shape_of_the_tree(data, window):
    """Any ends and any depths, of tiles of 4 positions, two rows; every pair of every tile is looked at."""
    rows = [
        [
            [data.draw(st.integers(position + 1, 24)) for position in range(24)],
            data.draw(st.lists(st.integers(0, 20), min_size=24, max_size=24)),
        ]
        for _ in range(2)
    ]
    subtree_end, position_ids = torch.tensor(rows, dtype=torch.int32).transpose(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "TILE", 4)
        some, every = flex._tile_pairs(subtree_end, position_ids, window)
    off_diagonal = ~torch.eye(6, dtype=torch.bool)
    tiles = visible(subtree_end, position_ids, window).view(2, 6, 4, 6, 4).transpose(2, 3).flatten(3)
    assert torch.equal(some & off_diagonal, tiles.any(3) & off_diagonal)
    assert torch.equal(every, tiles.all(3))


def test_padded_lengths_are_few_and_near():
    lengths = [flex.padded_length(length) for length in range(1, 2**15 + 1)]
    assert all(length <= padded < length + 128 + length / 8 for length, padded in enumerate(lengths, 1))
    assert all(padded % 128 == 0 for padded in lengths)
    assert len(set(lengths)) == 8 + 8 * 5  # 1 to 8 tiles, and 8 for each doubling up to 256
    for kept in (128, 1024, 1152, 4096, 10 * 1024, 12 * 1024, 40 * 1024, 2**17):
        assert flex.padded_length(kept) == kept


# --- cost


MEASURE_MEMORY = """
import json, sys
import numpy as np, torch
from measure import peak_memory
from dagpack_hf.attention import flex
torch.set_num_threads(1)
length = int(sys.argv[1])
depths = np.tile(np.arange(length // 64), 64)
ends = np.repeat((np.arange(64) + 1) * (length // 64), length // 64)
subtree_end, position_ids = torch.from_numpy(ends).int()[None], torch.from_numpy(depths).int()[None]
flex.block_mask_of(subtree_end[:, :1024].clamp(max=1024), position_ids[:, :1024], 100)
kept, peaks = [], []
for window in (None, 1000):
    peaks.append(peak_memory(lambda: kept.append(flex.block_mask_of(subtree_end, position_ids, window))))
print(json.dumps(peaks))
"""


@pytest.mark.parametrize("length", [65_536, 131_072])
def test_memory_grows_with_the_pairs_of_tiles(length):
    """A byte for each key and query tile would be 128 bytes for each pair of tiles, and `T * T` pairs 16,384."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(length)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        capture_output=True,
        text=True,
        check=True,
    )
    for peak_mib in json.loads(done.stdout):
        if peak_mib is None:
            pytest.skip("the peak of resident memory is known on Linux only")
        assert 0 < peak_mib * 2**20 < 110 * (length / 128) ** 2


@pytest.mark.parametrize("window", [None, 40])
def test_a_mask_is_made_without_reading_values(window):
    """What reads a value waits for the GPU; tensors without values find out."""
    with FakeTensorMode():
        subtree_end, position_ids = torch.ones(2, 2, 300, dtype=torch.int32)
        block_mask = flex.block_mask_of(subtree_end, position_ids, window)
    assert block_mask.kv_indices.shape == (2, 1, 3, 3)


# --- compilation


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that the kernel is compiled to; they are computed by eager FlexAttention."""
    compiled: list[torch.fx.GraphModule] = []
    compile_graph = torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_graph(function, backend=backend, **options)
    )
    monkeypatch.setattr(flex, "_kernel", lambda device: flex._compiled_flex_attention())
    flex._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()
    flex._compiled_flex_attention.cache_clear()


@pytest.mark.parametrize("options", [{}, {"softcap": 0.7}, {"sinks_H": torch.arange(4.0)}])
@pytest.mark.parametrize("window", [None, 40])
def test_ten_steps_with_different_trees_compile_once(graphs, window, options):
    for step in range(10):
        visibility = DagVisibility(*vectors(bushy(step, 384 - 10 * step), bushy(step, 300, 0.2), length=384))
        *inputs, _ = random_inputs(2, 384, torch.float32, seed=step)
        found = flex.attend(*inputs, visibility, window=window, **options)
        expected = dense.attend(*inputs, visibility, window=window, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    assert len(graphs) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_the_compiled_kernel_equals_dense(monkeypatch):
    """As on a GPU, but by PyTorch's code for CPU; that one knows no log-sum-exp, so there are no sinks here."""
    monkeypatch.setattr(flex, "_kernel", lambda device: flex._compiled_flex_attention())
    flex._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    query, key, _, _ = random_inputs(2, 300, torch.float32)
    for step in range(10):
        visibility = DagVisibility(*vectors(bushy(step, 290), bushy(step + 10, 300, 0.2), length=300))
        with torch.no_grad():
            found = flex.attend(query, key, key, visibility, window=40)
        expected = dense.attend(query, key, key, visibility, window=40)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_model_compiles_once_for_each_distinct_window(graphs):
    model = tiny_model("qwen2_sliding", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    enable(model, "flex")
    for step in range(10):
        subtree_end, position_ids = vectors(bushy(step, 250), length=256)
        input_ids = torch.randint(VOCABULARY, (1, 256), generator=torch.Generator().manual_seed(step))
        visibility = DagVisibility(subtree_end, position_ids, "flex")
        with torch.no_grad():
            model(input_ids=input_ids, position_ids=position_ids.long(), dag_visibility=visibility, use_cache=False)
    assert len(graphs) == 2


def test_batches_of_any_width_compile_for_few_lengths(graphs):
    """27 widths from 2,000 to 2,624 are padded to 2,048, 2,304, 2,560 and 2,816."""
    for width in range(2000, 2625, 24):
        inputs = torch.randn(3, 1, 1, width, 16)
        flex.attend(*inputs, DagVisibility(*vectors([0] * width)))
    assert len(graphs) == 4


def test_too_many_lengths_are_an_error_and_not_a_slow_kernel(graphs, monkeypatch):
    monkeypatch.setattr(flex, "_COMPILATIONS", 2)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for tiles in (1, 2, 3, 4):
            flex.attend(*torch.randn(3, 1, 1, 128 * tiles, 16), DagVisibility(*vectors([0] * 128 * tiles)))
    assert len(graphs) == 2


# --- gradients and checkpointing


def compute_by_tiles(
    query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options
) -> Tensor | tuple[Tensor, AuxOutput]:
    """FlexAttention with a backward pass: full tiles are not masked, partial ones are, others are not computed."""
    rows, heads, length, size = query.shape
    assert enable_gqa == (heads != key.shape[1]) and block_mask.shape[2:] == (length, length)
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    partial, full = (torch.zeros(rows, 1, length, length, dtype=torch.bool) for _ in range(2))
    for seen, counts, indices in (
        (partial, block_mask.kv_num_blocks, block_mask.kv_indices),
        (full, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for row, _, tile in np.ndindex(*counts.shape):
            for other in indices[row, 0, tile, : counts[row, 0, tile]].tolist():
                seen[row, 0, tile * 128 : tile * 128 + 128, other * 128 : other * 128 + 128] = True
    seen = full | partial & create_mask(block_mask.mask_mod, rows, 1, length, length, device="cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    output = scores.softmax(-1) @ value
    return (output, AuxOutput(lse=scores.logsumexp(-1))) if return_aux else output


@pytest.fixture
def with_backward(monkeypatch):
    """Let flex train on CPU."""
    monkeypatch.setattr(flex, "_kernel", lambda device: compute_by_tiles)
    monkeypatch.setattr(flex, "_refuse_backward_on_cpu", lambda *inputs: None)


@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 0.7}, {"sinks": True}, {"window": 150, "sinks": True}]
)
def test_gradients_equal_dense(with_backward, options):
    """Of queries, keys, values and sinks, at a length that is padded."""
    options = dict(options)
    visibility = DagVisibility(*vectors(SHAPES["star"], bushy(3, 500), length=LENGTH))
    inputs = [x.requires_grad_() for x in random_inputs(2, LENGTH)]
    if not options.pop("sinks", False):
        inputs[3] = None
    output_grad = random_inputs(2, LENGTH, seed=1)[2].repeat_interleave(2, dim=1)
    found, expected = (
        torch.autograd.grad(
            attend(*inputs[:3], visibility, sinks_H=inputs[3], **options),
            [x for x in inputs if x is not None],
            output_grad,
        )
        for attend in (flex.attend, dense.attend)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_computed_again_take_the_mask_that_is_there(with_backward, monkeypatch, name, reentrant):
    """Gradient checkpointing: one mask for each window, and the gradients of the dense backend without it."""
    built: list[int | None] = []
    attended: list[int | None] = []
    build, attend = flex.block_mask_of, flex.attend

    def block_mask_of(subtree_end: Tensor, position_ids: Tensor, window: int | None) -> BlockMask:
        built.append(window)
        return build(subtree_end, position_ids, window)

    monkeypatch.setattr(flex, "block_mask_of", block_mask_of)
    monkeypatch.setitem(
        sys.modules["dagpack_hf.attention.interface"]._ATTEND,
        "flex",
        lambda *inputs, window, **options: attended.append(window) or attend(*inputs, window=window, **options),
    )
    model = tiny_model(name)
    model.train()
    subtree_end, position_ids = vectors(bushy(0, 200), bushy(1, 180), length=200)
    input_ids = torch.randint(VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(0))
    gradients = []
    for backend in ("dense", "flex"):
        enable(model, backend)
        if backend == "flex":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        visibility = DagVisibility(subtree_end, position_ids, backend)
        logits = model(
            input_ids=input_ids, position_ids=position_ids.long(), dag_visibility=visibility, use_cache=False
        ).logits
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), input_ids.flatten()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert sorted(built, key=bool) == [None, WINDOW]
    assert len(attended) == 2 * model.config.num_hidden_layers and set(attended) == {None, WINDOW}
    expected, found = gradients
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter in expected:
        torch.testing.assert_close(found[parameter], expected[parameter], rtol=0, atol=1e-5 * largest.item())

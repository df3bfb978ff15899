"""The self-check of recurrent layers: it passes what is right, and finds each fault that is planted."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise

import pytest
import torch

from dagpack_hf.attention import UnsupportedModelError, packed_attention, probe
from dagpack_hf.attention import comparison as rows_of_the_probe
from dagpack_hf.recurrent import mamba2
from dagpack_hf.recurrent.functions import CARRIERS
from dagpack_hf.recurrent.modules import recurrent_modules
from dagpack_hf.recurrent.states import DagStates, Places, plan_of
from tests.shrunk_models import tiny_causal_model

torch.set_num_threads(1)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

CONVOLUTION = "lfm2"
DELTA_RULE = "qwen3_5_text"
MAMBA2 = "nemotron_h"
"""Its time steps are limited from below."""


@cache
def model_of(model_type: str, dtype: torch.dtype):
    return tiny_causal_model(model_type, dtype)


def check(model_type: str, dtype: torch.dtype) -> float:
    model = model_of(model_type, dtype)
    with packed_attention(model):
        return probe(model)


def refusal(model_type: str, dtype: torch.dtype) -> str:
    with pytest.raises(UnsupportedModelError) as error:
        check(model_type, dtype)
    return str(error.value)


@DTYPES
@pytest.mark.parametrize("model_type", [CONVOLUTION, DELTA_RULE, MAMBA2])
def test_what_is_right_passes(model_type, dtype):
    assert check(model_type, dtype) < (3e-5 if dtype == torch.float32 else 3e-2)


def test_nothing_is_left_on_the_model():
    model = model_of(DELTA_RULE, torch.float32)
    check(DELTA_RULE, torch.float32)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@DTYPES
@pytest.mark.parametrize("model_type", [CONVOLUTION, DELTA_RULE, MAMBA2])
def test_a_layer_that_is_not_reached(model_type, dtype):
    """Something above it keeps the keyword arguments to itself."""
    model = model_of(model_type, dtype)
    module = recurrent_modules(model)[-1]

    def drop(layer, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if not name.startswith("dag_")}

    handle = model.get_submodule(module.name).register_forward_pre_hook(drop, with_kwargs=True)
    try:
        message = refusal(model_type, dtype)
    finally:
        handle.remove()
    assert f"{module.class_name} at {module.name} did not call causal_conv1d_fn with dag_states" in message


@DTYPES
@pytest.mark.parametrize(
    ("model_type", "function"),
    [
        (CONVOLUTION, "causal_conv1d_fn"),
        (DELTA_RULE, "causal_conv1d_fn"),
        (DELTA_RULE, "torch_chunk_gated_delta_rule"),
        (MAMBA2, "causal_conv1d_fn"),
        (MAMBA2, "mamba2_chunk_scan"),
    ],
)
def test_a_function_that_is_reached_and_computes_the_flat_row(monkeypatch, model_type, function, dtype):
    monkeypatch.setitem(CARRIERS, function, lambda original, states, *args, **kwargs: original(*args, **kwargs))
    assert "is altered, the logits of the" in refusal(model_type, dtype)


@DTYPES
@pytest.mark.parametrize("model_type", [CONVOLUTION, DELTA_RULE, MAMBA2])
def test_a_convolution_without_ancestors(monkeypatch, model_type, dtype):
    runs = DagStates.runs

    class Halved(Places):
        """Runs stand where they do, and zeros in place of what comes before each."""

        def __init__(self, places):
            self.__dict__.update(places.__dict__)
            own = torch.zeros(len(self._position_M), dtype=torch.bool)
            own[self._place_N] = True
            self._empty = (~own).nonzero()[:, 0]

    monkeypatch.setattr(DagStates, "runs", lambda states, above, device: Halved(runs(states, above, device)))
    assert "of the probe its logits differ by" in refusal(model_type, dtype)


@DTYPES
@pytest.mark.parametrize("fault", ["another parent", "no parent"])
def test_a_delta_rule_that_goes_on_from_the_wrong_state(monkeypatch, fault, dtype):
    chains = DagStates.chains

    def wrong(states, device):
        places, levels = chains(states, device)
        levels = copy.deepcopy(levels)
        for above, calls in pairwise(levels):
            for call in calls:
                call.parents_C = (call.parents_C + 1) % sum(each.shape[0] for each in above)
        return places, levels

    if fault == "another parent":
        monkeypatch.setattr(DagStates, "chains", wrong)
    else:
        rule = CARRIERS["torch_chunk_gated_delta_rule"]

        def from_zero(original, states, *args, **kwargs):
            return rule(lambda *a, initial_state, **k: original(*a, initial_state=None, **k), states, *args, **kwargs)

        monkeypatch.setitem(CARRIERS, "torch_chunk_gated_delta_rule", from_zero)
    assert "computes packed rows wrongly" in refusal(DELTA_RULE, dtype)


@DTYPES
@pytest.mark.parametrize("fault", ["another parent", "no parent"])
def test_a_scan_that_goes_on_from_the_wrong_state(monkeypatch, fault, dtype):
    before = mamba2._states_before

    def wrong(added, decay, steps):
        if fault == "no parent":
            return torch.zeros_like(before(added, decay, steps))
        others = [(parents + 1) % len(above) for above, parents in pairwise(steps)]
        return before(added, decay, [steps[0], *others])

    monkeypatch.setattr(mamba2, "_states_before", wrong)
    assert "computes packed rows wrongly" in refusal(MAMBA2, dtype)


def keep_padding(places: Places, x: torch.Tensor) -> torch.Tensor:
    """Empty places hold the values of some position."""
    return x.index_select(0, places._position_M)


@DTYPES
def test_padding_that_writes_to_the_state_of_a_delta_rule(monkeypatch, dtype):
    """The first branch is padded to the length of the second, and its end is where its leaves go on from."""
    rule = CARRIERS["torch_chunk_gated_delta_rule"]

    def padded(original, states, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(Places, "spread", keep_padding)
            return rule(original, states, *args, **kwargs)

    monkeypatch.setitem(CARRIERS, "torch_chunk_gated_delta_rule", padded)
    assert "computes packed rows wrongly" in refusal(DELTA_RULE, dtype)


@DTYPES
def test_time_steps_of_padding_reach_no_state_of_a_scan(monkeypatch, dtype):
    """Were they limited from below like others, nothing would change: cells are padded below leaves only."""
    spread, scan = Places.spread, CARRIERS["mamba2_chunk_scan"]
    filled = []

    def limited(places, x):
        x_M = spread(places, x)
        if x.dim() == 2 and places._empty is not None:  # time steps
            filled.append(len(places._empty))
            x_M = x_M.index_fill(0, places._empty, 0.5)
        return x_M

    def padded(original, states, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(Places, "spread", limited)
            return scan(original, states, *args, **kwargs)

    right = check(MAMBA2, dtype)
    monkeypatch.setitem(CARRIERS, "mamba2_chunk_scan", padded)
    assert check(MAMBA2, dtype) == right and filled and min(filled) > 0


def test_the_row_of_the_probe_has_what_can_go_wrong():
    row = rows_of_the_probe.probe_row(model_of(DELTA_RULE, torch.float32), "auto", recurrent=True)
    plan = plan_of(row.visibility.subtree_end_BT)
    first, second, third = plan.chains(plan.chain_length()).levels
    assert [call.shape for call in first] == [(2, 64)]
    [call] = second
    assert call.lengths.tolist() == [96, 64] and call.goes_on, "the first branch is padded"
    assert sum(call.shape[0] for call in third) == 2
    assert 1 in {span.stop - span.start for span in row.spans.values()}

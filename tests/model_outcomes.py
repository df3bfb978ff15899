"""What becomes of a causal language model on packed rows: exact, refused, wrong or not built; and the table of all."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from dagpack_hf.attention import UnsupportedModelError, check_model, packed_attention, probe, probe_head, route_of
from dagpack_hf.recurrent import recurrent_modules
from tests.packed_comparison import TOLERANCE, difference, float64_everywhere, rows
from tests.reference_recurrent import recurrent_rows
from tests.shrunk_models import flipped_options, sliding_options, tiny_causal_model

SLIDING = "sliding window"
"""Variant of a model that comes without a sliding window."""

SECONDS = 120
"""Time of one model type in a process of its own."""

MEMORY = 12 << 30
"""Bytes of address space of that process."""


@dataclass(frozen=True)
class Outcome:
    """One line of the table.

    Attributes:
        model_type: Key of transformers' table.
        variant: `""` for the defaults of the config, or what is changed.
        model_class: Name of the class, `""` if it could not be built.
        result: `"exact"`, `"refused"`, `"wrong"` or `"not built"`.
        route: How an exact model learns what each position sees.
        layers: Kinds of layers.
        head: Whether TRL's fused LM head gives the model's logits, of an exact model.
        note: The reason.
    """

    model_type: str
    variant: str
    model_class: str
    result: str
    route: str = ""
    layers: str = ""
    head: bool | None = None
    note: str = ""


def outcomes_of(model_type: str, flips: bool = False) -> list[Outcome]:
    """Try a model type as its config comes, and with a sliding window if it can have one but comes without.

    Args:
        model_type: Key of transformers' table.
        flips: Whether to try each of its options that are true or false the other way, too.
    """
    with float64_everywhere():
        found = [_outcome(model_type, "", {})]
        if found[0].result == "exact":
            if options := sliding_options(model_type):
                found.append(_outcome(model_type, SLIDING, options))
            for options in flipped_options(model_type) if flips else ():
                found.append(_outcome(model_type, re.sub(r"[{}' ]", "", str(options)), options))
        return found


def _outcome(model_type: str, variant: str, options: dict[str, Any]) -> Outcome:
    try:
        model = tiny_causal_model(model_type, torch.float64, **options)
    except Exception as error:  # whatever a config or a constructor may raise
        return Outcome(model_type, variant, "", "not built", note=_first_line(error))
    name, layers = type(model).__name__, _layers(model)
    try:
        check_model(model)
        with packed_attention(model):
            probe(model)
            return _compared(model, model_type, variant, layers)
    except UnsupportedModelError as error:
        return Outcome(model_type, variant, name, "refused", layers=layers, note=_reason(error, name))


def _compared(model: PreTrainedModel, model_type: str, variant: str, layers: str) -> Outcome:
    name, route = type(model).__name__, route_of(model)
    found = difference(model, recurrent_rows() if recurrent_modules(model) else rows())
    if not found.worst < TOLERANCE:
        note = f"logits off by {found.logits:.0e}, gradients by {found.gradients:.0e}"
        return Outcome(model_type, variant, name, "wrong", route, layers, note=note)
    note, head = "", True
    try:
        add_fused_lm_head(model)
        probe_head(model)
    except UnsupportedModelError as error:
        note, head = _reason(error, name), False
    return Outcome(model_type, variant, name, "exact", route, layers, head, note)


def _layers(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["sliding" if getattr(config, "sliding_window", None) else "full"]
    return ", ".join(dict.fromkeys(each.removesuffix("_attention") for each in layer_types))


def _reason(error: Exception, name: str) -> str:
    text = str(error).removeprefix(f"{name} cannot be trained on packed rows: ")
    return re.sub(r"\b(\d\.\de[-+]\d+|inf|nan)\b(?= \(relative\)|, relative)", "…", text)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if 'Class validation' in lines[0] else lines[0]}"[:160]


# --- in a process of its own


def outcomes_in_bounds(model_type: str) -> list[Outcome]:
    """`outcomes_of` with limits of time and memory, so that no model takes the run down with it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.model_outcomes"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcomes, args=(sender, model_type))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return [Outcome(model_type, "", "", "not built", note=f"took more than {SECONDS} s")]
        return receiver.recv()
    except EOFError:
        process.join()
        return [Outcome(model_type, "", "", "not built", note=f"its process ended with code {process.exitcode}")]
    finally:
        process.kill()
        process.join()


def _send_outcomes(sender: Connection, model_type: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        sender.send(outcomes_of(model_type, flips=True))
    except Exception:
        sender.send([Outcome(model_type, "", "", "wrong", note=traceback.format_exc(limit=-3))])


# --- the table


def table(outcomes: Iterable[Outcome]) -> str:
    """`docs/models.md`."""
    outcomes = list(outcomes)
    defaults = [each for each in outcomes if not each.variant]
    count = Counter(each.result for each in defaults)
    figures = {
        "types": len(defaults),
        "version": transformers.__version__,
        "tolerance": f"{TOLERANCE:.0e}",
        "routes": _listed_routes(Counter(each.route for each in defaults if each.result == "exact")),
        "trained": sum(each.head is True for each in defaults),
    }
    flips = Counter(each.result for each in outcomes if each.variant not in ("", SLIDING))
    figures["flips"] = ", ".join(f"{flips[result]} {result}" for result in RESULTS)
    page = PAGE.format(**figures, **{result.replace(" ", "_"): count[result] for result in RESULTS})
    shown = [each for each in outcomes if each.variant in ("", SLIDING) or each.result != "exact"]
    return page + "".join(f"{_line(each)}\n" for each in shown)


RESULTS = ("exact", "refused", "wrong", "not built")

PAGE = """\
# Models

All {types} types of causal language model that transformers {version} knows, each shrunk to some thousand weights with
every type of its layers, and computed in float64: two packed rows with branches, several roots, replayed ancestors and
padding, longer than any window, and than two cells of recurrent layers, against each sequence alone with the model's
own eager attention. Logits and the gradients of all parameters must agree to {tolerance}, relative to the largest.

    DAGPACK_WRITE_DOCS=1 pytest -m matrix tests/test_models.py

writes this page; without the variable the run compares it.

| result | model types | |
| --- | ---: | --- |
| exact | {exact} | {routes} |
| refused | {refused} | with a message that says why |
| wrong | {wrong} | |
| not built | {not_built} | needs another package or model, or its config has no valid default |

{trained} of the exact ones can be trained with `DagSFTTrainer`: its loss comes from TRL's fused LM head, which knows
the usual heads only. The others are exact when called, and refused by the trainer.

A ready mask is dense: it takes a byte for each pair of positions, and computes them all. A model that comes with full
attention but can have a sliding window is listed a second time with one. Each option of an exact model that is true or
false was also tried the other way: {flips}; those that are not exact are listed.

| model type | class | result | route | layers | trainer | note |
| --- | --- | --- | --- | --- | --- | --- |
"""


def _listed_routes(by_route: Counter[str]) -> str:
    return ", ".join(f"{number} by {route}" for route, number in sorted(by_route.items(), key=lambda item: -item[1]))


def _line(outcome: Outcome) -> str:
    name = f"`{outcome.model_type}`" + (f", {outcome.variant}" if outcome.variant else "")
    trainer = {True: "yes", False: "no", None: ""}[outcome.head]
    note = outcome.note.replace("\n", " ").replace("|", "\\|")
    cells = [name, outcome.model_class, outcome.result, outcome.route, outcome.layers, trainer, note]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")

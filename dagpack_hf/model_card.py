"""The part of a model card that says what the model was trained on, how that was packed, and how it was weighted.

Numbers only: reports also name session files and turns, which a card must not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dagpack_hf import __version__
from dagpack_hf.card import code, packing_figures, redaction_note, table
from dagpack_hf.pack_report import PackReport
from dagpack_hf.pi import LoadReport
from dagpack_hf.redact import RedactionReport
from dagpack_hf.render import RenderReport

if TYPE_CHECKING:
    from dagpack_hf.config import DagSFTConfig

_SECTION = """

## Data and packing

Trained with dagpack_hf {version}: sequences that share a prefix are merged, and shared tokens are computed once.

{options}
"""

_WEIGHTING = {
    "once": "each distinct target counts once",
    "paths": "each target as often as sequences train it, as in ordinary training",
}

_NORMALIZATION = {
    "corpus": "every target has the same share of the gradient over an epoch",
    "step": "each step divides by its own weight",
}


def training_section(
    args: DagSFTConfig,
    packed: PackReport | None = None,
    rendered: RenderReport | None = None,
    loaded: LoadReport | None = None,
    redaction: RedactionReport | None = None,
) -> str:
    """Markdown of the section.

    Args:
        args: options of the trainer.
        packed: report of the packing; `None` where batches are packed on the fly, or rows came packed.
        rendered: report of the rendering of conversations.
        loaded: report of the loading of sessions.
        redaction: report of the scan for secrets.
    """
    parts = [_SECTION.format(version=__version__, options=table({"training": _options(args)}))]
    if packed is not None:
        parts.append(table({"packing": packing_figures(packed)}) + "\n")
    if loaded is not None:
        parts.append(_sessions(loaded))
    if rendered is not None:
        parts.append(_counts(f"{rendered.turns:,} turns are trained", "skipped", rendered.skipped))
    if redaction is not None:
        parts.append(redaction_note(redaction.to_dict()).strip() + "\n")
    return "\n".join(parts)


def _options(args: DagSFTConfig) -> dict[str, str]:
    normalization = cast(str, args.loss_normalization)
    return {
        "window length (`max_length`)": f"{args.max_length:,}",
        "merged": "the whole data set" if args.packing_scope == "dataset" else "the examples of each batch",
        "loss weighting": f"{code(args.loss_weighting)}: {_WEIGHTING[args.loss_weighting]}",
        "loss normalization": f"{code(normalization)}: {_NORMALIZATION[normalization]}",
        "longer sequences (`overflow`)": code(args.overflow),
    }


def _sessions(loaded: LoadReport) -> str:
    left_out = {**loaded.untrained_turns, **loaded.duplicate_turns}
    return _counts(
        f"Pi sessions: {loaded.files:,} files with {loaded.turns:,} turns, of which {loaded.targets:,} are targets",
        "left out",
        left_out,
    )


def _counts(text: str, what: str, reasons: Mapping[str, Any]) -> str:
    """A sentence, and what was left out by reason."""
    listed = ", ".join(f"{count:,} x {code(reason)}" for reason, count in sorted(reasons.items()))
    return f"{text}{f'; {what}: {listed}' if listed else ''}.\n"

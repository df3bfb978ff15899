"""Session files -> the conversational data set.

Every branch of every file becomes a message list, and the rows are the maximal lists among those that end with a
target. Forked files repeat entries, and a turn is trained once. Anything left out is counted and, if it was damage,
warned about.

Cost: one pass over the files; decoded entries of one file and the message texts of all files are held in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, overload

from datasets import Dataset

from dagpack_hf.conversations import ConversationRows, Provenance
from dagpack_hf.pi.reader import SessionFile
from dagpack_hf.pi.report import LoadReport, Tally
from dagpack_hf.pi.turns import TARGET_STOP_REASONS, Images, PathLike, iter_turns

logger = logging.getLogger(__name__)


@overload
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = ...,
    *,
    images: Images = ...,
    on_error: Literal["skip", "raise"] = ...,
    text_only_models: Collection[str] = ...,
    system_update_models: Collection[str] = ...,
    target_stop_reasons: Collection[str] = ...,
    system_prompt: str | Callable[[SessionFile], str | None] | None = ...,
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None = ...,
    return_report: Literal[False] = ...,
) -> Dataset: ...
@overload
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = ...,
    *,
    images: Images = ...,
    on_error: Literal["skip", "raise"] = ...,
    text_only_models: Collection[str] = ...,
    system_update_models: Collection[str] = ...,
    target_stop_reasons: Collection[str] = ...,
    system_prompt: str | Callable[[SessionFile], str | None] | None = ...,
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None = ...,
    return_report: Literal[True],
) -> tuple[Dataset, LoadReport]: ...
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = None,
    *,
    images: Images = "placeholder",
    on_error: Literal["skip", "raise"] = "skip",
    text_only_models: Collection[str] = (),
    system_update_models: Collection[str] = (),
    target_stop_reasons: Collection[str] = TARGET_STOP_REASONS,
    system_prompt: str | Callable[[SessionFile], str | None] | None = None,
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None = None,
    return_report: bool = False,
) -> Dataset | tuple[Dataset, LoadReport]:
    """Load pi sessions as a conversational data set.

    Args:
        paths: A file, a folder (searched at any depth for `*.jsonl`), several of these, or `None` for pi's own folder
            (`PI_CODING_AGENT_SESSION_DIR`, else `PI_CODING_AGENT_DIR/sessions`, else `~/.pi/agent/sessions`).
        images: `"placeholder"` puts pi's text for models without image input in place of images, so that all content
            is text; `"keep"` leaves images in, as parts of content.
        on_error: `"skip"` leaves out what cannot be read and counts it; `"raise"` stops at the first such place.
        text_only_models: Models without image input, as `model` or `provider/model`; what files show is added.
        system_update_models: Models that accept system messages in mid-session, as `model` or `provider/model`. For
            all others pi folds them into the first message.
        target_stop_reasons: Stop reasons of turns that are targets; `length` is the one that may be added.
        system_prompt: System prompt of turns for which the file records none (sessions of pi before 0.86, and the old
            part of a session resumed since), or a function of the session that returns it.
        tools: Their function schemas, or a function of the session that returns them.
        return_report: Return the counts too.

    Returns:
        A data set with one row for each maximal message list, or the data set and a `LoadReport`. Columns:
        `messages` and `tools` (chat form, JSON text in Arrow), `trained` (bool for each message; a target is true in
        exactly one row), `session`, `session_id`, `cwd` and `timestamp` of the turn that ends the row, `entry_ids` and
        `models` (for each message, null where a message comes from no single entry or no model).

    Raises:
        FileNotFoundError: If a path, or pi's own folder, is not there.
        SessionError: With `on_error="raise"`, for the first file or line that cannot be used.

    Example:
    ```python
    dataset = load_sessions("~/.pi/agent/sessions")
    dataset[0]["messages"][-1]["content"]
    ```
    """
    tally = Tally()
    rows = ConversationRows()
    turns = iter_turns(
        paths,
        images=images,
        on_error=on_error,
        text_only_models=text_only_models,
        system_update_models=system_update_models,
        target_stop_reasons=target_stop_reasons,
        system_prompt=system_prompt,
        tools=tools,
        progress=True,
        tally=tally,
    )
    session = None
    for turn in turns:
        if turn.session != session:
            rows.forget_links()
            session = turn.session
        if not turn.trained:
            continue
        provenance = Provenance(turn.session, turn.session_id, turn.cwd, turn.timestamp)
        if not rows.add(turn.target, turn.tools, provenance):
            tally.targets -= 1
            tally.duplicate_turns["same messages and reply as an earlier turn"] += 1
    report = tally.report()
    if not report.complete or report.unrecorded_prompts:
        logger.warning("Not everything in the session files could be used as it is.\n%s", report)
    return (rows.dataset(), report) if return_report else rows.dataset()

"""Session files -> turns: one `Turn` for each assistant entry, with the request that produced it.

All branches count, not only the one pi has its cursor on. Which turns are targets: replies that ended by themselves
(`stop`, `toolUse`), each once, however many forked files repeat it. What a file does not say is decided here, once:

    * A model takes images unless the file shows that it does not (a tool result that pi marked so, before or after
      the turn), or the caller names it in `text_only_models`.
    * A model gets later system messages folded into the first one, pi's default, unless the caller names it in
      `system_update_models`.
    * A request follows the rules of pi before 1.x if no system message is recorded above it (those files hold none)
      and the reply lacks the duration that 1.x records.

Cost: linear in entries for each file; the turns of a file share their messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from datasets.utils import tqdm

from dagpack_hf.conversations import Message, dumps
from dagpack_hf.pi.context import (
    NO_SYSTEM_PROMPT,
    Context,
    ContextBuilder,
    SystemPrompt,
    block_text,
    blocks,
    content_text,
    mapping,
)
from dagpack_hf.pi.reader import Problem, SessionError, SessionFile, read_session
from dagpack_hf.pi.report import Tally
from dagpack_hf.pi.tree import EntryTree, build_tree
from dagpack_hf.pi.wire import RequestModel, RequestWriter, model_key, reply

PathLike = str | os.PathLike[str]
Images = Literal["placeholder", "keep"]
TARGET_STOP_REASONS = ("stop", "toolUse")
_NO_IMAGES_NOTE = "[Current model does not support images"


@dataclass(frozen=True)
class Turn:
    """One assistant entry: the request, and the reply.

    Attributes:
        session: Path of the session file, as it was given or found.
        session_id: Id in the file's header.
        cwd: Working directory in the file's header.
        entry: Id of the assistant entry.
        provider: Provider of the model.
        model: Id of the model.
        timestamp: Time of the entry, as stored (ISO 8601).
        stop_reason: `stop`, `toolUse`, `length`, `error`, `aborted`, or what else the file has.
        untrained: Why the turn is no target, `None` if it is one.
        duplicate: Whether an earlier file, or an earlier entry, holds the same turn.
        tools: Function schemas offered with the request, `None` if there are none or the file does not say.
        context: Last message of the request, linked to the ones before it.
        target: The reply, linked to the request.
    """

    session: str
    session_id: str
    cwd: str | None
    entry: str
    provider: str
    model: str
    timestamp: str | None
    stop_reason: str | None
    untrained: str | None
    duplicate: bool
    tools: list[dict[str, Any]] | None
    context: Message | None
    target: Message

    @property
    def trained(self) -> bool:
        """Whether the turn is a target."""
        return self.untrained is None and not self.duplicate

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request, as a fresh list in chat form; written out at each call."""
        return [] if self.context is None else [link.content() for link in self.context.chain()]

    @property
    def reply(self) -> dict[str, Any]:
        """The reply, as a fresh message in chat form."""
        return self.target.content()


def default_session_dir() -> Path:
    """Return pi's own session folder.

    `PI_CODING_AGENT_SESSION_DIR`, else `sessions` under `PI_CODING_AGENT_DIR`, else `~/.pi/agent/sessions`.
    """
    if sessions := os.environ.get("PI_CODING_AGENT_SESSION_DIR"):
        return Path(sessions).expanduser()
    agent = os.environ.get("PI_CODING_AGENT_DIR")
    return (Path(agent).expanduser() if agent else Path.home() / ".pi" / "agent") / "sessions"


def session_files(paths: PathLike | Iterable[PathLike] | None = None) -> list[str]:
    """List session files.

    Args:
        paths: A file, a folder (searched at any depth for `*.jsonl`), several of these, or `None` for pi's own folder.

    Returns:
        Paths in the order given, those of a folder sorted; each file once.

    Raises:
        FileNotFoundError: If a path, or pi's own folder, is not there.
    """
    if paths is None:
        paths = default_session_dir()
        if not paths.exists():
            raise FileNotFoundError(
                f"pi's session folder {paths} does not exist: name the files or folders to read, or set "
                "PI_CODING_AGENT_SESSION_DIR"
            )
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: dict[str, str] = {}
    for path in (os.path.expanduser(os.fspath(path)) for path in given):
        if not os.path.exists(path):
            raise FileNotFoundError(f"no such session file or folder: {path}")
        for file in _files_under(path) if os.path.isdir(path) else [path]:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def _files_under(folder: str) -> list[str]:
    found = []
    for parent, _, names in os.walk(folder):
        found += [os.path.join(parent, name) for name in names if name.endswith(".jsonl")]
    return sorted(path for path in found if os.path.isfile(path))


def iter_turns(
    paths: PathLike | Iterable[PathLike] | None = None,
    *,
    images: Images = "placeholder",
    on_error: Literal["skip", "raise"] = "skip",
    text_only_models: Collection[str] = (),
    system_update_models: Collection[str] = (),
    target_stop_reasons: Collection[str] = TARGET_STOP_REASONS,
    system_prompt: str | Callable[[SessionFile], str | None] | None = None,
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None = None,
    progress: bool = False,
    tally: Tally | None = None,
) -> Iterator[Turn]:
    """Yield every assistant entry of every file, in file order.

    Args:
        paths: As for `session_files`.
        images: `"placeholder"` puts pi's placeholder text for every image, and each message's content is one string;
            `"keep"` leaves images where the model of the turn takes them, and content of several parts stays a list.
        on_error: `"skip"` leaves out what cannot be read and counts it; `"raise"` stops at the first such place.
        text_only_models: Models without image input, as `model` or `provider/model`.
        system_update_models: Models that accept system messages in mid-session, as `model` or `provider/model`.
        target_stop_reasons: Stop reasons of turns that are targets; `length` is the one that may be added.
        system_prompt: System prompt of turns for which the file records none (sessions of pi before 0.86, and the old
            part of a session resumed since), or a function of the session that returns it.
        tools: Their function schemas, or a function of the session that returns them.
        progress: Show a progress bar over the files (`datasets.disable_progress_bars()` hides it).
        tally: Where to count; a fresh one by default.

    Yields:
        One turn for each assistant entry.

    Raises:
        FileNotFoundError: If a path is not there.
        SessionError: With `on_error="raise"`, for the first file or line that cannot be used.
        ValueError: If an option has an unknown value.
    """
    if images not in ("placeholder", "keep"):
        raise ValueError(f"images={images!r} is unknown: use 'placeholder' or 'keep'")
    if on_error not in ("skip", "raise"):
        raise ValueError(f"on_error={on_error!r} is unknown: use 'skip' or 'raise'")
    if failed := {"error", "aborted"} & set(target_stop_reasons):
        raise ValueError(f"target_stop_reasons holds {sorted(failed)}: a failed turn is never a target")
    tally = tally or Tally()
    seen: set[bytes] = set()
    for path in tqdm(session_files(paths), desc="Reading sessions", unit=" files", disable=not progress):
        session = _read(path, on_error, tally)
        if session is None:
            continue
        tree = build_tree(session)
        _count(session, [*session.problems, *tree.problems], on_error, tally)
        options = _ModelOptions(images, text_only_models, system_update_models)
        unrecorded = _unrecorded(session, system_prompt, tools)
        yield from _turns(session, tree, options, unrecorded, frozenset(target_stop_reasons), seen, tally)


def _read(path: str, on_error: str, tally: Tally) -> SessionFile | None:
    try:
        return read_session(path)
    except SessionError as error:
        if on_error == "raise":
            raise
        tally.note(tally.skipped_files, error.reason, path if error.line is None else f"{path}:{error.line}")
    except OSError as error:
        if on_error == "raise":
            raise
        tally.note(tally.skipped_files, f"cannot be read: {error.strerror}", path)
    return None


def _count(session: SessionFile, problems: Iterable[Problem], on_error: str, tally: Tally) -> None:
    for problem in problems:
        if problem.skipped and on_error == "raise":
            raise SessionError(session.path, problem.line, problem.reason)
        counts = tally.skipped_lines if problem.skipped else tally.repaired_lines
        tally.note(counts, problem.reason, f"{session.path}:{problem.line}")
    tally.files += 1
    tally.entries += len(session.entries)


def _unrecorded(
    session: SessionFile,
    system_prompt: str | Callable[[SessionFile], str | None] | None,
    tools: Sequence[dict[str, Any]] | Callable[[SessionFile], Sequence[dict[str, Any]] | None] | None,
) -> SystemPrompt:
    """Return the prompt and tools for requests of a file that it does not record."""
    text = system_prompt(session) if callable(system_prompt) else system_prompt
    schemas = tools(session) if callable(tools) else tools
    functions = [schema.get("function", schema) for schema in schemas or ()]
    if not text and not functions:
        return NO_SYSTEM_PROMPT
    return SystemPrompt((text,) if text else (), tools={function["name"]: function for function in functions})


@dataclass(frozen=True)
class _ModelOptions:
    """What the caller says about models."""

    images: Images
    text_only: Collection[str]
    system_updates: Collection[str]

    def model(self, message: dict[str, Any], context: Context | None, text_only: set[str]) -> RequestModel:
        """Return the request model of an assistant message."""
        provider, api, name = model_key(message)
        full = f"{provider}/{name}"
        keep = self.images == "keep"
        recorded = context is not None and bool(context.system.entries)
        return RequestModel(
            provider,
            api,
            name,
            images=keep and not {name, full} & (text_only | set(self.text_only)),
            parts=keep,
            system_updates=bool({name, full} & set(self.system_updates)),
            legacy=not recorded and "durationMs" not in message,
        )


def _turns(
    session: SessionFile,
    tree: EntryTree,
    options: _ModelOptions,
    unrecorded: SystemPrompt,
    target_stop_reasons: Collection[str],
    seen: set[bytes],
    tally: Tally,
) -> Iterator[Turn]:
    contexts = ContextBuilder(tree)
    writer = RequestWriter(unrecorded)
    text_only = _text_only_models(tree)
    for index, entry in enumerate(tree.entries):
        if entry["type"] != "message" or entry["message"]["role"] != "assistant":
            continue
        message = entry["message"]
        context = contexts.at(tree.parents[index])
        request = writer.request(context, options.model(message, context, text_only))
        provider, _, name = model_key(message)
        stop_reason = message.get("stopReason")
        untrained = None if stop_reason in target_stop_reasons else f"stop reason {stop_reason}"
        turn = Turn(
            session=session.path,
            session_id=session.session_id,
            cwd=session.cwd,
            entry=entry["id"],
            provider=provider,
            model=name,
            timestamp=entry["timestamp"] if isinstance(entry.get("timestamp"), str) else None,
            stop_reason=stop_reason if isinstance(stop_reason, str) else None,
            untrained=untrained,
            duplicate=_seen_before(entry, seen),
            tools=writer.system_prompt(context).schemas(),
            context=request,
            target=reply(message, entry["id"], request),
        )
        tally.turns += 1
        if untrained is not None:
            tally.untrained_turns[untrained] += 1
        elif turn.duplicate:
            tally.duplicate_turns["same entry id and content as an earlier turn"] += 1
        else:
            tally.targets += 1
            tally.unrecorded_prompts += writer.system_prompt(context) is NO_SYSTEM_PROMPT
        yield turn


def _seen_before(entry: dict[str, Any], seen: set[bytes]) -> bool:
    """Say whether a turn of this entry id and content came up before, and remember it."""
    message = entry["message"]
    content = [entry["id"], message.get("stopReason"), message.get("content")]
    digest = blake2b(dumps(content).encode(), digest_size=16).digest()
    if digest in seen:
        return True
    seen.add(digest)
    return False


def _text_only_models(tree: EntryTree) -> set[str]:
    """Return the models that a tool result of the file shows to take no images.

    pi 1.x records the model beside an image that it could not take; before, it added a note to the result, for the
    model whose call it answers.
    """
    models = set()
    for index, entry in enumerate(tree.entries):
        message = entry.get("message")
        if entry["type"] != "message" or not isinstance(message, dict) or message["role"] != "toolResult":
            continue
        named = mapping(message.get("details")).get("imageUnsupportedByModel")
        if isinstance(named, str):
            models.add(named)
        elif _NO_IMAGES_NOTE in content_text(message.get("content")) and _has_image(message):
            models.add(_model_above(tree, index))
    return models - {""}


def _has_image(message: dict[str, Any]) -> bool:
    return any(block.get("type") == "image" for block in blocks(message.get("content")))


def _model_above(tree: EntryTree, index: int) -> str:
    """Return `provider/model` of the nearest assistant entry above an entry, empty if there is none."""
    while (index := tree.parents[index]) >= 0:
        entry = tree.entries[index]
        if entry["type"] == "message" and entry["message"]["role"] == "assistant":
            provider, name = (block_text(entry["message"], key) for key in ("provider", "model"))
            return f"{provider}/{name}"
    return ""

"""Session files -> turns: one `Turn` for each assistant entry, with the request that produced it.

All branches count, not only the one pi has its cursor on. Which turns are targets: replies that ended by themselves
(`stop`, `toolUse`) and that the caller selects, each once, however many forked files repeat it.

A request's system prompt and tools are, in this order: what the recorder extension wrote above the turn, unless a
newer system message is above it; the system messages above it (pi since 0.86); an HTML export of the session; what
the caller supplies.

Cost: linear in entries for each file; the turns of a file share their messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from dagpack_hf.conversations import MessageTree, dumps, loads
from dagpack_hf.pi.context import NO_SYSTEM_PROMPT, ContextBuilder, SystemPrompt, block_text, mapping
from dagpack_hf.pi.files import session_files, with_progress
from dagpack_hf.pi.images import ImageStore
from dagpack_hf.pi.models import RequestModels
from dagpack_hf.pi.options import PathLike, ReadOptions, Selection
from dagpack_hf.pi.reader import Problem, SessionError, SessionFile, read_session
from dagpack_hf.pi.recorded import RECORD_TYPE, html_prompts, recorded_prompt
from dagpack_hf.pi.report import Tally
from dagpack_hf.pi.tree import EntryTree, build_tree
from dagpack_hf.pi.wire import RequestWriter

SAME_TURN = "same entry id and content as an earlier turn"
_WORD = re.compile(r"\w{1,40}", re.ASCII)


class Turn(NamedTuple):
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
        unprompted: Whether neither system prompt nor tools of the request are known.
        tools_json: JSON text of the function schemas offered with the request, `None` if there are none or they are
            not known.
        tree: The messages of the session's requests and replies.
        context: Last node of the request in `tree`, -1 for an empty request.
        target: Node of the reply, which continues the request.
        images: The session's images, if messages refer to them.
        duplicate: Whether an earlier file, or an earlier entry, holds the same turn.
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
    unprompted: bool
    tools_json: str | None
    tree: MessageTree
    context: int
    target: int
    images: ImageStore | None = None
    duplicate: bool = False

    @property
    def trained(self) -> bool:
        """Whether the turn is a target."""
        return self.untrained is None and not self.duplicate

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request, as a fresh list in chat form; written out at each call."""
        text = self.tree.json(self.context)
        return loads((text if self.images is None else self.images.restore(text)).decode())

    @property
    def reply(self) -> dict[str, Any]:
        """The reply, as a fresh message in chat form."""
        return loads(self.tree.texts[self.tree.text_of[self.target]].decode())

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The function schemas offered with the request, as a fresh list."""
        return None if self.tools_json is None else loads(self.tools_json)


def iter_turns(
    paths: PathLike | Iterable[PathLike] | None = None,
    *,
    progress: bool = False,
    tally: Tally | None = None,
    **options: Any,
) -> Iterator[Turn]:
    """Yield every assistant entry of every file, in file order.

    Args:
        paths: As for `session_files`.
        progress: Show a progress bar over the files (`datasets.disable_progress_bars()` hides it).
        tally: Where to count; a fresh one by default.
        **options: The fields of `ReadOptions`.

    Yields:
        One turn for each assistant entry.

    Raises:
        FileNotFoundError: If a path is not there.
        SessionError: With `on_error="raise"`, for the first file or line that cannot be used.
        ValueError: If an option has an unknown value.
    """
    reading = ReadOptions(**options)
    prompts = exported_prompts(reading)
    tally = tally or Tally()
    seen: set[bytes] = set()
    files = session_files(paths)
    for path in with_progress(files, files, disable=not progress):
        for turn in file_turns(path, reading, prompts, tally):
            if turn.untrained is None:
                if _seen_before(turn, seen):
                    turn = turn._replace(duplicate=True)
                    tally.duplicate_turns[SAME_TURN] += 1
                else:
                    tally.targets += 1
                    tally.unrecorded_prompts += turn.unprompted
            yield turn


def exported_prompts(options: ReadOptions) -> dict[str, SystemPrompt]:
    """Return prompts and tools by session id, from the HTML exports the caller names."""
    exports = options.html_exports
    if exports is None:
        return {}
    return html_prompts([exports] if isinstance(exports, str | os.PathLike) else exports)


def file_turns(path: str, options: ReadOptions, prompts: Mapping[str, SystemPrompt], tally: Tally) -> Iterator[Turn]:
    """Yield every assistant entry of one file.

    Args:
        path: The file.
        options: How to read it.
        prompts: Prompts and tools by session id, for turns that record none.
        tally: Where to count what was read and what was left out; targets are counted by the caller, who knows which
            turns came up before.
    """
    session = _read(path, options, tally)
    if session is None:
        return
    tree = build_tree(session)
    _count(session, [*session.problems, *tree.problems], options, tally)
    unrecorded = prompts.get(session.session_id) or _supplied(session, options)
    yield from _turns(session, tree, options, unrecorded, tally)


def _read(path: str, options: ReadOptions, tally: Tally) -> SessionFile | None:
    try:
        return read_session(path, images="drop" if options.images == "placeholder" else "reference")
    except SessionError as error:
        if options.on_error == "raise":
            raise
        tally.note(tally.skipped_files, error.reason, path if error.line is None else f"{path}:{error.line}")
    except OSError as error:
        if options.on_error == "raise":
            raise
        tally.note(tally.skipped_files, f"cannot be read: {error.strerror}", path)
    return None


def _count(session: SessionFile, problems: Iterable[Problem], options: ReadOptions, tally: Tally) -> None:
    for problem in problems:
        if problem.skipped and options.on_error == "raise":
            raise SessionError(session.path, problem.line, problem.reason)
        counts = tally.skipped_lines if problem.skipped else tally.repaired_lines
        tally.note(counts, problem.reason, f"{session.path}:{problem.line}")
    tally.files += 1
    tally.entries += len(session.entries)
    tally.dropped_images += session.dropped_images


def _supplied(session: SessionFile, options: ReadOptions) -> SystemPrompt:
    """Return the prompt and tools that the caller supplies for requests of a file that it does not record."""
    text = options.system_prompt(session) if callable(options.system_prompt) else options.system_prompt
    schemas = options.tools(session) if callable(options.tools) else options.tools
    if text is not None and not isinstance(text, str):
        raise ValueError(f"system_prompt= gives {text!r} for {session.path}: it must be a text or None")
    functions = [mapping(mapping(schema).get("function", schema)) for schema in schemas or ()]
    if not all(isinstance(function.get("name"), str) for function in functions):
        raise ValueError(
            f"tools= gives {schemas!r} for {session.path}: it must be a list of function schemas, or None"
        )
    if not text and not functions:
        return NO_SYSTEM_PROMPT
    return SystemPrompt((text,) if text else (), tools={function["name"]: dict(function) for function in functions})


def _turns(
    session: SessionFile, tree: EntryTree, options: ReadOptions, unrecorded: SystemPrompt, tally: Tally
) -> Iterator[Turn]:
    messages = MessageTree()
    own = _paths(tree)
    copies, forked = _copied_path(session, tree)
    copied = own if copies == 0 else _paths(forked)
    writer = RequestWriter(messages, session.source, references=bool(session.images))
    models = RequestModels(options, tree)
    unwanted = Selection(options, session, tree.parents).unwanted
    path, session_id, cwd = session.path, session.session_id, session.cwd
    stop_reasons = frozenset(options.target_stop_reasons)
    images = ImageStore(session.path, session.images) if options.images == "keep" and session.images else None
    tool_texts: dict[SystemPrompt, str | None] = {}
    for index, entry in enumerate(tree.entries):
        if entry["type"] != "message" or entry["message"]["role"] != "assistant":
            continue
        message = entry["message"]
        parents, contexts, recorded = copied if index < copies else own
        context = contexts.at(parents[index])
        model = models.of(message, context)
        system = NO_SYSTEM_PROMPT if context is None else context.system
        if not (model.system_updates and system.entries):
            system = (recorded and recorded(index)) or system
        if not system.entries:
            system = unrecorded
        tools = tool_texts.get(system, "")
        if tools == "":
            schemas = system.schemas()
            tools = tool_texts[system] = None if schemas is None else dumps(schemas)
        request = writer.request(context, model, system)
        stop_reason = message.get("stopReason")
        timestamp = entry.get("timestamp")
        untrained: str | None = None
        if type(stop_reason) is not str or stop_reason not in stop_reasons:
            untrained = f"stop reason {stop_reason if _WORD.fullmatch(str(stop_reason)) else 'that is no word'}"
        elif unwanted is not None:
            untrained = unwanted(index, model.provider, model.name, timestamp)
        tally.turns += 1
        if untrained is not None:
            tally.untrained_turns[untrained] += 1
        yield Turn(
            session=path,
            session_id=session_id,
            cwd=cwd,
            entry=entry["id"],
            provider=model.provider,
            model=model.name,
            timestamp=timestamp if type(timestamp) is str else None,
            stop_reason=stop_reason if type(stop_reason) is str else None,
            untrained=untrained,
            unprompted=system is NO_SYSTEM_PROMPT,
            tools_json=tools,
            tree=messages,
            context=request,
            target=writer.reply(message, entry["id"], request, model.key),
            images=images,
        )


class _Paths(NamedTuple):
    """What stands above an entry: for each entry its parent, contexts, and prompts that the recorder wrote."""

    parents: list[int]
    contexts: ContextBuilder
    recorded: Callable[[int], SystemPrompt | None] | None


def _paths(tree: EntryTree) -> _Paths:
    return _Paths(tree.parents, ContextBuilder(tree), _recorded(tree))


def _copied_path(session: SessionFile, tree: EntryTree) -> tuple[int, EntryTree]:
    """Return how many entries a fork copied from a path that it tore (0: none), and the tree with that path whole.

    What a fork copied is older than its header. A fork by pi before 0.79.2 leaves labels out, and what hung below a
    label then has no parent in the file. The copied replies were written with the whole path above them, what follows
    them in the fork only with its last piece.
    """
    start = block_text(session.header, "timestamp")
    parents = list(tree.parents)
    count = torn = 0
    for entry, parent in zip(tree.entries, parents, strict=True):
        if block_text(entry, "timestamp") >= start:
            break
        if parent != count - 1:
            if parent >= 0 or not entry.get("parentId"):
                return 0, tree
            parents[count] = count - 1
            torn += 1
        count += 1
    return (count, replace(tree, parents=parents)) if torn else (0, tree)


def _recorded(tree: EntryTree) -> Callable[[int], SystemPrompt | None] | None:
    """Return a function that gives the prompt which the recorder wrote last above an entry, if it is current.

    `None` if the recorder wrote nothing in this session.
    """
    records: dict[int, SystemPrompt | None] = {
        index: recorded_prompt(entry)
        for index, entry in enumerate(tree.entries)
        if entry["type"] == "custom" and entry.get("customType") == RECORD_TYPE
    }
    records = {-1: None, **{index: prompt for index, prompt in records.items() if prompt is not None}}
    if len(records) == 1:
        return None
    for index, entry in enumerate(tree.entries):
        if _has_system_message(entry):
            records[index] = None

    def above(index: int) -> SystemPrompt | None:
        path = []
        while index not in records:
            path.append(index)
            index = tree.parents[index]
        prompt = records[index]
        records.update(dict.fromkeys(path, prompt))
        return prompt

    return above


def _has_system_message(entry: Mapping[str, Any]) -> bool:
    if entry["type"] == "message":
        return entry["message"]["role"] == "system"
    return entry["type"] == "compaction" and isinstance(entry.get("systemMessage"), dict)


def turn_key(turn: Turn) -> str:
    """Return what, together with the reply, makes two turns the same turn."""
    return f"{turn.stop_reason} {turn.entry}\n"


def _seen_before(turn: Turn, seen: set[bytes]) -> bool:
    """Say whether a turn of this entry id and content came up before, and remember it."""
    content = turn.tree.texts[turn.tree.text_of[turn.target]]
    digest = blake2b(turn_key(turn).encode("utf-8", "surrogatepass") + content, digest_size=16).digest()
    if digest in seen:
        return True
    seen.add(digest)
    return False

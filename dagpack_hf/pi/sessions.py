"""Session files -> the conversational data set.

Every branch of every file becomes a message list, and the rows are the maximal lists among those that end with a
target. Forked files repeat entries, and a turn is trained once. Anything left out is counted and, if it was damage,
warned about.

Design: files are read one by one, in as many processes as the caller likes, and each leaves its texts in a spill file
and a `SourcePart` of flat arrays; `maximal` finds the rows over all of them and streams them to an Arrow file, which
the data set maps into memory. The Arrow file is a cache, found again by the contents of the files and the options.

Cost: one pass over the files to hash them and one to read them. In memory: one file's entries for each process,
without most of their texts if it is large, and about 50 bytes for each turn and 20 for each message of all files. On
disk, for as long as it takes: the texts of all files.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import datasets
import dill
import xxhash
from datasets import Dataset, DatasetInfo
from datasets.fingerprint import Hasher, get_temporary_cache_files_directory
from datasets.table import MemoryMappedTable

from dagpack_hf.code_digest import code_digest
from dagpack_hf.conversations import FEATURES
from dagpack_hf.maximal import BackgroundFile, Provenance, SourcePart, SourceWriter, merge, write_rows
from dagpack_hf.pi.context import SystemPrompt
from dagpack_hf.pi.files import file_size, session_files, with_progress
from dagpack_hf.pi.images import ImageStore
from dagpack_hf.pi.options import PathLike, ReadOptions
from dagpack_hf.pi.reader import read_session
from dagpack_hf.pi.report import LoadReport, Tally
from dagpack_hf.pi.turns import SAME_TURN, exported_prompts, file_turns, turn_key

logger = logging.getLogger(__name__)

_EQUAL_TURN = "same messages and reply as an earlier turn"
_BUFFER = 1024 * 1024
_LARGE = 8 * 1024 * 1024


@overload
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = ...,
    *,
    num_proc: int | None = ...,
    cache_dir: PathLike | None = ...,
    load_from_cache_file: bool | None = ...,
    return_report: Literal[False] = ...,
    **options: Any,
) -> Dataset: ...
@overload
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = ...,
    *,
    num_proc: int | None = ...,
    cache_dir: PathLike | None = ...,
    load_from_cache_file: bool | None = ...,
    return_report: Literal[True],
    **options: Any,
) -> tuple[Dataset, LoadReport]: ...
def load_sessions(
    paths: PathLike | Iterable[PathLike] | None = None,
    *,
    num_proc: int | None = None,
    cache_dir: PathLike | None = None,
    load_from_cache_file: bool | None = None,
    return_report: bool = False,
    **options: Any,
) -> Dataset | tuple[Dataset, LoadReport]:
    """Load pi sessions as a conversational data set.

    Args:
        paths: A file, a folder (searched at any depth for `*.jsonl`), several of these, or `None` for pi's own folder
            (`PI_CODING_AGENT_SESSION_DIR`, else `PI_CODING_AGENT_DIR/sessions`, else `~/.pi/agent/sessions`).
        num_proc: Processes that read files; the rows are the same for any number.
        cache_dir: Where the data set is kept; by default a folder in that of `datasets`. It holds the text of the
            sessions and is readable by its owner only.
        load_from_cache_file: Whether to take the data set from there if contents and options are the same; by default
            as `datasets` does (`datasets.disable_caching()`).
        return_report: Return the counts too.
        **options: The fields of `ReadOptions`: `images`, `on_error`, `text_only_models`, `system_update_models`,
            `pi_version`, `target_stop_reasons`, `system_prompt`, `tools`, `html_exports`, and to select targets
            `models`, `providers`, `since`, `until`, `cwd`, `names`, `labels`.

    Returns:
        A data set with one row for each maximal message list, or the data set and a `LoadReport`. Columns:
        `messages` and `tools` (chat form, JSON text in Arrow), `trained` (bool for each message; a target is true in
        exactly one row), `session`, `session_id`, `cwd` and `timestamp` of the turn that ends the row, `entry_ids` and
        `models` (for each message, null where a message comes from no single entry or no model).

    Raises:
        FileNotFoundError: If a path, or pi's own folder, is not there.
        SessionError: With `on_error="raise"`, for the first file or line that cannot be used.
        ValueError: If an option has an unknown value.

    Example:
    ```python
    dataset = load_sessions("~/.pi/agent/sessions", num_proc=4)
    dataset[0]["messages"][-1]["content"]
    ```
    """
    reading = ReadOptions(**options)
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc={num_proc} is no number of processes: use 1 or more, or None")
    use_cache = datasets.is_caching_enabled() if load_from_cache_file is None else load_from_cache_file
    files = session_files(paths)
    fingerprint = _fingerprint(files, reading)
    folder = _folder(cache_dir, fingerprint)
    if not (use_cache and _complete(folder)):
        with _new_files(folder) as new:
            report = _read_into(new, files, reading, num_proc)
            (new / _REPORT).write_text(json.dumps(asdict(report)), "utf-8")
    report = LoadReport(**json.loads((folder / _REPORT).read_text("utf-8")))
    table = MemoryMappedTable.from_file(str(folder / _ROWS))
    dataset = Dataset(table, info=DatasetInfo(features=FEATURES.copy()), fingerprint=fingerprint)
    if not report.complete or report.unrecorded_prompts:
        logger.warning("Not everything in the session files could be used as it is.\n%s", report)
    return (dataset, report) if return_report else dataset


def resolve_images(messages: Sequence[dict[str, Any]], session: PathLike) -> list[dict[str, Any]]:
    """Put images in place of the references that `images="reference"` leaves in messages.

    Args:
        messages: Messages of a row.
        session: The row's session file.

    Returns:
        New messages with data URLs.

    Raises:
        ValueError: If the file no longer holds an image.
    """
    path = os.path.expanduser(os.fspath(session))
    store = ImageStore(path, read_session(path, images="reference").images)
    return [store.resolved(message) for message in messages]


# Reading


@dataclass(frozen=True)
class _FileResult:
    """What one file gave."""

    part: SourcePart | None
    tally: Tally


def _read_into(folder: Path, files: Sequence[str], options: ReadOptions, num_proc: int | None) -> LoadReport:
    """Read the files and write the rows."""
    prompts = exported_prompts(options)
    tally = Tally()
    parts: list[SourcePart] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="spill-") as spill, _without_gc():
        read = partial(_read_file, options=options, prompts=prompts, folder=spill, seed=secrets.randbits(64))
        with _results(read, files, min(num_proc or 1, len(files))) as results:
            for result in with_progress(files, results, disable=False):
                tally.add(result.tally)
                if result.part is not None:
                    parts.append(result.part)
        rows = merge(parts)
        write_rows(str(folder / _ROWS), rows, _restore if options.images == "keep" else None)
    tally.targets = rows.targets
    tally.unrecorded_prompts = rows.unprompted
    for reason, count in ((SAME_TURN, rows.repeated), (_EQUAL_TURN, rows.equal)):
        if count:
            tally.duplicate_turns[reason] += count
    return tally.report()


@contextmanager
def _results(
    read: Callable[[str], _FileResult], files: Sequence[str], num_proc: int
) -> Iterator[Iterable[_FileResult]]:
    """Yield one result for each file, in order; with several processes the reader is sent to each of them once."""
    if num_proc <= 1:
        yield map(read, files)
        return
    pool = ProcessPoolExecutor(num_proc, initializer=_start_reader, initargs=(dill.dumps(read),))
    try:
        yield pool.map(_read_next, files)
    except BrokenProcessPool as error:
        reason = f"one of {num_proc} processes that read sessions was killed; for lack of memory? use a lower num_proc"
        raise RuntimeError(reason) from error
    finally:
        pool.shutdown(cancel_futures=True)


_reader: Callable[[str], _FileResult]


def _start_reader(read: bytes) -> None:
    global _reader
    _reader = dill.loads(read)


def _read_next(path: str) -> _FileResult:
    return _reader(path)


def _read_file(
    path: str, *, options: ReadOptions, prompts: Mapping[str, SystemPrompt], folder: str, seed: int
) -> _FileResult:
    """Read one file; the texts of its message lists go to this process's spill file."""
    with _without_gc(), BackgroundFile(os.path.join(folder, str(os.getpid()))) as spill:
        result = _read_turns(path, options, prompts, spill, seed)
    if file_size(path) > _LARGE:
        _give_memory_back()
    return result


def _give_memory_back() -> None:
    """Empty the interpreter's lists of free objects, which keep the memory of a file from going back.

    Only a collection does that. Where nobody has frozen objects, all are frozen for it, so that it searches none.
    """
    freeze = not gc.get_freeze_count()
    if freeze:
        gc.freeze()
    gc.collect()
    if freeze:
        gc.unfreeze()


def _read_turns(
    path: str, options: ReadOptions, prompts: Mapping[str, SystemPrompt], spill: BackgroundFile, seed: int
) -> _FileResult:
    tally = Tally()
    writer = None
    for turn in file_turns(path, options, prompts, tally):
        if writer is None:
            writer = SourceWriter(turn.tree, spill, seed)
            provenance = Provenance(turn.session, turn.session_id, turn.cwd)
            images = turn.images
        if turn.untrained is None:
            writer.add(turn.target, turn.tools_json, turn_key(turn), turn.timestamp, turn.unprompted)
    return _FileResult(None if writer is None else writer.part(provenance, images), tally)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Keep the collector from searching the entries of a file again and again: there are no cycles among them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _restore(part: SourcePart, text: bytes) -> bytes:
    return text if part.context is None else part.context.restore(text)


# Cache

_ROWS, _REPORT = "rows.arrow", "report.json"


def _fingerprint(files: Sequence[str], options: ReadOptions) -> str:
    """Digest of everything the rows depend on: contents and names of files, options, and the code that reads them."""
    fields = {name: _content(value) if name == "html_exports" else value for name, value in vars(options).items()}
    code = code_digest("conversations", "maximal", "pi")
    return Hasher.hash([code, [(path, _file_digest(path)) for path in files], fields])


def _content(paths: PathLike | Iterable[PathLike] | None) -> list[Any]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths or ())
    return [_file_digest(os.path.expanduser(os.fspath(path))) for path in given]


def _file_digest(path: str) -> str | None:
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BUFFER):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def _folder(cache_dir: PathLike | None, fingerprint: str) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / fingerprint
    if datasets.is_caching_enabled():
        return Path(datasets.config.HF_DATASETS_CACHE) / "dagpack_sessions" / fingerprint
    return Path(get_temporary_cache_files_directory()) / fingerprint


def _complete(folder: Path) -> bool:
    return (folder / _ROWS).is_file() and (folder / _REPORT).is_file()


@contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """A folder for new files, which move into `folder` when all are complete.

    Files of the same name are replaced one by one: whoever reads the old ones at that moment keeps them, and others
    that are written at the same time hold the same, since the folder is named after what they depend on.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield new
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in (_ROWS, _REPORT):
            os.replace(new / name, folder / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)

"""`dagpack export`: the exact turns of session files, as JSON lines or Parquet, for any trainer.

The forms are those of `dagpack_hf.pi.export`; here they become files. Rows are written as they come: JSON lines hold
one in memory, Parquet the rows of one row group (`ROW_GROUP_BYTES` of Arrow data). Whole conversations are the
exception, since the last turn may still make a row longer: they are held as `load_sessions` holds them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from dagpack_hf.cli.arguments import (
    HelpFormatter,
    UsageError,
    add_sessions,
    quiet_libraries,
    session_paths,
    show_progress,
)
from dagpack_hf.cli.reading import add_reading, loading_options, reading_options
from dagpack_hf.cli.redaction import RedactedTurns, add_redaction, read_deny, redact_or_scan

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""Size of the Arrow data at which a Parquet row group is written."""

_DESCRIPTION = """\
Write the exact turns of pi session files for any trainer, as JSON lines or, where --out ends in
.parquet, as Parquet. Each line or row is

  --format openai     the request behind one assistant entry, failed ones too, without the reply:
                        session, entry, model, stop_reason, trained, messages, tools
                      messages and tools are as chat-completions servers take them.
  --format messages   one target turn in the form of chat templates (transformers, TRL):
                        messages, tools, trained, session, entry, model, timestamp
                      messages are the request and the reply. trained has true or false for each
                      message: only the reply is true.
  --format sharegpt   the same as text:
                        conversations, tools, trained, session, entry, model, timestamp
                      conversations are {"from": system|human|gpt|tool, "value": text} items, tools
                      is JSON text.

Target turns are replies that ended by themselves, each once, however many forked files repeat it.
With --unit conversations, a line or row is a maximal message list with all its targets instead,
each trained in exactly one of them:
                        messages (or conversations), tools, trained, session, session_id, cwd,
                        timestamp, entry_ids, models

A turn has the request as it was sent, so the turns of a long session are much text; conversations
repeat only what branches share. Session files hold whatever the agent has seen, and so does the
export; secrets and personal data in it are counted on stderr, and --redact replaces them.
"""

_EPILOG = """\
examples:
  dagpack export --format openai session.jsonl > requests.jsonl
  dagpack export ~/sessions --format messages --out turns.parquet
  dagpack export --format sharegpt --unit conversations --out sessions.jsonl
  dagpack export ~/sessions --redact --deny customers.txt --out clean.jsonl
  dagpack export sample | jq -r .model | sort | uniq -c

train on it:
  Parquet gives messages and tools back as they are, without nulls for keys that other rows have:

    dataset = load_dataset("parquet", data_files="turns.parquet", split="train")

  So does JSON, if the types are given. Without them datasets guesses from the first 10 MB; then
  later rows with other keys fail to load, or have their text changed without a word:

    features = export_features("messages", "turns")     # from dagpack_hf.pi.export
    dataset = load_dataset("json", data_files="turns.jsonl", split="train", features=features)

  The file itself is exact. datasets reads integers beyond 64 bits not at all, may lose the last of
  a float's 17 digits, and rounds floats of JSON files to ten decimals; from Parquet,
  pyarrow.parquet.read_table gives the JSON text as it is.

  DagSFTTrainer reads 'trained' of --format messages, and so do trainers with a flag for each
  message. TRL's SFTTrainer learns only the reply from prompt and completion:

    dataset.map(lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
                remove_columns=["messages", "trained"])

sharegpt in detail:
  A gpt value is <think>, the thinking and </think>, then the text, then a <tool_call> with JSON
  {"name", "arguments"} for each call; a tool value is one <tool_response>. Line breaks are as the
  templates of Hermes and Qwen models print them, and as there, call ids and the names of results
  are left out. One item for each message: roles need not alternate. Images are placeholder text.

What cannot be read is left out, counted on stderr, and does not change the exit status unless
nothing could be read at all (1); --strict stops at the first such place instead.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "export",
        help="the exact turns for any trainer, as JSON lines or Parquet",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_sessions(parser)
    parser.add_argument(
        "--format", choices=["openai", "messages", "sharegpt"], default="openai", help="see above (default: openai)"
    )
    parser.add_argument(
        "--unit",
        choices=["turns", "conversations"],
        default="turns",
        help="what a line or row is, see above (default: turns)",
    )
    parser.add_argument(
        "--images",
        choices=["keep", "placeholder"],
        help="whether images stay, as parts of content, where the model of the turn takes them, or become pi's "
        "placeholder text (default: keep for openai, placeholder for the others)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write, replaced if it is there; Parquet if its name ends in .parquet (default: JSON lines on "
        "stdout)",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first file or line that cannot be used")
    add_redaction(parser)
    add_reading(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file."""
    _check_form(options)
    from dagpack_hf.pi import load_sessions, session_files
    from dagpack_hf.pi.export import export_conversations, export_features, export_turns
    from dagpack_hf.pi.report import Tally

    files = session_files(session_paths(options.sessions))
    if options.out and os.path.realpath(options.out) in {os.path.realpath(file) for file in files}:
        raise UsageError(f"--out {options.out}: is one of the session files that are read; choose another name")
    reading = loading_options(options) if options.unit == "conversations" else reading_options(options)
    reading["on_error"] = "raise" if options.strict else "skip"
    if options.images:
        reading["images"] = options.images
    deny = read_deny(options)
    with _output(options.out) as out:
        if options.unit == "conversations":
            with quiet_libraries(progress=show_progress()):
                conversations, report = load_sessions(files, return_report=True, **reading)
                conversations, private = redact_or_scan(
                    conversations, options.redact, deny, options.num_proc, use_cache=not options.no_cache
                )
            rows = export_conversations(conversations, options.format)
        else:
            tally = Tally()
            form = {"format": options.format, **reading}
            before = export_turns(files, tally=Tally(), **form) if options.redact else None
            turns = RedactedTurns(export_turns(files, tally=tally, **form), before, files, deny)
            rows = iter(turns)
        if options.out and options.out.lower().endswith(".parquet"):
            write_parquet(out, rows, export_features(options.format, options.unit))
        else:
            write_json_lines(out, rows)
    if options.unit == "turns":
        report, private = tally.report(), turns.report()
    if options.out or not report.complete:
        print(report, file=sys.stderr)
    if options.out or private.found:
        print(private, file=sys.stderr)
    return 1 if files and not report.files else 0


def _check_form(options: argparse.Namespace) -> None:
    if options.format == "openai" and options.unit == "conversations":
        raise UsageError(
            "--unit conversations: --format openai holds single requests. Use --format messages (or sharegpt) for "
            "whole conversations, or --unit turns"
        )
    if options.format == "sharegpt" and options.images == "keep":
        raise UsageError(
            "--images keep: --format sharegpt holds text only. Use --format messages to keep images, or --images "
            "placeholder"
        )


def write_json_lines(out: BinaryIO, rows: Iterable[dict[str, Any]]) -> None:
    """Write each row as one line of exact JSON, in UTF-8.

    Args:
        out: Where to write.
        rows: Plain objects.
    """
    from dagpack_hf.conversations import dumps

    for row in rows:
        out.write(dumps(row).encode() + b"\n")
    out.flush()


def write_parquet(out: BinaryIO, rows: Iterable[dict[str, Any]], features: Features) -> None:
    """Write rows as Parquet, one row group at a time.

    `features` are stored with the schema, where `datasets` finds them: columns of feature `Json` are exact JSON text,
    which it decodes. Turns repeat most of the text of the turn before, so a page, the unit of compression, and a
    dictionary of equal values may be as large as a row group.

    Args:
        out: Where to write.
        rows: Plain objects with the keys of `features`.
        features: The columns.
    """
    import pyarrow.parquet as pq

    schema = features.arrow_schema
    page = {"data_page_size": ROW_GROUP_BYTES, "dictionary_pagesize_limit": ROW_GROUP_BYTES}
    with pq.ParquetWriter(out, schema, compression="zstd", **page) as writer:
        for table in _row_groups(rows, features):
            writer.write_table(table)
    out.flush()


def _row_groups(rows: Iterable[dict[str, Any]], features: Features) -> Iterator[pa.Table]:
    import pyarrow as pa

    group: list[pa.Table] = []
    size = 0
    for row in rows:
        group.append(_one_row(row, features))
        size += group[-1].nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.concat_tables(group)
            group, size = [], 0
    if group:
        yield pa.concat_tables(group)


def _one_row(row: dict[str, Any], features: Features) -> pa.Table:
    import pyarrow as pa
    from datasets import Json

    from dagpack_hf.conversations import dumps

    schema = features.arrow_schema
    columns = []
    for field in schema:
        value = row[field.name]
        if isinstance(features[field.name], Json):
            text = pa.array([None if value is None else dumps(value)], pa.string())
            columns.append(pa.ExtensionArray.from_storage(field.type, text))
        else:
            columns.append(pa.array([_utf8(value)], field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _utf8(value: Any) -> Any:
    """Replace lone surrogates (in a file name, say), which an Arrow string cannot hold, by `?`."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


@contextmanager
def _output(path: str | None) -> Iterator[BinaryIO]:
    """Stdout, a device, or a file that appears under its name when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        return
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as device:
            yield device
        return
    folder, name = os.path.split(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
        try:
            yield file  # type: ignore[misc]
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)

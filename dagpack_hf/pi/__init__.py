"""pi session files: from the file to what the model saw and answered at each turn.

`lines` (bytes to JSON values) -> `reader` with `migrate` (values to entries) -> `tree` (entries to paths) -> `context`
(a path to pi's message list) -> `wire` (pi's messages to the request) -> `turns` (one `Turn` for each assistant entry)
-> `sessions` (`load_sessions`) and `export` (`export_turns`). `files` finds sessions, `options` has what a caller can
say, `models` how requests are written for a model, `messages` what a single message becomes, `recorded` the prompts
that pi does not store, `images` and `stored` what is kept by reference. Session files are untrusted and hold secrets:
they are only read, nothing in them is executed and nothing leaves the machine.
"""

from dagpack_hf.pi.export import export_conversations, export_features, export_turns
from dagpack_hf.pi.files import default_session_dir, session_files
from dagpack_hf.pi.options import ReadOptions
from dagpack_hf.pi.reader import SessionError
from dagpack_hf.pi.report import LoadReport
from dagpack_hf.pi.sessions import load_sessions, resolve_images
from dagpack_hf.pi.turns import Turn, iter_turns

__all__ = [
    "LoadReport",
    "ReadOptions",
    "SessionError",
    "Turn",
    "default_session_dir",
    "export_conversations",
    "export_features",
    "export_turns",
    "iter_turns",
    "load_sessions",
    "resolve_images",
    "session_files",
]

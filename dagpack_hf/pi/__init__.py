"""pi session files: from the file to what the model saw and answered at each turn.

`reader` (lines to entries) -> `tree` (entries to paths) -> `context` (a path to pi's message list) -> `wire` (pi's
messages to the request) -> `turns` (one `Turn` for each assistant entry) -> `sessions` (`load_sessions`) and `export`
(`export_turns`). Session files are untrusted and hold secrets: they are only read, nothing in them is executed and
nothing leaves the machine.
"""

from dagpack_hf.pi.export import export_turns
from dagpack_hf.pi.reader import SessionError
from dagpack_hf.pi.report import LoadReport
from dagpack_hf.pi.sessions import load_sessions
from dagpack_hf.pi.turns import Turn, default_session_dir, iter_turns, session_files

__all__ = [
    "LoadReport",
    "SessionError",
    "Turn",
    "default_session_dir",
    "export_turns",
    "iter_turns",
    "load_sessions",
    "session_files",
]

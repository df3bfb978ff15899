"""Session files for the tests of the viewer: many turns, branches, and texts that try to be something else."""

from __future__ import annotations

from pathlib import Path

from tests.pi_sessions import SessionBuilder, call, text

HOSTILE = (
    "</script><script>document.title = 'owned'</script> \x1b[31mred\x1b[0m \u202eevil\u202c "
    "<img src=x onerror=\"document.title='owned'\"> <b>bold</b> &amp; <!-- --> ]]> \x1b]0;title\x07 \u2066x\u2069 "
    "a\u200bb \u2028 \u2029 \x00 \x9b2J"
)
"""Markup, the end of a script, escape sequences of terminals, and controls of the reading direction."""

SEEN = ("</script><script>", "<b>bold</b> &amp; <!-- --> ]]>", "⟨ESC⟩[31mred", "⟨U+202E⟩evil⟨U+202C⟩", "a⟨U+200B⟩b")
"""What a reader sees of it."""


def hostile_session(folder: Path) -> Path:
    """Write a session that has hostile text wherever text can be."""
    session = SessionBuilder(cwd="/<b>home</b>\u202e")
    session.entry("session_info", name=HOSTILE)
    session.system(HOSTILE, sections={"<b>rules</b>\x1b[1m": HOSTILE}, toolsAdded=[{"name": "<i>tool</i>"}])
    user = session.user(f"user {HOSTILE}")
    session.assistant(text(f"answer {HOSTILE}"), call("c1", "<i>tool</i>", **{"<u>": HOSTILE}))
    session.message(
        "toolResult", [text(f"result {HOSTILE}")], toolCallId="c1", toolName="<i>tool</i>\x1b[2J", isError=True
    )
    session.assistant(f"done {HOSTILE}")
    session.entry("label", targetId=user, label=f"label {HOSTILE}"[:60])
    return session.write(folder / "hostile <b>.jsonl")


def long_session(folder: Path, turns: int) -> Path:
    """Write a session of many turns: a trunk, and a branch of three turns every two hundred turns."""
    session = SessionBuilder()
    session.system("You are a test.")
    last = session.user("begin")
    for turn in range(turns):
        if turn % 200 == 40:
            parent = last
            for step in range(3):
                parent = session.user(f"aside {turn}.{step}", parent=parent)
                parent = session.assistant(f"reply to aside {turn}.{step}")
        session.user(f"question {turn}: " + f"why does line {turn} say so? " * 4, parent=last)
        last = session.assistant(f"answer {turn}: " + f"because of needle{turn} and what is before it. " * 6)
    for line in session.lines:
        line["timestamp"] = "2026-01-01T00:00:00.000Z"
    return session.write(folder / "long.jsonl")

"""The real pi: an installation of a given version, and one process of it in RPC mode."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recorder.model import Reply, ScriptedModel

PACKAGE = Path("node_modules/@earendil-works/pi-coding-agent")
NODE = Path("node_modules/node/bin/node")
TIMEOUT_S = 30


@dataclass(frozen=True)
class Installation:
    """A version of pi with a Node that runs it.

    Attributes:
        version: Version of pi.
        root: The folder that holds `node_modules`.
    """

    version: str
    root: Path

    @property
    def node(self) -> str:
        """The Node that runs it."""
        return str(self.root / NODE)

    @property
    def command(self) -> list[str]:
        """How to start it."""
        return [self.node, str(self.root / PACKAGE / "dist" / "cli.js")]


def installed(version: str) -> Installation:
    """Return a version of pi, installed with npm where it is not there yet; skips the test where it cannot be had.

    Installations are kept, one folder for each version, in the folder that `DAGPACK_TEST_PI` names, else in the user's
    cache folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dagpack_hf" / "pi"
    root = Path(os.environ.get("DAGPACK_TEST_PI") or cache) / version
    if not (root / PACKAGE / "package.json").exists():
        _install(version, root)
    found = json.loads((root / PACKAGE / "package.json").read_text())["version"]
    assert found == version, f"{root} holds pi {found}"
    return Installation(version, root)


def _install(version: str, root: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, to install pi")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as work:
        arguments = ["install", "--prefix", work, "--no-audit", "--no-fund", "--loglevel=error"]
        arguments += ["--fetch-retries=1", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=1000"]
        try:
            done = subprocess.run(
                [npm, *arguments, "node@24", f"@earendil-works/pi-coding-agent@{version}"],
                capture_output=True,
                text=True,
                timeout=300,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm did not install pi {version} within 300 s")
        if done.returncode or not (Path(work) / NODE).exists():
            pytest.skip(f"npm cannot install pi {version}: {' '.join(done.stderr.split())[:300]}")
        root.mkdir(exist_ok=True)
        os.replace(Path(work, "node_modules"), root / "node_modules")


@dataclass(frozen=True)
class Desk:
    """Where pi runs: a home of its own and a project in it.

    Attributes:
        home: The home folder.
        model: The model that answers.
    """

    home: Path
    model: ScriptedModel

    @property
    def agent_dir(self) -> Path:
        """pi's folder."""
        return self.home / ".pi" / "agent"

    @property
    def project(self) -> Path:
        """The folder pi works in."""
        return self.home / "project"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of pi."""
        return {
            "PATH": os.defpath,
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PI_CODING_AGENT_DIR": str(self.agent_dir),
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
        }

    def prepare(self, **compat: Any) -> None:
        """Make the folders and pi's settings; `compat` is what the model can do, in pi's terms."""
        self.project.mkdir(parents=True)
        self.agent_dir.mkdir(parents=True)
        model = {
            "id": "scripted",
            "reasoning": False,
            "contextWindow": 128000,
            "maxTokens": 4096,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "compat": compat,
        }
        provider = {"baseUrl": self.model.url, "api": "openai-completions", "apiKey": "none", "models": [model]}
        settings = {"compaction": {"enabled": False, "keepRecentTokens": 1}, "quietStartup": True}
        (self.agent_dir / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
        (self.agent_dir / "settings.json").write_text(json.dumps(settings))


class Pi:
    """One process of pi; to be used as a context manager, which ends it.

    Args:
        installation: The version.
        desk: Where it runs.
        arguments: Further arguments of the command line.
    """

    def __init__(self, installation: Installation, desk: Desk, *arguments: str) -> None:
        steer = Path(__file__).with_name("steer.ts")
        options = ["--mode", "rpc", "--model", "local/scripted", "--extension", str(steer), *arguments]
        self._desk = desk
        self._sent = 0
        self._records: queue.Queue[dict[str, Any]] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*installation.command, *options],
            cwd=desk.project,
            env=dict(desk.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Pi:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._records.put(json.loads(line))

    def _await(self, what: str, **fields: Any) -> dict[str, Any]:
        """Return the next record with these fields; the ones before it are dropped."""
        deadline = time.monotonic() + TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                record = self._records.get(timeout=left)
            except queue.Empty:
                break
            if fields.items() <= record.items():
                return record
        self._errors.seek(0)
        raise TimeoutError(f"pi sent no {what}; stderr: {self._errors.read()[-2000:]}")

    def call(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send an RPC command and return the data of the answer."""
        self._sent += 1
        name = f"request-{self._sent}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": name, "type": kind, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._await(f"answer to {kind} {fields}", type="response", id=name)
        assert answer["success"], answer
        return answer.get("data") or {}

    def command(self, line: str, *replies: Reply) -> None:
        """Run a command of the test extension; `replies` are for the requests it makes."""
        self._desk.model.replies.extend(replies)
        self.call("prompt", message=line)
        self._check()

    def prompt(self, text: str, *replies: Reply) -> None:
        """Prompt, and wait until pi is idle again."""
        self._desk.model.replies.extend(replies)
        self.call("prompt", message=text)
        self._await("end of the run", type="agent_end")
        while self.call("get_state")["isStreaming"]:
            time.sleep(0.01)
        self._check()

    def compact(self, *replies: Reply) -> None:
        """Compact the context."""
        self._desk.model.replies.extend(replies)
        self.call("compact")
        self._check()

    @property
    def session_file(self) -> Path:
        """The file of the current session."""
        return Path(self.call("get_state")["sessionFile"])

    def _check(self) -> None:
        assert not self._desk.model.refused, "a request more than scripted"
        assert not self._desk.model.replies, "a request less than scripted"

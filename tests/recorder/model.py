"""A model that says what it is told to: a chat-completions server on 127.0.0.1 that keeps every request."""

from __future__ import annotations

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | dict[str, Any]


class ScriptedModel(ThreadingHTTPServer):
    """Answers from a queue, first in, first out; to be used as a context manager.

    Attributes:
        replies: What it says next: a text, or the arguments of a call of the tool `bash`.
        requests: Bodies of the requests it answered, by the id of the response.
        refused: Bodies of requests for which there was no reply.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: deque[Reply] = deque()
        self.requests: dict[str, dict[str, Any]] = {}
        self.refused: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> ScriptedModel:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedModel

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.server.replies:
            self.server.refused.append(body)
            self.send_error(400, "no reply is scripted for this request")
            return
        reply = self.server.replies.popleft()
        name = f"chatcmpl-{len(self.server.requests) + 1:03d}"
        self.server.requests[name] = body
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for chunk in _chunks(name, reply):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _chunks(name: str, reply: Reply) -> list[dict[str, Any]]:
    delta: dict[str, Any] = {"role": "assistant", "content": reply}
    if isinstance(reply, dict):
        function = {"name": "bash", "arguments": json.dumps(reply)}
        call = {"index": 0, "id": f"call_{name}", "type": "function", "function": function}
        delta = {"role": "assistant", "content": None, "tool_calls": [call]}
    end = "tool_calls" if isinstance(reply, dict) else "stop"
    head = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
    return [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
        {**head, "choices": [], "usage": usage},
    ]

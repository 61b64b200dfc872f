"""A Slack API and a webhook on loopback, with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

Answer = tuple[int, dict[str, str], dict[str, Any]]
"""Status, headers and body."""


@dataclass
class AlertServer:
    """Answers with `answers` first, each a status, headers and a body; then accepts everything."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    """Every request: its body, also as `_raw`, and `_path`, `_token`, `_status`, `_time`."""

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [post for post in self.posts if post["_status"] == 200]

    def answer(self, post: dict[str, Any]) -> Answer:
        if self.answers:
            return self.answers.pop(0)
        return 200, {}, {"ok": True, "ts": f"1700000000.{len(self.posts):06d}", "channel": "C1"}


@contextmanager
def serve_alerts(*answers: Answer) -> Iterator[AlertServer]:
    state = AlertServer(answers=list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kind = self.headers.get("Content-Type", "")
            post: dict[str, Any] = {"_raw": body}
            if "json" in kind:
                post |= json.loads(body)
            elif "form" in kind:
                post |= dict(parse_qsl(body.decode()))
            status, headers, answer = state.answer(post)
            token = self.headers.get("Authorization", "")
            state.posts.append(
                {
                    **post,
                    "_path": self.path,
                    "_token": token,
                    "_status": status,
                    "_time": monotonic(),
                }
            )
            payload = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

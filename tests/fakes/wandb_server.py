"""W&B's GraphQL API on loopback, with one run: what `wandb.Api` asks for to read its history."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

VIEWER = {"id": "u", "entity": "team", "username": "u", "email": "", "flags": "{}"}
RUN = {
    "id": "1",
    "projectId": "1",
    "name": "abc",
    "displayName": "fleet_tool_use_0123abcd",
    "state": "crashed",
    "config": json.dumps({"lr": {"value": 1e-6}}),
    "summaryMetrics": "{}",
    "systemMetrics": "{}",
    "tags": [],
    "createdAt": "2026-01-01T00:00:00Z",
    "heartbeatAt": "2026-01-01T00:00:00Z",
    "user": {"name": "u", "username": "u"},
}


@contextmanager
def serve_wandb(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The URL of a server whose only run is team/project/abc."""
    history = {
        "history": [json.dumps(row) for row in rows],
        "historyLineCount": len(rows),
        "historyKeys": {"lastStep": max(row["_step"] for row in rows), "keys": {}, "sets": []},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer = b""
            if self.path.endswith("/graphql"):
                asked = json.loads(body).get("variables") or {}
                known = asked.get("entity") == "team" and "abc" in asked.values()
                project = {"id": "1", "internalId": "1", "run": RUN | history if known else None}
                data = {"viewer": VIEWER | {"teams": {"edges": []}}, "project": project}
                answer = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

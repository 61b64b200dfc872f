"""W&B's GraphQL API on loopback: what `wandb.Api` asks for to read a history, and `wandb.init` to start."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from tests.fakes.broken_server import ANSWERS

VIEWER = {"id": "u", "entity": "team", "username": "u", "email": "", "flags": "{}"}
RUN = {
    "id": "1",
    "projectId": "1",
    "displayName": "fleet_tool_use_0123abcd",
    "config": json.dumps({"lr": {"value": 1e-6}}),
    "summaryMetrics": "{}",
    "systemMetrics": "{}",
    "tags": [],
    "createdAt": "2026-01-01T00:00:00Z",
    "heartbeatAt": "2026-01-01T00:00:00Z",
    "user": {"name": "u", "username": "u"},
}


STARTED = {
    "id": "1",
    "name": "x",
    "displayName": "r",
    "description": None,
    "config": "{}",
    "sweepName": None,
    "historyLineCount": 0,
    "project": {"id": "1", "name": "p", "entity": {"id": "1", "name": "team"}},
}


def describe_run(name: str, rows: Sequence[dict[str, Any]], state: str) -> dict[str, Any]:
    last = max(row["_step"] for row in rows)
    return {
        **RUN,
        "name": name,
        "state": state,
        "history": [json.dumps(row) for row in rows],
        "historyLineCount": len(rows),
        "historyKeys": {"lastStep": last, "keys": {}, "sets": []},
    }


@contextmanager
def serve_wandb(*, fault: str = "", **histories: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The URL of a server with one run per history in team/project, all in the group `g`.

    Only the last of them is finished. With a `fault` of broken_server it fails once a run has started.
    """
    has_started, is_over = Event(), Event()
    *crashed, last = histories
    states = dict.fromkeys(crashed, "crashed") | {last: "finished"}
    runs = {name: describe_run(name, rows, states[name]) for name, rows in histories.items()}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        project: dict[str, Any] = {"id": "1", "internalId": "1", "runCount": len(runs)}
        project["run"] = runs.get(
            str(asked.get("name") or asked.get("runName") or asked.get("run"))
        )
        if "filters" in asked:
            found = runs.values() if json.loads(asked["filters"]) == {"group": "g"} else ()
            edges = [{"node": run, "cursor": run["name"]} for run in found]
            project["runs"] = {"edges": edges, "pageInfo": {"hasNextPage": False}}
        return {
            "viewer": VIEWER | {"teams": {"edges": []}},
            "project": project,
            "serverInfo": {"features": []},
            "model": {"bucket": None},
            "upsertBucket": {"inserted": True, "bucket": STARTED},
        }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            text = b""
            if fault and (fault == "401" or has_started.is_set()):
                self.close_connection = True
                if fault == "hangs":
                    is_over.wait()
                else:
                    self.wfile.write(ANSWERS[fault])
                return
            if b"mutation UpsertBucket" in body:
                has_started.set()
            if self.path.endswith("/graphql"):
                asked = json.loads(body).get("variables") or {}
                text = json.dumps({"data": answer(asked)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()

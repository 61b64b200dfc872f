"""A proxy in front of an S3 server that breaks requests and answers: it changes bytes, fails, hangs up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx

Fault = Callable[[str, str, bytes], "bytes | int | None"]
"""Gets method, path and body; returns the body to forward, a status to answer, or None to hang up."""

Answer = Callable[[str, str, dict[str, str], bytes], "bytes | int"]
"""Gets method, path, headers, which it may change, and body of an answer; returns the body to send, or
a status to send instead."""

_SIGNATURE = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
"""moto wants one and checks none, so that Google's XML API can be tried with it."""
_HOP_HEADERS = {"connection", "content-length", "transfer-encoding", "host", "content-encoding"}


@contextmanager
def break_requests(
    endpoint: str,
    fault: Fault = lambda method, path, body: body,
    answer_with: Answer = lambda method, path, headers, body: body,
) -> Iterator[str]:
    """Yields the proxy's endpoint."""

    # Plain HTTP: reading certificates takes long.
    client = httpx.Client(verify=False, timeout=120)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            changed = fault(self.command, self.path, body)
            if changed is None:
                self.close_connection = True
                return
            if isinstance(changed, int):
                self.send_status(changed)
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
            if not headers.get("authorization", "").startswith("AWS4"):
                headers["authorization"] = _SIGNATURE
            answer = client.request(
                self.command, f"{endpoint}{self.path}", content=changed, headers=headers
            )
            answered = {k: v for k, v in answer.headers.items() if k not in _HOP_HEADERS}
            content = answer_with(self.command, self.path, answered, answer.content)
            if isinstance(content, int):
                self.send_status(content)
                return
            self.send_response(answer.status_code)
            for key, value in answered.items():
                self.send_header(key, value)
            length = answer.headers.get("content-length", str(len(content)))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)

        def send_status(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()

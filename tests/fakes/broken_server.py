"""An HTTP server on loopback that is down in one of several ways."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

FAULTS = ("refused", "hangs", "500", "429", "invalid JSON", "closes mid-reply")
ANSWERS = {
    "401": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 7\r\n\r\nbad key",
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n",
    "invalid JSON": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 6\r\n\r\n<html>",
    "closes mid-reply": b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"ok": true,',
}


@contextmanager
def serve_broken(fault: str) -> Iterator[str]:
    """The URL of a server that answers every request with this fault."""
    listening, is_over = socket.create_server(("127.0.0.1", 0)), Event()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    if fault == "refused":
        listening.close()
        yield url
        return

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 20)
            if fault == "hangs":
                is_over.wait()
            else:
                connection.sendall(ANSWERS[fault])
                # A client that still sends would see a reset instead of the answer.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                Thread(target=answer, args=(connection,), daemon=True).start()

    thread = Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        is_over.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()

"""ASGI middleware of every server: access checks, and limits on bodies, messages and slow clients."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

from skyfleet.serving.access import MAX_TARGET_BYTES, AccessPolicy, Refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

IDLE_SECONDS = 30.0
"""How long a client may send no byte of a body that it has begun."""
BODY_SECONDS = 300.0
"""How long it may take to send a whole body."""

_VERSIONS = ("1.0", "1.1", "2", "3")
_TOO_BIG = 1009
_POLICY_VIOLATION = 1008

logger = logging.getLogger(__name__)


class Guard:
    """Refuses a request before `app` sees it, and ends one that grows too large or too slow."""

    def __init__(self, app: App, policy: AccessPolicy) -> None:
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._policy.check(scope.get("method", "GET"), scope["path"], scope["headers"])
        if len(scope.get("query_string", b"")) > MAX_TARGET_BYTES:
            refusal = Refusal(status=414, sentence="the query is too long")
        if scope.get("http_version", "1.1") not in _VERSIONS:
            refusal = Refusal(status=505, sentence="this HTTP version is not supported; use 1.1")
        if refusal is not None:
            logger.debug("%s %s refused: %s", kind, scope["path"], refusal.sentence)
            await (_refuse_request if kind == "http" else _refuse_socket)(refusal, scope, send)
        elif kind == "http":
            await _GuardedRequest(self._policy, receive, send).run(self._app, scope)
        else:
            limit = self._policy.max_body_bytes
            await self._app(scope, _limit_messages(receive, send, limit), send)


class _GuardedRequest:
    """One HTTP request whose body is counted while it arrives."""

    def __init__(self, policy: AccessPolicy, receive: Receive, send: Send) -> None:
        self._policy, self._receive, self._send = policy, receive, send
        self._n_bytes, self._deadline = 0, monotonic() + BODY_SECONDS
        self._is_complete = self._has_started = self._is_refused = False

    async def run(self, app: App, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            # The app has received a disconnect; how it ends does not matter.
            if not self._is_refused:
                raise

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._is_refused:
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout(min(IDLE_SECONDS, self._deadline - monotonic())):
                message = await self._receive()
        except TimeoutError:
            slow = Refusal(status=408, sentence="the body did not arrive in time; send it again")
            return await self._refuse(slow)
        if message["type"] != "http.request":
            return message
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._policy.max_body_bytes:
            return await self._refuse(self._policy.refuse_body())
        self._is_complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if not self._is_refused:
            self._has_started = True
            await self._send(message)

    async def _refuse(self, refusal: Refusal) -> Message:
        self._is_refused = True
        if not self._has_started:
            await _refuse_request(refusal, {}, self._send)
        return {"type": "http.disconnect"}


def _limit_messages(receive: Receive, send: Send, max_bytes: int) -> Receive:
    async def receive_limited() -> Message:
        message = await receive()
        text = message.get("text") or ""
        n_bytes = len(message.get("bytes") or b"") + len(text)
        if n_bytes <= max_bytes < 4 * len(text):
            n_bytes = len(text.encode(errors="replace"))
        if message["type"] == "websocket.receive" and n_bytes > max_bytes:
            await send({"type": "websocket.close", "code": _TOO_BIG})
            return {"type": "websocket.disconnect", "code": _TOO_BIG}
        return message

    return receive_limited


async def _refuse_request(
    refusal: Refusal, scope: Scope, send: Send, *, prefix: str = "http.response"
) -> None:
    body = build_refusal_body(refusal)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # What is left of the request's body is not read.
        (b"connection", b"close"),
    ]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if scope.get("method") == "HEAD":
        body = b""
    await send({"type": f"{prefix}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})


async def _refuse_socket(refusal: Refusal, scope: Scope, send: Send) -> None:
    if "websocket.http.response" in scope.get("extensions", {}):
        await _refuse_request(refusal, {}, send, prefix="websocket.http.response")
    else:
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})


def build_refusal_body(refusal: Refusal) -> bytes:
    """In the formats of OpenAI's clients (`error`) and of FastAPI's and Fleet's (`detail`)."""
    code = "invalid_api_key" if refusal.status == 401 else None
    kind = "invalid_request_error"
    error = {"message": refusal.sentence, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error, "detail": refusal.sentence}).encode()

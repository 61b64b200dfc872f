"""Servers that are broken at times only, and odd ones that are healthy."""

from __future__ import annotations

import asyncio
import gzip
import json

from tests.engines.broken_servers import GZIP, INVALID, add, answer_well, responding, sending
from tests.fakes.broken_http import Behaviour, Connection, HttpRequest, good_answer


def switching(first: Behaviour, second: Behaviour, *, after: int) -> Behaviour:
    async def behave(request: HttpRequest, connection: Connection) -> bool | None:
        return await (first if request.number < after else second)(request, connection)

    return behave


ERROR = responding(b"overloaded", 500)
add("dies after 3 requests", switching(answer_well, sending(then="reset"), after=3))
add(
    "hangs after 3 requests",
    switching(answer_well, sending(then="hang"), after=3),
    is_slow=True,
    sentence="did not respond",
)
add(
    "sends nonsense after 3 requests",
    switching(answer_well, responding(b"{}"), after=3),
    sentence=INVALID,
)
add("recovers after 3 requests", switching(ERROR, answer_well, after=3), ends="graded")


async def fail_every_other(request: HttpRequest, connection: Connection) -> bool | None:
    return await (answer_well if request.number % 2 else ERROR)(request, connection)


async def answer_late(request: HttpRequest, connection: Connection) -> bool:
    await asyncio.sleep(0.05)
    return await answer_well(request, connection)


async def compress(request: HttpRequest, connection: Connection) -> bool:
    good = json.dumps(good_answer(request)).encode()
    await connection.respond(gzip.compress(good), 200, GZIP)
    return True


async def answer_with_whitespace(request: HttpRequest, connection: Connection) -> bool:
    await connection.respond(b"\n \n" + json.dumps(good_answer(request)).encode())
    return True


async def answer_twice(request: HttpRequest, connection: Connection) -> None:
    """The second answer belongs to no request, so it must not answer the next one."""
    await answer_well(request, connection)
    await connection.respond(b'{"choices": []}')


add("fails every other request", fail_every_other, ends="graded")
add("slow but healthy", answer_late, ends="graded")
add("compresses unasked", compress, ends="graded")
add("whitespace before the answer", answer_with_whitespace, ends="graded")
add(
    "wrong content type",
    sending(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: LENGTH\r\n\r\nGOOD"),
    ends="graded",
)
add("a second answer nobody asked for", answer_twice, ends="graded")

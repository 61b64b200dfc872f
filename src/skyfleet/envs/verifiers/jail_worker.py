"""The jail worker process: it waits for requests and forks a child for each.

The child gives up files, processes, network, CPU time and memory before it runs a line of
untrusted code. The worker never parses what a child writes. It starts without site-packages, so
everything it imports must need the standard library only.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from contextlib import closing, suppress
from math import ceil
from time import monotonic
from typing import NoReturn

from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.difference import Difference
from skyfleet.envs.verifiers.jail_protocol import (
    MAX_REPLY_BYTES,
    SIZE,
    VerifyRequest,
    pack_failure,
    pack_verdict,
    unpack_request,
    unpack_timeout_seconds,
)
from skyfleet.envs.verifiers.run_verifier import (
    TimedOutVerifierError,
    execute_verifier,
    load_state,
)
from skyfleet.envs.verifiers.write_verifier import write_verifier
from skyfleet.errors import VerifierError

MEMORY_BYTES = 512 * 2**20
"""For the verifier; the two databases are added to it."""

# What verifiers import: behind the filter no file can be opened, so it must be loaded before.
_PRELOADED = (
    *("base64", "bisect", "calendar", "collections", "copy", "csv", "dataclasses", "datetime"),
    *("decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "html"),
    *("itertools", "operator", "random", "statistics", "textwrap", "time", "traceback"),
    *("unicodedata", "urllib.parse", "uuid", "_strptime"),
)

_WARMUP_RUNS = 20
"""CPython specialises a function after about ten calls."""

_NICE_AFTER_SECONDS, _NICENESS = 1.0, 10
"""A verifier that runs longer leaves the CPU to the others."""

_PR_SET_PDEATHSIG = 1
_RESULT = 3
"""The only file descriptor of a child besides /dev/null."""


def main(*, use_filter: bool) -> None:
    """Answer requests on stdin, which is a socket, until the jail closes it."""
    for name in _PRELOADED:
        importlib.import_module(name)
    _warm_up()
    gc.freeze()
    received = _Received()
    with socket.socket(fileno=os.dup(0)) as client, open(os.devnull, "r+b", buffering=0) as null:
        while request := _read_frame(client):
            reply = _answer(request, client, null.fileno(), received, use_filter)
            # At once, so that the jail wakes up once; a socket may take only the beginning.
            n_sent = client.sendmsg([SIZE.pack(len(reply)), reply]) - SIZE.size
            if n_sent < len(reply):
                client.sendall(reply[n_sent:])
            received.wipe()


class _Received:
    """What a child has written; one buffer for all, so that no copy of it stays in memory."""

    def __init__(self) -> None:
        self._buffer = bytearray(MAX_REPLY_BYTES + 1)
        self.n_bytes = 0

    def read(self, descriptor: int) -> bool:
        """Read more; False at the end."""
        n_read = os.readv(descriptor, [memoryview(self._buffer)[self.n_bytes :]])
        self.n_bytes += n_read
        return n_read > 0

    def view(self) -> memoryview:
        return memoryview(self._buffer)[: self.n_bytes]

    def wipe(self) -> None:
        """The next child inherits this memory, and may belong to another task."""
        self._buffer[: self.n_bytes] = bytes(self.n_bytes)
        self.n_bytes = 0


def _warm_up() -> None:
    """Do once, before the forks, what Python does at first use."""
    seed, current = load_state(b""), load_state(b"")
    current.execute("create table acts (id integer primary key, name text)")
    current.execute("insert into acts (name) values ('first')")
    code = write_verifier(Difference(seed, current).changes, "ready")
    with closing(seed), closing(current):
        for _ in range(_WARMUP_RUNS):
            pack_verdict(execute_verifier(code, seed, current, "ready"))


def _read_frame(client: socket.socket) -> bytearray:
    """Return the next request; empty when the jail has closed the socket."""
    size = client.recv(SIZE.size, socket.MSG_WAITALL)
    if len(size) < SIZE.size:
        return bytearray()
    request = bytearray(SIZE.unpack(size)[0])
    left = memoryview(request)
    while left:
        n_read = client.recv_into(left)
        if not n_read:
            return bytearray()
        left = left[n_read:]
    return request


def _answer(
    packed: bytearray, client: socket.socket, null: int, received: _Received, use_filter: bool
) -> bytes | memoryview:
    """Run the request in a child. It is parsed there, and wiped here: no later child finds it."""
    timeout_seconds = unpack_timeout_seconds(packed)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(packed, write_end, null, use_filter)
    packed[:] = bytes(len(packed))
    os.close(write_end)
    try:
        problem = _collect(read_end, client, child, timeout_seconds, received)
    finally:
        os.close(read_end)
        # Usually it has exited; a child that closed its result and still runs is not waited for.
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if problem is None and not received.n_bytes:
        problem = _make_error(f"was ended without a result ({_describe_status(status)})")
    return received.view() if problem is None else pack_failure(problem)


def _collect(
    read_end: int, client: socket.socket, child: int, timeout_seconds: float, received: _Received
) -> VerifierError | None:
    """Read all that the child writes, or return an error that says what it did wrong."""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(client, 0)
    start, is_nice = monotonic(), False
    while (left := start + timeout_seconds - monotonic()) > 0:
        if not is_nice and monotonic() - start > _NICE_AFTER_SECONDS:
            is_nice = True
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child, _NICENESS)
        ready = dict(poll.poll(1000 * (left if is_nice else min(left, _NICE_AFTER_SECONDS))))
        if client.fileno() in ready:
            raise SystemExit("the jail has closed the socket")
        if read_end in ready and not received.read(read_end):
            return None
        if received.n_bytes > MAX_REPLY_BYTES:
            return _make_error(f"wrote more than {MAX_REPLY_BYTES} bytes of result")
    return _make_error(f"ran longer than {timeout_seconds:g} s", TimedOutVerifierError)


def _make_error(problem: str, kind: type[VerifierError] = VerifierError) -> VerifierError:
    return kind(f"verifier_code {problem}; the grade is unknown until the verifier is fixed")


def _describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _run_child(packed: bytearray, write_end: int, null: int, use_filter: bool) -> NoReturn:
    """Run the verifier in the child, which always exits here."""
    try:
        try:
            _close_files_except(write_end, null)
            request, seed, current = unpack_request(packed)
            cpu_seconds = ceil(request.timeout_seconds) + 1
            memory_bytes = MEMORY_BYTES + 2 * (len(seed) + len(current))
            _restrict(cpu_seconds, memory_bytes, use_filter)
            reply = _verify(request, seed, current)
        except BaseException as error:
            ended = f"was ended by {type(error).__name__}: {error}"
            reply = pack_failure(_make_error(ended))
        while reply:
            reply = reply[os.write(_RESULT, reply) :]
    finally:
        os._exit(0)


def _close_files_except(result: int, null: int) -> None:
    """Close everything else: with the socket to the jail a verifier could forge the reply."""
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(result, _RESULT)
    os.closerange(_RESULT + 1, 2**16)


def _restrict(cpu_seconds: int, memory_bytes: int, use_filter: bool) -> None:
    if sys.platform == "linux":
        seccomp.control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if use_filter:
        seccomp.install_filter()


def _verify(request: VerifyRequest, seed: bytes, current: bytes) -> bytes:
    with closing(load_state(seed)) as seed_db, closing(load_state(current)) as current_db:
        try:
            verdict = execute_verifier(
                request.code,
                seed_db,
                current_db,
                request.final_answer,
                conversation=request.conversation,
                partial_credit=request.partial_credit,
            )
        except VerifierError as error:
            return pack_failure(error)
        return pack_verdict(verdict)

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
from contextlib import closing
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
    pack_frame,
    pack_verdict,
    unpack_request,
)
from skyfleet.envs.verifiers.running import (
    TimedOutVerifierError,
    execute_verifier,
    load_state,
)
from skyfleet.envs.verifiers.writing import write_verifier
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
    with socket.socket(fileno=os.dup(0)) as client, open(os.devnull, "r+b", buffering=0) as null:
        while request := _read_frame(client):
            client.sendall(pack_frame(_answer(request, client, null.fileno(), use_filter)))


def _warm_up() -> None:
    """Do once, before the forks, what Python does at first use."""
    seed, current = load_state(b""), load_state(b"")
    current.execute("create table acts (id integer primary key, name text)")
    current.execute("insert into acts (name) values ('first')")
    code = write_verifier(Difference(seed, current).changes, "ready")
    with closing(seed), closing(current):
        for _ in range(_WARMUP_RUNS):
            pack_verdict(execute_verifier(code, seed, current, "ready"))


def _read_frame(client: socket.socket) -> bytes:
    """Return the next request; empty when the jail has closed the socket."""
    size = client.recv(SIZE.size, socket.MSG_WAITALL)
    return client.recv(SIZE.unpack(size)[0], socket.MSG_WAITALL) if len(size) == SIZE.size else b""


def _answer(packed: bytes, client: socket.socket, null: int, use_filter: bool) -> bytes:
    request, seed, current = unpack_request(packed)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(request, seed, current, write_end, null, use_filter)
    os.close(write_end)
    try:
        reply = _collect(read_end, client, child, request.timeout_seconds)
    finally:
        os.close(read_end)
        # Usually it has exited; a child that closed its result and still runs is not waited for.
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if isinstance(reply, VerifierError):
        return pack_failure(reply)
    if not reply:
        ended = f"was ended without a result ({_describe_status(status)})"
        return pack_failure(_make_error(ended))
    return reply


def _collect(
    read_end: int, client: socket.socket, child: int, timeout_seconds: float
) -> bytes | VerifierError:
    """Return all that the child wrote, or an error that says what it did wrong."""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(client, 0)
    start, reply, is_nice = monotonic(), b"", False
    while (left := start + timeout_seconds - monotonic()) > 0:
        if not is_nice and monotonic() - start > _NICE_AFTER_SECONDS:
            is_nice = True
            os.setpriority(os.PRIO_PROCESS, child, _NICENESS)
        ready = dict(poll.poll(1000 * (left if is_nice else min(left, _NICE_AFTER_SECONDS))))
        if client.fileno() in ready:
            raise SystemExit("the jail has closed the socket")
        if read_end in ready:
            chunk = os.read(read_end, 2**16)
            if not chunk:
                return reply
            reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            return _make_error(f"wrote more than {MAX_REPLY_BYTES} bytes of result")
    return _make_error(f"ran longer than {timeout_seconds:g} s", TimedOutVerifierError)


def _make_error(problem: str, kind: type[VerifierError] = VerifierError) -> VerifierError:
    return kind(f"verifier_code {problem}; the grade is unknown until the verifier is fixed")


def _describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _run_child(
    request: VerifyRequest,
    seed: bytes,
    current: bytes,
    write_end: int,
    null: int,
    use_filter: bool,
) -> NoReturn:
    """Run the verifier in the child, which always exits here."""
    try:
        try:
            _close_files_except(write_end, null)
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

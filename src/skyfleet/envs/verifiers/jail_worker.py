"""Worker: the inside of a jail. It waits for questions, and forks a child to answer each.

The child shuts every door behind it before it runs a line that a stranger wrote: no file, no
process, no network, so much time and memory. The worker itself never reads what a child says.
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
    Question,
    framed,
    pack_failure,
    pack_grade,
    unpack_request,
)
from skyfleet.envs.verifiers.running import BrokenVerifierError, load_state, run_verifier
from skyfleet.envs.verifiers.writing import write_verifier
from skyfleet.errors import VerifierError

MEMORY_BYTES = 512 * 2**20
"""For the verifier; the two databases come on top."""

# What verifiers import: behind the filter nothing can be opened, so it must be here already.
_PRELOADED = (
    *("base64", "bisect", "calendar", "collections", "copy", "csv", "dataclasses", "datetime"),
    *("decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "html"),
    *("itertools", "operator", "random", "statistics", "textwrap", "time", "traceback"),
    *("unicodedata", "urllib.parse", "uuid", "_strptime"),
)

_REHEARSALS = 20
"""Python makes a function faster once it has been called some ten times."""

_PR_SET_PDEATHSIG = 1
_RESULT = 3
"""The one thing a child holds open, besides /dev/null."""


def main() -> None:
    """Serve whoever holds the other end of stdin, until they hang up."""
    for name in _PRELOADED:
        importlib.import_module(name)
    _rehearse()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as asker, open(os.devnull, "r+b", buffering=0) as nothing:
        while request := _read_frame(asker):
            asker.sendall(framed(_answer(request, asker, nothing.fileno())))


def _rehearse() -> None:
    """What Python prepares at first use, it prepares here once and not in every child."""
    seed, current = load_state(b""), load_state(b"")
    current.execute("create table acts (id integer primary key, name text)")
    current.execute("insert into acts (name) values ('first')")
    code = write_verifier(Difference(seed, current).changes, "ready")
    with closing(seed), closing(current):
        for _ in range(_REHEARSALS):
            pack_grade(run_verifier(code, seed, current, "ready"))


def _read_frame(asker: socket.socket) -> bytes:
    """Empty when the asker has hung up."""
    size = asker.recv(SIZE.size, socket.MSG_WAITALL)
    return asker.recv(SIZE.unpack(size)[0], socket.MSG_WAITALL) if len(size) == SIZE.size else b""


def _answer(request: bytes, asker: socket.socket, nothing: int) -> bytes:
    question, seed, current = unpack_request(request)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _judge(question, seed, current, writing, nothing)
    os.close(writing)
    try:
        reply = _collect(reading, asker, question.timeout_seconds)
    finally:
        os.close(reading)
        # Gone already, as a rule; one that closed its result and goes on is not waited for.
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if isinstance(reply, str):
        return _unknown(reply)
    if not reply:
        return _unknown(f"was ended without a result ({_cause(status)})")
    return reply


def _collect(reading: int, asker: socket.socket, timeout_seconds: float) -> bytes | str:
    """All that the child wrote, or what it did wrong."""
    watched = select.poll()
    watched.register(reading, select.POLLIN)
    watched.register(asker, 0)
    deadline, reply = monotonic() + timeout_seconds, b""
    while (left := deadline - monotonic()) > 0:
        ready = dict(watched.poll(left * 1000))
        if asker.fileno() in ready:
            raise SystemExit("nobody waits for the answer")
        if reading in ready:
            chunk = os.read(reading, 2**16)
            if not chunk:
                return reply
            reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            return f"wrote more than {MAX_REPLY_BYTES} bytes of result"
    return f"ran longer than {timeout_seconds:g} s"


def _unknown(did: str) -> bytes:
    return pack_failure(f"verifier_code {did}; the grade is unknown until the verifier is mended")


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _judge(question: Question, seed: bytes, current: bytes, writing: int, nothing: int) -> NoReturn:
    """The child: whatever happens, it does not come back."""
    try:
        try:
            _keep_only(writing, nothing)
            cpu_seconds = ceil(question.timeout_seconds) + 1
            _lock_up(cpu_seconds, MEMORY_BYTES + 2 * (len(seed) + len(current)))
            reply = _graded(question, seed, current)
        except BaseException as error:
            reply = _unknown(f"was ended by {type(error).__name__}: {error}")
        while reply:
            reply = reply[os.write(_RESULT, reply) :]
    finally:
        os._exit(0)


def _keep_only(result: int, nothing: int) -> None:
    """Inherited, a socket to the jail would let a verifier answer in the worker's name."""
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(result, _RESULT)
    os.closerange(_RESULT + 1, 2**16)


def _lock_up(cpu_seconds: int, memory_bytes: int) -> None:
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
    if seccomp.SUPPORTED:
        seccomp.install_filter()


def _graded(question: Question, seed: bytes, current: bytes) -> bytes:
    with closing(load_state(seed)) as seed_db, closing(load_state(current)) as current_db:
        try:
            grade = run_verifier(
                question.code,
                seed_db,
                current_db,
                question.final_answer,
                conversation=question.conversation,
                partial_credit=question.partial_credit,
            )
        except VerifierError as error:
            return pack_failure(str(error), permanent=isinstance(error, BrokenVerifierError))
        return pack_grade(grade)

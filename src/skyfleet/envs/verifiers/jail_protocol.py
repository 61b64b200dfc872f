"""The byte protocol between a jail and its workers.

A worker may be compromised by the verifier it runs, so the jail reads nothing but JSON from it,
and no more than `MAX_REPLY_BYTES`. The worker imports this module without site-packages.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from struct import Struct

from skyfleet.envs.verifiers.run_verifier import (
    BrokenVerifierError,
    TimedOutVerifierError,
    Verdict,
)
from skyfleet.errors import VerifierError

SIZE = Struct("!Q")
"""Precedes every frame."""
_HEADER = Struct("!dQQ")
"""The seconds that the verifier may take, and the sizes of the request and the first database."""
MAX_REPLY_BYTES = 1_000_000
_MAX_STDOUT_CHARACTERS = 64_000
"""A character takes at most 12 bytes of JSON, so a reply always fits."""
_MAX_FAILURE_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    code: str
    final_answer: str | None
    conversation: str | None
    partial_credit: bool
    timeout_seconds: float


def pack_frame(content: bytes) -> bytes:
    return SIZE.pack(len(content)) + content


def pack_request(request: VerifyRequest, seed: bytes, current: bytes) -> bytes:
    head = json.dumps(asdict(request)).encode()
    header = _HEADER.pack(request.timeout_seconds, len(head), len(seed))
    return b"".join([header, head, seed, current])


def unpack_timeout_seconds(packed: bytearray) -> float:
    """Read only this, and leave no copy of anything else."""
    timeout_seconds: float = _HEADER.unpack_from(packed)[0]
    return timeout_seconds


def unpack_request(packed: bytearray) -> tuple[VerifyRequest, bytes, bytes]:
    _, n_head, n_seed = _HEADER.unpack_from(packed)
    content = memoryview(packed)[_HEADER.size :]
    request = VerifyRequest(**json.loads(bytes(content[:n_head])))
    states = content[n_head:]
    return request, bytes(states[:n_seed]), bytes(states[n_seed:])


def pack_verdict(verdict: Verdict) -> bytes:
    stdout = verdict.stdout[-_MAX_STDOUT_CHARACTERS:]
    return json.dumps({"reward": verdict.reward, "stdout": stdout}).encode()


def pack_failure(error: VerifierError) -> bytes:
    reply = {"failure": str(error)[:_MAX_FAILURE_CHARACTERS], "kind": type(error).__name__}
    return json.dumps(reply).encode()


_KINDS = {kind.__name__: kind for kind in (BrokenVerifierError, TimedOutVerifierError)}


def unpack_reply(packed: bytes) -> Verdict:
    """Return the verdict; a failure, or anything a worker would not send, is a VerifierError."""
    try:
        reply = json.loads(packed)
    except (ValueError, RecursionError):
        reply = None
    match reply:
        case {"reward": float(reward), "stdout": str(stdout)} if math.isfinite(reward):
            return Verdict(reward=reward, stdout=_make_printable(stdout))
        case {"failure": str(failure), "kind": str(kind)}:
            kept = _make_printable(failure[:_MAX_FAILURE_CHARACTERS])
            raise _KINDS.get(kind, VerifierError)(kept)
    raise VerifierError(
        f"verifier_code overwrote its own result ({packed[:60]!r}); "
        "the grade is unknown until the verifier is fixed"
    )


def _make_printable(text: str) -> str:
    """Replace lone surrogates, which cannot be written as UTF-8."""
    return text.encode(errors="replace").decode()

"""Frames: what a jail and its worker say to each other, as bytes.

A worker may be lying, so nothing but JSON is read from it, and no more than `MAX_REPLY_BYTES`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from struct import Struct

from skyfleet.envs.verifiers.running import SUCCESS_REWARD, BrokenVerifierError
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

SIZE = Struct("!Q")
"""Stands before every frame."""
MAX_REPLY_BYTES = 1_000_000
_MAX_STDOUT_CHARACTERS = 64_000
"""A character takes at most 12 bytes of JSON, so that a reply always fits."""
_MAX_FAILURE_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    code: str
    final_answer: str | None
    conversation: str | None
    partial_credit: bool
    timeout_seconds: float


def framed(content: bytes) -> bytes:
    return SIZE.pack(len(content)) + content


def pack_request(question: Question, seed: bytes, current: bytes) -> bytes:
    head = json.dumps(asdict(question)).encode()
    return b"".join([SIZE.pack(len(head)), SIZE.pack(len(seed)), head, seed, current])


def unpack_request(request: bytes) -> tuple[Question, bytes, bytes]:
    (n_head,), (n_seed,) = SIZE.unpack_from(request), SIZE.unpack_from(request, SIZE.size)
    begin = 2 * SIZE.size + n_head
    question = Question(**json.loads(request[2 * SIZE.size : begin]))
    return question, request[begin : begin + n_seed], request[begin + n_seed :]


def pack_grade(grade: Grade) -> bytes:
    stdout = grade.explanation[-_MAX_STDOUT_CHARACTERS:]
    return json.dumps({"reward": grade.reward, "stdout": stdout}).encode()


def pack_failure(failure: str, *, permanent: bool = False) -> bytes:
    said = {"failure": failure[:_MAX_FAILURE_CHARACTERS], "permanent": permanent}
    return json.dumps(said).encode()


def read_reply(reply: bytes) -> Grade:
    """The grade; a failure, or anything that a worker would not say, is a VerifierError."""
    try:
        said = json.loads(reply)
    except (ValueError, RecursionError):
        said = None
    match said:
        case {"reward": float(reward), "stdout": str(stdout)} if math.isfinite(reward):
            success = reward >= SUCCESS_REWARD
            return Grade(reward=reward, success=success, explanation=_printable(stdout))
        case {"failure": str(failure), "permanent": bool(permanent)}:
            kind = BrokenVerifierError if permanent else VerifierError
            raise kind(_printable(failure[:_MAX_FAILURE_CHARACTERS]))
    raise VerifierError(
        f"verifier_code wrote over its own result ({reply[:60]!r}); "
        "the grade is unknown until the verifier is mended"
    )


def _printable(text: str) -> str:
    """Half a surrogate pair would break whoever writes the text down as UTF-8."""
    return text.encode(errors="replace").decode()

"""Run verifier source that a client sends, on the client's instance.

Client data is never unpickled: `read_plain` reads plain values from the opcodes of a pickle. The
source runs only in the jail.
"""

from __future__ import annotations

import ast
import base64
import binascii
from collections import OrderedDict
from dataclasses import dataclass
from pickletools import genops
from time import perf_counter
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field

from skyfleet.envs.fleet.bundles import digest, unpack
from skyfleet.envs.verifiers.grading import shared_jail
from skyfleet.envs.verifiers.run_verifier import TimedOutVerifierError
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade
from skyfleet.worlds.fleet_server.http import HttpError
from skyfleet.worlds.fleet_server.instances import Instance

_WORDS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_SKIPPED = ("PROTO", "FRAME", "STOP")


def read_plain(data: bytes) -> Any:
    """Read the plain data of a pickle; ValueError if it holds anything else or is not a pickle."""
    reader = _Reader()
    try:
        for opcode, argument, _ in genops(data):
            reader.take(opcode.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a pickle: {error!r}") from error
    if len(reader.stack) != 1:
        raise ValueError(f"the pickle holds {len(reader.stack)} values; send one")
    return reader.stack[0]


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: list[Any] = []

    def take(self, name: str, argument: Any) -> None:
        if name in _NUMBERS or name in _TEXTS:
            self.stack.append(argument)
        elif name in _WORDS:
            self.stack.append(_WORDS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo.append(self.stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(self.stack)
            self.stack = []
        elif name not in _SKIPPED:
            self._gather(name)

    def _gather(self, name: str) -> None:
        if name in _SHORT_TUPLES:
            self.stack.append(tuple(self._last(_SHORT_TUPLES[name])))
        elif name == "TUPLE":
            items = self._since_mark()
            self.stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = self._last(1) if name == "APPEND" else self._since_mark()
            self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._since_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            raise ValueError(
                f"the pickle contains {name}; send only strings, numbers, lists and dicts"
            )

    def _last(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._outer.pop()
        return items


_MAX_SOURCES = 4096
_RAW_SECONDS = 30


class ExecuteRequest(BaseModel):
    key: str | None = None
    sha256: str | None = None
    bundle: str | None = None
    """Base64 of a zip; omitted if the server already has the source by its digest."""
    args: str | None = None
    """Base64 of a pickle of the positional and the keyword arguments."""
    args_array: list[Any]
    """The positional arguments, then {"env": instance_id}."""
    timeout: int = Field(30, ge=1, le=300)


class RawRequest(BaseModel):
    function_code: str
    function_name: str
    text_solution: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierArguments:
    """The arguments of a verifier, besides the environment."""

    final_answer: str | None = None
    conversation: str | None = None


class SourceCache:
    """Verifier sources by the digest of their bundle; the oldest is evicted first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._known

    def find(self, request: ExecuteRequest) -> str:
        if request.bundle is None:
            code = self._known.get(request.sha256 or "")
            if code is None:
                # fleet-python sends the bundle when the error contains these words.
                raise HttpError(400, f"bundle not found: sha256={request.sha256!r}; send it")
            return code
        bundle = _decode_base64("bundle", request.bundle)
        try:
            code = unpack(bundle)
        except ValueError as error:
            raise HttpError(400, f"bundle: {error}") from error
        self._known[digest(bundle)] = code
        if len(self._known) > _MAX_SOURCES:
            self._known.popitem(last=False)
        return code


def get_instance_id(request: ExecuteRequest) -> str:
    named = [a["env"] for a in request.args_array if isinstance(a, dict) and "env" in a]
    if not named:
        raise HttpError(400, 'args_array names no instance; add {"env": instance_id}')
    return str(named[-1])


def parse_arguments(request: ExecuteRequest) -> VerifierArguments:
    """Parse the verifier's arguments; only strings are supported."""
    positional = [a for a in request.args_array if not (isinstance(a, dict) and "env" in a)]
    named = {} if request.args is None else _parse_keywords(request.args)
    given = dict(zip(("final_answer", "conversation"), positional, strict=False)) | named
    if given.keys() - {"final_answer", "conversation"} or len(positional) > 2:
        raise HttpError(
            400,
            f"arguments {sorted(map(str, given))}; a verifier takes final_answer and conversation",
        )
    if not all(value is None or isinstance(value, str) for value in given.values()):
        raise HttpError(400, "final_answer and conversation must be strings")
    return VerifierArguments(**given)


async def execute(
    instance: Instance, code: str, arguments: VerifierArguments, *, timeout_seconds: float
) -> dict[str, Any]:
    """Run a verifier; the response has Fleet's format. A verifier that fails returns no result."""
    start = perf_counter()
    answer: dict[str, Any] = {"execution_id": str(uuid4())}
    try:
        grade = await _grade(instance, code, arguments, timeout_seconds)
    except VerifierError as error:
        timed_out = isinstance(error, TimedOutVerifierError)
        kind = TimedOutVerifierError if timed_out else VerifierError
        failure = {"type": kind.__name__, "message": str(error)}
        answer |= {"success": False, "result": None, "stdout": "", "error": failure}
    else:
        answer |= {"success": True, "result": grade.reward, "stdout": grade.explanation}
    return answer | {"execution_time_ms": round(1000 * (perf_counter() - start))}


async def execute_raw(instance: Instance, request: RawRequest) -> dict[str, Any]:
    """Run the older request format: source without a bundle, called with two databases."""
    code = request.function_code
    try:
        if _takes_two_databases(code, request.function_name):
            code = _wrap_for_env(code, request.function_name)
        arguments = VerifierArguments(final_answer=request.text_solution)
        grade = await _grade(instance, code, arguments, _RAW_SECONDS)
    except VerifierError as error:
        return {"success": False, "error": str(error), "message": "the verifier failed"}
    return {"success": True, "result": grade.reward, "message": grade.explanation or "ok"}


async def _grade(
    instance: Instance, code: str, arguments: VerifierArguments, timeout_seconds: float
) -> Grade:
    # In the jail even for source that this process wrote: a client may have changed the tables.
    return await shared_jail().verify(
        code,
        instance.world.image(instance.data_seed),
        instance.app.db.image(),
        arguments.final_answer,
        arguments.conversation,
        timeout_seconds=timeout_seconds,
    )


def _takes_two_databases(code: str, name: str) -> bool:
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise VerifierError(f"function_code cannot be parsed, {reason:.200}; correct it") from error
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in body if isinstance(node, kinds)]
    return any(
        [a.arg for a in f.args.args][:2] == ["before", "after"] for f in functions if f.name == name
    )


def _wrap_for_env(code: str, name: str) -> str:
    # In a list, because the executor calls the first function that has a verifier's name.
    return (
        f"from __future__ import annotations\n{code}\n"
        f"kept = [{name}]\ndel {name}\n"
        "def main(env, final_answer=None):\n"
        '    return kept[0](env.db("seed"), env.db("current"), final_answer)\n'
    )


def _parse_keywords(args: str) -> dict[Any, Any]:
    try:
        named = read_plain(_decode_base64("args", args))["kwargs"]
        if not isinstance(named, dict):
            raise TypeError(f"kwargs is a {type(named).__name__}, not a dict")
    except (ValueError, KeyError, TypeError) as error:
        raise HttpError(400, f"args: {error}; pickle {{'args': ..., 'kwargs': ...}}") from error
    return named


def _decode_base64(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise HttpError(400, f"{key} is not base64: {error}") from error

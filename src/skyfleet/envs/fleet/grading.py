"""Judging: a task's verifier, run by the service, as a grade or as a reason why there is none."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import httpx

from skyfleet.chat.message import Message
from skyfleet.envs.fleet.service import Arguments, FleetService, RemoteInstance
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.running import (
    SUCCESS_REWARD,
    VERIFIER_NAME,
    call_verifier,
    check_judge,
    credit_of,
    read_reward,
)
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task


async def judge(
    service: FleetService,
    instance: RemoteInstance,
    task: Task,
    *,
    final_answer: str | None,
    conversation: Sequence[Message],
) -> Grade:
    """VerifierError once every try has failed: an unknown grade is never a zero."""
    if task.verifier_code is None:
        raise VerifierError(f"task {task.key}: verifier_code is None; give it one")
    function = verifier_function(task.verifier_code)
    said = _arguments(function, final_answer, conversation)
    settings, problem = service.settings, ""
    for wait_seconds in [*settings.waits_seconds(settings.verifier_tries), None]:
        try:
            answer = await service.execute_verifier(
                instance, task, task.verifier_code, function.name, said
            )
            return read_verdict(answer, partial=settings.partial_reward)
        except (httpx.HTTPError, ValueError, VerifierError) as error:
            problem = str(error) or type(error).__name__
        if wait_seconds is not None:
            await asyncio.sleep(wait_seconds)
    raise VerifierError(f"task {task.key}: no grade in {settings.verifier_tries} tries: {problem}")


def read_verdict(answer: Mapping[str, Any], *, partial: bool) -> Grade:
    """The service's answer as a grade; partial credit can only better a zero."""
    stdout = str(answer.get("stdout") or "")
    if not answer.get("success"):
        raise VerifierError(f"the verifier failed: {answer.get('error')}")
    check_judge(stdout)
    result = answer.get("result")
    if isinstance(result, Mapping):
        result = result.get("score")
    try:
        reward = read_reward(result)
    except (TypeError, OverflowError) as error:
        said = f"the verifier returned {result!r:.100}; return a number"
        raise VerifierError(said) from error
    if partial and reward == 0:
        reward = credit_of(stdout)
    return Grade(reward=reward, success=reward >= SUCCESS_REWARD, explanation=stdout)


def verifier_function(code: str) -> ast.FunctionDef:
    """The function to be called, found without running anything."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"verifier_code cannot be read: {error}; mend it") from error
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise VerifierError("verifier_code has no function; define validate_task(env)")
    named = [f for f in functions if VERIFIER_NAME.match(f.name)]
    return (named or functions)[0]


def _arguments(
    function: ast.FunctionDef, final_answer: str | None, conversation: Sequence[Message]
) -> Arguments:
    """What our own executor would call it with: a row is graded alike here and there."""
    told = {"final_answer": final_answer, "conversation": conversation_json(conversation)}
    given: Arguments = ((), {})

    def stand_in(env: object = None, *positional: str | None, **named: str | None) -> None:
        nonlocal given
        given = positional, named

    stand_in.__dict__["__signature__"] = _signature(function)
    # Any, because of the function only its signature counts, and of the env nothing.
    call: Any = call_verifier
    call(stand_in, None, told)
    return given


def _signature(function: ast.FunctionDef) -> Signature:
    taken = function.args
    kinds = (
        (Parameter.POSITIONAL_ONLY, taken.posonlyargs),
        (Parameter.POSITIONAL_OR_KEYWORD, taken.args),
        (Parameter.VAR_POSITIONAL, [taken.vararg]),
        (Parameter.KEYWORD_ONLY, taken.kwonlyargs),
        (Parameter.VAR_KEYWORD, [taken.kwarg]),
    )
    return Signature([Parameter(one.arg, kind) for kind, found in kinds for one in found if one])

"""Judging: a task's verifier, run by the service, as a grade or as a reason why there is none."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from skyfleet.chat.message import Message
from skyfleet.envs.fleet.service import FleetService, RemoteInstance
from skyfleet.envs.verifiers.partial import partial_reward
from skyfleet.errors import VerifierError
from skyfleet.tasks.grade import Grade
from skyfleet.tasks.task import Task

_JUDGE_ERROR = re.compile(r"^JUDGE ERROR:.*", re.M)
_SUCCESS = 1.0


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
    if found := _JUDGE_ERROR.search(stdout):
        raise VerifierError(found[0])
    result = answer.get("result")
    if isinstance(result, Mapping):
        result = result.get("score")
    reward = _SUCCESS if result is None else _number(result)
    if partial and reward == 0:
        share = partial_reward(stdout) or 0.0
        # What failed does not pass, whatever its checks add up to.
        reward = share if share < _SUCCESS else 0.0
    return Grade(reward=reward, success=reward >= _SUCCESS, explanation=stdout)


def verifier_function(code: str) -> ast.FunctionDef:
    """The function to be called, found without running anything."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"verifier_code cannot be read: {error}; mend it") from error
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise VerifierError("verifier_code has no function; define validate_task(env)")
    named = [f for f in functions if re.match(r"validate_task|(main|verify)$", f.name)]
    return (named or functions)[0]


def _arguments(
    function: ast.FunctionDef, final_answer: str | None, conversation: Sequence[Message]
) -> dict[str, str]:
    """What the verifier's signature asks for."""
    taken = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    said: dict[str, str] = {}
    if final_answer is not None and ("final_answer" in taken or function.args.kwarg):
        said["final_answer"] = final_answer
    if "conversation" in taken:
        turns = [{"role": message.role, "content": message.text} for message in conversation]
        said["conversation"] = json.dumps(turns, ensure_ascii=False)
    return said


def _number(result: object) -> float:
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise VerifierError(f"the verifier returned {result!r:.100}; return a number")
    return float(result)

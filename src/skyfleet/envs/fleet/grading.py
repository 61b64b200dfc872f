"""Run a task's verifier on Fleet's service and turn the answer into a grade or an error."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import httpx

from skyfleet.chat.message import Message
from skyfleet.envs.fleet.service import (
    Arguments,
    FleetService,
    InstanceEndedError,
    RemoteInstance,
)
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.printed import compute_partial_credit, find_judge_error
from skyfleet.envs.verifiers.quoting import QUOTED_NOTE, Quoted, find_quoted
from skyfleet.envs.verifiers.run_verifier import (
    SUCCESS_REWARD,
    VERIFIER_NAME,
    TimedOutVerifierError,
    call_verifier,
    check_judge,
    parse_reward,
)
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task

VerifierFunction = ast.FunctionDef | ast.AsyncFunctionDef

_NOTHING_QUOTED = Quoted()


async def grade_on_fleet(
    service: FleetService,
    instance: RemoteInstance,
    task: Task,
    *,
    final_answer: str | None,
    conversation: Sequence[Message],
) -> Grade:
    """Raise VerifierError once every try has failed: an unknown grade is never a zero."""
    if task.verifier_code is None:
        raise VerifierError(f"task {task.key}: verifier_code is None; set it")
    function = find_verifier_function(task.verifier_code)
    arguments = _make_arguments(function, final_answer, conversation)
    settings, problem = service.settings, ""
    quoted = find_quoted(
        [final_answer or "", *(m.text for m in conversation if m.role in ("assistant", "tool"))],
        [call.arguments for message in conversation for call in message.tool_calls],
    )
    for wait_seconds in [*settings.waits_seconds(settings.verifier_tries), None]:
        try:
            answer = await service.execute_verifier(
                instance, task, task.verifier_code, function.name, arguments
            )
            return parse_verdict(answer, partial=settings.partial_reward, quoted=quoted)
        except TimedOutVerifierError:
            raise
        except InstanceEndedError as error:
            raise VerifierError(f"task {task.key}: no grade: {error}") from error
        except (httpx.HTTPError, ValueError, VerifierError) as error:
            problem = str(error) or type(error).__name__
        if wait_seconds is not None:
            await asyncio.sleep(wait_seconds)
    raise VerifierError(f"task {task.key}: no grade in {settings.verifier_tries} tries: {problem}")


def parse_verdict(
    answer: Mapping[str, Any], *, partial: bool, quoted: Quoted = _NOTHING_QUOTED
) -> Grade:
    """Turn the service's answer into a grade; partial credit replaces a zero only.

    The service returns the output as one text. If the agent wrote something like a result line,
    such lines in the output may be its own, and only the returned number counts.
    """
    stdout = str(answer.get("stdout") or "")
    if not answer.get("success"):
        error = answer.get("error")
        name = error.get("type") if isinstance(error, Mapping) else None
        timed_out = name == TimedOutVerifierError.__name__
        kind = TimedOutVerifierError if timed_out else VerifierError
        raise kind(f"the verifier failed: {error}")
    if not quoted.judge_error:
        check_judge(find_judge_error(stdout))
    result = answer.get("result")
    if isinstance(result, Mapping):
        result = result.get("score")
    try:
        reward = parse_reward(result)
    except (TypeError, OverflowError) as error:
        raise VerifierError(f"the verifier returned {result!r:.100}; return a number") from error
    if partial and reward == 0 and not quoted.checks:
        reward = compute_partial_credit(stdout)
    note = QUOTED_NOTE if quoted != _NOTHING_QUOTED else ""
    return Grade(reward=reward, success=reward >= SUCCESS_REWARD, explanation=stdout + note)


def find_verifier_function(code: str) -> VerifierFunction:
    """Find the function to call without running any code."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"verifier_code cannot be parsed: {error}; fix it") from error
    functions = [node for node in body if isinstance(node, VerifierFunction)]
    if not functions:
        raise VerifierError("verifier_code has no function; define validate_task(env)")
    named = [f for f in functions if VERIFIER_NAME.match(f.name)]
    return (named or functions)[0]


def _make_arguments(
    function: VerifierFunction, final_answer: str | None, conversation: Sequence[Message]
) -> Arguments:
    """Return the arguments that `run_verifier` would pass, so that both grade a row alike."""
    available = {"final_answer": final_answer, "conversation": conversation_json(conversation)}
    arguments: Arguments = ((), {})

    def capture(env: object = None, *positional: str | None, **named: str | None) -> None:
        nonlocal arguments
        arguments = positional, named

    capture.__dict__["__signature__"] = _parse_signature(function)
    # Any, because only the signature of the function counts, and nothing of the env.
    call: Any = call_verifier
    call(capture, None, available)
    return arguments


def _parse_signature(function: VerifierFunction) -> Signature:
    defined = function.args
    kinds = (
        (Parameter.POSITIONAL_ONLY, defined.posonlyargs),
        (Parameter.POSITIONAL_OR_KEYWORD, defined.args),
        (Parameter.VAR_POSITIONAL, [defined.vararg]),
        (Parameter.KEYWORD_ONLY, defined.kwonlyargs),
        (Parameter.VAR_KEYWORD, [defined.kwarg]),
    )
    return Signature([Parameter(one.arg, kind) for kind, found in kinds for one in found if one])

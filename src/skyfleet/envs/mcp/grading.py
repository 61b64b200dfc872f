"""Grading: MCP says nothing of rewards, so a grader finds one after the episode."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from inspect import isawaitable
from urllib.parse import quote

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

from skyfleet.chat.message import Message
from skyfleet.config.imports import import_named
from skyfleet.envs.mcp.session import Session
from skyfleet.envs.tls import certificates
from skyfleet.envs.turns import SUBMIT_NAME
from skyfleet.envs.validation import Reward, grade_from
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.grading import grade_state
from skyfleet.envs.verifiers.running import load_state
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task

_GRADE_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode that is over, its session still open."""

    task: Task
    messages: tuple[Message, ...]
    """Everything said, from the opening on."""
    session: Session


Grader = Callable[[Played], Awaitable[Grade | None]]

RewardFunction = Callable[[Task, Sequence[Message]], Reward | Awaitable[Reward]]


def by_function(target: str) -> Grader:
    """Your own `module:function(task, messages)`; it returns a reward, a Grade, or None.

    One that is not `async def` runs in a thread, so that it may take its time.
    """
    reward_of: RewardFunction = import_named(target, key="environment.mcp.reward")

    async def grade(played: Played) -> Grade | None:
        result = await asyncio.to_thread(reward_of, played.task, played.messages)
        if isawaitable(result):
            result = await result
        return grade_from(result, by=f"environment.mcp.reward={target!r}")

    return grade


def by_verifier(*, seed_uri: str, current_uri: str) -> Grader:
    """The task's `verifier_code` on two SQLite images that the server offers as resources."""

    async def grade(played: Played) -> Grade | None:
        code = played.task.verifier_code
        if code is None:
            raise VerifierError(f"task {played.task.key}: verifier_code is None; give it one")
        seed, current = await _image(played, seed_uri), await _image(played, current_uri)
        # Few verifiers ask for it, and it is as long as the episode.
        said = conversation_json(played.messages) if "conversation" in code else None
        with closing(load_state(current)) as state:
            answer = _answer(played.messages)
            return await grade_state(code, seed, state, answer, conversation=said)

    return grade


def by_url(url: str) -> Grader:
    """What GET `url` says of the session, as `mcp_app` answers at `/{task_key}/grade`."""

    async def grade(played: Played) -> Grade | None:
        address = url.replace("{task_key}", quote(played.task.key, safe=""))
        headers = {"mcp-session-id": played.session.id or ""}
        async with httpx.AsyncClient(verify=certificates(), timeout=_GRADE_SECONDS) as http:
            answer = await http.get(address, headers=headers)
        try:
            told = _Told.model_validate_json(answer.content)
        except ValidationError as error:
            raise VerifierError(f"{address} answers {answer.status_code}, no grade") from error
        if told.error:
            raise VerifierError(f"{address}: {told.error}")
        if told.reward is None:
            return None
        return Grade(reward=told.reward, success=told.success, explanation=told.explanation)

    return grade


class _Told(BaseModel):
    reward: FiniteFloat | None = None
    success: bool = False
    explanation: str = ""
    error: str = ""


async def _image(played: Played, uri: str) -> bytes:
    for content in (await played.session.read(uri)).contents:
        if blob := getattr(content, "blob", None):
            return b64decode(blob)
    raise VerifierError(f"task {played.task.key}: resource {uri} is no SQLite image")


def _answer(messages: Sequence[Message]) -> str | None:
    """What was submitted, or else the last words."""
    said = [message for message in messages if message.role == "assistant"]
    calls = [call for message in said for call in message.tool_calls]
    submitted = [call for call in calls if call.name == SUBMIT_NAME]
    if submitted:
        return str(submitted[-1].arguments.get("answer"))
    return said[-1].text if said else None

"""Graders for MCP episodes: MCP has no rewards, so a grader computes one after the episode."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from inspect import isawaitable
from types import MappingProxyType
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

from skyfleet.chat.message import Message
from skyfleet.config.environment import Mcp, Verifier
from skyfleet.config.imports import import_named
from skyfleet.envs.mcp.session import Session
from skyfleet.envs.tls import tls_context
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.envs.validation import Reward, parse_grade
from skyfleet.envs.verifiers.conversation import conversation_json
from skyfleet.envs.verifiers.grading import grade_state
from skyfleet.envs.verifiers.run_verifier import load_state
from skyfleet.errors import ConfigError, VerifierError
from skyfleet.tasks.task import Grade, Task

_GRADE_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """An episode that is over while its session is still open."""

    task: Task
    messages: tuple[Message, ...]
    """All messages, including the prompt."""
    session: Session


Grader = Callable[[FinishedEpisode], Awaitable[Grade | None]]

RewardFunction = Callable[[Task, Sequence[Message]], Reward | Awaitable[Reward]]


def build_grader(section: Mcp, verifier: Verifier | None = None) -> Grader:
    """Choose the grader that the config section names."""
    if section.reward is not None:
        return by_function(section.reward)
    if section.grade_url is not None:
        return by_url(section.grade_url, _select_headers(section))
    if section.seed_uri is not None and section.current_uri is not None:
        return by_verifier(
            seed_uri=section.seed_uri, current_uri=section.current_uri, verifier=verifier
        )
    raise ConfigError(
        "environment.mcp does not say how to grade; set reward, or grade_url, or seed_uri and "
        "current_uri for the tasks' verifiers"
    )


def by_function(target: str) -> Grader:
    """Grade with the user's `module:function(task, messages)`: a reward, a Grade, or None.

    A function that is not `async def` runs in a thread, so it may block.
    """
    compute_reward: RewardFunction = import_named(target, key="environment.mcp.reward")

    async def grade(episode: FinishedEpisode) -> Grade | None:
        result = await asyncio.to_thread(compute_reward, episode.task, episode.messages)
        if isawaitable(result):
            result = await result
        return parse_grade(result, by=f"environment.mcp.reward={target!r}")

    return grade


def by_verifier(*, seed_uri: str, current_uri: str, verifier: Verifier | None = None) -> Grader:
    """Run the task's `verifier_code` on two SQLite images that the server offers as resources."""
    settings = verifier or Verifier()

    async def grade(episode: FinishedEpisode) -> Grade | None:
        code = episode.task.verifier_code
        if code is None:
            raise VerifierError(f"task {episode.task.key}: verifier_code is None; set it")
        seed, current = (
            await _read_image(episode, seed_uri),
            await _read_image(episode, current_uri),
        )
        # Few verifiers use it, and it is as long as the episode.
        conversation = conversation_json(episode.messages) if "conversation" in code else None
        with closing(load_state(current)) as state:
            answer = _find_answer(episode.messages)
            return await grade_state(
                code,
                seed,
                state,
                answer,
                conversation=conversation,
                timeout_seconds=settings.timeout_seconds,
                allow_unconfined=settings.allow_unconfined,
            )

    return grade


def _select_headers(section: Mcp) -> dict[str, str]:
    """The headers of environment.mcp for its own server; another one must not see its tokens."""
    servers = [urlsplit(url or "")[:2] for url in (section.url, section.grade_url)]
    if servers[0] != servers[1]:
        return {}
    return {name: value.get_secret_value() for name, value in section.headers.items()}


def by_url(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> Grader:
    """GET the grade of the session from `url`, as `mcp_app` serves it at `/{task_key}/grade`."""
    own_headers = headers

    async def grade(episode: FinishedEpisode) -> Grade | None:
        address = url.replace("{task_key}", quote(episode.task.key, safe=""))
        headers = {**own_headers, "mcp-session-id": episode.session.id or ""}
        async with httpx.AsyncClient(verify=tls_context(), timeout=_GRADE_SECONDS) as http:
            answer = await http.get(address, headers=headers)
        try:
            body = _GradeBody.model_validate_json(answer.content)
        except ValidationError as error:
            raise VerifierError(
                f"{address} answers {answer.status_code} without a grade"
            ) from error
        if body.error:
            raise VerifierError(f"{address}: {body.error}")
        if body.reward is None:
            return None
        return Grade(reward=body.reward, success=body.success, explanation=body.explanation)

    return grade


class _GradeBody(BaseModel):
    reward: FiniteFloat | None = None
    success: bool = False
    explanation: str = ""
    error: str = ""


async def _read_image(episode: FinishedEpisode, uri: str) -> bytes:
    for content in (await episode.session.read(uri)).contents:
        if blob := getattr(content, "blob", None):
            return b64decode(blob)
    raise VerifierError(f"task {episode.task.key}: resource {uri} is not an SQLite image")


def _find_answer(messages: Sequence[Message]) -> str | None:
    """Return the submitted answer, or else the last text of the agent."""
    actions = [message for message in messages if message.role == "assistant"]
    calls = [call for message in actions for call in message.tool_calls]
    submitted = [call for call in calls if call.name == SUBMIT_NAME]
    if submitted:
        return str(submitted[-1].arguments.get("answer"))
    return actions[-1].text if actions else None

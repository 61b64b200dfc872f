"""Play episodes against one kind of broken server, beside siblings with a good one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from tests.engines import broken_at_times, broken_completions  # noqa: F401 - add their kinds
from tests.engines.broken_servers import KINDS as KINDS
from tests.engines.broken_servers import Client, Kind, answer_well
from tests.fakes.broken_http import BROKEN, GOOD, MODEL, broken_http
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import CounterEnv

from skyfleet.chat.message import Message
from skyfleet.engines.anthropic_chat import AnthropicChat
from skyfleet.engines.openai_chat import OpenAIChat, OpenAIChatEngine
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Env, Observation
from skyfleet.rollouts.conversation import (
    AgentFactory,
    MessageConversation,
    TokenConversation,
)
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory

SAMPLING = SamplingParams(max_generate_length=64)
CONTEXT = 4096
SIBLING_SECONDS = 60.0


class NamedEnv(CounterEnv):
    """Its prompt starts with the task's key, so the server knows whose request it gets."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task

    async def reset(self) -> Observation:
        return Observation(
            messages=(Message(role="user", content=f"{self._task.key}: count to 3"),)
        )


async def open_env(task: Task) -> Env:
    return NamedEnv(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    broken: Sequence[Trajectory]
    siblings: Sequence[Trajectory]


async def play(
    kind: Kind,
    client: Client,
    *,
    limit_seconds: float,
    timeout_seconds: float = 300.0,
    tries: int = 4,
    attempts: int = 2,
) -> Played:
    """Two groups at once on one client: one meets the broken server, one has good answers.

    A server that is broken before it reads a request has no good answers: there, the siblings have
    a server of their own. Their time limit is long, so that a busy machine does not matter.
    """
    async with AsyncExitStack() as opened:
        url = await opened.enter_async_context(broken_http(kind.behave, accepts=kind.accepts))
        broken = await connect(client, url, opened, timeout_seconds, tries)
        good = broken
        if not kind.accepts:
            other = await opened.enter_async_context(broken_http(answer_well))
            good = await connect(client, other, opened, timeout_seconds, tries)

        async with asyncio.TaskGroup() as groups:
            unlucky = groups.create_task(collect_one(BROKEN, broken, limit_seconds, attempts))
            lucky = groups.create_task(collect_one(GOOD, good, SIBLING_SECONDS, attempts))
    return Played(broken=unlucky.result(), siblings=lucky.result())


async def collect_one(
    key: str, agent: AgentFactory, limit_seconds: float, attempts: int
) -> Sequence[Trajectory]:
    limits = Limits(
        max_turns=8, max_input_length=CONTEXT - 64, trajectory_timeout_seconds=limit_seconds
    )
    task = Task(key=key, env_key="counter", prompt="count to 3")
    (group,) = await collect([task], open_env, agent, limits, n_samples=attempts, max_concurrent=64)
    return group.trajectories


async def connect(
    client: Client, url: str, opened: AsyncExitStack, timeout_seconds: float, tries: int
) -> AgentFactory:
    if client in ("messages", "anthropic"):
        model: OpenAIChat | AnthropicChat
        if client == "messages":
            model = OpenAIChat(f"{url}/v1", model=MODEL, timeout_seconds=timeout_seconds)
        else:
            model = AnthropicChat(url, model=MODEL, timeout_seconds=timeout_seconds)
        await opened.enter_async_context(model)
        return lambda task, observation, session: MessageConversation(
            observation, model=model, sampling=SAMPLING
        )
    if client == "chat":
        chat = await opened.enter_async_context(
            OpenAIChatEngine(
                f"{url}/v1",
                model=MODEL,
                model_names={MODEL},
                timeout_seconds=timeout_seconds,
                tries=tries,
            )
        )
        return lambda task, observation, session: NativeToolConversation(
            observation,
            engine=chat,
            sampling=SAMPLING,
            session=session,
            max_input_length=CONTEXT,
        )
    engine = await opened.enter_async_context(
        OpenAIEngine(
            f"{url}/v1",
            model=MODEL,
            model_names={MODEL},
            max_model_len=CONTEXT,
            timeout_seconds=timeout_seconds,
            tries=tries,
        )
    )
    return lambda task, observation, session: TokenConversation(
        observation,
        engine=engine,
        renderer=CharRenderer(),
        sampling=replace(SAMPLING, stop_token_ids=CharRenderer.stop_token_ids),
        session=session,
    )

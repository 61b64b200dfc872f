"""Helpers that run agents against scripted policies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from tests.fakes.serving import nothing_left
from tests.fakes.tiny_policy import tiny_policy

from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.agent_env import ApiCredentials
from skyfleet.envs.env import EnvFactory, Observation
from skyfleet.rollouts.conversation import AgentFactory, Conversation, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory

FOLDER = Path(__file__).parents[2] / "examples" / "add_an_env"
TASKS = load_tasks(FOLDER / "tasks.jsonl")
TASK = TASKS[0]
LIMITS = Limits(max_turns=4, max_input_length=2000, trajectory_timeout_seconds=20)
QUESTION: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def no_resources_left() -> AsyncIterator[None]:
    """Starts asyncio's thread pool first, which the client uses and which stays."""
    await asyncio.to_thread(int)
    async with nothing_left():
        yield


def client(credentials: ApiCredentials) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=credentials.base_url, api_key=credentials.key, max_retries=0)


async def send(credentials: ApiCredentials, messages: Any, **more: Any) -> str:
    async with client(credentials) as model:
        answer = await model.chat.completions.create(
            model=credentials.model, messages=messages, **more
        )
        return answer.choices[0].message.content or ""


def random_policy(task: Task, observation: Observation, session: str) -> Conversation:
    """A policy that samples eight tokens per turn from a random model."""
    policy_model = tiny_policy()
    return TokenConversation(
        observation,
        engine=policy_model.engine(capacity=2000),
        renderer=policy_model.renderer,
        sampling=SamplingParams(max_generate_length=8, seed=1, stop=("e",)),
        session=session,
    )


async def play(open_env: EnvFactory, *, limits: Limits = LIMITS) -> Trajectory:
    async with no_resources_left():
        return await run_episode(
            TASK, open_env, replies("one", "two", "three", "four", "five"), limits
        )


def replies(*lines: str) -> AgentFactory:
    def start(task: Task, observation: Observation, session: str) -> Conversation:
        return TokenConversation(
            observation,
            engine=ScriptedLines(list(lines)),
            renderer=tiny_policy().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


class ScriptedLines:
    policy_version = 0

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        completion = tiny_policy().tokenizer.encode(f"{self._lines.pop(0)}<|im_end|>")
        return Completion(
            token_ids=tuple(completion),
            logprobs=(-1.0,) * len(completion),
            finish="stop",
            policy_version=0,
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

"""Programs played by a policy that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from tests.fakes.serving import nothing_left
from tests.fakes.tiny_speaker import tiny_speaker

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
async def nothing_of_ours_left() -> AsyncIterator[None]:
    """The client asks a thread of asyncio's for the platform; that one stays."""
    await asyncio.to_thread(int)
    async with nothing_left():
        yield


def client(api: ApiCredentials) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0)


async def ask(api: ApiCredentials, messages: Any, **more: Any) -> str:
    async with client(api) as model:
        answer = await model.chat.completions.create(model=api.model, messages=messages, **more)
        return answer.choices[0].message.content or ""


def generation(task: Task, opening: Observation, session: str) -> Conversation:
    """Eight tokens of a random model a turn."""
    policy_model = tiny_speaker()
    return TokenConversation(
        opening,
        engine=policy_model.engine(capacity=2000),
        renderer=policy_model.renderer,
        sampling=SamplingParams(max_generate_length=8, seed=1, stop=("e",)),
        session=session,
    )


async def played(open_env: EnvFactory, *, limits: Limits = LIMITS) -> Trajectory:
    async with nothing_of_ours_left():
        return await run_episode(
            TASK, open_env, says("one", "two", "three", "four", "five"), limits
        )


def says(*lines: str) -> AgentFactory:
    def start(task: Task, opening: Observation, session: str) -> Conversation:
        return TokenConversation(
            opening,
            engine=Lines(list(lines)),
            renderer=tiny_speaker().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


class Lines:
    policy_version = 0

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        said = tiny_speaker().tokenizer.encode(f"{self._lines.pop(0)}<|im_end|>")
        return Completion(
            token_ids=tuple(said), logprobs=(-1.0,) * len(said), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

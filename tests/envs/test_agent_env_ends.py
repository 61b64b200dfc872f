"""However an agent ends, it affects its own episode only."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from openai import APIStatusError, APITimeoutError, PermissionDeniedError
from tests.envs.agents import (
    LIMITS,
    QUESTION,
    TASK,
    ScriptedLines,
    no_resources_left,
    play,
    send,
)
from tests.fakes.tiny_policy import tiny_policy

from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.agent_env import ApiCredentials, agent_env
from skyfleet.envs.env import Observation, close_env
from skyfleet.rollouts.conversation import Conversation, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending


async def test_an_exception_of_the_agent_fails_its_episode() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        await send(credentials, QUESTION)
        raise ValueError("no such page")

    trajectory = await play(agent_env(agent))
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert "ValueError: no such page" in trajectory.failure.detail


async def test_an_exit_of_the_agent_ends_only_its_episode() -> None:
    async def exits(task: Task, credentials: ApiCredentials) -> float:
        await send(credentials, QUESTION)
        sys.exit(0)

    async def cancels(task: Task, credentials: ApiCredentials) -> float:
        await send(credentials, QUESTION)
        helper = asyncio.create_task(asyncio.sleep(9))
        helper.cancel()
        await helper
        return 1.0

    for agent, word in ((exits, "SystemExit(0)"), (cancels, "cancelled itself")):
        trajectory = await play(agent_env(agent))
        assert trajectory.reward is None
        assert word in str(trajectory.failure)


async def test_a_client_timeout_fails_the_episode() -> None:
    slow = asyncio.Event()

    class Slow(ScriptedLines):
        async def generate(
            self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
        ) -> Completion:
            await slow.wait()
            return await super().generate(token_ids, sampling, session=session)

    async def agent(task: Task, credentials: ApiCredentials) -> float:
        with pytest.raises(APITimeoutError):
            await send(credentials, QUESTION, timeout=0.2)
        await asyncio.sleep(0.1)  # for the gateway to notice that its client has disconnected
        slow.set()
        await send(credentials, QUESTION)
        return 1.0

    def start(task: Task, observation: Observation, session: str) -> Conversation:
        return TokenConversation(
            observation,
            engine=Slow(["one", "two"]),
            renderer=tiny_policy().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    async with no_resources_left():
        trajectory = await run_episode(TASK, agent_env(agent), start, LIMITS)
    assert trajectory.reward is None
    assert "stopped waiting for its response" in str(trajectory.failure)


async def test_concurrent_requests_are_all_rejected_when_the_episode_ends() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        answers = await asyncio.gather(
            *(send(credentials, QUESTION) for _ in range(4)), return_exceptions=True
        )
        return sum(isinstance(answer, PermissionDeniedError) for answer in answers) / 10

    limits = Limits(max_turns=1, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await play(agent_env(agent, truncated_reward=0.25), limits=limits)
    assert trajectory.reward == 0.3


async def test_an_agent_that_does_not_end_gets_the_truncated_reward() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        messages = list(QUESTION)
        with suppress(PermissionDeniedError):
            while True:
                messages += [
                    {"role": "assistant", "content": await send(credentials, messages)},
                    *QUESTION,
                ]
        await asyncio.sleep(60)
        return 1.0

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    open_env = agent_env(agent, truncated_reward=0.25, grace_seconds=0.1)
    assert (await play(open_env, limits=limits)).reward == 0.25


async def test_no_request_is_a_failure_and_no_reward_is_unknown() -> None:
    async def sends_nothing(task: Task, credentials: ApiCredentials) -> float:
        return 1.0

    async def returns_none(task: Task, credentials: ApiCredentials) -> None:
        await send(credentials, QUESTION)

    trajectory = await play(agent_env(sends_nothing))
    assert "before it sent a request" in str(trajectory.failure)
    trajectory = await play(agent_env(returns_none))
    assert (trajectory.ending, trajectory.grade, trajectory.failure) == (Ending.DONE, None, None)


@pytest.mark.parametrize(("truncated_reward", "reward"), [(None, None), (0.25, 0.25)])
@pytest.mark.parametrize("catches", [False, True])
async def test_a_truncated_agent_may_still_return_its_reward(
    truncated_reward: float | None, reward: float | None, catches: bool
) -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        messages = list(QUESTION)
        try:
            while True:
                messages += [
                    {"role": "assistant", "content": await send(credentials, messages)},
                    *QUESTION,
                ]
        except PermissionDeniedError:
            if catches:
                return 0.75
            raise

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await play(agent_env(agent, truncated_reward=truncated_reward), limits=limits)
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.MAX_TURNS, 2)
    assert trajectory.reward == (0.75 if catches else reward)


@pytest.mark.parametrize(
    ("asked", "key"), [({"n": 2}, "n"), ({"stop": ["x"]}, "stop"), ({"logprobs": True}, "logprobs")]
)
async def test_unsupported_request_keys_are_rejected_by_name(asked: Any, key: str) -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        with pytest.raises(APIStatusError) as refused:
            await send(credentials, QUESTION, **asked)
        assert refused.value.status_code == 400
        assert json.loads(refused.value.response.text)["error"]["param"] == key
        await send(credentials, QUESTION, temperature=0.3, max_tokens=5)
        return 1.0

    assert (await play(agent_env(agent))).reward == 1.0


async def test_a_key_is_valid_for_one_episode() -> None:
    kept: list[ApiCredentials] = []

    async def agent(task: Task, credentials: ApiCredentials) -> float:
        kept.append(credentials)
        await send(credentials, QUESTION)
        if len(kept) == 1:
            await asyncio.sleep(0)
            return 1.0
        with pytest.raises(APIStatusError) as refused:
            await send(ApiCredentials(base_url=credentials.base_url, key=kept[0].key), QUESTION)
        assert refused.value.status_code == 401
        return 1.0

    open_env = agent_env(agent)
    for _ in range(2):
        assert (await play(open_env)).reward == 1.0


def test_closing_an_episode_twice_is_allowed() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        await send(credentials, QUESTION)
        return 1.0

    async def closed() -> None:
        async with no_resources_left():
            env = await agent_env(agent)(TASK)
            await close_env(env)
            env = await agent_env(agent)(TASK)
            await env.reset()
            await close_env(env)
            await close_env(env)

    asyncio.run(closed())

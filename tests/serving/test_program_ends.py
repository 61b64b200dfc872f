"""However a program ends, or is ended, it ends its own episode and nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from openai import APIStatusError, APITimeoutError, PermissionDeniedError
from tests.fakes.tiny_speaker import tiny_speaker
from tests.serving.programs import (
    LIMITS,
    QUESTION,
    TASK,
    Lines,
    ask,
    nothing_of_ours_left,
    played,
)

from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.agent_env import ApiCredentials, agent_env
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import Conversation, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending


async def test_what_a_program_raises_fails_its_episode_and_tells_why() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        await ask(api, QUESTION)
        raise ValueError("no such page")

    trajectory = await played(agent_env(solve))
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert "ValueError: no such page" in trajectory.failure.detail


async def test_what_would_end_a_process_ends_the_episode_alone() -> None:
    async def leaves(task: Task, api: ApiCredentials) -> float:
        await ask(api, QUESTION)
        sys.exit(0)

    async def cancels(task: Task, api: ApiCredentials) -> float:
        await ask(api, QUESTION)
        helper = asyncio.create_task(asyncio.sleep(9))
        helper.cancel()
        await helper
        return 1.0

    for solve, word in ((leaves, "SystemExit(0)"), (cancels, "cancelled itself")):
        trajectory = await played(agent_env(solve))
        assert trajectory.reward is None
        assert word in str(trajectory.failure)


async def test_a_question_that_nobody_waits_for_is_no_turn() -> None:
    slow = asyncio.Event()

    class Slow(Lines):
        async def generate(
            self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
        ) -> Completion:
            await slow.wait()
            return await super().generate(token_ids, sampling, session=session)

    async def solve(task: Task, api: ApiCredentials) -> float:
        with pytest.raises(APITimeoutError):
            await ask(api, QUESTION, timeout=0.2)
        await asyncio.sleep(0.1)  # for the door to see that its client has gone
        slow.set()
        await ask(api, QUESTION)
        return 1.0

    def start(task: Task, opening: Observation, session: str) -> Conversation:
        return TokenConversation(
            opening,
            engine=Slow(["one", "two"]),
            renderer=tiny_speaker().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    async with nothing_of_ours_left():
        trajectory = await run_episode(TASK, agent_env(solve), start, LIMITS)
    assert trajectory.reward is None
    assert "waits for its answer no longer" in str(trajectory.failure)


async def test_questions_asked_at_once_are_all_refused_when_the_episode_is_over() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        answers = await asyncio.gather(
            *(ask(api, QUESTION) for _ in range(4)), return_exceptions=True
        )
        return sum(isinstance(answer, PermissionDeniedError) for answer in answers) / 10

    limits = Limits(max_turns=1, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await played(agent_env(solve, truncated_reward=0.25), limits=limits)
    assert trajectory.reward == 0.3


async def test_a_program_that_will_not_end_has_the_reward_of_one_that_was_cut_short() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        talk = list(QUESTION)
        with suppress(PermissionDeniedError):
            while True:
                talk += [{"role": "assistant", "content": await ask(api, talk)}, *QUESTION]
        await asyncio.sleep(60)
        return 1.0

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    open_env = agent_env(solve, truncated_reward=0.25, grace_seconds=0.1)
    assert (await played(open_env, limits=limits)).reward == 0.25


async def test_a_program_that_asks_nothing_and_a_reward_that_is_none_are_told_apart() -> None:
    async def silent(task: Task, api: ApiCredentials) -> float:
        return 1.0

    async def cannot_tell(task: Task, api: ApiCredentials) -> None:
        await ask(api, QUESTION)

    trajectory = await played(agent_env(silent))
    assert "before it asked" in str(trajectory.failure)
    trajectory = await played(agent_env(cannot_tell))
    assert (trajectory.ending, trajectory.grade, trajectory.failure) == (Ending.DONE, None, None)


@pytest.mark.parametrize(("truncated_reward", "reward"), [(None, None), (0.25, 0.25)])
@pytest.mark.parametrize("catches", [False, True])
async def test_limits_are_kept_and_a_program_may_have_a_last_word(
    truncated_reward: float | None, reward: float | None, catches: bool
) -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        talk = list(QUESTION)
        try:
            while True:
                talk += [{"role": "assistant", "content": await ask(api, talk)}, *QUESTION]
        except PermissionDeniedError:
            if catches:
                return 0.75
            raise

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await played(agent_env(solve, truncated_reward=truncated_reward), limits=limits)
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.MAX_TURNS, 2)
    assert trajectory.reward == (0.75 if catches else reward)


@pytest.mark.parametrize(
    ("asked", "key"), [({"n": 2}, "n"), ({"stop": ["x"]}, "stop"), ({"logprobs": True}, "logprobs")]
)
async def test_what_would_change_the_turn_is_refused_by_name(asked: Any, key: str) -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        with pytest.raises(APIStatusError) as refused:
            await ask(api, QUESTION, **asked)
        assert refused.value.status_code == 400
        assert json.loads(refused.value.response.text)["error"]["param"] == key
        await ask(api, QUESTION, temperature=0.3, max_tokens=5)
        return 1.0

    assert (await played(agent_env(solve))).reward == 1.0


async def test_a_key_is_one_episodes_and_no_longer_than_that() -> None:
    kept: list[ApiCredentials] = []

    async def solve(task: Task, api: ApiCredentials) -> float:
        kept.append(api)
        await ask(api, QUESTION)
        if len(kept) == 1:
            await asyncio.sleep(0)
            return 1.0
        with pytest.raises(APIStatusError) as refused:
            await ask(ApiCredentials(base_url=api.base_url, key=kept[0].key), QUESTION)
        assert refused.value.status_code == 401
        return 1.0

    open_env = agent_env(solve)
    for _ in range(2):
        assert (await played(open_env)).reward == 1.0


def test_an_episode_is_closed_twice_without_harm() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        await ask(api, QUESTION)
        return 1.0

    async def closed() -> None:
        async with nothing_of_ours_left():
            env = await agent_env(solve)(TASK)
            await env.close()
            env = await agent_env(solve)(TASK)
            await env.reset()
            await env.close()
            await env.close()

    asyncio.run(closed())

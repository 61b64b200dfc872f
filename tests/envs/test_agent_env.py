"""Agents written against OpenAI's API run, are graded and are recorded like any environment."""

from __future__ import annotations

from examples.add_an_env.env import open_env as open_safe_env
from examples.train_an_agent.agent import open_env as open_example_env
from examples.train_an_agent.agent import open_safe
from openai import OpenAI
from tests.envs.agents import (
    LIMITS,
    QUESTION,
    TASK,
    TASKS,
    client,
    no_resources_left,
    play,
    random_policy,
    replies,
    send,
)
from tests.fakes.tiny_policy import tiny_policy

from skyfleet.envs.agent_env import ApiCredentials, agent_env
from skyfleet.rollouts.conversation import RESTARTED
from skyfleet.rollouts.episode import collect, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending


async def test_the_example_solves_its_tasks_with_their_solutions() -> None:
    async with no_resources_left():
        for task in TASKS:
            trajectory = await run_episode(task, open_example_env, oracle_policy, LIMITS)
            assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)
            assert len(trajectory.turns) == len(task.solution)


async def test_an_agents_episodes_have_the_same_tokens_as_the_env_itself() -> None:
    """Malformed and empty turns, several concurrently: prompts and samples are the same."""
    groups = [
        await collect(TASKS, open_env, random_policy, LIMITS, n_samples=4, max_concurrent=12)
        for open_env in (agent_env(open_safe, truncated_reward=0.0), open_safe_env)
    ]
    through, directly = (
        [[t.transcripts for t in group.trajectories] for group in side] for side in groups
    )
    assert [[[t.token_ids for t in ts] for ts in group] for group in through] == [
        [[t.token_ids for t in ts] for ts in group] for group in directly
    ]
    assert {t.reward for group in groups[0] for t in group.trajectories} == {0.0}


async def test_an_agent_without_async_runs_in_its_own_thread() -> None:
    def agent(task: Task, credentials: ApiCredentials) -> Grade:
        with OpenAI(base_url=credentials.base_url, api_key=credentials.key) as model:
            answer = model.chat.completions.create(model=credentials.model, messages=QUESTION)
        text = answer.choices[0].message.content
        return Grade(reward=0.5, success=False, explanation=f"the response is {text}")

    trajectory = await play(agent_env(agent))
    assert trajectory.grade == Grade(reward=0.5, success=False, explanation="the response is one")


async def test_a_stream_returns_the_whole_response() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        text, calls = "", []
        async with client(credentials) as model:
            stream = await model.chat.completions.create(
                model=credentials.model, messages=QUESTION, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                calls += chunk.choices[0].delta.tool_calls or []
        return float(text == "one" and calls == [])

    assert (await play(agent_env(agent))).reward == 1.0


async def test_a_rewritten_history_starts_another_transcript() -> None:
    async def agent(task: Task, credentials: ApiCredentials) -> float:
        first = await send(credentials, QUESTION)
        messages = [*QUESTION, {"role": "assistant", "content": first}, *QUESTION]
        await send(credentials, messages)
        await send(credentials, [{"role": "user", "content": "in short: hi"}])
        return 1.0

    trajectory = await play(agent_env(agent))
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.DONE, 3)
    assert [t.reason for t in trajectory.transcripts] == ["", RESTARTED]
    text = tiny_policy().renderer.text(trajectory.transcripts[1].token_ids)
    assert "in short: hi" in text
    assert "one" not in text
    assert trajectory.turns[1].replies[0].text == "in short: hi"


async def test_a_callable_object_is_an_agent() -> None:
    class AgentObject:
        async def __call__(self, task: Task, credentials: ApiCredentials) -> float:
            return float(await send(credentials, QUESTION) == "one")

    assert (await play(agent_env(AgentObject()))).reward == 1.0


async def test_a_malformed_call_stays_in_one_transcript() -> None:
    seen: list[str] = []

    async def agent(task: Task, credentials: ApiCredentials) -> float:
        seen.append(await send(credentials, QUESTION))
        messages = [*QUESTION, {"role": "assistant", "content": seen[0]}, *QUESTION]
        seen.append(await send(credentials, messages))
        return 1.0

    half = '<tool_call>\n{"name": "look", "argu\n</tool_call>'
    trajectory = await run_episode(TASK, agent_env(agent), replies(f"Hm. {half}", "two"), LIMITS)
    assert seen[0].startswith("Hm.")
    assert "argu" in seen[0]
    assert len(trajectory.transcripts) == 1

"""An agent that somebody wrote against OpenAI's API is played, graded and recorded like any env."""

from __future__ import annotations

from examples.add_an_env.env import open_env as open_safe_env
from examples.train_an_agent.agent import open_safe, play
from openai import OpenAI
from tests.fakes.tiny_speaker import tiny_speaker
from tests.serving.programs import (
    LIMITS,
    QUESTION,
    TASK,
    TASKS,
    ask,
    client,
    nothing_of_ours_left,
    played,
    says,
    generation,
)

from skyfleet.envs.agent_env import ApiCredentials, agent_env
from skyfleet.rollouts.conversation import BEGUN
from skyfleet.rollouts.episode import collect, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending


async def test_the_examples_tasks_are_solved_by_their_solutions() -> None:
    async with nothing_of_ours_left():
        for task in TASKS:
            trajectory = await run_episode(task, play, oracle_policy, LIMITS)
            assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)
            assert len(trajectory.turns) == len(task.solution)


async def test_an_agents_episodes_have_the_tokens_of_the_same_env_played_directly() -> None:
    """Malformed and empty turns, several at once: the prompts and the draws are the same."""
    groups = [
        await collect(TASKS, open_env, generation, LIMITS, n_samples=4, max_concurrent=12)
        for open_env in (agent_env(open_safe, truncated_reward=0.0), open_safe_env)
    ]
    through, directly = (
        [[t.transcripts for t in group.trajectories] for group in side] for side in groups
    )
    assert [[[t.token_ids for t in ts] for ts in group] for group in through] == [
        [[t.token_ids for t in ts] for ts in group] for group in directly
    ]
    assert {t.reward for group in groups[0] for t in group.trajectories} == {0.0}


async def test_without_async_a_program_has_a_thread_of_its_own() -> None:
    def solve(task: Task, api: ApiCredentials) -> Grade:
        with OpenAI(base_url=api.base_url, api_key=api.key) as model:
            answer = model.chat.completions.create(model=api.model, messages=QUESTION)
        said = answer.choices[0].message.content
        return Grade(reward=0.5, success=False, explanation=f"it said {said}")

    trajectory = await played(agent_env(solve))
    assert trajectory.grade == Grade(reward=0.5, success=False, explanation="it said one")


async def test_a_stream_says_it_all() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        said, calls = "", []
        async with client(api) as model:
            stream = await model.chat.completions.create(
                model=api.model, messages=QUESTION, stream=True
            )
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                calls += chunk.choices[0].delta.tool_calls or []
        return float(said == "one" and calls == [])

    assert (await played(agent_env(solve))).reward == 1.0


async def test_another_past_begins_another_transcript_of_the_episode() -> None:
    async def solve(task: Task, api: ApiCredentials) -> float:
        first = await ask(api, QUESTION)
        talk = [*QUESTION, {"role": "assistant", "content": first}, *QUESTION]
        await ask(api, talk)
        await ask(api, [{"role": "user", "content": "in short: hi"}])
        return 1.0

    trajectory = await played(agent_env(solve))
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.DONE, 3)
    assert [t.reason for t in trajectory.transcripts] == ["", BEGUN]
    text = tiny_speaker().renderer.text(trajectory.transcripts[1].token_ids)
    assert "in short: hi" in text
    assert "one" not in text
    assert trajectory.turns[1].replies[0].text == "in short: hi"


async def test_an_object_that_is_called_is_a_program_too() -> None:
    class Solver:
        async def __call__(self, task: Task, api: ApiCredentials) -> float:
            return float(await ask(api, QUESTION) == "one")

    assert (await played(agent_env(Solver()))).reward == 1.0


async def test_a_malformed_call_goes_back_and_forth_in_one_transcript() -> None:
    seen: list[str] = []

    async def solve(task: Task, api: ApiCredentials) -> float:
        seen.append(await ask(api, QUESTION))
        talk = [*QUESTION, {"role": "assistant", "content": seen[0]}, *QUESTION]
        seen.append(await ask(api, talk))
        return 1.0

    half = '<tool_call>\n{"name": "look", "argu\n</tool_call>'
    trajectory = await run_episode(TASK, agent_env(solve), says(f"Hm. {half}", "two"), LIMITS)
    assert seen[0].startswith("Hm.")
    assert "argu" in seen[0]
    assert len(trajectory.transcripts) == 1

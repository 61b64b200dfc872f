"""An agent that somebody wrote against OpenAI's API is played, graded and recorded like any env."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from examples.add_an_env.env import open_env as open_safe_env
from examples.train_an_agent.agent import open_safe, play
from openai import APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI, PermissionDeniedError
from tests.fakes.serving import nothing_left
from tests.fakes.tiny_speaker import tiny_speaker

from skyfleet.chat.completion import Completion
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import EnvFactory, Opening
from skyfleet.rollouts.collect import collect
from skyfleet.rollouts.conversation import BEGUN, Conversation, Policy, TokenConversation
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.limits import Limits
from skyfleet.rollouts.reference import oracle_policy
from skyfleet.serving.programs import Api, program
from skyfleet.tasks.grade import Grade
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

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


def client(api: Api) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0)


async def ask(api: Api, messages: Any, **more: Any) -> str:
    async with client(api) as model:
        answer = await model.chat.completions.create(model=api.model, messages=messages, **more)
        return answer.choices[0].message.content or ""


def speaking(task: Task, opening: Opening, session: str) -> Conversation:
    """Eight tokens of a random model a turn."""
    speaker = tiny_speaker()
    return TokenConversation(
        opening,
        engine=speaker.engine(capacity=2000),
        renderer=speaker.renderer,
        sampling=SamplingParams(max_generate_length=8, seed=1, stop=("e",)),
        session=session,
    )


async def played(open_env: EnvFactory, *, limits: Limits = LIMITS) -> Trajectory:
    async with nothing_of_ours_left():
        return await run_episode(
            TASK, open_env, says("one", "two", "three", "four", "five"), limits
        )


def says(*lines: str) -> Policy:
    def start(task: Task, opening: Opening, session: str) -> Conversation:
        return TokenConversation(
            opening,
            engine=_Lines(list(lines)),
            renderer=tiny_speaker().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


class _Lines:
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


async def test_the_examples_tasks_are_solved_by_their_solutions() -> None:
    async with nothing_of_ours_left():
        for task in TASKS:
            trajectory = await run_episode(task, play, oracle_policy, LIMITS)
            assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)
            assert len(trajectory.turns) == len(task.solution)


async def test_an_agents_episodes_have_the_tokens_of_the_same_env_played_directly() -> None:
    """Malformed and empty turns, several at once: the prompts and the draws are the same."""
    groups = [
        await collect(TASKS, open_env, speaking, LIMITS, n_samples=4, max_concurrent=12)
        for open_env in (program(open_safe, cut_short=0.0), open_safe_env)
    ]
    through, directly = (
        [[t.transcripts for t in group.trajectories] for group in side] for side in groups
    )
    assert [[[t.token_ids for t in ts] for ts in group] for group in through] == [
        [[t.token_ids for t in ts] for ts in group] for group in directly
    ]
    assert {t.reward for group in groups[0] for t in group.trajectories} == {0.0}


async def test_without_async_a_program_has_a_thread_of_its_own() -> None:
    def solve(task: Task, api: Api) -> Grade:
        with OpenAI(base_url=api.base_url, api_key=api.key) as model:
            answer = model.chat.completions.create(model=api.model, messages=QUESTION)
        said = answer.choices[0].message.content
        return Grade(reward=0.5, success=False, explanation=f"it said {said}")

    trajectory = await played(program(solve))
    assert trajectory.grade == Grade(reward=0.5, success=False, explanation="it said one")


async def test_a_stream_says_it_all() -> None:
    async def solve(task: Task, api: Api) -> float:
        said, calls = "", []
        async with client(api) as model:
            stream = await model.chat.completions.create(
                model=api.model, messages=QUESTION, stream=True
            )
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                calls += chunk.choices[0].delta.tool_calls or []
        return float(said == "one" and calls == [])

    assert (await played(program(solve))).reward == 1.0


async def test_another_past_begins_another_transcript_of_the_episode() -> None:
    async def solve(task: Task, api: Api) -> float:
        first = await ask(api, QUESTION)
        talk = [*QUESTION, {"role": "assistant", "content": first}, *QUESTION]
        await ask(api, talk)
        await ask(api, [{"role": "user", "content": "in short: hi"}])
        return 1.0

    trajectory = await played(program(solve))
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.DONE, 3)
    assert [t.reason for t in trajectory.transcripts] == ["", BEGUN]
    text = tiny_speaker().renderer.text(trajectory.transcripts[1].token_ids)
    assert "in short: hi" in text
    assert "one" not in text
    assert trajectory.turns[1].replies[0].text == "in short: hi"


async def test_what_a_program_raises_fails_its_episode_and_tells_why() -> None:
    async def solve(task: Task, api: Api) -> float:
        await ask(api, QUESTION)
        raise ValueError("no such page")

    trajectory = await played(program(solve))
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert "ValueError: no such page" in trajectory.failure.detail


async def test_what_would_end_a_process_ends_the_episode_alone() -> None:
    async def leaves(task: Task, api: Api) -> float:
        await ask(api, QUESTION)
        sys.exit(0)

    async def cancels(task: Task, api: Api) -> float:
        await ask(api, QUESTION)
        helper = asyncio.create_task(asyncio.sleep(9))
        helper.cancel()
        await helper
        return 1.0

    for solve, word in ((leaves, "SystemExit(0)"), (cancels, "cancelled itself")):
        trajectory = await played(program(solve))
        assert trajectory.reward is None
        assert word in str(trajectory.failure)


async def test_an_object_that_is_called_is_a_program_too() -> None:
    class Solver:
        async def __call__(self, task: Task, api: Api) -> float:
            return float(await ask(api, QUESTION) == "one")

    assert (await played(program(Solver()))).reward == 1.0


async def test_a_question_that_nobody_waits_for_is_no_turn() -> None:
    slow = asyncio.Event()

    class Slow(_Lines):
        async def generate(
            self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
        ) -> Completion:
            await slow.wait()
            return await super().generate(token_ids, sampling, session=session)

    async def solve(task: Task, api: Api) -> float:
        with pytest.raises(APITimeoutError):
            await ask(api, QUESTION, timeout=0.2)
        await asyncio.sleep(0.1)  # for the door to see that its client has gone
        slow.set()
        await ask(api, QUESTION)
        return 1.0

    def start(task: Task, opening: Opening, session: str) -> Conversation:
        return TokenConversation(
            opening,
            engine=Slow(["one", "two"]),
            renderer=tiny_speaker().renderer,
            sampling=SamplingParams(),
            session=session,
        )

    async with nothing_of_ours_left():
        trajectory = await run_episode(TASK, program(solve), start, LIMITS)
    assert trajectory.reward is None
    assert "waits for its answer no longer" in str(trajectory.failure)


async def test_questions_asked_at_once_are_all_refused_when_the_episode_is_over() -> None:
    async def solve(task: Task, api: Api) -> float:
        answers = await asyncio.gather(
            *(ask(api, QUESTION) for _ in range(4)), return_exceptions=True
        )
        return sum(isinstance(answer, PermissionDeniedError) for answer in answers) / 10

    limits = Limits(max_turns=1, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await played(program(solve, cut_short=0.25), limits=limits)
    assert trajectory.reward == 0.3


async def test_a_program_that_will_not_end_has_the_reward_of_one_that_was_cut_short() -> None:
    async def solve(task: Task, api: Api) -> float:
        talk = list(QUESTION)
        with suppress(PermissionDeniedError):
            while True:
                talk += [{"role": "assistant", "content": await ask(api, talk)}, *QUESTION]
        await asyncio.sleep(60)
        return 1.0

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    open_env = program(solve, cut_short=0.25, last_words_seconds=0.1)
    assert (await played(open_env, limits=limits)).reward == 0.25


async def test_a_program_that_asks_nothing_and_a_reward_that_is_none_are_told_apart() -> None:
    async def silent(task: Task, api: Api) -> float:
        return 1.0

    async def cannot_tell(task: Task, api: Api) -> None:
        await ask(api, QUESTION)

    trajectory = await played(program(silent))
    assert "before it asked" in str(trajectory.failure)
    trajectory = await played(program(cannot_tell))
    assert (trajectory.ending, trajectory.grade, trajectory.failure) == (Ending.DONE, None, None)


@pytest.mark.parametrize(("cut_short", "reward"), [(None, None), (0.25, 0.25)])
@pytest.mark.parametrize("catches", [False, True])
async def test_limits_are_kept_and_a_program_may_have_a_last_word(
    cut_short: float | None, reward: float | None, catches: bool
) -> None:
    async def solve(task: Task, api: Api) -> float:
        talk = list(QUESTION)
        try:
            while True:
                talk += [{"role": "assistant", "content": await ask(api, talk)}, *QUESTION]
        except PermissionDeniedError:
            if catches:
                return 0.75
            raise

    limits = Limits(max_turns=2, max_input_length=2000, trajectory_timeout_seconds=20)
    trajectory = await played(program(solve, cut_short=cut_short), limits=limits)
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.MAX_TURNS, 2)
    assert trajectory.reward == (0.75 if catches else reward)


@pytest.mark.parametrize(
    ("asked", "key"), [({"n": 2}, "n"), ({"stop": ["x"]}, "stop"), ({"logprobs": True}, "logprobs")]
)
async def test_what_would_change_the_turn_is_refused_by_name(asked: Any, key: str) -> None:
    async def solve(task: Task, api: Api) -> float:
        with pytest.raises(APIStatusError) as refused:
            await ask(api, QUESTION, **asked)
        assert refused.value.status_code == 400
        assert json.loads(refused.value.response.text)["error"]["param"] == key
        await ask(api, QUESTION, temperature=0.3, max_tokens=5)
        return 1.0

    assert (await played(program(solve))).reward == 1.0


async def test_a_key_is_one_episodes_and_no_longer_than_that() -> None:
    kept: list[Api] = []

    async def solve(task: Task, api: Api) -> float:
        kept.append(api)
        await ask(api, QUESTION)
        if len(kept) == 1:
            await asyncio.sleep(0)
            return 1.0
        with pytest.raises(APIStatusError) as refused:
            await ask(Api(base_url=api.base_url, key=kept[0].key), QUESTION)
        assert refused.value.status_code == 401
        return 1.0

    open_env = program(solve)
    for _ in range(2):
        assert (await played(open_env)).reward == 1.0


async def test_a_malformed_call_goes_back_and_forth_in_one_transcript() -> None:
    seen: list[str] = []

    async def solve(task: Task, api: Api) -> float:
        seen.append(await ask(api, QUESTION))
        talk = [*QUESTION, {"role": "assistant", "content": seen[0]}, *QUESTION]
        seen.append(await ask(api, talk))
        return 1.0

    half = '<tool_call>\n{"name": "look", "argu\n</tool_call>'
    trajectory = await run_episode(TASK, program(solve), says(f"Hm. {half}", "two"), LIMITS)
    assert seen[0].startswith("Hm.")
    assert "argu" in seen[0]
    assert len(trajectory.transcripts) == 1


def test_an_episode_is_closed_twice_without_harm() -> None:
    async def solve(task: Task, api: Api) -> float:
        await ask(api, QUESTION)
        return 1.0

    async def closed() -> None:
        async with nothing_of_ours_left():
            env = await program(solve)(TASK)
            await env.close()
            env = await program(solve)(TASK)
            await env.reset()
            await env.close()
            await env.close()

    asyncio.run(closed())

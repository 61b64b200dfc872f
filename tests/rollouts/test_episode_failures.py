"""A failure ends one episode and is recorded; only the engine's own bugs stop the run."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, Place, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.engines.http_client import ContextLengthError
from skyfleet.envs.env import Observation, Step
from skyfleet.errors import ContextFullError, EngineError, EnvError, VerifierError
from skyfleet.rollouts.episode import Limits, collect, run_episode
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)
HASTY = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=0.05)
LINES = (PRESS % 3, "done")
OVERTIME = "not finished after 0.05 s (generator.trajectory_timeout_seconds)"


async def played(
    env: CounterEnv, limits: Limits = LIMITS, engine: ScriptedEngine | None = None
) -> Trajectory:
    trajectory = await run_episode(
        TASK, make_factory(env), token_agent(engine or ScriptedEngine(*LINES)), limits
    )
    for transcript in trajectory.transcripts:
        n_tokens = len(transcript.token_ids)
        assert len(transcript.loss_mask) == len(transcript.logprobs) == n_tokens
    return trajectory


def outcome(trajectory: Trajectory) -> tuple[Ending, float | None, str | None, str | None]:
    failure = trajectory.failure
    kind, detail = (failure.kind, failure.detail) if failure else (None, None)
    return trajectory.ending, trajectory.reward, kind, detail


@pytest.mark.parametrize(
    ("place", "detail", "n_turns"),
    [
        ("open", "opening counter: OSError: it broke", 0),
        ("reset", "reset: OSError: it broke", 0),
        ("step", "step: OSError: it broke", 0),
    ],
)
async def test_an_env_that_raises_fails_its_episode(
    place: Place, detail: str, n_turns: int
) -> None:
    env = CounterEnv(breaks=place)
    trajectory = await played(env)
    assert outcome(trajectory) == (Ending.FAILED, None, "EnvError", detail)
    assert len(trajectory.turns) == n_turns
    assert env.closed == (0 if place == "open" else 1)


@pytest.mark.parametrize(
    ("place", "given", "kind", "detail"),
    [
        ("reset", None, "EnvError", "reset() returned None, not an Observation"),
        ("reset", Observation(messages=("hello",)), "EnvError", "'hello' among its messages"),  # type: ignore[arg-type]
        ("step", None, "EnvError", "step() returned None, not a Step"),
        ("step", Step(messages=("hello",)), "EnvError", "'hello' among its messages"),  # type: ignore[arg-type]
        ("step", Step(reward=math.nan), "EnvError", "the reward nan"),
        ("step", Step(opening="x"), "EnvError", "step() returned 'x', not an Observation"),  # type: ignore[arg-type]
        ("step", Step(opening=Observation(messages=())), "EnvError", "without messages"),
        ("reset", Observation(messages=()), "EnvError", "without messages"),
        ("grade", 1.0, "VerifierError", "grade() returned 1.0; return a Grade"),
        ("grade", {"reward": 1.0}, "VerifierError", "return a Grade, or None"),
        ("grade", Grade(reward=math.nan, success=False), "VerifierError", "the reward nan"),
        ("grade", Grade(reward="1", success=True), "VerifierError", "the reward '1'"),  # type: ignore[arg-type]
    ],
)
async def test_an_env_that_gives_something_else_fails_its_episode_alone(
    place: str, given: object, kind: str, detail: str
) -> None:
    env: Any = CounterEnv()

    async def give(*_: object) -> object:
        return given

    setattr(env, place, give)
    trajectory = await played(env)
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.kind == kind
    assert detail in trajectory.failure.detail


async def test_numbers_of_numpy_are_numbers() -> None:
    env: Any = CounterEnv()

    async def grade() -> Grade:
        return Grade(reward=np.float32(0.5), success=False)  # type: ignore[arg-type]

    env.grade = grade
    reward = (await played(env)).reward
    assert (reward, type(reward)) == (0.5, float)


async def test_an_error_that_has_a_name_keeps_it() -> None:
    trajectory = await played(CounterEnv(breaks="step", error=EnvError("the button fell off")))
    assert outcome(trajectory)[2:] == ("EnvError", "the button fell off")


async def test_turns_before_a_failure_are_kept() -> None:
    trajectory = await played(CounterEnv(breaks="step"))
    (transcript,) = trajectory.transcripts
    assert sum(transcript.loss_mask) == len(PRESS % 3) + 1
    assert [message.text for message in trajectory.prompt] == ["reach 3"]


async def test_an_env_that_will_not_close_is_logged_and_its_grade_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert outcome(await played(CounterEnv(breaks="close"))) == (Ending.DONE, 1.0, None, None)
    assert "closing counter for task t: OSError: it broke" in caplog.text


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (VerifierError("no such table"), "no such table"),
        (ZeroDivisionError("by zero"), "grade: ZeroDivisionError: by zero"),
    ],
)
async def test_a_broken_verifier_leaves_the_grade_unknown_not_zero(
    error: Exception, detail: str
) -> None:
    trajectory = await played(CounterEnv(breaks="grade", error=error))
    assert outcome(trajectory) == (Ending.DONE, None, "VerifierError", detail)
    assert trajectory.success is None


async def test_an_env_that_cannot_be_asked_for_its_grade_leaves_the_ending_as_it_was() -> None:
    env = CounterEnv(breaks="grade", error=EnvError("the server is gone"))
    assert outcome(await played(env)) == (Ending.DONE, None, "EnvError", "the server is gone")
    assert env.closed == 1


async def test_an_engine_that_hangs_at_its_release_keeps_no_env_open() -> None:
    asked = asyncio.Event()

    class Clinging(ScriptedEngine):
        async def release(self, session: str) -> None:
            asked.set()
            await asyncio.sleep(60)

    env = CounterEnv()
    episode = asyncio.create_task(played(env, engine=Clinging(*LINES)))
    await asyncio.wait_for(asked.wait(), timeout=5)
    assert env.closed == 1
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


async def test_a_grade_that_is_none_is_unknown_not_zero() -> None:
    class Undecided(CounterEnv):
        async def grade(self) -> Grade | None:
            return None

    assert outcome(await played(Undecided())) == (Ending.DONE, None, None, None)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("open", (Ending.FAILED, None, "EnvError", f"opening counter: {OVERTIME}")),
        ("reset", (Ending.FAILED, None, "EnvError", f"reset: {OVERTIME}")),
        ("step", (Ending.TIMEOUT, 0.0, "EpisodeTimeoutError", OVERTIME)),
        ("grade", (Ending.DONE, None, "VerifierError", f"grade: EpisodeTimeoutError: {OVERTIME}")),
    ],
)
async def test_an_env_that_hangs_is_given_its_time_and_graded_if_it_can_be(
    place: Place, expected: tuple[Any, ...]
) -> None:
    env = CounterEnv(breaks=place, hangs=True)
    assert outcome(await played(env, HASTY)) == expected
    assert env.closed == (0 if place == "open" else 1)


async def test_an_engine_that_takes_too_long_ends_its_episode_only() -> None:
    engine = ScriptedEngine(*LINES, delay=60)
    trajectory = await played(CounterEnv(), HASTY, engine)
    assert outcome(trajectory) == (Ending.TIMEOUT, 0.0, "EpisodeTimeoutError", OVERTIME)
    assert engine.released == ["t/0"]


async def test_a_conversation_too_long_for_the_engine_ends_there_and_is_graded() -> None:
    engine = ScriptedEngine(ContextFullError("8192 tokens at most"))
    assert outcome(await played(CounterEnv(), engine=engine)) == (
        Ending.CONTEXT_FULL,
        0.0,
        None,
        None,
    )


async def test_a_server_that_calls_only_a_later_prompt_too_long_ends_the_episode_graded() -> None:
    full = ContextLengthError("http://server rejected the request with 400: too long")
    first = await played(CounterEnv(), engine=ScriptedEngine(full))
    assert outcome(first)[:3] == (Ending.FAILED, None, "EngineError")
    assert first.failure is not None
    assert "raise its context length, or lower max_generate_length" in first.failure.detail
    later = await played(CounterEnv(), engine=ScriptedEngine(PRESS % 3, full))
    assert outcome(later) == (Ending.CONTEXT_FULL, 1.0, None, None)


async def test_no_completion_fails_the_episode() -> None:
    engine = ScriptedEngine(EngineError("too long"))
    assert outcome(await played(CounterEnv(), engine=engine))[2:] == ("EngineError", "too long")
    assert engine.released == ["t/0"]


async def test_a_request_that_the_engine_cancels_fails_its_episode_and_not_the_run() -> None:
    class Cancelling(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            request = asyncio.get_running_loop().create_future()
            request.cancel()
            await request

    trajectory = await played(CounterEnv(), engine=Cancelling())
    assert (trajectory.ending, trajectory.grade) == (Ending.FAILED, None)
    assert outcome(trajectory)[2] == "EngineError"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), TimeoutError("from elsewhere")])
@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_an_engines_own_bug_stops_the_run_after_closing_the_env(
    error: Exception, seconds: float
) -> None:
    env, engine = CounterEnv(), ScriptedEngine(error)
    limits = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=seconds)
    with pytest.raises(type(error), match=str(error)):
        await played(env, limits, engine)
    assert (env.closed, engine.released) == (1, ["t/0"])
    with pytest.raises(ExceptionGroup) as caught:
        await collect(
            [TASK],
            make_factory(CounterEnv()),
            token_agent(ScriptedEngine(error)),
            limits,
            n_samples=2,
            max_concurrent=1,
        )
    assert caught.group_contains(type(error))


async def test_one_failing_episode_does_not_touch_its_siblings() -> None:
    envs = [CounterEnv(breaks=place) for place in (None, "open", "step", "grade", None, "reset")]
    waiting = iter(envs)

    async def open_next(task: Task) -> CounterEnv:
        env = next(waiting)
        await env.passing("open")
        return env

    (group,) = await collect(
        [TASK],
        open_next,
        token_agent(ScriptedEngine(*LINES)),
        LIMITS,
        n_samples=6,
        max_concurrent=6,
    )
    assert [t.reward for t in group.trajectories] == [1.0, None, None, None, 1.0, None]
    assert [t.sample for t in group.trajectories] == list(range(6))


@pytest.mark.parametrize("place", ["open", "reset", "step", "grade"])
async def test_cancellation_closes_the_env_and_leaves_no_task(place: Place) -> None:
    env, engine = CounterEnv(breaks=place, hangs=True), ScriptedEngine(*LINES)
    episodes = asyncio.create_task(
        collect(
            [TASK], make_factory(env), token_agent(engine), LIMITS, n_samples=1, max_concurrent=1
        )
    )
    await asyncio.sleep(0.02)
    episodes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episodes
    assert env.closed == (0 if place == "open" else 1)
    assert engine.released == (["t/0"] if place in ("step", "grade") else [])
    assert asyncio.all_tasks() == {asyncio.current_task()}

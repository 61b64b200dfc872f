"""Step rewards and step info count: in the grade, per turn, and in the record."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from tests.fakes.counter_env import PRESS, TASK, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.envs import validation
from skyfleet.envs.context_env import ContextEnv
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)


class BareEnv:
    """Neither grade nor close; every step has the next of `steps`, and the last one is the end."""

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="go"),))

    async def step(self, action: Message) -> Step:
        return self._steps.pop(0)


class GradingEnv(BareEnv):
    async def grade(self) -> Grade:
        return Grade(reward=1.0, success=True)


def step(reward: float, *, done: bool = False, **others: Any) -> Step:
    return Step(
        messages=(Message(role="user", content="next"),), reward=reward, done=done, **others
    )


async def run(env: Env, open_env: EnvFactory | None = None) -> Trajectory:
    policy = token_agent(ScriptedEngine(*[PRESS % 1] * 8))
    return await run_episode(TASK, open_env or make_factory(env), policy, LIMITS)


async def test_an_environment_without_grade_earns_the_sum_of_its_step_rewards() -> None:
    trajectory = await run(BareEnv(step(0.25), step(0.5, done=True)))
    assert trajectory.grade == Grade(
        reward=0.75, success=False, parts={"turn_0": 0.25, "turn_1": 0.5}
    )
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("steps", "success"),
    [
        ([step(0.5), step(0.5, done=True)], True),
        ([step(0.5), step(0.4, done=True)], False),
        ([step(5.0), step(0.0, done=True, success=False)], False),
        ([step(0.0, success=False), step(0.1, done=True, success=True)], True),
        ([step(0.0, success=True), step(0.0, done=True)], True),
    ],
)
async def test_a_sum_of_one_is_a_success_unless_a_step_decides(
    steps: list[Step], success: bool
) -> None:
    assert (await run(BareEnv(*steps))).success is success


async def test_step_rewards_of_a_failed_episode_are_no_grade() -> None:
    trajectory = await run(BareEnv(step(5.0)))  # the second step raises
    assert trajectory.ending is Ending.FAILED
    assert trajectory.grade is None


async def test_with_a_grade_the_step_rewards_are_its_breakdown_by_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trajectory = await run(GradingEnv(step(0.25), step(0.75, done=True)))
    assert trajectory.reward == 1.0
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.75]
    assert caplog.text == ""


async def test_step_rewards_that_do_not_add_up_to_the_grade_are_logged_once_per_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def open_env(task: Task) -> Env:
        return GradingEnv(step(2.0), step(3.0, done=True))

    trajectories = [await run(GradingEnv(), open_env) for _ in range(3)]
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    (record,) = caplog.records
    assert "step rewards add up to 5 and grade() returned 1" in record.getMessage()


async def test_a_grade_without_any_step_reward_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await run(GradingEnv(step(0.0), step(0.0, done=True)))
    assert caplog.text == ""


async def test_numbers_in_info_are_recorded_per_turn_and_other_values_are_ignored() -> None:
    info = {"my_metric": 7, "rate": 0.5, "passed": True, "note": "text", "rows": [1], "none": None}
    trajectory = await run(BareEnv(step(0.0, info=info), step(0.0, done=True)))
    assert trajectory.turns[0].info == {"my_metric": 7.0, "rate": 0.5, "passed": 1.0}
    assert trajectory.turns[1].info == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "text", None])
async def test_a_value_in_info_that_is_no_finite_number_is_dropped_and_named_once(
    value: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_warned_names", set())
    steps = step(1.0, info={"bad": value, "good": 1}), step(0.0, done=True, info={"bad": value})
    trajectory = await run(BareEnv(*steps))
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert [dict(turn.info) for turn in trajectory.turns] == [{"good": 1.0}, {}]
    assert caplog.text.count("step() returned info['bad']=") == 1


@pytest.mark.parametrize("info", [[("a", 1)], None, 7])
async def test_info_that_is_no_mapping_fails_the_episode(info: Any) -> None:
    trajectory = await run(BareEnv(step(0.0, info=info)))
    assert "return a mapping of names to numbers" in str(trajectory.failure)


async def test_a_wrapper_keeps_the_step_rewards_of_an_environment_without_grade() -> None:
    inner = BareEnv(step(0.5, info={"hits": 1}), step(0.5, done=True))
    trajectory = await run(ContextEnv(inner, page_characters=100))
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert trajectory.turns[0].info == {"hits": 1.0}

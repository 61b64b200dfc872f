"""What each environment had to teach, on groups counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from skyfleet.analysis.learning_signal import env_signals, mixed_share, quarters
from skyfleet.trajectories.entry import Entry, Kind
from skyfleet.trajectories.trajectory import Ending


def entries(
    step: int,
    task_key: str,
    rewards: Sequence[float | None],
    *,
    env_key: str = "github",
    kind: Kind = "train",
) -> list[Entry]:
    return [
        Entry(
            path=Path("x"),
            number=number,
            kind=kind,
            set_name="",
            step=step,
            env_key=env_key,
            task_key=task_key,
            sample=number,
            ending=Ending.DONE,
            reward=reward,
            success=None if reward is None else reward == 1.0,
            turns=1,
            tool_calls=1,
            tool_errors=0,
            malformed_calls=0,
            sampled_tokens=1,
            seconds=0.0,
            failure=None,
            offset=0,
            line=number,
        )
        for number, reward in enumerate(rewards)
    ]


def test_groups_of_one_step_and_task_are_counted_and_evaluation_is_not() -> None:
    given = [
        *entries(1, "a", [1.0, 0.0, 0.0, 0.0]),
        *entries(1, "b", [1.0, 1.0, 1.0, 1.0]),
        *entries(2, "a", [0.0, 0.0, 0.0, None]),
        *entries(2, "a", [1.0, 0.0], kind="eval"),
    ]
    (signal,) = env_signals(given).values()
    run = signal.over_run
    assert (run.n_steps, run.n_groups, run.n_attempts, run.n_unknown) == (2, 3, 12, 1)
    assert run.variance_per_prompt == pytest.approx(0.1875 / 3)
    assert (run.mixed_groups, run.steps_with_signal) == pytest.approx((1 / 3, 0.5))
    assert (run.all_passed, run.none_passed) == pytest.approx((1 / 3, 1 / 3))
    assert (run.n_passed, run.pass_rate) == pytest.approx((5, 5 / 11))
    assert run.n_wasted == 8
    assert signal.group_size == 4
    assert (signal.lately.n_steps, signal.lately.n_attempts) == (1, 4)


def test_a_step_in_which_half_the_groups_differ_is_a_step_with_signal() -> None:
    given = [*entries(1, "a", [1.0, 0.0]), *entries(1, "b", [0.0, 0.0])]
    assert env_signals(given)["github"].over_run.steps_with_signal == 1.0


def test_up_to_the_attempts_made_the_share_is_counted_without_a_model() -> None:
    # Of the six pairs of (1, 0, 0, 0) three are mixed; of (1, 1, 0, 0) four.
    assert mixed_share([(4, 1), (4, 2)], 2) == pytest.approx((3 / 6 + 4 / 6) / 2)
    assert mixed_share([(4, 1), (4, 0)], 4) == 0.5


def test_tasks_alike_are_mixed_as_the_formula_says() -> None:
    # 1 - 0.96^32 - 0.04^32 = 0.729
    assert mixed_share([(25, 1)] * 200, 32) == pytest.approx(0.729, abs=0.01)


def test_tasks_always_or_never_passed_stay_unmixed_though_half_of_the_attempts_passed() -> None:
    assert mixed_share([(8, 0), (8, 8)] * 50, 16) < 0.02
    # Four tasks are not enough to be sure of it.
    assert mixed_share([(8, 0), (8, 8)] * 2, 16) > 0.1
    assert mixed_share([(8, 4)] * 100, 32) > 0.99


def test_a_task_never_passed_in_few_attempts_is_not_written_off() -> None:
    assert 0 < mixed_share([(8, 0)] * 1000, 32) < mixed_share([(8, 0)] * 5, 32) < 0.5


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        ([[1.0] * 8] * 20, "hubspot is saturated (p = 1.00): drop it or raise its difficulty."),
        ([[1.0, 0.0] * 4] * 20, "hubspot teaches: p = 0.50, 100 % of its groups are mixed."),
        (
            [[0.0] * 8] * 20,
            "hubspot was never passed in its last 160 attempts: "
            "begin with easier tasks or a longer warm start.",
        ),
        (
            [[1.0] + [None] * 7] * 20,
            "hubspot: 88 % of its grades are unknown: mend the environment first.",
        ),
        (
            [[1.0]] * 20,
            "hubspot: no group has two known grades: raise generator.n_samples_per_prompt.",
        ),
    ],
)
def test_the_advice_is_one_sentence_to_act_on(
    groups: list[list[float | None]], advice: str
) -> None:
    given = [
        entry
        for number, rewards in enumerate(groups)
        for entry in entries(1, f"t{number}", rewards, env_key="hubspot")
    ]
    assert env_signals(given)["hubspot"].advice == advice


def advice_on(env_key: str, *groups: list[float]) -> str:
    """These groups over and over, each of a task of its own."""
    given = [
        entry
        for number in range(300)
        for entry in entries(1, f"t{number}", groups[number % len(groups)], env_key=env_key)
    ]
    return env_signals(given)[env_key].advice


ONCE, NEVER = [1.0, 0.0, 0.0, 0.0], [0.0] * 4


def test_a_hard_environment_is_told_the_group_that_would_teach_as_much_a_rollout() -> None:
    # As if all had p = 0.1: of four 1 - 0.9^4 = 34 % are mixed, of eight 57 %, or 83 % a rollout.
    twice = [1.0, 1.0, 0.0, 0.0]
    advice = advice_on("ticketmaster", *([NEVER] * 66), *([ONCE] * 29), *([twice] * 5))
    assert advice.startswith(
        "ticketmaster p = 0.10, 34 % of its groups are mixed: a group of 8 would be so 5"
    )
    assert advice.endswith("with nearly as many mixed groups a rollout.")


def test_a_larger_group_that_wastes_rollouts_is_not_advised() -> None:
    # p = 1/24: of eight 33 % are mixed, of 32 it would be 74 %, 56 % of today's a rollout.
    hard = advice_on("ticketmaster", ONCE + NEVER, NEVER * 2, NEVER * 2)
    assert "a group of 32 would be so 7" in hard
    assert hard.endswith("draw the tasks that are sometimes passed (trainer.curriculum=true).")


def test_an_environment_that_is_mostly_passed_is_told_to_become_harder() -> None:
    easy = advice_on("hubspot", [1.0, 1.0, 1.0, 0.0], *([[1.0] * 4] * 2))
    assert easy.endswith("(trainer.curriculum=true) or raise its difficulty.")


def test_tasks_always_or_never_passed_are_not_told_to_grow_their_groups() -> None:
    advice = advice_on("github", [0.0] * 8, [1.0] * 8)
    assert "a group of 32 would be so 1 % of the time, for 4 times the rollouts: draw" in advice


def test_a_quarter_is_rounded_up_and_of_what_there_is() -> None:
    assert quarters([9, 1, 3, 5, 7, 7]) == ([1, 3], [7, 9])
    assert quarters([4]) == ([4], [4])
    assert quarters([]) == ([], [])


def test_the_advice_is_about_the_last_quarter_of_the_steps() -> None:
    given = [
        entry
        for step in range(8)
        for entry in entries(step, "t", [1.0] * 4 if step >= 6 else [1.0, 0.0, 0.0, 0.0])
    ]
    signal = env_signals(given)["github"]
    assert signal.lately.n_steps == 2
    assert "saturated" in signal.advice

"""What each environment had to teach, on groups counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from skyfleet.analysis.learning_signal import (
    compute_signals,
    expected_mixed_share,
    first_and_last_quarter,
)
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


def test_groups_are_the_training_attempts_at_one_task_in_one_step() -> None:
    given = [
        *entries(1, "a", [1.0, 0.0, 0.0, 0.0]),
        *entries(1, "b", [1.0, 1.0, 1.0, 1.0]),
        *entries(2, "a", [0.0, 0.0, 0.0, None]),
        *entries(2, "a", [1.0, 0.0], kind="eval"),
    ]
    (signal,) = compute_signals(given).values()
    run = signal.whole_run
    assert (run.n_steps, run.n_groups, run.n_attempts, run.n_unknown) == (2, 3, 12, 1)
    assert run.variance_per_prompt == pytest.approx(0.1875 / 3)
    assert (run.mixed_groups, run.steps_with_signal) == pytest.approx((1 / 3, 0.5))
    assert (run.all_passed, run.none_passed) == pytest.approx((1 / 3, 1 / 3))
    assert (run.n_passed, run.pass_rate) == pytest.approx((5, 5 / 11))
    assert run.n_wasted == 8
    assert signal.group_size == 4
    assert (signal.recent.n_steps, signal.recent.n_attempts) == (1, 4)


def test_a_step_with_one_mixed_group_has_signal() -> None:
    given = [*entries(1, "a", [1.0, 0.0]), *entries(1, "b", [0.0, 0.0])]
    assert compute_signals(given)["github"].whole_run.steps_with_signal == 1.0


def test_up_to_the_recorded_attempts_the_mixed_share_is_exact() -> None:
    # Of the six pairs of (1, 0, 0, 0) three are mixed; of (1, 1, 0, 0) four.
    assert expected_mixed_share([(4, 1), (4, 2)], 2) == pytest.approx((3 / 6 + 4 / 6) / 2)
    assert expected_mixed_share([(4, 1), (4, 0)], 4) == 0.5


def test_tasks_of_equal_difficulty_follow_the_binomial_formula() -> None:
    # 1 - 0.96^32 - 0.04^32 = 0.729
    assert expected_mixed_share([(25, 1)] * 200, 32) == pytest.approx(0.729, abs=0.01)


def test_tasks_that_always_or_never_pass_stay_unmixed() -> None:
    assert expected_mixed_share([(8, 0), (8, 8)] * 50, 16) < 0.02
    # Four tasks are not enough to be sure of it.
    assert expected_mixed_share([(8, 0), (8, 8)] * 2, 16) > 0.1
    assert expected_mixed_share([(8, 4)] * 100, 32) > 0.99


def test_a_task_that_failed_in_few_attempts_may_still_be_mixed() -> None:
    assert (
        0 < expected_mixed_share([(8, 0)] * 1000, 32) < expected_mixed_share([(8, 0)] * 5, 32) < 0.5
    )


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        (
            [[1.0] * 8] * 20,
            "hubspot is saturated (pass rate 1.00); drop it or raise its difficulty.",
        ),
        (
            [[1.0, 0.0] * 4] * 20,
            "hubspot: 100 % of groups have mixed outcomes (pass rate 0.50), good learning signal.",
        ),
        (
            [[0.0] * 8] * 20,
            "hubspot: none of the last 160 attempts passed; "
            "start with easier tasks or a longer warm start.",
        ),
        (
            [[1.0] + [None] * 7] * 20,
            "hubspot: 88 % of the attempts are ungraded; fix the environment first.",
        ),
        (
            [[1.0]] * 20,
            "hubspot: no group has two graded attempts; raise generator.n_samples_per_prompt.",
        ),
    ],
)
def test_the_advice_is_one_sentence(groups: list[list[float | None]], advice: str) -> None:
    given = [
        entry
        for number, rewards in enumerate(groups)
        for entry in entries(1, f"t{number}", rewards, env_key="hubspot")
    ]
    assert compute_signals(given)["hubspot"].advice == advice


def advice_on(env_key: str, *groups: list[float]) -> str:
    """Repeats these groups, each with its own task."""
    given = [
        entry
        for number in range(300)
        for entry in entries(1, f"t{number}", groups[number % len(groups)], env_key=env_key)
    ]
    return compute_signals(given)[env_key].advice


ONCE, NEVER = [1.0, 0.0, 0.0, 0.0], [0.0] * 4


def test_a_larger_group_is_suggested_if_it_is_as_efficient_per_rollout() -> None:
    # As if all had p = 0.1: of four 1 - 0.9^4 = 34 % are mixed, of eight 57 %, or 83 % per rollout.
    twice = [1.0, 1.0, 0.0, 0.0]
    advice = advice_on("ticketmaster", *([NEVER] * 66), *([ONCE] * 29), *([twice] * 5))
    assert advice.startswith(
        "ticketmaster: 34 % of groups have mixed outcomes (pass rate 0.10); groups of 8 would be mixed 5"
    )
    assert advice.endswith("with nearly as many mixed groups per rollout.")


def test_a_larger_group_that_wastes_rollouts_is_not_suggested() -> None:
    # p = 1/24: of eight 33 % are mixed, of 32 it would be 74 %, 56 % of today's per rollout.
    hard = advice_on("ticketmaster", ONCE + NEVER, NEVER * 2, NEVER * 2)
    assert "groups of 32 would be mixed 7" in hard
    assert hard.endswith("sample the tasks that sometimes pass (trainer.curriculum=true).")


def test_higher_difficulty_is_suggested_if_most_attempts_pass() -> None:
    easy = advice_on("hubspot", [1.0, 1.0, 1.0, 0.0], *([[1.0] * 4] * 2))
    assert easy.endswith("(trainer.curriculum=true) or raise its difficulty.")


def test_larger_groups_are_not_suggested_if_tasks_always_or_never_pass() -> None:
    advice = advice_on("github", [0.0] * 8, [1.0] * 8)
    assert "groups of 32 would be mixed 1 % of the time, for 4 times the rollouts; sample" in advice


def test_quarters_are_rounded_up() -> None:
    assert first_and_last_quarter([9, 1, 3, 5, 7, 7]) == ([1, 3], [7, 9])
    assert first_and_last_quarter([4]) == ([4], [4])
    assert first_and_last_quarter([]) == ([], [])


def test_the_advice_is_based_on_the_last_quarter_of_the_steps() -> None:
    given = [
        entry
        for step in range(8)
        for entry in entries(step, "t", [1.0] * 4 if step >= 6 else [1.0, 0.0, 0.0, 0.0])
    ]
    signal = compute_signals(given)["github"]
    assert signal.recent.n_steps == 2
    assert "saturated" in signal.advice

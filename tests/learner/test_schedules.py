"""Learning-rate schedules on numbers worked by hand."""

from __future__ import annotations

from math import sqrt

import pytest

from skyfleet.learner.optimizer import build_lr_schedule, linear_to_a_tenth


def lr_factors(
    name: str, steps: range, *, num_warmup_steps: int = 0, total_steps: int
) -> list[float]:
    schedule = build_lr_schedule(name, num_warmup_steps=num_warmup_steps, total_steps=total_steps)
    return [schedule(step) for step in steps]


def test_a_constant_rate_warms_up_and_stays() -> None:
    warmed = lr_factors("constant_with_warmup", range(5), num_warmup_steps=3, total_steps=5)
    assert warmed == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_linear_rate_is_above_zero_in_its_last_step() -> None:
    assert lr_factors("linear", range(5), total_steps=4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    warmed = lr_factors("linear", range(6), num_warmup_steps=2, total_steps=6)
    assert warmed == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_a_cosine_rate_falls_along_half_a_cosine() -> None:
    quarter = sqrt(2) / 4
    assert lr_factors("cosine", range(5), total_steps=4) == pytest.approx(
        [1.0, 0.5 + quarter, 0.5, 0.5 - quarter, 0.0]
    )
    warmed = lr_factors("cosine", range(4), num_warmup_steps=1, total_steps=5)
    assert warmed == pytest.approx([0.5, 1.0, 0.5 + quarter, 0.5])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_its_last_step_a_rate_stays_at_zero(name: str) -> None:
    assert lr_factors(name, range(4, 9), total_steps=4) == pytest.approx([0.0] * 5)


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    assert lr_factors("linear", range(2), num_warmup_steps=3, total_steps=2) == [0.25, 0.5]


def test_the_warm_start_rate_falls_to_a_tenth() -> None:
    cooled = [linear_to_a_tenth(s, num_warmup_steps=0, total_steps=10) for s in (0, 5, 10, 99)]
    assert cooled == pytest.approx([1.0, 0.55, 0.1, 0.1])

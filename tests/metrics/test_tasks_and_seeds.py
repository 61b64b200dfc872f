from __future__ import annotations

from math import sqrt

import pytest

from skyfleet.metrics.tasks_and_seeds import crossed_mean


def test_the_variances_between_tasks_and_between_seeds_add_up() -> None:
    # Task means 0.3 and 0.1, seed means 0.1 and 0.3: both mean squares are 2 x 0.02 = 0.04.
    found = crossed_mean([[0.2, 0.4], [0.0, 0.2]])
    assert found.mean == pytest.approx(0.2)
    assert found.standard_error == pytest.approx(sqrt(0.08 / 4))
    assert found.degrees_of_freedom == pytest.approx(2)  # 0.08**2 / (0.04**2 + 0.04**2)
    # Student's t with two degrees: 4.303 at 97.5 %; t = sqrt(2) has p = 0.293.
    assert found.interval() == pytest.approx(
        (0.2 - 4.303 * sqrt(0.02), 0.2 + 4.303 * sqrt(0.02)), 1e-3
    )
    assert found.p_value == pytest.approx(0.2929, abs=1e-4)
    assert found.detectable() == pytest.approx((4.3027 + 1.0607) * sqrt(0.02), 1e-3)


def test_seeds_that_disagree_are_no_evidence_however_many_tasks_agree() -> None:
    # 300 tasks all gain with one seed and all lose a little less with the other.
    found = crossed_mean([[0.30, -0.10 - 0.001 * (n % 2)] for n in range(300)])
    assert found.p_value > 0.5
    assert found.degrees_of_freedom == pytest.approx(1, abs=0.1)


def test_no_variation_is_certain_only_of_a_difference() -> None:
    assert crossed_mean([[0.0, 0.0], [0.0, 0.0]]).p_value == 1.0
    assert crossed_mean([[0.5, 0.5], [0.5, 0.5]]).p_value == 0.0


def test_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tasks and 1 seeds; give at least two of each"):
        crossed_mean([[0.1], [0.2]])

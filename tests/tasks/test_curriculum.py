from __future__ import annotations

import json

import pytest

from skyfleet.errors import CheckpointError
from skyfleet.tasks.curriculum import Curriculum
from skyfleet.tasks.task import Task


def test_the_weight_is_the_variance_of_a_pass_with_a_floor() -> None:
    curriculum = Curriculum(decay=0.5, floor=0.1)
    assert curriculum.weight("new") == 1.0
    curriculum.observe("a", passed=6, failed=0)  # (6 + 1) / (6 + 2) = 7/8; 4 x 7/8 x 1/8 = 7/16
    assert curriculum.weight("a") == pytest.approx(0.1 + 0.9 * 7 / 16)
    curriculum.observe("b", passed=1, failed=1)
    assert curriculum.weight("b") == 1.0


def test_old_outcomes_decay() -> None:
    curriculum = Curriculum(decay=0.5, floor=0.1)
    curriculum.observe("a", passed=4, failed=0)
    curriculum.observe("a", passed=0, failed=2)  # 4 x 0.5 = 2 passed and 2 failed
    assert curriculum.pass_rate("a") == 0.5


def test_solved_tasks_keep_a_minimum_weight() -> None:
    curriculum = Curriculum(floor=0.1)
    for _ in range(1000):
        curriculum.observe("a", passed=8, failed=0)
    # The decayed counts converge to 8 / (1 - 0.8) = 40: 41/42 and 4 x 41/42 x 1/42.
    assert curriculum.weight("a") == pytest.approx(0.1 + 0.9 * 4 * 41 / 42**2)


def test_a_resumed_curriculum_has_the_same_weights() -> None:
    tasks = [Task(key=key, env_key="e", prompt="p") for key in "abc"]
    one, other = Curriculum(), Curriculum()
    one.observe("b", passed=3, failed=1)
    one.observe("a", passed=0, failed=4)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.weights(tasks) == one.weights(tasks)
    assert other.state_dict() == one.state_dict()


def test_a_state_saved_with_other_settings_is_rejected() -> None:
    with pytest.raises(CheckpointError, match=r"saved with decay=0.8, now it is 0.5"):
        Curriculum(decay=0.5).load_state_dict(Curriculum().state_dict())

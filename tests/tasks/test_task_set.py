from __future__ import annotations

import pytest

from skyfleet.errors import TaskError
from skyfleet.tasks.task import Task, TaskSet


def task(key: str, env_key: str, difficulty: int | None = None) -> Task:
    return Task(key=key, env_key=env_key, prompt="p", difficulty=difficulty)


ROWS = [task("c", "github", 1), task("a", "booking", 3), task("b", "github")]


def test_tasks_keep_their_order_and_are_found_by_key() -> None:
    tasks = TaskSet(ROWS)
    assert list(tasks) == ROWS
    assert len(tasks) == 3
    assert tasks["a"] is ROWS[1]
    assert tasks.env_keys == ("booking", "github")


def test_filters_keep_the_order() -> None:
    tasks = TaskSet(ROWS)
    assert [t.key for t in tasks.of_envs(["github"])] == ["c", "b"]
    assert [t.key for t in tasks.of_difficulties([1, 3])] == ["c", "a"]


def test_an_env_without_tasks_is_named() -> None:
    with pytest.raises(TaskError, match=r"\['githb'\]; choose from \['booking', 'github'\]"):
        TaskSet(ROWS).of_envs(["githb"])


def test_a_duplicate_key_is_an_error() -> None:
    with pytest.raises(TaskError, match="key='a' occurs twice"):
        TaskSet([task("a", "x"), task("a", "y")])

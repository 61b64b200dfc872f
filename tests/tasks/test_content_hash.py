"""The hash of a task's content is equal in every process and differs with whatever grading may use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from skyfleet.tasks.content_hash import hash_content, hash_task_set
from skyfleet.tasks.task import Task


def task(key: str = "a", env_key: str = "e", prompt: str = "Go.", **metadata: Any) -> Task:
    return Task(key=key, env_key=env_key, prompt=prompt, metadata=metadata)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (task(), task(prompt="Stop.")),
        (task(n=1), task(n=2)),
        (task(n=1), task(n=1.0)),
        (task(n=1), task(n="1")),
        (task(n=1), task(n=True)),
        (task(extra_info={"index": 1, "answer": 1}), task(extra_info={"index": 1, "answer": 2})),
    ],
)
def test_another_content_has_another_hash(one: Task, other: Task) -> None:
    assert hash_content(one) != hash_content(other)
    assert hash_task_set([one]) != hash_task_set([other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (task(env_key="run-1"), task(env_key="run-2")),
        (task(a=1, b=2), task(b=2, a=1)),
        (task(f=object()), task(f=object())),
        (task(extra_info={"index": 1}), task(extra_info={"index": 2})),
    ],
)
def test_names_order_positions_and_addresses_do_not_matter(one: Task, other: Task) -> None:
    assert hash_content(one) == hash_content(other)


def test_a_set_of_tasks_has_no_order() -> None:
    one, other = task("a", n=1), task("b", n=2)
    assert hash_task_set([one, other]) == hash_task_set([other, one])
    assert hash_task_set([one, other]) != hash_task_set([task("a", n=2), task("b", n=1)])


def test_python_sets_hash_alike_in_every_process() -> None:
    code = (
        "from skyfleet.tasks.content_hash import *; from skyfleet.tasks.task import Task;"
        "print(hash_content(Task(key='a', env_key='e', prompt='p', metadata={'w': set('abcdef')})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1

"""Reference solutions for the warm start: a failed environment is not a broken task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from skyfleet.chat.renderers import make_renderer
from skyfleet.envs.env import Env, EnvFactory
from skyfleet.errors import EnvError, TaskError
from skyfleet.models.tiny import train_tokenizer
from skyfleet.rollouts.episode import Limits
from skyfleet.tasks.task import Task
from skyfleet.trainer.sft import SOLUTION_TRIES, collect_demonstrations
from skyfleet.worlds.catalog import generate_world_tasks, open_world

LIMITS = Limits(max_turns=20, max_input_length=10**6, trajectory_timeout_seconds=60)
RENDERER = make_renderer(train_tokenizer([], vocab_size=0))
TASKS = generate_world_tasks("github", split="train", count=4)


def fail_for(fails: Callable[[int, int], bool]) -> EnvFactory:
    """Opens fail by the index of the task and the number of the try, from 0."""
    opened: Counter[str] = Counter()

    async def open_env(task: Task) -> Env:
        opened[task.key] += 1
        if fails(TASKS.index(task), opened[task.key] - 1):
            raise EnvError("the machine of the environment is restarting")
        return await open_world(task)

    return open_env


@pytest.mark.parametrize(
    ("fails", "n_left_out"),
    [
        (lambda task, attempt: False, 0),
        (lambda task, attempt: attempt < SOLUTION_TRIES - 1, 0),
        (lambda task, attempt: task == 1, 1),
        (lambda task, attempt: task < 2, 2),
    ],
)
async def test_a_solution_whose_environment_failed_is_tried_again_and_then_left_out(
    fails: Callable[[int, int], bool], n_left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = await collect_demonstrations(TASKS, fail_for(fails), RENDERER, LIMITS)
    assert len(samples) == len(TASKS) - n_left_out
    warnings = [record.getMessage() for record in caplog.records]
    assert [w for w in warnings if "is not in the warm start" in w] == [
        f"task {task.key} is not in the warm start: its reference solution failed: "
        "the machine of the environment is restarting"
        for task in TASKS
        if fails(TASKS.index(task), SOLUTION_TRIES - 1)
    ]


async def test_most_environments_failing_is_an_error_that_names_the_cause() -> None:
    with pytest.raises(TaskError, match="the machine of the environment is restarting"):
        await collect_demonstrations(TASKS, fail_for(lambda task, _: task < 3), RENDERER, LIMITS)

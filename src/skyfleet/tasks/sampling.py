"""Samplers: draw batches of tasks, epoch after epoch, resumable from a saved state."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any, Protocol

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.tasks.task import Task, TaskSet


class Sampler(Protocol):
    """Draws batches of tasks; its state is its position."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        ...

    def draw(self) -> list[Task]: ...

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """Record the outcome of a drawn task; ungraded attempts are in neither number."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TaskSampler:
    """Draws every task once per epoch, with at least `min_per_env` tasks of each env per batch.

    A batch has no duplicates. A task repeats within an epoch only if its env is too small to fill
    its share of every batch. Draws do not depend on the order of the given tasks.
    """

    _epoch: int
    _plan: list[int]
    """Task indices of the epoch, batch after batch."""
    _position: int
    """Number of indices already drawn from the plan."""
    _carried: list[int]
    """The incomplete last batch of the previous epoch, filled from the start of this plan."""

    def __init__(
        self, tasks: Iterable[Task], *, batch_size: int, seed: int, min_per_env: int = 0
    ) -> None:
        self._tasks = sorted(TaskSet(tasks), key=lambda task: task.key)
        self._batch_size, self._seed, self._min_per_env = batch_size, seed, min_per_env
        check_batch_size(self._tasks, batch_size, min_per_env)
        self._begin(epoch=0, carried=[])

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def draw(self) -> list[Task]:
        end = self._position + self._batch_size
        batch = self._plan[self._position : end]
        self._position = end
        if end >= len(self._plan):
            self._begin(epoch=self._epoch + 1, carried=batch if end > len(self._plan) else [])
            batch = batch + self._plan[: self._position]
        return [self._tasks[index] for index in batch]

    def state_dict(self) -> dict[str, Any]:
        position = {"epoch": self._epoch, "position": self._position, "carried": self._carried}
        return self._identity() | position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self._identity())
        self._begin(epoch=state["epoch"], carried=state["carried"])
        self._position = state["position"]

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """Ignored: an epoch draws every task whatever its outcome."""

    def _identity(self) -> dict[str, Any]:
        return describe_sampler(
            self._tasks,
            batch_size=self._batch_size,
            seed=self._seed,
            min_per_env=self._min_per_env,
        )

    def _begin(self, *, epoch: int, carried: list[int]) -> None:
        self._epoch, self._carried = epoch, carried
        self._position = self._batch_size - len(carried) if carried else 0
        order = list(range(len(self._tasks)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        filling = [index for index in order if index not in carried][: self._position]
        drawn = set(filling)
        self._plan = filling + self._batches([i for i in order if i not in drawn], drawn)

    def _batches(self, order: list[int], drawn: set[int]) -> list[int]:
        """Concatenate batches until every task of `order` is in one; the last may be incomplete."""
        queues: dict[str, deque[int]] = {}
        for index in (*order, *sorted(drawn)):
            queues.setdefault(self._tasks[index].env_key, deque()).append(index)
        seen = set(drawn)
        unseen = (index for index in order if index not in seen)
        plan: list[int] = []
        while len(seen) < len(self._tasks):
            batch = [_rotate(queue) for queue in queues.values() for _ in range(self._min_per_env)]
            seen.update(batch)
            for index in islice(unseen, self._batch_size - len(batch)):
                # The first unseen task of an env heads its queue: drawn ones moved to the end.
                batch.append(_rotate(queues[self._tasks[index].env_key]))
                seen.add(index)
            plan.extend(batch)
        return plan


def describe_sampler(
    tasks: Sequence[Task], *, batch_size: int, seed: int, min_per_env: int
) -> dict[str, Any]:
    """Describe everything that determines the draws, except the position."""
    rows = json.dumps([[task.key, task.env_key] for task in tasks])
    return {
        "tasks_sha256": hashlib.sha256(rows.encode()).hexdigest(),
        "batch_size": batch_size,
        "seed": seed,
        "min_per_env": min_per_env,
    }


_KEYS = {
    "batch_size": "trainer.train_batch_size",
    "seed": "trainer.seed",
    "min_per_env": "trainer.min_samples_per_env",
    "env_weights": "data.env_weights",
}
"""The configuration key of each setting in the sampler's state."""


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for name, value in identity.items():
        if saved.get(name) == value:
            continue
        if name == "tasks_sha256":
            raise CheckpointError(
                "data.train_data (tasks= in Python) has other tasks than the run was started with: "
                "keys were added, removed or renamed; resume with the same tasks, or train on these "
                "in a new folder: another trainer.run_name (run_dir=)"
            )
        raise CheckpointError(
            f"the sampler was saved with {_KEYS.get(name, name)}={saved.get(name)!r}, now it is "
            f"{value!r}; resume with the saved value, or train in a new folder: another "
            "trainer.run_name (run_dir=)"
        )


def _rotate(queue: deque[int]) -> int:
    """Move the first item to the end and return it."""
    queue.rotate(-1)
    return queue[-1]


def check_batch_size(tasks: list[Task], batch_size: int, min_per_env: int) -> None:
    if batch_size > len(tasks):
        raise ConfigError(
            f"trainer.train_batch_size={batch_size} needs {batch_size} different tasks, but there "
            f"are {len(tasks)}; lower it or add tasks"
        )
    n_by_env = Counter(task.env_key for task in tasks)
    if (needed := len(n_by_env) * min_per_env) > batch_size:
        raise ConfigError(
            f"trainer.min_samples_per_env={min_per_env} x {len(n_by_env)} envs = {needed} is more "
            f"than trainer.train_batch_size={batch_size}; lower the first or raise the second"
        )
    for env_key, n_tasks in n_by_env.items():
        if n_tasks < min_per_env:
            raise ConfigError(
                f"trainer.min_samples_per_env={min_per_env}, but env {env_key!r} has only {n_tasks} "
                "different tasks; lower it or remove the env"
            )

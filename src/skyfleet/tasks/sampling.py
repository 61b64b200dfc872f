"""TaskSampler: batches of tasks, epoch after epoch, from any saved position."""

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
    """Batches of tasks; its state is its place."""

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        ...

    def draw(self) -> list[Task]: ...

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """How the attempts at a drawn task went; those without a grade are in neither number."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TaskSampler:
    """An epoch draws every task, and every batch holds at least `min_per_env` of each env.

    No task is twice in a batch. A task comes twice in an epoch only where a small env runs out
    before the others. Draws depend on the tasks, not on the order in which they are given.
    """

    _epoch: int
    _plan: list[int]
    """The epoch's tasks, batch after batch."""
    _position: int
    """How much of the plan is drawn."""
    _carried: list[int]
    """The short batch that the epoch before left, filled from the head of this plan."""

    def __init__(
        self, tasks: Iterable[Task], *, batch_size: int, seed: int, min_per_env: int = 0
    ) -> None:
        self._tasks = sorted(TaskSet(tasks), key=lambda task: task.key)
        self._batch_size, self._seed, self._min_per_env = batch_size, seed, min_per_env
        check_fit(self._tasks, batch_size, min_per_env)
        self._begin(epoch=0, carried=[])

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
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
        place = {"epoch": self._epoch, "position": self._position, "carried": self._carried}
        return self._identity() | place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self._identity())
        self._begin(epoch=state["epoch"], carried=state["carried"])
        self._position = state["position"]

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """An epoch draws every task, however it went."""

    def _identity(self) -> dict[str, Any]:
        return identity_of(
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
        """Batches end to end until every task of `order` is in one; the last may be short."""
        decks: dict[str, deque[int]] = {}
        for index in (*order, *sorted(drawn)):
            decks.setdefault(self._tasks[index].env_key, deque()).append(index)
        seen = set(drawn)
        unseen = (index for index in order if index not in seen)
        plan: list[int] = []
        while len(seen) < len(self._tasks):
            batch = [_dealt(deck) for deck in decks.values() for _ in range(self._min_per_env)]
            seen.update(batch)
            for index in islice(unseen, self._batch_size - len(batch)):
                # The first unseen task of an env is the top of its deck: what was dealt lies below.
                batch.append(_dealt(decks[self._tasks[index].env_key]))
                seen.add(index)
            plan.extend(batch)
        return plan


def identity_of(
    tasks: Sequence[Task], *, batch_size: int, seed: int, min_per_env: int
) -> dict[str, Any]:
    """What decides the draws, besides the place."""
    rows = json.dumps([[task.key, task.env_key] for task in tasks])
    return {
        "tasks_sha256": hashlib.sha256(rows.encode()).hexdigest(),
        "batch_size": batch_size,
        "seed": seed,
        "min_per_env": min_per_env,
    }


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for name, value in identity.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"the sampler was saved with {name}={saved.get(name)!r} and now has {value!r}; "
                "resume with what it was saved with, or start with trainer.resume_mode=none"
            )


def _dealt(deck: deque[int]) -> int:
    """The top card, which goes to the bottom."""
    deck.rotate(-1)
    return deck[-1]


def check_fit(tasks: list[Task], batch_size: int, min_per_env: int) -> None:
    if batch_size > len(tasks):
        raise ConfigError(
            f"trainer.train_batch_size={batch_size} wants {batch_size} different tasks and there "
            f"are {len(tasks)}; lower it or add tasks"
        )
    n_by_env = Counter(task.env_key for task in tasks)
    if (wanted := len(n_by_env) * min_per_env) > batch_size:
        raise ConfigError(
            f"trainer.min_samples_per_env={min_per_env} x {len(n_by_env)} envs = {wanted} is more "
            f"than trainer.train_batch_size={batch_size}; lower the one or raise the other"
        )
    for env_key, n_tasks in n_by_env.items():
        if n_tasks < min_per_env:
            raise ConfigError(
                f"trainer.min_samples_per_env={min_per_env} and env {env_key!r} has only {n_tasks} "
                "different tasks; lower it or leave the env out"
            )

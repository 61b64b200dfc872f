"""TaskSet: tasks in order, each found by its key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from skyfleet.errors import TaskError
from skyfleet.tasks.task import Task


class TaskSet:
    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_key: dict[str, Task] = {}
        for task in tasks:
            if task.key in self._by_key:
                raise TaskError(f"key={task.key!r} is there twice; give every task its own key")
            self._by_key[task.key] = task

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_key.values())

    def __getitem__(self, key: str) -> Task:
        return self._by_key[key]

    @property
    def env_keys(self) -> tuple[str, ...]:
        return tuple(sorted({task.env_key for task in self}))

    def of_envs(self, env_keys: Collection[str]) -> TaskSet:
        if unknown := set(env_keys) - set(self.env_keys):
            raise TaskError(f"no task of env {sorted(unknown)}; choose from {list(self.env_keys)}")
        return TaskSet(task for task in self if task.env_key in env_keys)

    def of_difficulties(self, difficulties: Collection[int]) -> TaskSet:
        """A task that does not say how difficult it is belongs to none."""
        return TaskSet(task for task in self if task.difficulty in difficulties)

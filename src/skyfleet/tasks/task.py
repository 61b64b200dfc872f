"""Task: one row of a dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from skyfleet.errors import TaskError
from skyfleet.tasks.grade import Grade as Grade

Modality = Literal["tool_use", "computer_use", "browser_use"]


class RecordedCall(BaseModel):
    """A tool call of the reference solution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Task(BaseModel):
    """What the agent is asked to do, where, and how it is judged.

    Reads both spellings of each field: Fleet's exports and the OpenEnv client disagree.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True
    )

    key: str = Field(min_length=1, validation_alias=AliasChoices("key", "task_key"))
    """Stable identity; the split hash is taken over it."""
    env_key: str = Field(min_length=1, validation_alias=AliasChoices("env_key", "env_id"))
    env_version: str | None = Field(
        default=None, validation_alias=AliasChoices("env_version", "version")
    )
    modality: Modality = Field(
        default="tool_use", validation_alias=AliasChoices("modality", "task_modality")
    )
    prompt: str = Field(min_length=1)
    env_variables: dict[str, Any] = Field(default_factory=dict)
    """CURRENT_DATE, LOGGED_IN_USER and the like."""
    data_key: str | None = Field(default=None, validation_alias=AliasChoices("data_key", "data_id"))
    data_version: str | None = None
    verifier_code: str | None = Field(
        default=None, validation_alias=AliasChoices("verifier_code", "verifier_func")
    )
    difficulty: int | None = Field(default=None, ge=0, le=1000)
    """1 easy, 2 medium, 3 hard."""
    solution: tuple[RecordedCall, ...] = ()
    """Reference calls: replayed by checks and the warm start, never shown to the policy."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Whatever else the row's maker wants kept, such as the template it was drawn from."""


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

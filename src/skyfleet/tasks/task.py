"""Task: one row of a dataset, and a set of tasks with unique keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from skyfleet.errors import TaskError
from skyfleet.tasks.grade import Grade as Grade

Modality = Literal["tool_use", "computer_use", "browser_use"]

EXPECTED_ERRORS = "expected_errors"
"""Key of `metadata`: the number of reference calls that fail on purpose."""
NULL_SUCCESS = "null_success"
"""Key of `metadata`: whether doing nothing solves the task, where that is known in advance."""


class RecordedCall(BaseModel):
    """A tool call of the reference solution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Task(BaseModel):
    """The instruction for the agent, the environment it runs in, and how it is graded.

    Accepts the aliases of Fleet's exports and of the OpenEnv client, which differ. `task[name]` is
    the row's column `name`: a field, or a value of `metadata`.

    >>> import skyfleet as sf
    >>> task = sf.Task(key="press-3", env_key="button", prompt="Press it.", metadata={"times": 3})
    >>> task["times"], task["prompt"], task.get("color", "red")
    (3, 'Press it.', 'red')

    Functions that take tasks accept dicts as well: `{"prompt": "Press it.", "times": 3}`.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True
    )

    key: str = Field(min_length=1, validation_alias=AliasChoices("key", "task_key"))
    """Stable id; the train/eval split is a hash of it."""
    env_key: str = Field(min_length=1, validation_alias=AliasChoices("env_key", "env_id"))
    env_version: str | None = Field(
        default=None, validation_alias=AliasChoices("env_version", "version")
    )
    modality: Modality = Field(
        default="tool_use", validation_alias=AliasChoices("modality", "task_modality")
    )
    prompt: str = Field(min_length=1)
    """The instruction; for a chat prompt the text of its last user message."""
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
    """Reference calls: replayed by validation and warm start, never shown to the policy."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Every other column of the row, such as SkyRL's reward_spec and extra_info."""
    messages: tuple[Mapping[str, str], ...] = ()
    """A chat prompt of more than one message, `{"role": ..., "content": ...}` each; else empty."""
    env_class: str | None = None
    """Environment class of this row; None selects the run's environment.env_class."""

    @model_validator(mode="after")
    def _check_messages(self) -> Self:
        if self.messages and self.prompt != last_user_text(self.messages):
            raise ValueError("prompt is not the last user message of messages; make them equal")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Rows without these two fields keep the bytes and the hash that they had before the fields
        # existed: manifests and quarantine files refer to the hash.
        row: dict[str, Any] = serialize(self)
        if not self.messages:
            row.pop("messages", None)
        if self.env_class is None:
            row.pop("env_class", None)
        return row

    @property
    def chat(self) -> list[dict[str, str]]:
        """The prompt as chat messages: `messages`, or one user message made of `prompt`."""
        if self.messages:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.prompt}]

    def __getitem__(self, name: str) -> Any:
        """Return a column of the row: a value of `metadata`, or else a field."""
        if name in self.metadata:
            return self.metadata[name]
        if name in _FIELD_BY_COLUMN:
            return getattr(self, _FIELD_BY_COLUMN[name])
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self.metadata or name in _FIELD_BY_COLUMN

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _list_columns() -> Iterator[tuple[str, str]]:
    for name, field in Task.model_fields.items():
        yield name, name
        if isinstance(field.validation_alias, AliasChoices):
            yield from ((str(alias), name) for alias in field.validation_alias.choices)


_FIELD_BY_COLUMN = dict(_list_columns())
"""Every name that a row may give a field, with the field's own."""


def last_user_text(messages: Iterable[Mapping[str, str]]) -> str | None:
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    return texts[-1] if texts else None


class TaskSet:
    """Tasks in order, found by key; a duplicate key is an error."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_key: dict[str, Task] = {}
        for task in tasks:
            if task.key in self._by_key:
                raise TaskError(f"key={task.key!r} occurs twice; give every task its own key")
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
            raise TaskError(
                f"no task has env_key {sorted(unknown)}; choose from {list(self.env_keys)}"
            )
        return TaskSet(task for task in self if task.env_key in env_keys)

    def of_difficulties(self, difficulties: Collection[int]) -> TaskSet:
        """Tasks of these difficulties; a task without a difficulty matches none."""
        return TaskSet(task for task in self if task.difficulty in difficulties)

"""Scenario: what one simulated user wants, knows, refuses and changes its mind about."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyfleet.errors import TaskError
from skyfleet.tasks.task import Task

COLUMN = "user"
"""Key of `Task.metadata` that holds a scenario."""


class Fact(BaseModel):
    """Something that the user says when it is asked for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asked_by: tuple[str, ...]
    """Words or phrases of a question that asks for it; a word also matches its plural."""
    text: str
    """The sentence in which the user says it."""


class Scenario(BaseModel):
    """The side of the user, from which every kind of user is made.

    A scenario with an `opening` alone makes a user that says it and confirms what the agent asks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    opening: str = Field(min_length=1)
    """The first message of a user that does not tell everything at once."""
    facts: tuple[Fact, ...] = ()
    changes_of_mind: tuple[str, ...] = ()
    """Said one after another when the agent asks to confirm."""
    declines: tuple[Fact, ...] = ()
    """Requests that the user refuses, because the policy forbids the agent to make them."""
    objections: tuple[str, ...] = ()
    """Said once each when the agent refuses or reports: the user insists before it stops."""
    secrets: tuple[str, ...] = ()
    """Texts that only the agent can look up: a user that says one before the agent leaks them."""
    instruction: str = ""
    """How a model should play the user, instead of what the other fields imply."""

    @property
    def statement(self) -> str:
        """Everything the user knows and wants at the beginning, in one message."""
        return " ".join([self.opening, *(fact.text for fact in self.facts)])


def read_scenario(task: Task) -> Scenario:
    """Return the scenario of a row; TaskError if it is missing or invalid."""
    value: Any = task.metadata.get(COLUMN)
    if value is None:
        raise TaskError(f"task {task.key}: metadata.{COLUMN} is missing; add the user's scenario")
    try:
        return Scenario.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (COLUMN, *first["loc"])))
        raise TaskError(
            f"task {task.key}: metadata.{where}={first['input']!r:.60}: {first['msg']}; correct the row"
        ) from error

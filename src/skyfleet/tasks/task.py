"""Task: one row of a dataset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

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

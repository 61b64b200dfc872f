"""Section: the base class of every part of the configuration, and the value types they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    model_validator,
)


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )

    def find_problems(self) -> Iterator[str]:
        """One sentence per contradiction between keys of this section: key, value, remedy."""
        yield from ()

    @model_validator(mode="after")
    def _check_section(self, info: ValidationInfo) -> Self:
        """Raise ValueError, or append to the list that the loader passes as context."""
        problems = list(self.find_problems())
        if isinstance(info.context, list):
            info.context.extend(problems)
        elif problems:
            raise ValueError("\n".join(problems))
        return self


def _check_positive_or_minus_one(value: int) -> int:
    """-1 or at least 1"""
    if value < -1 or value == 0:
        raise ValueError("is neither -1 nor at least 1")
    return value


def as_list(value: Any) -> Any:
    """A list from one string, from null (empty) or from a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


PositiveOrMinusOne = Annotated[int, AfterValidator(_check_positive_or_minus_one)]
StrList = Annotated[list[str], BeforeValidator(as_list)]
"""Also accepts one string, or null for an empty list."""

"""Section: the manners every part of the configuration shares, and the value types they repeat."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )


def _positive_or_minus_one(value: int) -> int:
    """-1 or at least 1"""
    if value < -1 or value == 0:
        raise ValueError("is neither -1 nor at least 1")
    return value


def listed(value: Any) -> Any:
    """A list from one string, from null (none) or from a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


PositiveOrMinusOne = Annotated[int, AfterValidator(_positive_or_minus_one)]
StrList = Annotated[list[str], BeforeValidator(listed)]
"""Also read from one string, or from null when there is none."""

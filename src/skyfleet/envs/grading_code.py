"""GradingCode: hashes of the user's code that plays and grades, to tell whether it has changed.

Compiled code is hashed, with its constants and without line numbers, so comments, formatting, names
of local variables and docstrings of functions do not count.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from skyfleet.envs.code_walk import hash_reached_code

logger = logging.getLogger(__name__)

_PYTHON = sys.implementation.cache_tag or sys.version


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingCode:
    hashes: Mapping[str, str]
    """By the name of a function or value; empty if no code of the user's plays or grades."""
    python: str = _PYTHON
    """Compiled code of different versions of Python cannot be compared."""

    def is_comparable(self, other: GradingCode) -> bool:
        return self.python == other.python

    def find_changes(self, other: GradingCode) -> list[str]:
        """The names that differ; none if the versions of Python differ, because that is not known."""
        if not self.is_comparable(other):
            return []
        names = sorted(self.hashes.keys() | other.hashes.keys())
        return [name for name in names if self.hashes.get(name) != other.hashes.get(name)]


def find_grading_code(*given: object) -> GradingCode | None:
    """The code behind environments or factories of environments; None if unknown."""
    try:
        return GradingCode(hashes=hash_reached_code(given))
    except Exception as error:  # looking at a user's object may run its code
        logger.warning("whether the environment's code changes is not known: %r", error)
        return None


def describe_changes(names: list[str]) -> str:
    """The first names, for an error: `reward, threshold and 3 more`."""
    more = len(names) - 3
    return f"{', '.join(names[:3])} and {more} more" if more > 0 else ", ".join(names)

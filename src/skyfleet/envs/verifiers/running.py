"""Run a verifier: Fleet's Python source and two states of a database in, a grade out.

The source runs in this process with all of Python at hand, so it must come from someone trusted;
a jail will stand here before tasks of strangers are graded.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import string
from functools import lru_cache, partial
from io import StringIO
from types import CodeType, FunctionType
from typing import Any

from skyfleet.envs.verifiers.answers import (
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
)
from skyfleet.envs.verifiers.difference import Difference, IgnoreConfig
from skyfleet.envs.verifiers.tables import Snapshot
from skyfleet.errors import VerifierError
from skyfleet.tasks.grade import Grade

SUCCESS_REWARD = 1.0


class Verified:
    """The `env` a verifier is called with."""

    def __init__(self, seed: sqlite3.Connection, current: sqlite3.Connection) -> None:
        self._states = {"seed": Snapshot(seed), "current": Snapshot(current)}
        self.instance = self

    def load(self) -> None:
        """Nothing to do: both states are already here."""

    def db(self, name: str = "current") -> Snapshot:
        return self._states[name]


VOCABULARY: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "Environment": Verified,
    "DatabaseSnapshot": Snapshot,
    "SnapshotDiff": Difference,
    "IgnoreConfig": IgnoreConfig,
    "normalized_contains": normalized_contains,
    "normalized_string_comparison": normalized_string_comparison,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "json": json,
    "re": re,
    "string": string,
}
"""The names a verifier may use without importing them."""


def run_verifier(
    code: str,
    seed_db: sqlite3.Connection,
    current_db: sqlite3.Connection,
    final_answer: str | None,
) -> Grade:
    """Grade `current_db` by `code`. What the verifier prints becomes the explanation.

    A verifier that crashes or returns no number has graded nothing: VerifierError, never a zero.
    """
    printed = StringIO()
    try:
        # A print of its own, because redirecting stdout would catch what other episodes say.
        names = {**VOCABULARY, "print": partial(print, file=printed)}
        exec(_compiled(code), names)
        verify = _find_function(names)
        env = Verified(seed_db, current_db)
        result = verify(env, final_answer) if verify.__code__.co_argcount > 1 else verify(env)
        reward = _read_reward(result)
    except (Exception, SystemExit) as error:
        raise VerifierError(
            f"verifier_code failed with {type(error).__name__}: {error}; "
            "the grade is unknown until the verifier is mended"
        ) from error
    return Grade(reward=reward, success=reward >= SUCCESS_REWARD, explanation=printed.getvalue())


@lru_cache(maxsize=4096)
def _compiled(code: str) -> CodeType:
    return compile(_without_fleet(code), "<verifier_code>", "exec", dont_inherit=True)


def _without_fleet(code: str) -> str:
    """Fleet's own imports and decorator name a package that need not be here."""
    return re.sub(r"^(@verifier\b.*|from fleet\b.*|import fleet\b.*)$", "", code, flags=re.M)


def _find_function(names: dict[str, Any]) -> FunctionType:
    defined = [
        value
        for name, value in names.items()
        if isinstance(value, FunctionType) and name not in VOCABULARY
    ]
    named = [f for f in defined if re.match(r"validate_task|(main|verify)$", f.__name__)]
    if not defined:
        raise NameError("no function; define validate_task(env, final_answer=None)")
    return (named or defined)[0]


def _read_reward(result: object) -> float:
    if result is None:
        return SUCCESS_REWARD
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise TypeError(f"returned {result!r}; return a number")
    return float(result)

"""Run a Fleet verifier: Python source and two database states in, a reward and its output out.

The source runs in this process with all of Python available, so source from others must run in a
jail. The jail worker imports this module without site-packages: it must not import pydantic.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sqlite3
import string
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from skyfleet.envs.verifiers.awaiting import allow_plain_awaits, awaiting_names, run_to_end
from skyfleet.envs.verifiers.difference import IgnoreConfig
from skyfleet.envs.verifiers.printed import Printed
from skyfleet.envs.verifiers.source_tracking import track_source, tracking_names
from skyfleet.envs.verifiers.tables import Snapshot, snapshot_diff
from skyfleet.errors import VerifierError

if TYPE_CHECKING:
    from skyfleet.tasks.task import Grade

SUCCESS_REWARD = 1.0
"""An episode with at least this reward is a success, unless its environment decides otherwise."""
VERIFIER_NAME = re.compile(r"validate_task|(main|verify)$")
"""Which function to call if the source defines several."""

_SPACE_FOR_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))


class BrokenVerifierError(VerifierError):
    """The source can never run, so a retry is pointless."""


class TimedOutVerifierError(VerifierError):
    """The verifier ran longer than its time; it would again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    reward: float
    stdout: str
    """What the verifier printed."""


def run_verifier(
    code: str,
    seed_db: sqlite3.Connection,
    current_db: sqlite3.Connection,
    final_answer: str | None,
    *,
    conversation: str | None = None,
    partial_credit: bool = False,
) -> Grade:
    """Grade `current_db` with `code`; what the verifier prints becomes the explanation."""
    from skyfleet.tasks.task import Grade

    verdict = execute_verifier(
        code,
        seed_db,
        current_db,
        final_answer,
        conversation=conversation,
        partial_credit=partial_credit,
    )
    success = verdict.reward >= SUCCESS_REWARD
    return Grade(reward=verdict.reward, success=success, explanation=verdict.stdout)


def execute_verifier(
    code: str,
    seed_db: sqlite3.Connection,
    current_db: sqlite3.Connection,
    final_answer: str | None,
    *,
    conversation: str | None = None,
    partial_credit: bool = False,
) -> Verdict:
    """Call the verifier.

    If it crashes, returns no number or got no answer from its judge model, the grade is unknown:
    VerifierError, never a reward of zero. `partial_credit` replaces a reward of zero by the share
    of checks that passed.
    """
    # Rewriting the source takes as long as compiling it, and few verifiers need it.
    tracks = partial_credit or "JUDGE" in code
    printed = Printed(tracks=tracks)
    try:
        # Its own print, because redirecting stdout would capture the output of other episodes.
        names = {
            **VERIFIER_GLOBALS,
            **awaiting_names,
            **tracking_names(printed.tracker),
            "print": printed.print,
        }
        exec(_compile(code, tracks), names)
        env = VerifierEnv(seed_db, current_db)
        available = {"final_answer": final_answer, "conversation": conversation}
        reward = parse_reward(run_to_end(call_verifier(_find_function(names), env, available)))
        check_judge(printed.find_judge_error())
    except VerifierError:
        raise
    except (Exception, SystemExit) as error:
        raise VerifierError(_describe_failure(error, printed.text)) from error
    uses_partial_credit = partial_credit and reward == 0
    if uses_partial_credit:
        reward = printed.compute_partial_credit()
    return Verdict(reward=reward, stdout=printed.describe(partial_credit=uses_partial_credit))


def load_state(image: bytes) -> sqlite3.Connection:
    """Open a database image in memory; the caller closes it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    # A jail has no file that a large sort could spill into.
    connection.execute("pragma temp_store = memory")
    if image:
        connection.deserialize(image)
    return connection


class VerifierEnv:
    """The `env` argument of a verifier."""

    def __init__(self, seed: sqlite3.Connection, current: sqlite3.Connection) -> None:
        self._states = {"seed": Snapshot(seed), "current": Snapshot(current)}
        self.instance = self

    def load(self) -> None:
        """Do nothing: both states are loaded already."""

    def db(self, name: str = "current") -> Snapshot:
        return self._states[name]


def call_verifier(
    verify: FunctionType, env: VerifierEnv, available: dict[str, str | None]
) -> object:
    """Pass `available` values by the parameter names; as in Fleet, an unknown second parameter
    receives the final answer."""
    parameters = _get_parameters(verify)
    if not parameters:
        return verify()
    others = parameters[1:]
    named = {each.name: available[each.name] for each in others if each.name in available}
    if not others or "final_answer" in named or others[0].name in named:
        return verify(env, **named)
    if others[0].kind in (others[0].KEYWORD_ONLY, others[0].VAR_KEYWORD):
        return verify(env, final_answer=available["final_answer"], **named)
    return verify(env, available["final_answer"], **named)


def check_judge(judge_error: str | None) -> None:
    """Raise if the verifier reports that its judge model gave no answer."""
    if judge_error is not None:
        raise VerifierError(f"verifier_code printed {judge_error[:200]!r}; the grade is unknown")


def parse_reward(result: object) -> float:
    """Read what a verifier returned; None means that every assertion held."""
    if result is None:
        return SUCCESS_REWARD
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise TypeError(f"returned {result!r}; return a number")
    return float(result)


@lru_cache(maxsize=4096)
def _compile(code: str, tracks: bool) -> CodeType:
    try:
        source = _strip_fleet(code)
        if tracks:
            with suppress(RecursionError):  # a very long sum: its result lines do not count
                return _compile_tree(track_source(_parse(source)))
        return _compile_tree(_parse(source) if "await" in source else source)
    except Exception as error:
        raise BrokenVerifierError(_describe_failure(error, "")) from error


def _parse(source: str) -> ast.Module:
    tree = ast.parse(source)
    return allow_plain_awaits(tree) if "await" in source else tree


def _compile_tree(source: str | ast.Module) -> CodeType:
    return compile(source, "<verifier_code>", "exec", dont_inherit=True)


def _strip_fleet(code: str) -> str:
    """Remove Fleet's imports and decorator, which name a package that may not be installed."""
    named = r"^(@verifier|from fleet|import fleet)\b[^\n(]*(\([^)]*\))?.*$"
    return re.sub(named, "", code, flags=re.M)


def _find_function(names: dict[str, Any]) -> FunctionType:
    defined = [
        value
        for name, value in names.items()
        if isinstance(value, FunctionType)
        and name not in VERIFIER_GLOBALS
        and name not in awaiting_names
    ]
    named = [f for f in defined if VERIFIER_NAME.match(f.__name__)]
    if not defined:
        raise BrokenVerifierError(
            "verifier_code has no function; define validate_task(env, final_answer=None)"
        )
    return (named or defined)[0]


def _get_parameters(verify: FunctionType) -> tuple[inspect.Parameter, ...]:
    plain = not verify.__code__.co_freevars and not hasattr(verify, "__wrapped__")
    # Every grade creates the function anew, but its code object is cached.
    return _get_code_parameters(verify.__code__) if plain else _inspect_parameters(verify)


@lru_cache(maxsize=4096)
def _get_code_parameters(code: CodeType) -> tuple[inspect.Parameter, ...]:
    """Return names and kinds; defaults and annotations are not needed."""
    return _inspect_parameters(FunctionType(code, {}))


def _inspect_parameters(verify: FunctionType) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(verify).parameters.values())


def _describe_failure(error: BaseException, stdout: str) -> str:
    printed = f" after it printed {stdout[-200:]!r}" if stdout else ""
    return (
        f"verifier_code failed with {type(error).__name__}: {str(error)[:500]}{printed}; "
        "the grade is unknown until the verifier is fixed"
    )


def normalized_contains(target: str, blob: object) -> bool:
    """Whether `target` occurs in `blob`, ignoring case, ASCII punctuation and spaces."""
    return _normalize(target) in _normalize(_to_text(blob))


def normalized_string_comparison(target: str, blob: object) -> bool:
    """Whether both are equal, ignoring case, ASCII punctuation and spaces."""
    return _normalize(target) == _normalize(_to_text(blob))


def extract_numbers(text: str) -> list[float]:
    """Return the numbers in a text: `extract_numbers("1,200 of 3.5")` is [1200.0, 3.5]."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]


def contains_number(text: str, target_number: float | str) -> bool:
    """Whether one of the numbers in `text` equals the target; False if that is not a number."""
    numbers = extract_numbers(text)
    if isinstance(target_number, str):
        target_number = target_number.replace(",", "")
    try:
        return float(target_number) in numbers
    except ValueError:
        return False


def _to_text(content: object) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def _normalize(text: str) -> str:
    return "".join(text.lower().translate(_SPACE_FOR_PUNCTUATION).split())


VERIFIER_GLOBALS: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "Environment": VerifierEnv,
    "DatabaseSnapshot": Snapshot,
    "SnapshotDiff": snapshot_diff,
    "IgnoreConfig": IgnoreConfig,
    "normalized_contains": normalized_contains,
    "normalized_string_comparison": normalized_string_comparison,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "json": json,
    "re": re,
    "string": string,
}
"""The names that a verifier can use without importing them."""

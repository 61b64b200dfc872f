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
from dataclasses import dataclass
from functools import lru_cache, partial
from io import StringIO
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from skyfleet.envs.verifiers.difference import IgnoreConfig
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
    printed = StringIO()
    try:
        # Its own print, because redirecting stdout would capture the output of other episodes.
        names = {**VERIFIER_GLOBALS, "print": partial(print, file=printed)}
        exec(_compile(code), names)
        env = VerifierEnv(seed_db, current_db)
        available = {"final_answer": final_answer, "conversation": conversation}
        reward = parse_reward(call_verifier(_find_function(names), env, available))
        check_judge(printed.getvalue())
    except VerifierError:
        raise
    except (Exception, SystemExit) as error:
        raise VerifierError(_describe_failure(error, printed.getvalue())) from error
    if partial_credit and reward == 0:
        reward = compute_partial_credit(printed.getvalue())
    return Verdict(reward=reward, stdout=printed.getvalue())


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


def parse_reward(result: object) -> float:
    """Read what a verifier returned; None means that every assertion held."""
    if result is None:
        return SUCCESS_REWARD
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise TypeError(f"returned {result!r}; return a number")
    return float(result)


def check_judge(stdout: str) -> None:
    """Raise if the verifier reports that its judge model gave no answer."""
    if found := re.search(r"^JUDGE ERROR:.*", stdout, re.M):
        raise VerifierError(f"verifier_code printed {found[0][:200]!r}; the grade is unknown")


@lru_cache(maxsize=4096)
def _compile(code: str) -> CodeType:
    try:
        return compile(_strip_fleet(code), "<verifier_code>", "exec", dont_inherit=True)
    except Exception as error:
        raise BrokenVerifierError(_describe_failure(error, "")) from error


def _strip_fleet(code: str) -> str:
    """Remove Fleet's imports and decorator, which name a package that may not be installed."""
    named = r"^(@verifier|from fleet|import fleet)\b[^\n(]*(\([^)]*\))?.*$"
    return re.sub(named, "", code, flags=re.M)


def _find_function(names: dict[str, Any]) -> FunctionType:
    defined = [
        value
        for name, value in names.items()
        if isinstance(value, FunctionType) and name not in VERIFIER_GLOBALS
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


_APP = re.compile(r"^App (.+): ([01])(?:\.0)?$", re.M)
_TRIVIAL = re.compile(
    r"no unexpected changes|no filesystem changes|no-unexpected-envelopes", re.IGNORECASE
)
"""Output of an app that needed no work: an agent that does nothing would pass it."""


def compute_partial_credit(stdout: str) -> float:
    """Return the share of checks that passed; never enough for a success."""
    share = partial_reward(stdout)
    return share if share is not None and share < SUCCESS_REWARD else 0.0


def partial_reward(stdout: str) -> float | None:
    """Read the share of apps that passed, among those that needed work, or else of checks.

    None if the output has neither.
    `partial_reward(">>> ERROR_ACCUMULATOR >>>\\n['no mail']\\n<<< ERROR_ACCUMULATOR <<<")` is 0.0.
    """
    if apps := _APP.findall(stdout):
        earned = [
            passed == "1"
            for name, passed in apps
            if passed == "0" or not _TRIVIAL.search(_find_section(stdout, name))
        ]
        return sum(earned) / len(earned) if earned else None
    successes, errors = _count(stdout, "SUCCESS"), _count(stdout, "ERROR")
    return successes / (successes + errors) if successes + errors else None


def _find_section(stdout: str, app: str) -> str:
    """Return what was printed while `app` was verified."""
    name = re.escape(app)
    found = re.search(rf"<<< VERIFY_{name} <<<(.*?)>>> VERIFY_{name} >>>", stdout, re.S)
    return found[1] if found else ""


def _count(stdout: str, kind: str) -> int:
    """Count the entries of the accumulators of this kind; each is a printed Python list."""
    blocks = re.findall(
        rf">>> {kind}_ACCUMULATOR >>>\n(.*?)\n<<< {kind}_ACCUMULATOR <<<", stdout, re.S
    )
    return sum(map(_count_entries, blocks))


def _count_entries(printed: str) -> int:
    try:
        entries = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return 0
    return len(entries) if isinstance(entries, list) else 0


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

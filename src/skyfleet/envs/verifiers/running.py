"""Run a verifier: Fleet's Python source and two states of a database in, a grade out.

The source runs in this process with all of Python at hand: strangers' source only inside a jail.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sqlite3
import string
from functools import lru_cache, partial
from io import StringIO
from types import CodeType, FunctionType
from typing import Any

from skyfleet.envs.verifiers.difference import IgnoreConfig
from skyfleet.envs.verifiers.tables import Snapshot, snapshot_diff
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

_SPACE_FOR_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalized_contains(target: str, blob: object) -> bool:
    """Whether `target` occurs in `blob`, case, ASCII punctuation and spaces aside."""
    return _normalized(target) in _normalized(_text(blob))


def normalized_string_comparison(target: str, blob: object) -> bool:
    """Whether both say the same, case, ASCII punctuation and spaces aside."""
    return _normalized(target) == _normalized(_text(blob))


def extract_numbers(text: str) -> list[float]:
    """The numbers in a text: `extract_numbers("1,200 of 3.5")` is [1200.0, 3.5]."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]


def contains_number(text: str, target_number: float | str) -> bool:
    """Whether one of the numbers in `text` is the target; a text that is no number never is."""
    numbers = extract_numbers(text)
    if isinstance(target_number, str):
        target_number = target_number.replace(",", "")
    try:
        return float(target_number) in numbers
    except ValueError:
        return False


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def _normalized(text: str) -> str:
    return "".join(text.lower().translate(_SPACE_FOR_PUNCTUATION).split())


_APP = re.compile(r"^App (.+): ([01])(?:\.0)?$", re.M)
_TRIVIAL = re.compile(
    r"no unexpected changes|no filesystem changes|no-unexpected-envelopes", re.IGNORECASE
)
"""What an app reports that nobody had to touch: who does nothing would pass it."""


def partial_reward(stdout: str) -> float | None:
    """The apps that passed of those that had to be worked in, or else the checks that passed.

    None where the output does not tell.
    `partial_reward(">>> ERROR_ACCUMULATOR >>>\\n['no mail']\\n<<< ERROR_ACCUMULATOR <<<")` is 0.0.
    """
    if apps := _APP.findall(stdout):
        earned = [
            passed == "1"
            for name, passed in apps
            if passed == "0" or not _TRIVIAL.search(_section(stdout, name))
        ]
        return sum(earned) / len(earned) if earned else None
    successes, errors = _count(stdout, "SUCCESS"), _count(stdout, "ERROR")
    return successes / (successes + errors) if successes + errors else None


def _section(stdout: str, app: str) -> str:
    """What was printed while `app` was verified."""
    name = re.escape(app)
    found = re.search(rf"<<< VERIFY_{name} <<<(.*?)>>> VERIFY_{name} >>>", stdout, re.S)
    return found[1] if found else ""


def _count(stdout: str, kind: str) -> int:
    """Entries of the accumulators of this kind, each of which is a list as Python prints it."""
    blocks = re.findall(
        rf">>> {kind}_ACCUMULATOR >>>\n(.*?)\n<<< {kind}_ACCUMULATOR <<<", stdout, re.S
    )
    return sum(map(_length, blocks))


def _length(printed: str) -> int:
    try:
        entries = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return 0
    return len(entries) if isinstance(entries, list) else 0


SUCCESS_REWARD = 1.0
VERIFIER_NAME = re.compile(r"validate_task|(main|verify)$")
"""Of several functions, the one to be called."""


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
"""The names a verifier may use without importing them."""


class BrokenVerifierError(VerifierError):
    """The source cannot be run at all, so trying again gives the same."""


def load_state(image: bytes) -> sqlite3.Connection:
    """A database in memory, to be closed by the caller."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    # In a jail there is no file that a large sort could spill into.
    connection.execute("pragma temp_store = memory")
    if image:
        connection.deserialize(image)
    return connection


def run_verifier(
    code: str,
    seed_db: sqlite3.Connection,
    current_db: sqlite3.Connection,
    final_answer: str | None,
    *,
    conversation: str | None = None,
    partial_credit: bool = False,
) -> Grade:
    """Grade `current_db` by `code`. What the verifier prints becomes the explanation.

    A verifier that crashes, returns no number or could not ask its judge has graded nothing:
    VerifierError, never a zero. `partial_credit` puts the share of checks that passed in the
    place of a zero.
    """
    printed = StringIO()
    try:
        # A print of its own, because redirecting stdout would catch what other episodes say.
        names = {**VOCABULARY, "print": partial(print, file=printed)}
        exec(_compiled(code), names)
        env = Verified(seed_db, current_db)
        told = {"final_answer": final_answer, "conversation": conversation}
        reward = read_reward(call_verifier(_find_function(names), env, told))
        check_judge(printed.getvalue())
    except VerifierError:
        raise
    except (Exception, SystemExit) as error:
        raise VerifierError(_complaint(error, printed.getvalue())) from error
    if partial_credit and reward == 0:
        reward = credit_of(printed.getvalue())
    return Grade(reward=reward, success=reward >= SUCCESS_REWARD, explanation=printed.getvalue())


@lru_cache(maxsize=4096)
def _compiled(code: str) -> CodeType:
    try:
        return compile(_without_fleet(code), "<verifier_code>", "exec", dont_inherit=True)
    except Exception as error:
        raise BrokenVerifierError(_complaint(error, "")) from error


def _without_fleet(code: str) -> str:
    """Fleet's own imports and decorator name a package that need not be here."""
    named = r"^(@verifier|from fleet|import fleet)\b[^\n(]*(\([^)]*\))?.*$"
    return re.sub(named, "", code, flags=re.M)


def _find_function(names: dict[str, Any]) -> FunctionType:
    defined = [
        value
        for name, value in names.items()
        if isinstance(value, FunctionType) and name not in VOCABULARY
    ]
    named = [f for f in defined if VERIFIER_NAME.match(f.__name__)]
    if not defined:
        raise BrokenVerifierError(
            "verifier_code has no function; define validate_task(env, final_answer=None)"
        )
    return (named or defined)[0]


def call_verifier(verify: FunctionType, env: Verified, told: dict[str, str | None]) -> object:
    """By name what it names; else what stands second is the answer, as Fleet has it."""
    parameters = _parameters(verify)
    if not parameters:
        return verify()
    others = parameters[1:]
    named = {each.name: told[each.name] for each in others if each.name in told}
    if not others or "final_answer" in named or others[0].name in named:
        return verify(env, **named)
    if others[0].kind in (others[0].KEYWORD_ONLY, others[0].VAR_KEYWORD):
        return verify(env, final_answer=told["final_answer"], **named)
    return verify(env, told["final_answer"], **named)


def _parameters(verify: FunctionType) -> tuple[inspect.Parameter, ...]:
    plain = not verify.__code__.co_freevars and not hasattr(verify, "__wrapped__")
    # A verifier is made anew for every grade, and its code is not.
    return _parameters_of(verify.__code__) if plain else _signed(verify)


@lru_cache(maxsize=4096)
def _parameters_of(code: CodeType) -> tuple[inspect.Parameter, ...]:
    """Names and kinds; what stands in a signature besides is not asked for."""
    return _signed(FunctionType(code, {}))


def _signed(verify: FunctionType) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(verify).parameters.values())


def read_reward(result: object) -> float:
    if result is None:
        return SUCCESS_REWARD
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise TypeError(f"returned {result!r}; return a number")
    return float(result)


def credit_of(stdout: str) -> float:
    """In the place of a zero; never so much that what failed would pass."""
    share = partial_reward(stdout)
    return share if share is not None and share < SUCCESS_REWARD else 0.0


def check_judge(stdout: str) -> None:
    """A verifier that asks a model says so when it got no answer, and then grades nothing."""
    if found := re.search(r"^JUDGE ERROR:.*", stdout, re.M):
        raise VerifierError(f"verifier_code printed {found[0][:200]!r}; the grade is unknown")


def _complaint(error: BaseException, stdout: str) -> str:
    printed = f" after it printed {stdout[-200:]!r}" if stdout else ""
    return (
        f"verifier_code failed with {type(error).__name__}: {str(error)[:500]}{printed}; "
        "the grade is unknown until the verifier is mended"
    )

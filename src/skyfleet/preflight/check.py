"""Check: one row of the preflight table, with its function, group and time limit; and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Any, Literal, ParamSpec, TypeVar

from skyfleet.config.root import RunConfig
from skyfleet.errors import SkyfleetError, is_outage
from skyfleet.preflight.recovery import is_recovery

Group = Literal["configuration", "keys", "machine", "storage", "data", "environment", "policy"]
GROUPS: tuple[Group, ...] = (
    "configuration",
    "keys",
    "machine",
    "storage",
    "data",
    "environment",
    "policy",
)
P = ParamSpec("P")
T = TypeVar("T")


class CheckFailedError(SkyfleetError):
    """What is wrong, and its remedy."""


class NotCheckedError(SkyfleetError):
    """The check needs something that failed in a row of its own."""


class UnreachableError(CheckFailedError):
    """A service did not answer; the same check may pass later."""


class WarningError(SkyfleetError):
    """What is lacking, and that the run goes on without it."""


class Outcome(Enum):
    PASSED = "ok"
    WARNING = "warning"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    name: str
    group: Group
    outcome: Outcome
    detail: str
    """What was found, or what is wrong and its remedy."""
    seconds: float
    is_outage: bool = False
    """It failed because a service did not answer."""
    is_stuck: bool = False
    """It was not finished in its time, and its thread still runs."""


class Subject:
    """The configuration that is checked, and what several checks need, computed once."""

    def __init__(self, config: RunConfig, environ: Mapping[str, str]) -> None:
        self.config, self.environ = config, environ
        self.timeout_seconds: Mapping[str, float] = {}
        """By name of the check."""
        self._lock = Lock()
        self._shared: dict[str, Future[Any]] = {}

    @property
    def is_recovery(self) -> bool:
        """Whether the run was started before: an outage of what only watches it must not end it."""
        return self.share("recovery", lambda: is_recovery(self.config))

    def share(self, name: str, compute: Callable[[], T]) -> T:
        """The result or the error of the first call with this name; later calls wait for it."""
        with self._lock:
            is_first = name not in self._shared
            future: Future[T] = self._shared.setdefault(name, Future())
        if is_first:
            try:
                future.set_result(compute())
            except BaseException as error:
                future.set_exception(error)
        return future.result()


CheckFunction = Callable[[Subject], str | None]
"""Returns what it found, None if the configuration does not need it, or raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    group: Group
    run: CheckFunction
    timeout_seconds: float
    is_optional: bool
    """A run that was started before goes on although the service does not answer."""
    is_exclusive: bool
    """Such checks run one after another: they load the policy, or measure the memory that is free."""


CHECKS: dict[str, Check] = {}
"""By name, in the order of the table."""


def check(
    name: str,
    group: Group,
    *,
    timeout_seconds: float = 60,
    is_optional: bool = False,
    is_exclusive: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = Check(
            name=name,
            group=group,
            run=function,
            timeout_seconds=timeout_seconds,
            is_optional=is_optional,
            is_exclusive=is_exclusive,
        )
        return function

    return register


def describe_error(error: Exception) -> str:
    """In one sentence, whoever raised it."""
    if isinstance(error, SkyfleetError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    return f"{type(error).__name__}: {error}"


class Problems:
    """Calls several functions and raises one error with the sentences of all that failed."""

    def __init__(self, *sentences: str) -> None:
        self._sentences = list(sentences)
        self._are_outages = not sentences

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._sentences.append(describe_error(error))
            self._are_outages &= isinstance(error, UnreachableError) or is_outage(error)
            return None

    def raise_all(self) -> None:
        if self._sentences:
            kind = UnreachableError if self._are_outages else CheckFailedError
            raise kind("\n".join(dict.fromkeys(self._sentences)))

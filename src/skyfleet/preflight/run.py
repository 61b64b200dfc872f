"""Run all checks at once, each in a thread of its own and with its own time limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from time import perf_counter
from typing import ParamSpec, TypeVar

from skyfleet.config.root import RunConfig
from skyfleet.errors import is_outage
from skyfleet.preflight.check import (
    CHECKS,
    GROUPS,
    Check,
    CheckResult,
    Group,
    NotCheckedError,
    Outcome,
    Subject,
    UnreachableError,
    WarningError,
    describe_error,
)
from skyfleet.redaction import redact

P = ParamSpec("P")
T = TypeVar("T")
_MODULES = ("configuration", "keys", "machine", "storage", "data", "environment", "policy")
"""Each registers its checks when it is imported; their order is that of the table."""


def list_checks(*, skip: Collection[Group] = ()) -> list[Check]:
    for name in _MODULES:
        import_module(f"skyfleet.preflight.{name}")
    listed = [one for one in CHECKS.values() if one.group not in skip]
    return sorted(listed, key=lambda one: GROUPS.index(one.group))


def run_preflight(
    config: RunConfig,
    *,
    skip: Collection[Group] = (),
    timeout_seconds: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[CheckResult]:
    """The results in the order of the table; checks that the configuration does not need are left out.

    `timeout_seconds` replaces the limit of every check. A check that exceeds its limit is reported,
    and its thread is left behind.
    """
    checks = list_checks(skip=skip)
    subject = Subject(config, os.environ if environ is None else environ)
    subject.timeout_seconds = {
        one.name: one.timeout_seconds if timeout_seconds is None else timeout_seconds
        for one in checks
    }
    lanes = [[one] for one in checks if not one.is_exclusive]
    lanes.append([one for one in checks if one.is_exclusive])
    running = [_start(_run_lane, lane, subject) for lane in lanes if lane]
    wait(running)
    found = {result.name: result for lane in running for result in lane.result()}
    return [found[one.name] for one in checks if one.name in found]


def _run_lane(lane: Sequence[Check], subject: Subject) -> list[CheckResult]:
    results = [_run_check(one, subject) for one in lane]
    return [result for result in results if result is not None]


def _run_check(one: Check, subject: Subject) -> CheckResult | None:
    limit, start = subject.timeout_seconds[one.name], perf_counter()
    found = _start(_judge, one, subject)
    wait([found], timeout=limit)
    is_stuck = not found.done()
    if is_stuck:
        judged = _Judged(
            Outcome.FAILED,
            f"no answer within {limit:g} s; look at what it talks to, or raise --timeout-seconds "
            "if that is only slow",
            # Of a first start it may be a wrong address, which a restart repeats.
            is_outage=subject.is_recovery,
        )
    else:
        judged = found.result()
    outcome = judged.outcome
    if outcome is None:
        return None
    if outcome is Outcome.FAILED and judged.is_outage and one.is_optional and subject.is_recovery:
        outcome = Outcome.WARNING
    return CheckResult(
        name=one.name,
        group=one.group,
        outcome=outcome,
        detail=redact(judged.detail),
        seconds=perf_counter() - start,
        is_outage=outcome is Outcome.FAILED and judged.is_outage,
        is_stuck=is_stuck,
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    outcome: Outcome | None
    """None: the configuration does not need the check."""
    detail: str = ""
    is_outage: bool = False


def _judge(one: Check, subject: Subject) -> _Judged:
    """Any exception is a failed check, and never hides the others."""
    try:
        detail = one.run(subject)
    except NotCheckedError as error:
        return _Judged(Outcome.NOT_CHECKED, str(error))
    except WarningError as error:
        return _Judged(Outcome.WARNING, str(error))
    except Exception as error:
        unreachable = isinstance(error, UnreachableError) or is_outage(error)
        return _Judged(Outcome.FAILED, describe_error(error), is_outage=unreachable)
    return _Judged(None) if detail is None else _Judged(Outcome.PASSED, detail)


def _start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run the function in a daemon thread: one that never ends does not keep the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True, name="preflight").start()
    return future

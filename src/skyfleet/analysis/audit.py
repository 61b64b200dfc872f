"""Audit: find passes that look unearned and failures that share one verifier message.

A finding is a reason to read an episode, not proof of a mistake.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from skyfleet.analysis.formatting import percent
from skyfleet.analysis.replay import replay
from skyfleet.analysis.run_folder import read_entries, warn
from skyfleet.chat.message import ToolCall
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import get_world

_DOMINANT_SHARE = 0.5
_MIN_FAILURES = 20
"""With fewer failures a common message is not conclusive."""
_MIN_TASKS = 3
_MESSAGE_CHARACTERS = 120
_VARIABLE_PARTS = re.compile(r"\"[^\"]*\"|'[^']*'|\d+")
_ERRORS = re.compile(r">>> ERROR_ACCUMULATOR >>>\n(.*?)\n<<< ERROR_ACCUMULATOR <<<", re.DOTALL)


class Suspicion(StrEnum):
    UNTOUCHED_STATE = "untouched_state"
    """Passed without a successful writing call, although the reference solution writes."""
    NEEDED_TOOL_UNUSED = "needed_tool_unused"
    """Passed without calling a tool that the reference solution calls."""
    REPLAY_FAILS = "replay_fails"
    """Passed, but the same actions fail when replayed."""
    DOMINANT_MESSAGE = "dominant_message"
    """Most failures of the environment have the same verifier message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    entry_id: str
    env_key: str
    task_key: str
    suspicion: Suspicion
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    findings: Sequence[Finding]
    """In the order of the entries; dominant messages last."""
    judged: Mapping[Suspicion, int]
    """The number of passes that each check covered; for the dominant message, of failures."""


async def audit(
    entries: Sequence[Entry],
    tasks: Mapping[str, Task],
    open_env: EnvFactory | None,
    *,
    on_read: Callable[[], None] = lambda: None,
) -> Audit:
    """Check all graded entries. Passes of tasks that are not in `tasks` are skipped.

    Without `open_env` nothing is replayed. Episodes in damaged files are logged and skipped.
    """
    findings: list[Finding] = []
    judged = Counter(dict.fromkeys(Suspicion, 0))
    failures: dict[str, list[_Failed]] = defaultdict(list)
    graded = (entry for entry in entries if entry.success is not None)
    for entry, trajectory in read_entries(graded, on_damage=warn):
        task = tasks.get(entry.task_key)
        if not entry.success:
            failures[entry.env_key].append((_message(trajectory), entry))
            judged[Suspicion.DOMINANT_MESSAGE] += 1
        elif task is not None:
            judged.update(applicable_checks(task))
            findings += [_finding(entry, *reason) for reason in find_suspicions(trajectory, task)]
            if open_env is not None:
                judged[Suspicion.REPLAY_FAILS] += 1
                if reason := await _replay_failure(trajectory, task, open_env):
                    findings.append(_finding(entry, Suspicion.REPLAY_FAILS, reason))
        on_read()
    for env_failures in failures.values():
        findings += _dominant(env_failures)
    return Audit(findings=findings, judged=dict(judged))


_Failed = tuple[str, Entry]
"""The verifier's message, and the entry."""


def applicable_checks(task: Task) -> list[Suspicion]:
    """The checks that apply to a pass of this task; none without a reference solution."""
    checks = [Suspicion.NEEDED_TOOL_UNUSED] if task.solution else []
    return [Suspicion.UNTOUCHED_STATE, *checks] if _needed_writes(task) else checks


def find_suspicions(trajectory: Trajectory, task: Task) -> Iterator[tuple[Suspicion, str]]:
    """The suspicions that the calls of a pass raise."""
    succeeded = {call.name for call, is_error in answered_calls(trajectory) if not is_error}
    needed = _needed_writes(task)
    if needed and not succeeded & _writing_tools(task.env_key):
        yield Suspicion.UNTOUCHED_STATE, f"the reference solution writes with {_join_names(needed)}"
    called = {call.name for turn in trajectory.turns for call in turn.action.tool_calls}
    if unused := {call.name for call in task.solution} - called:
        yield Suspicion.NEEDED_TOOL_UNUSED, f"never called {_join_names(unused)}"


def answered_calls(trajectory: Trajectory) -> Iterator[tuple[ToolCall, bool]]:
    """Each call that has a result, and whether the result is an error."""
    for turn in trajectory.turns:
        replies = [reply for reply in turn.replies if reply.role == "tool"]
        # Calls after one that ends the episode have no result.
        for call, reply in zip(turn.action.tool_calls, replies, strict=False):
            yield call, reply.is_error


async def _replay_failure(trajectory: Trajectory, task: Task, open_env: EnvFactory) -> str | None:
    result = await replay(trajectory, task, open_env)
    if result.replayed.success:
        return None
    return result.difference or "the replay has no grade"


def _dominant(failures: Sequence[_Failed]) -> Iterator[Finding]:
    by_message: dict[str, list[Entry]] = defaultdict(list)
    for message, entry in failures:
        by_message[message].append(entry)
    message, same = max(by_message.items(), key=lambda item: len(item[1]))
    share = len(same) / len(failures)
    several = len({entry.task_key for entry in same}) >= _MIN_TASKS
    if several and share > _DOMINANT_SHARE and len(failures) >= _MIN_FAILURES:
        detail = (
            f"{percent(share)} of {len(failures)} failures have the message: {message or '(empty)'}"
        )
        yield _finding(same[0], Suspicion.DOMINANT_MESSAGE, detail)


def _message(trajectory: Trajectory) -> str:
    """The verifier's message without the parts that vary between tasks."""
    explanation = trajectory.grade.explanation if trajectory.grade else ""
    printed = _ERRORS.search(explanation)
    text = _join_list(printed[1]) if printed else explanation
    return " ".join(_VARIABLE_PARTS.sub("…", text).split())[:_MESSAGE_CHARACTERS]


def _join_list(printed: str) -> str:
    """Join a printed Python list of strings; return any other text unchanged."""
    try:
        return "; ".join(map(str, ast.literal_eval(printed)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return printed


def _needed_writes(task: Task) -> frozenset[str]:
    return _writing_tools(task.env_key).intersection(call.name for call in task.solution)


def _writing_tools(env_key: str) -> frozenset[str]:
    """Only the built-in environments declare which tools write."""
    try:
        return get_world(env_key).toolkit.writing
    except ConfigError:
        return frozenset()


def _finding(entry: Entry, suspicion: Suspicion, detail: str) -> Finding:
    return Finding(
        entry_id=entry.id,
        env_key=entry.env_key,
        task_key=entry.task_key,
        suspicion=suspicion,
        detail=detail,
    )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

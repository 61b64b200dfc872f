"""Audit: wins that look unearned and failures that all sound alike, listed to be read.

A finding is a reason to read an episode, not a verdict on it.
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
_FEWEST_FAILURES = 20
"""Below this many, half of them say nothing."""
_FEWEST_TASKS = 3
_MESSAGE_CHARACTERS = 120
_CHANGING = re.compile(r"\"[^\"]*\"|'[^']*'|\d+")
_ERRORS = re.compile(r">>> ERROR_ACCUMULATOR >>>\n(.*?)\n<<< ERROR_ACCUMULATOR <<<", re.DOTALL)


class Suspicion(StrEnum):
    UNTOUCHED_STATE = "untouched_state"
    """Passed without one successful writing call, where the reference writes."""
    NEEDED_TOOL_UNUSED = "needed_tool_unused"
    """Passed without a tool that the reference solution calls."""
    REPLAY_FAILS = "replay_fails"
    """Passed, and the same actions in the same world do not."""
    DOMINANT_MESSAGE = "dominant_message"
    """Most failures of the environment end with the verifier's one sentence."""


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
    """In the order of the entries, then the dominant messages."""
    judged: Mapping[Suspicion, int]
    """How many wins each check could say something of; of the dominant message, failures."""


async def audit(
    entries: Sequence[Entry],
    tasks: Mapping[str, Task],
    open_env: EnvFactory | None,
    *,
    on_read: Callable[[], None] = lambda: None,
) -> Audit:
    """Wins of a task that is not given are not judged. Without `open_env` nothing is replayed.

    What a damaged file has lost is warned of, and is in no number.
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
            judged.update(judgeable(task))
            findings += [_finding(entry, *reason) for reason in unearned(trajectory, task)]
            if open_env is not None:
                judged[Suspicion.REPLAY_FAILS] += 1
                if lost := await _lost(trajectory, task, open_env):
                    findings.append(_finding(entry, Suspicion.REPLAY_FAILS, lost))
        on_read()
    for of_env in failures.values():
        findings += _dominant(of_env)
    return Audit(findings=findings, judged=dict(judged))


_Failed = tuple[str, Entry]
"""With what the verifier said."""


def judgeable(task: Task) -> list[Suspicion]:
    """What a win's calls can be held against; nothing without a reference solution."""
    checks = [Suspicion.NEEDED_TOOL_UNUSED] if task.solution else []
    return [Suspicion.UNTOUCHED_STATE, *checks] if _needed_writes(task) else checks


def unearned(trajectory: Trajectory, task: Task) -> Iterator[tuple[Suspicion, str]]:
    """What is odd about a win, as told by its calls."""
    wrote = {call.name for call, is_error in answered_calls(trajectory) if not is_error}
    needed = _needed_writes(task)
    if needed and not wrote & _writing_tools(task.env_key):
        yield Suspicion.UNTOUCHED_STATE, f"the reference writes with {_names(needed)}"
    called = {call.name for turn in trajectory.turns for call in turn.action.tool_calls}
    if unused := {call.name for call in task.solution} - called:
        yield Suspicion.NEEDED_TOOL_UNUSED, f"never called {_names(unused)}"


def answered_calls(trajectory: Trajectory) -> Iterator[tuple[ToolCall, bool]]:
    """Each call that a tool answered, and whether with an error."""
    for turn in trajectory.turns:
        replies = [reply for reply in turn.replies if reply.role == "tool"]
        # A call that ends the episode leaves those behind it without an answer.
        for call, reply in zip(turn.action.tool_calls, replies, strict=False):
            yield call, reply.is_error


async def _lost(trajectory: Trajectory, task: Task, open_env: EnvFactory) -> str | None:
    again = await replay(trajectory, task, open_env)
    if again.replayed.success:
        return None
    return again.difference or "the replay has no grade"


def _dominant(failures: Sequence[_Failed]) -> Iterator[Finding]:
    by_message: dict[str, list[Entry]] = defaultdict(list)
    for message, entry in failures:
        by_message[message].append(entry)
    message, same = max(by_message.items(), key=lambda item: len(item[1]))
    share = len(same) / len(failures)
    several = len({entry.task_key for entry in same}) >= _FEWEST_TASKS
    if several and share > _DOMINANT_SHARE and len(failures) >= _FEWEST_FAILURES:
        detail = f"{percent(share)} of {len(failures)} failures say: {message or 'nothing'}"
        yield _finding(same[0], Suspicion.DOMINANT_MESSAGE, detail)


def _message(trajectory: Trajectory) -> str:
    """What the verifier said was wrong, without what changes from task to task."""
    explanation = trajectory.grade.explanation if trajectory.grade else ""
    printed = _ERRORS.search(explanation)
    said = " ".join(_CHANGING.sub("…", _listed(printed[1]) if printed else explanation).split())
    return said[:_MESSAGE_CHARACTERS]


def _listed(printed: str) -> str:
    """A list of strings, as Python prints it; what is none is taken as it is."""
    try:
        return "; ".join(map(str, ast.literal_eval(printed)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return printed


def _needed_writes(task: Task) -> frozenset[str]:
    return _writing_tools(task.env_key).intersection(call.name for call in task.solution)


def _writing_tools(env_key: str) -> frozenset[str]:
    """Only worlds say which of their tools write."""
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


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

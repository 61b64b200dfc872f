"""Validation by execution: the reference solution passes every time, and no mutant of it passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import islice
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.curation.inspection import RecordingEnv
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.envs.env import EnvFactory, Observation
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.rollouts.conversation import AgentFactory, Conversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.random_agent import RANDOM_CALLS, random_policy
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import EXPECTED_ERRORS as EXPECTED_ERRORS
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of one reference call."""

    call_index: int
    tool: str
    name: str
    value: object
    schema: Mapping[str, Any]

    def mutate(self, task: Task, wrong: object) -> Task:
        """Return the task with this argument of its solution replaced by `wrong`."""
        calls = list(task.solution)
        call = calls[self.call_index]
        arguments = {**call.arguments, self.name: wrong}
        calls[self.call_index] = RecordedCall(name=call.name, arguments=arguments)
        return task.model_copy(update={"solution": tuple(calls)})

    def describe(self, wrong: object) -> str:
        """`update_issue(state='closed' -> 'open')`"""
        return f"{self.tool}({self.name}={self.value!r} -> {wrong!r})"

    def wrong_values(self, outputs: list[str]) -> Iterator[object]:
        """Yield an invented value, then values that occur in the tool outputs.

        `outputs` may grow in between. The last words come first, because an error message ends with
        the valid values.
        """
        if self.tool == RESPOND_NAME:
            yield mutate_message(str(self.value))
            return
        invented = mutate_value(self.value, self.schema)
        if invented is None:
            return
        yield invented
        if isinstance(self.value, bool) or not isinstance(self.value, str | int):
            return
        kind, pattern = (int, r"\b\d{1,9}\b") if isinstance(self.value, int) else (str, r"[\w-]+")
        found = [
            kind(word) for text in reversed(outputs) for word in re.findall(pattern, text)[::-1]
        ]
        yield from (word for word in dict.fromkeys(found) if word not in (self.value, invented))


def writing_arguments(
    task: Task, tools: Mapping[str, ToolSpec], writing: frozenset[str] | None
) -> Iterator[Argument]:
    """Yield the arguments of writing calls, or of all calls if the writing tools are unknown."""
    for index, call in enumerate(task.solution):
        if writing is not None and call.name not in writing:
            continue
        schema = tools[call.name].parameters if call.name in tools else {}
        for name, value in call.arguments.items():
            yield Argument(
                call_index=index,
                tool=call.name,
                name=name,
                value=value,
                schema=schema.get("properties", {}).get(name, {}),
            )


def mutate_value(value: object, schema: Mapping[str, Any]) -> object:
    """Return a different value of the same type; None if there is none."""
    if choices := [one for one in schema.get("enum", ()) if one != value]:
        return choices[0]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return _mutate_text(value)
        case list():
            schemas = dict.fromkeys(range(len(value)), schema.get("items", {}))
            mutated = _mutate_leaf(dict(enumerate(value)), schemas)
            return list(mutated.values()) if mutated else None
        case dict():
            return _mutate_leaf(value, schema.get("properties", {}))
    return None


def _mutate_leaf(
    values: Mapping[Any, object], schemas: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, object] | None:
    """Change the first value that can be changed, at any depth; the others stay."""
    for key, value in values.items():
        if (wrong := mutate_value(value, schemas.get(key, {}))) is not None:
            return {**values, key: wrong}
    return None


def _mutate_text(text: str) -> str:
    if text.isdecimal():
        return str(int(text) + 1)
    try:
        return (date.fromisoformat(text) + timedelta(days=1)).isoformat()
    except (ValueError, OverflowError):
        # As a prefix, because some verifiers compare only the beginning.
        return f"zorqua {text}"


def mutate_message(text: str) -> str:
    """Return a message to a user that states other numbers, or one that states nothing.

    `mutate_message("It is $9.50, see R4.")` is `It is $10.51, see R5.`
    """
    changed = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), text)
    return changed if changed != text else "zorqua"


MAX_MUTATED_ARGUMENTS = 12
MAX_WRONG_VALUES = 5
"""Tried per argument until the tool accepts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    trajectory: Trajectory
    final_state: str | None
    """The state before grading; None if the env is not inspectable."""
    changed_by_grading: bool
    writing: frozenset[str] | None
    tools: tuple[ToolSpec, ...]

    @property
    def passed(self) -> bool:
        return self.trajectory.success is True

    @property
    def ungraded(self) -> bool:
        """The episode ended normally without a grade: such attempts give no learning signal."""
        completed = self.trajectory.ending not in (Ending.FAILED, Ending.TIMEOUT)
        return completed and self.trajectory.grade is None

    @property
    def tool_outputs(self) -> list[str]:
        return [reply.text for turn in self.trajectory.turns for reply in turn.replies]

    @property
    def errors(self) -> list[str]:
        replies = (reply for turn in self.trajectory.turns for reply in turn.replies)
        return [reply.text for reply in replies if reply.is_error]

    def same_final_state(self, other: Episode) -> bool:
        return self.final_state is not None and self.final_state == other.final_state


async def replay(task: Task, open_env: EnvFactory, *, timeout_seconds: float) -> Fault | None:
    """Run the task and return its fault, or None.

    Without a reference solution, the only check is that doing nothing fails.
    """
    runner = _Runner(open_env, timeout_seconds)
    idle = await runner.run(task, null_policy)
    if idle.passed:
        return Reason.VACUOUS, _describe_outcome(idle)
    if idle.ungraded:
        return Reason.UNGRADED, f"doing nothing returns no grade: {_describe_outcome(idle)}"
    if not task.solution:
        return None
    reference = await runner.run(task, oracle_policy)
    if fault := _check_reference(task, reference):
        return fault
    again = await runner.run(task, oracle_policy)
    if again.trajectory.grade is None or _score(again) != _score(reference):
        return Reason.FLAKY, f"{_describe_outcome(reference)}, then {_describe_outcome(again)}"
    return await _check_wrong_solutions(task, reference, runner)


class _Runner:
    def __init__(self, open_env: EnvFactory, timeout_seconds: float) -> None:
        self._open_env, self._timeout_seconds = open_env, timeout_seconds

    async def run(self, task: Task, agent: AgentFactory) -> Episode:
        envs: list[RecordingEnv] = []
        observations: list[Observation] = []

        async def open_recording(task: Task) -> RecordingEnv:
            envs.append(RecordingEnv(await self._open_env(task)))
            return envs[0]

        def start(task: Task, observation: Observation, session: str) -> Conversation:
            observations.append(observation)
            return agent(task, observation, session)

        limits = Limits(
            max_turns=max(len(task.solution), RANDOM_CALLS) + 1,
            max_input_length=0,  # Scripted agents have no tokens.
            trajectory_timeout_seconds=self._timeout_seconds,
        )
        trajectory = await run_episode(task, open_recording, start, limits)
        env = envs[0] if envs else None
        return Episode(
            trajectory=trajectory,
            final_state=env.before if env else None,
            writing=env.writing if env else None,
            changed_by_grading=env is not None and env.before != env.after,
            tools=observations[0].tools if observations else (),
        )


def _check_reference(task: Task, episode: Episode) -> Fault | None:
    trajectory = episode.trajectory
    if trajectory.ending in (Ending.FAILED, Ending.TIMEOUT):
        return Reason.ENV_FAILS, _describe_outcome(episode)
    expected = task.metadata.get(EXPECTED_ERRORS, 0)
    if len(episode.errors) != expected:
        seen = "; ".join(episode.errors) or "no error"
        return Reason.WRONG_CALL, f"{expected} errors expected, got: {seen}"
    if trajectory.grade is None:
        return Reason.UNGRADED, _describe_outcome(episode)
    if not episode.passed:
        return Reason.IMPOSSIBLE, _describe_outcome(episode)
    if episode.changed_by_grading:
        return Reason.CHANGED_BY_GRADING, "the state after grading differs from the state before"
    return None


async def _check_wrong_solutions(task: Task, reference: Episode, runner: _Runner) -> Fault | None:
    """An episode that passes with another final state than the reference shows a weak verifier."""
    if fault := await _check_mutants(task, reference, runner):
        return fault
    episode = await runner.run(task, random_policy(seed=0))
    if episode.ungraded:
        return Reason.UNGRADED, f"random calls return no grade: {_describe_outcome(episode)}"
    if episode.passed and not episode.same_final_state(reference):
        return Reason.RANDOM_PASSES, _describe_outcome(episode)
    return None


async def _check_mutants(task: Task, reference: Episode, runner: _Runner) -> Fault | None:
    tools = {tool.name: tool for tool in reference.tools}
    arguments = writing_arguments(task, tools, reference.writing)
    n_killed = 0
    surviving = []
    for argument in islice(arguments, MAX_MUTATED_ARGUMENTS):
        outputs = list(reference.tool_outputs)
        for wrong in islice(argument.wrong_values(outputs), MAX_WRONG_VALUES):
            episode = await runner.run(argument.mutate(task, wrong), oracle_policy)
            mutant = argument.describe(wrong)
            if episode.ungraded:
                return Reason.UNGRADED, f"{mutant} returns no grade: {_describe_outcome(episode)}"
            if not episode.passed:
                n_killed += 1
            elif not episode.same_final_state(reference):
                surviving.append(mutant)
            if len(episode.errors) <= len(reference.errors):
                break
            # The tool rejected the value, which does not test the verifier: try another value.
            outputs += episode.errors
    # If final states cannot be compared, an irrelevant argument, such as a page, may rightly pass.
    if surviving and (reference.final_state is not None or not n_killed):
        return Reason.MUTANT_PASSES, surviving[0]
    return None


def _score(episode: Episode) -> tuple[float | None, bool | None]:
    return episode.trajectory.reward, episode.trajectory.success


def _describe_outcome(episode: Episode) -> str:
    trajectory = episode.trajectory
    if trajectory.failure is not None:
        return f"{trajectory.failure.kind}: {trajectory.failure.detail}"
    if trajectory.grade is None:
        return "unknown grade"
    explanation = " ".join(trajectory.grade.explanation.split())
    return f"reward {trajectory.grade.reward:g} {explanation}".strip()

"""Replay: a task's reference solution passes, every time, and nothing less than it does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from skyfleet.chat.message import ToolSpec
from skyfleet.curation.inspecting import Watched
from skyfleet.curation.mutating import writing_arguments
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.envs.env import EnvFactory, Observation
from skyfleet.rollouts.conversation import AgentFactory, Conversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.random_agent import RANDOM_CALLS, random_policy
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

EXPECTED_ERRORS = "expected_errors"
"""Where a row's metadata says how many reference calls fail on purpose."""

MOST_MUTANTS = 12
WRONG_VALUES = 5
"""Tried for one argument, until the tool takes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    trajectory: Trajectory
    end: str | None
    """The state before the grade; None where it cannot be told."""
    changed_by_grading: bool
    writing: frozenset[str] | None
    tools: tuple[ToolSpec, ...]

    @property
    def passed(self) -> bool:
        return self.trajectory.success is True

    @property
    def ungraded(self) -> bool:
        """Played to its end, and nobody can say how well: attempts like it would teach nothing."""
        whole = self.trajectory.ending not in (Ending.FAILED, Ending.TIMEOUT)
        return whole and self.trajectory.grade is None

    @property
    def replies(self) -> list[str]:
        return [reply.text for turn in self.trajectory.turns for reply in turn.replies]

    @property
    def errors(self) -> list[str]:
        replies = (reply for turn in self.trajectory.turns for reply in turn.replies)
        return [reply.text for reply in replies if reply.is_error]

    def same_end(self, other: Played) -> bool:
        return self.end is not None and self.end == other.end


async def replay(task: Task, open_env: EnvFactory, *, timeout_seconds: float) -> Fault | None:
    """What is wrong with the task, or None. Without a reference, only that idleness must fail."""
    player = _Player(open_env, timeout_seconds)
    idle = await player.play(task, null_policy)
    if idle.passed:
        return Reason.VACUOUS, _told(idle)
    if idle.ungraded:
        return Reason.UNGRADED, f"doing nothing fails without a grade: {_told(idle)}"
    if not task.solution:
        return None
    reference = await player.play(task, oracle_policy)
    if fault := _fault_of_reference(task, reference):
        return fault
    again = await player.play(task, oracle_policy)
    if again.trajectory.grade is None or _score(again) != _score(reference):
        return Reason.FLAKY, f"{_told(reference)}, then {_told(again)}"
    return await _fault_of_others(task, reference, player)


class _Player:
    def __init__(self, open_env: EnvFactory, timeout_seconds: float) -> None:
        self._open_env, self._timeout_seconds = open_env, timeout_seconds

    async def play(self, task: Task, policy: AgentFactory) -> Played:
        watched: list[Watched] = []
        openings: list[Observation] = []

        async def open_watched(task: Task) -> Watched:
            watched.append(Watched(await self._open_env(task)))
            return watched[0]

        def start(task: Task, opening: Observation, session: str) -> Conversation:
            openings.append(opening)
            return policy(task, opening, session)

        limits = Limits(
            max_turns=max(len(task.solution), RANDOM_CALLS) + 1,
            max_input_length=0,  # nobody counts tokens here
            trajectory_timeout_seconds=self._timeout_seconds,
        )
        trajectory = await run_episode(task, open_watched, start, limits)
        env = watched[0] if watched else None
        return Played(
            trajectory=trajectory,
            end=env.before if env else None,
            writing=env.writing if env else None,
            changed_by_grading=env is not None and env.before != env.after,
            tools=openings[0].tools if openings else (),
        )


def _fault_of_reference(task: Task, played: Played) -> Fault | None:
    trajectory = played.trajectory
    if trajectory.ending in (Ending.FAILED, Ending.TIMEOUT):
        return Reason.ENV_FAILS, _told(played)
    expected = task.metadata.get(EXPECTED_ERRORS, 0)
    if len(played.errors) != expected:
        seen = "; ".join(played.errors) or "no error"
        return Reason.WRONG_CALL, f"{expected} errors expected, met: {seen}"
    if trajectory.grade is None:
        return Reason.UNGRADED, _told(played)
    if not played.passed:
        return Reason.IMPOSSIBLE, _told(played)
    if played.changed_by_grading:
        return Reason.CHANGED_BY_GRADING, "the state after the grade is not the state before"
    return None


async def _fault_of_others(task: Task, reference: Played, player: _Player) -> Fault | None:
    """Whoever passes and ends elsewhere than the reference shows that the verifier lets it."""
    if fault := await _fault_of_mutants(task, reference, player):
        return fault
    played = await player.play(task, random_policy(seed=0))
    if played.ungraded:
        return Reason.UNGRADED, f"random calls fail without a grade: {_told(played)}"
    if played.passed and not played.same_end(reference):
        return Reason.RANDOM_PASSES, _told(played)
    return None


async def _fault_of_mutants(task: Task, reference: Played, player: _Player) -> Fault | None:
    tools = {tool.name: tool for tool in reference.tools}
    arguments = writing_arguments(task, tools, reference.writing)
    noticed = 0
    passing = []
    for argument in islice(arguments, MOST_MUTANTS):
        heard = list(reference.replies)
        for wrong in islice(argument.wrong_values(heard), WRONG_VALUES):
            played = await player.play(argument.changed(task, wrong), oracle_policy)
            if played.ungraded:
                told = f"{argument.told(wrong)} fails without a grade: {_told(played)}"
                return Reason.UNGRADED, told
            if not played.passed:
                noticed += 1
            elif not played.same_end(reference):
                passing.append(argument.told(wrong))
            if len(played.errors) <= len(reference.errors):
                break
            # The tool refused it, which says nothing of the verifier: try one that it takes.
            heard += played.errors
    # Where ends cannot be compared, another page of a listing may pass with every right.
    if passing and (reference.end is not None or not noticed):
        return Reason.MUTANT_PASSES, passing[0]
    return None


def _score(played: Played) -> tuple[float | None, bool | None]:
    return played.trajectory.reward, played.trajectory.success


def _told(played: Played) -> str:
    trajectory = played.trajectory
    if trajectory.failure is not None:
        return f"{trajectory.failure.kind}: {trajectory.failure.detail}"
    if trajectory.grade is None:
        return "unknown grade"
    explanation = " ".join(trajectory.grade.explanation.split())
    return f"reward {trajectory.grade.reward:g} {explanation}".strip()

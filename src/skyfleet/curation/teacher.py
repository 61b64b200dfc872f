"""Teacher check: the pass rate of a strong model on a task must be within a band."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyfleet.curation.verdict import Fault, Reason
from skyfleet.engines.engine import ChatModel
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import EnvFactory, Observation
from skyfleet.errors import EngineError, ModelError
from skyfleet.rollouts.conversation import MessageConversation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateBand:
    """Accepted pass rates, both ends included."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    name: str
    model: ChatModel
    attempts: int
    band: PassRateBand
    max_turns: int = 30
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_generate_length=4096)
    )


async def check_with_teacher(
    task: Task, open_env: EnvFactory, teacher: Teacher, *, timeout_seconds: float
) -> Fault | None:
    """Return a fault if the teacher's pass rate is outside its band.

    Ungraded attempts, such as those that the endpoint rejects, are not counted. An endpoint that
    cannot be called is a ModelError, because it says nothing about the task.
    """

    def start(task: Task, observation: Observation, session: str) -> MessageConversation:
        return MessageConversation(observation, model=teacher.model, sampling=teacher.sampling)

    limits = Limits(
        max_turns=teacher.max_turns,
        max_input_length=0,  # The endpoint enforces its own limit.
        trajectory_timeout_seconds=timeout_seconds,
    )
    n_samples = teacher.attempts
    (group,) = await collect(
        [task], open_env, start, limits, n_samples=n_samples, max_concurrent=n_samples
    )
    failures = [t.failure for t in group.trajectories if t.failure is not None]
    for failure in failures:
        if failure.kind == EngineError.__name__:
            raise ModelError(
                f"the teacher {teacher.name} could not be called for {task.key}: "
                f"{failure.detail}; when it is available again, continue with --resume"
            )
    if not group.graded:
        return Reason.UNGRADED, failures[0].detail if failures else "no attempt has a grade"
    n_passed = sum(t.success is True for t in group.graded)
    rate = n_passed / len(group.graded)
    result = f"{teacher.name} passes {n_passed} of {len(group.graded)}"
    if rate < teacher.band.low:
        return Reason.TOO_HARD, f"{result}, expected at least {teacher.band.low:.0%}"
    if rate > teacher.band.high:
        return Reason.TOO_EASY, f"{result}, expected at most {teacher.band.high:.0%}"
    return None

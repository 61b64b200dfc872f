"""Evaluation: run a policy on a set of tasks and report its score."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from skyfleet.envs.env import EnvFactory
from skyfleet.envs.grading_code import GradingCode
from skyfleet.errors import NothingGradedError
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import PASS_THRESHOLD
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import EpisodeRunner, Limits, collect
from skyfleet.tasks.task import Task
from skyfleet.tracking.tracing import RolloutTracer
from skyfleet.trajectories.trajectory import Group, Trajectory, first_grading_error


def check_graded(groups_by_set: Mapping[str, Sequence[Group]]) -> None:
    """NothingGradedError for a set without a single grade: no grade is not a score of zero."""
    empty = {
        name: groups
        for name, groups in groups_by_set.items()
        if groups and not any(group.graded for group in groups)
    }
    if empty:
        first = first_grading_error(next(iter(empty.values())))
        raise NothingGradedError(
            f"evaluation set {', '.join(empty)}: no attempt could be graded, so there is no score; "
            f"remove the cause and evaluate again: {first}"
        )


class GradedSets:
    """The evaluation sets of a training run that had a grade when they were last evaluated.

    A set without a grade at its first evaluation, or twice in a row, stops the run; once may be an
    outage. The run saves a checkpoint, and the same command evaluates the set again.
    """

    def __init__(self, *, stops: bool = True) -> None:
        """`stops=False` for trainer.sentinels.modes.nothing_graded=warn or off."""
        self._stops = stops
        self._graded: set[str] = set()

    def check(self, name: str, groups: Sequence[Group]) -> None:
        if any(group.graded for group in groups):
            self._graded.add(name)
        elif name in self._graded:
            self._graded.remove(name)
        elif self._stops:
            check_graded({name: groups})


async def evaluate(
    name: str,
    tasks: Sequence[Task],
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    *,
    step: int,
    n_samples: int,
    max_concurrent: int,
    trained_envs: Collection[str] | None = None,
    baselines: Mapping[str, Baseline] | None = None,
    pass_threshold: float = PASS_THRESHOLD,
    agent_info: AgentInfo | None = None,
    grading_code: GradingCode | None = None,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
    tracer: RolloutTracer | None = None,
    run: EpisodeRunner | None = None,
) -> tuple[EvalReport, list[Group]]:
    """Return the report and its episodes.

    `baselines` only depend on the tasks: measure them once and pass them to every evaluation.
    """
    groups = await collect(
        tasks,
        open_env,
        policy,
        limits,
        n_samples=n_samples,
        max_concurrent=max_concurrent,
        on_finished=on_finished,
        tracer=tracer,
        run=run,
    )
    report = EvalReport.from_groups(
        name,
        groups,
        step=step,
        tasks=tasks,
        trained_envs=trained_envs,
        baselines=baselines,
        pass_threshold=pass_threshold,
        agent_info=agent_info,
        grading_code=grading_code,
    )
    return report, groups

"""Bugs in grades, groups, filters and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.moody_world import MoodyWorld, open_breaking, open_ungradable
from tests.sentinels.bugs_in_tokens import change_samples
from tests.sentinels.planted import Bug

from skyfleet.algorithms import credit_assignment, filters
from skyfleet.algorithms.advantages import split_turns
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.algorithms.estimator import Estimator
from skyfleet.algorithms.filters import FilterResult, keep_graded
from skyfleet.algorithms.sample import Sample
from skyfleet.errors import VerifierError
from skyfleet.rollouts import episode, grading
from skyfleet.rollouts.episode import collect
from skyfleet.rollouts.grading import EpisodeGrade
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Grade, Task
from skyfleet.trainer import build_run, rollouts
from skyfleet.trainer.run import Run
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory

Patch = pytest.MonkeyPatch
PAIRS = ("generator.n_samples_per_prompt=2",)
TWO_WORLDS = (
    'data.train_data=["world:github?count=4&split=train", "world:reddit?count=4&split=train"]'
)
FRAIL = ("trainer.sentinels.modes.unknown_grades=off",)
"""For environments in which many episodes have no grade."""
NO_GRADE = Grade(reward=0.0, success=False)


def change_groups(change: Callable[[list[Group]], list[Group]]) -> Callable[[Run, Patch], None]:
    """Plants `change` after the rollout."""

    def plant(run: Run, patch: Patch) -> None:
        async def changed(*args: Any, **kwargs: Any) -> list[Group]:
            return change(await collect(*args, **kwargs))

        patch.setattr(rollouts, "collect", changed)

    return plant


def change_estimator(change: Callable[[Estimator], Estimator]) -> Callable[[Run, Patch], None]:
    """Plants an estimator."""

    def plant(run: Run, patch: Patch) -> None:
        patch.setattr(
            build_run,
            "assign_credit",
            lambda groups, own, **k: assign_credit(groups, change(own), **k),
        )

    return plant


def _each(groups: list[Group], change: Callable[[Trajectory], Trajectory]) -> list[Group]:
    return [replace(g, trajectories=tuple(map(change, g.trajectories))) for g in groups]


def _zero_for_failed(attempt: Trajectory) -> Trajectory:
    return replace(attempt, grade=NO_GRADE) if attempt.ending is Ending.FAILED else attempt


def _without_failed(groups: list[Group]) -> list[Group]:
    return [
        replace(g, trajectories=tuple(t for t in g.trajectories if t.ending is not Ending.FAILED))
        for g in groups
    ]


def _mixed_up(groups: list[Group]) -> list[Group]:
    """Regrouped by position, as a batch that was shuffled on the way."""
    every = [t for group in groups for t in group.trajectories]
    rows = zip(*[iter(every[1:] + every[:1])] * len(groups[0].trajectories), strict=True)
    return [replace(g, trajectories=row) for g, row in zip(groups, rows, strict=True)]


def verifiers_break(run: Run, patch: Patch) -> None:
    async def grade(self: MoodyWorld) -> Grade:
        raise VerifierError("Environment is not defined")

    patch.setattr(MoodyWorld, "grade", grade)


def a_broken_verifier_scores_zero(run: Run, patch: Patch) -> None:
    own = episode.run_episode

    async def zero(*args: Any, **kwargs: Any) -> Trajectory:
        attempt = await own(*args, **kwargs)
        is_ungraded = attempt.grade is None and attempt.ending is not Ending.FAILED
        return replace(attempt, grade=NO_GRADE) if is_ungraded else attempt

    patch.setattr(episode, "run_episode", zero)


def only_finished_episodes_are_graded(run: Run, patch: Patch) -> None:
    own = grading.grade_episode

    async def graded(env: Any, steps: Any, ending: Ending, **kwargs: Any) -> EpisodeGrade:
        if ending is Ending.DONE:
            return await own(env, steps, ending, **kwargs)
        return EpisodeGrade(grade=None, info={}, is_by_env=False)

    patch.setattr(episode, "grade_episode", graded)


def unknown_is_kept_as_zero(run: Run, patch: Patch) -> None:
    def keep(groups: Sequence[Group], *, at_least: int = 2) -> FilterResult:
        kept = _each(list(groups), lambda t: t if t.grade else replace(t, grade=NO_GRADE))
        return keep_graded(kept, at_least=at_least)

    patch.setattr(filters, "keep_graded", keep)


def the_filter_does_nothing(run: Run, patch: Patch) -> None:
    def let_through(groups: Sequence[Group], **_: Any) -> FilterResult:
        return FilterResult(groups=tuple(groups), dropped=Counter(zero_variance=0))

    patch.setattr(filters, "drop_zero_variance", let_through)


def groups_vanish(run: Run, patch: Patch) -> None:
    def lossy(groups: Sequence[Group], **kwargs: Any) -> FilterResult:
        kept = keep_graded(groups, **kwargs)
        return replace(kept, groups=kept.groups[:-1])

    patch.setattr(filters, "keep_graded", lossy)


def copies_share_their_key(run: Run, patch: Patch) -> None:
    patch.setattr(filters, "_copy", lambda group, number: group)


def one_env_fills_the_batch(run: Run, patch: Patch) -> None:
    draw = TaskSampler.draw

    def drawn(self: TaskSampler) -> list[Task]:
        first, *others = draw(self)
        alike = [task for task in self._tasks if task.env_key == first.env_key]
        return alike[: len(others) + 1]

    patch.setattr(TaskSampler, "draw", drawn)


def lone_attempts_keep_their_score(run: Run, patch: Patch) -> None:
    def keep(groups: Sequence[Group], **_: Any) -> FilterResult:
        return keep_graded(groups, at_least=1)

    patch.setattr(filters, "keep_graded", keep)
    raw = change_estimator(lambda own: lambda r: list(r) if len(r) == 1 else own(r))  # type: ignore[operator]
    raw(run, patch)


def only_the_last_turn_has_an_advantage(run: Run, patch: Patch) -> None:
    def copied(samples: Sequence[Sample]) -> list[Sample]:
        turns = split_turns(samples)
        ends = {(s.task_key, s.attempt): len(s.token_ids) for s in turns}
        last = [ends[s.task_key, s.attempt] == len(s.token_ids) for s in turns]
        nothing = [replace(s, advantages=(0.0,) * len(s.token_ids)) for s in turns]
        return [s if kept else n for s, n, kept in zip(turns, nothing, last, strict=True)]

    patch.setattr(credit_assignment, "split_turns", copied)


def _advantage_on_an_observation(sample: Sample) -> Sample:
    return replace(sample, advantages=(0.5, *sample.advantages[1:]))


IN_BATCHES = (
    Bug(
        name="a failed env leaves an attempt with reward 0",
        source="SkyRL 10",
        sentinel="failed_grades",
        plant=change_groups(lambda groups: _each(groups, _zero_for_failed)),
        settings=FRAIL,
        open_env=open_breaking,
    ),
    Bug(
        name="a broken verifier scores 0",
        source="Fleet 24",
        sentinel="failed_grades",
        plant=a_broken_verifier_scores_zero,
        settings=FRAIL,
        open_env=open_ungradable,
    ),
    Bug(
        name="verifiers run without their dependencies",
        source="Fleet 22",
        sentinel="unknown_grades",
        plant=verifiers_break,
    ),
    Bug(
        name="only finished episodes are graded",
        source="Fleet 28",
        sentinel="unknown_grades",
        plant=only_finished_episodes_are_graded,
    ),
    Bug(
        name="hybrid sampling is on and ignores the environment",
        source="Fleet 67",
        sentinel="env_balance",
        plant=one_env_fills_the_batch,
        settings=(TWO_WORLDS,),
    ),
    Bug(
        name="failed attempts vanish from their group",
        source="other",
        sentinel="batch_accounting",
        plant=change_groups(_without_failed),
        settings=FRAIL,
        open_env=open_breaking,
    ),
    Bug(
        name="indices and batches are mixed up: attempts land in other groups",
        source="Fleet 66",
        sentinel="batch_accounting",
        plant=change_groups(_mixed_up),
    ),
    Bug(
        name="a group is dropped and not counted",
        source="other",
        sentinel="batch_accounting",
        plant=groups_vanish,
    ),
    Bug(
        name="an unknown grade enters the group's mean as 0",
        source="Fleet 24",
        sentinel="batch_accounting",
        plant=unknown_is_kept_as_zero,
        settings=FRAIL,
        open_env=open_ungradable,
    ),
    Bug(
        name="dynamic_sampling=replace repeats the keys of the groups it copies",
        source="SkyRL 4",
        sentinel="batch_accounting",
        plant=copies_share_their_key,
        settings=("trainer.algorithm.dynamic_sampling.type=replace", "trainer.seed=5", *PAIRS),
    ),
    Bug(
        name="zero_variance_filter is on and does nothing",
        source="SkyRL 5",
        sentinel="filters",
        plant=the_filter_does_nothing,
        settings=("trainer.algorithm.zero_variance_filter=true", *PAIRS),
    ),
    Bug(
        name="a group of one has its raw score as advantage",
        source="SkyRL 10",
        sentinel="advantages",
        plant=lone_attempts_keep_their_score,
        settings=(*PAIRS, *FRAIL, "trainer.seed=3"),
        open_env=open_ungradable,
    ),
    Bug(
        name="step-wise: turns before the last get no advantage",
        source="SkyRL 7",
        sentinel="advantages",
        plant=only_the_last_turn_has_an_advantage,
        settings=("generator.step_wise_trajectories=true",),
    ),
    Bug(
        name="an observation token has an advantage",
        source="SkyRL 14",
        sentinel="advantages",
        plant=change_samples(lambda samples: list(map(_advantage_on_an_observation, samples))),
    ),
    Bug(
        name="advantages have no baseline",
        source="other",
        sentinel="advantages",
        plant=change_estimator(lambda own: lambda rewards: list(rewards)),
    ),
    Bug(
        name="advantages have the wrong sign",
        source="other",
        sentinel="advantages",
        plant=change_estimator(lambda own: lambda rewards: [-a for a in own(rewards)]),  # type: ignore[operator]
    ),
    Bug(
        name="advantages are assigned to the attempts in another order",
        source="other",
        sentinel="advantages",
        plant=change_estimator(lambda own: lambda rewards: own(rewards)[::-1]),  # type: ignore[operator]
    ),
)

"""Filters between rollout and loss: which groups are trained on, and when more are sampled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from skyfleet.algorithms.registry import get_estimator
from skyfleet.config.root import RunConfig
from skyfleet.errors import NoLearningSignalError
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, describe_ungraded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    groups: tuple[Group, ...]
    dropped: Counter[str]
    """Reason -> count: of attempts for `unknown_grade`, of groups for the other reasons."""
    modified: Counter[str] = field(default_factory=Counter)
    """Modification -> number of attempts that were modified and still count in their group."""
    wants_more: bool = False
    """Too few groups: roll out another batch, then filter all groups again."""

    @property
    def metrics(self) -> dict[str, float]:
        """`filter/*`."""
        return {f"filter/{why}": float(n) for why, n in {**self.dropped, **self.modified}.items()}


def keep_graded(groups: Iterable[Group], *, at_least: int = 2) -> FilterResult:
    """Drop attempts without a grade, then groups with fewer than `at_least` attempts left.

    An unknown grade counted as 0 would shift the group's mean.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter(unknown_grade=0, too_few_graded=0)
    for group in groups:
        graded = group.graded
        dropped["unknown_grade"] += len(group.trajectories) - len(graded)
        if len(graded) < at_least:
            dropped["too_few_graded"] += 1
        else:
            kept.append(replace(group, trajectories=graded))
    if too_few := dropped["too_few_graded"]:
        logger.warning(
            "%d groups have fewer than %d graded attempts and are dropped: there is nothing to "
            "compare; raise generator.n_samples_per_prompt or find out why grades are missing",
            too_few,
            at_least,
        )
    return FilterResult(groups=tuple(kept), dropped=dropped)


def drop_zero_variance(groups: Iterable[Group], *, tolerance: float = 1e-6) -> FilterResult:
    """Drop groups whose attempts all earned the same reward: their advantages are 0.

    A single attempt is kept: an estimator that allows it compares it with the batch.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter(zero_variance=0)
    for group in groups:
        rewards = group.rewards
        if len(rewards) > 1 and max(rewards) - min(rewards) <= tolerance:
            dropped["zero_variance"] += 1
        else:
            kept.append(group)
    return FilterResult(groups=tuple(kept), dropped=dropped)


def zero_unfinished(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Set the reward of a truncated episode to 0 (`generator.zero_reward_on_non_stop`).

    As in SkyRL the finish reason of the last turn decides, so an episode that reached max_turns
    keeps its reward.
    """

    def zero(trajectory: Trajectory) -> Trajectory:
        if trajectory.grade is None or trajectory.ending in (Ending.DONE, Ending.MAX_TURNS):
            return trajectory
        return replace(trajectory, grade=replace(trajectory.grade, reward=0.0, success=False))

    return _map_attempts(groups, zero)


def penalize_overlong(
    groups: Iterable[Group], *, max_len: int, buffer_len: int, penalty_factor: float
) -> tuple[Group, ...]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) for all tokens of an attempt.

    The reward falls over the last `buffer_len` tokens before `max_len`, by `penalty_factor` at
    `max_len` and beyond. Success does not change.
    """

    def penalize(trajectory: Trajectory) -> Trajectory:
        if trajectory.grade is None:
            return trajectory
        n_sampled = sum(sum(transcript.loss_mask) for transcript in trajectory.transcripts)
        share = min(max((n_sampled - (max_len - buffer_len)) / buffer_len, 0.0), 1.0)
        reward = trajectory.grade.reward - penalty_factor * share
        return replace(trajectory, grade=replace(trajectory.grade, reward=reward))

    return _map_attempts(groups, penalize)


def count_regraded(before: Iterable[Group], after: Iterable[Group]) -> int:
    """The number of attempts whose grade changed."""
    pairs = zip(_attempts(before), _attempts(after), strict=True)
    return sum(one.grade != other.grade for one, other in pairs)


def _attempts(groups: Iterable[Group]) -> Iterator[Trajectory]:
    return (trajectory for group in groups for trajectory in group.trajectories)


def _map_attempts(
    groups: Iterable[Group], change: Callable[[Trajectory], Trajectory]
) -> tuple[Group, ...]:
    return tuple(replace(g, trajectories=tuple(map(change, g.trajectories))) for g in groups)


def merge_by_task(groups: Sequence[Group]) -> list[Group]:
    """Merge the groups of a task that was sampled more than once."""
    merged: dict[str, Group] = {}
    for group in groups:
        before = merged.get(group.task_key)
        attempts = before.trajectories + group.trajectories if before else group.trajectories
        merged[group.task_key] = replace(group, trajectories=attempts)
    return list(merged.values())


def fill_batch(
    groups: Sequence[Group], *, batch_size: int, tolerance: float = 1e-6
) -> FilterResult:
    """DAPO's dynamic sampling (arXiv 2503.14476): the first `batch_size` informative groups."""
    kept = drop_zero_variance(groups, tolerance=tolerance)
    surplus = max(len(kept.groups) - batch_size, 0)
    return FilterResult(
        groups=kept.groups[:batch_size],
        dropped=Counter({**kept.dropped, "surplus": surplus}),
        wants_more=len(kept.groups) < batch_size,
    )


def replace_uninformative(
    groups: Sequence[Group], *, batch_size: int, min_replace_ratio: float, tolerance: float = 1e-6
) -> FilterResult:
    """The informative groups of the last batch, and copies of them until the batch is full.

    If the informative share is `min_replace_ratio` or less, another batch is needed. A copy has a
    key of its own, so that it counts as one more prompt.
    """
    kept = drop_zero_variance(groups, tolerance=tolerance)
    good = list(kept.groups)
    if len(good) <= min_replace_ratio * batch_size:
        return FilterResult(groups=(), dropped=kept.dropped, wants_more=True)
    # Seeded by the task keys: a resumed step copies the same groups.
    rng, missing = Random("/".join(group.task_key for group in groups)), batch_size - len(good)
    copied = rng.sample(good, missing) if missing <= len(good) else rng.choices(good, k=missing)
    filled = [*good, *(_copy(group, number) for number, group in enumerate(copied, 1))]
    rng.shuffle(filled)  # else the last mini-batch would hold copies only
    return FilterResult(groups=tuple(filled), dropped=Counter({**kept.dropped, "copied": missing}))


def check_sample_batches(
    kept: FilterResult, groups: Sequence[Group], *, batch_size: int, max_sample_batches: int
) -> None:
    """Raise NoLearningSignalError if `max_sample_batches` batches were not enough; -1 never does."""
    if not kept.wants_more or not 0 < max_sample_batches <= len(groups) // batch_size:
        return
    ungraded = describe_ungraded(groups)
    raise NoLearningSignalError(
        f"trainer.algorithm.dynamic_sampling.max_sample_batches={max_sample_batches} batches "
        "did not hold enough groups whose attempts earned different rewards; "
        + (f"{ungraded}; or " if ungraded else "")
        + "raise it, raise generator.n_samples_per_prompt, or choose tasks that are neither too hard "
        "nor too easy"
    )


def _copy(group: Group, number: int) -> Group:
    key = f"{group.task_key} (copy {number})"
    trajectories = tuple(replace(t, task_key=key) for t in group.trajectories)
    return replace(group, task_key=key, trajectories=trajectories)


def build_filter(config: RunConfig) -> Callable[[Sequence[Group]], FilterResult]:
    """The configured filters: all groups of a step so far -> groups to train on, or wants_more."""
    algorithm, generator = config.trainer.algorithm, config.generator
    at_least = get_estimator(algorithm.advantage_estimator).min_group_size

    def filter_groups(groups: Sequence[Group]) -> FilterResult:
        modified: Counter[str] = Counter()
        if generator.zero_reward_on_non_stop:
            before, groups = groups, zero_unfinished(groups)
            modified["zeroed"] = count_regraded(before, groups)
        if algorithm.overlong_buffer_len is not None:
            before = groups
            groups = penalize_overlong(
                groups,
                max_len=algorithm.overlong_max_len or generator.sampling_params.max_generate_length,
                buffer_len=algorithm.overlong_buffer_len,
                penalty_factor=algorithm.overlong_buffer_penalty_factor,
            )
            modified["punished"] = count_regraded(before, groups)
        kept = _drop_uninformative(config, groups, at_least)
        if generator.apply_overlong_filtering:
            unfinished = [t for group in kept.groups for t in group.graded if t.ending.truncated]
            modified["overlong"] = len(unfinished)
        check_sample_batches(
            kept,
            groups,
            batch_size=config.trainer.train_batch_size,
            max_sample_batches=algorithm.dynamic_sampling.max_sample_batches,
        )
        return replace(kept, modified=modified)

    return filter_groups


def drops_zero_variance(config: RunConfig) -> bool:
    """Whether groups of equal rewards are dropped, apart from dynamic sampling."""
    refill = config.trainer.fully_async
    return config.trainer.algorithm.zero_variance_filter or (
        refill.enabled and refill.sample_full_batch
    )


def _drop_uninformative(config: RunConfig, groups: Sequence[Group], at_least: int) -> FilterResult:
    algorithm, batch_size = config.trainer.algorithm, config.trainer.train_batch_size
    dynamic, tolerance = algorithm.dynamic_sampling, algorithm.zero_variance_filter_tol
    if dynamic.type == "filter":
        groups = merge_by_task(groups)
    elif dynamic.type == "replace":
        groups = groups[-batch_size:]
    graded = kept = keep_graded(groups, at_least=at_least)
    if dynamic.type == "filter":
        kept = fill_batch(graded.groups, batch_size=batch_size, tolerance=tolerance)
    elif dynamic.type == "replace":
        kept = replace_uninformative(
            graded.groups,
            batch_size=batch_size,
            min_replace_ratio=dynamic.min_replace_ratio,
            tolerance=tolerance,
        )
    elif drops_zero_variance(config):
        kept = drop_zero_variance(graded.groups, tolerance=tolerance)
    # Not `+`, which drops counts of zero.
    return FilterResult(
        groups=kept.groups,
        dropped=Counter({**graded.dropped, **kept.dropped}),
        wants_more=kept.wants_more,
    )

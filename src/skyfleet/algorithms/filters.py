"""Filters between rollout and loss: which groups are trained on, and when more are sampled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from skyfleet.algorithms.advantages import BatchEstimator, estimator_of
from skyfleet.config.root import RunConfig
from skyfleet.errors import NoLearningSignalError
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, describe_ungraded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    groups: tuple[Group, ...]
    dropped: Counter[str]
    """Reason -> how many: attempts for `unknown_grade`, groups for the rest."""
    touched: Counter[str] = field(default_factory=Counter)
    """What was done to attempts that count in their group still -> to how many."""
    wants_more: bool = False
    """Too few yet: play another batch, and sift all of them again."""

    @property
    def metrics(self) -> dict[str, float]:
        """`filter/*`."""
        return {f"filter/{why}": float(n) for why, n in {**self.dropped, **self.touched}.items()}


def keep_graded(groups: Iterable[Group], *, at_least: int = 2) -> FilterResult:
    """Leave out attempts whose grade is unknown, and groups of which fewer than `at_least` are left.

    An unknown grade read as zero would shift its siblings' mean; one attempt compares with nobody.
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
            "%d groups have fewer than %d known grades: nothing to compare, so nothing is learned; "
            "raise generator.n_samples_per_prompt or see why grades are missing",
            too_few,
            at_least,
        )
    return FilterResult(groups=tuple(kept), dropped=dropped)


def drop_zero_variance(groups: Iterable[Group], *, tolerance: float = 1e-6) -> FilterResult:
    """Leave out groups whose attempts all earned the same: they carry no comparison.

    A single attempt stays: where it came this far, it is compared with the batch.
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
    """Give no reward to an episode that was cut short (`generator.zero_reward_on_non_stop`).

    The last turn decides, as in SkyRL: one that had no turn left has finished all it began.
    """

    def zeroed(trajectory: Trajectory) -> Trajectory:
        if trajectory.grade is None or trajectory.ending in (Ending.DONE, Ending.MAX_TURNS):
            return trajectory
        return replace(trajectory, grade=replace(trajectory.grade, reward=0.0, success=False))

    return _each(groups, zeroed)


def punish_overlong(
    groups: Iterable[Group], *, max_len: int, buffer_len: int, penalty_factor: float
) -> tuple[Group, ...]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), on all an attempt has said.

    The reward falls over the last `buffer_len` tokens before `max_len`, by `penalty_factor` at
    `max_len` and beyond. Success is not touched.
    """

    def punished(trajectory: Trajectory) -> Trajectory:
        if trajectory.grade is None:
            return trajectory
        said = sum(sum(transcript.loss_mask) for transcript in trajectory.transcripts)
        share = min(max((said - (max_len - buffer_len)) / buffer_len, 0.0), 1.0)
        reward = trajectory.grade.reward - penalty_factor * share
        return replace(trajectory, grade=replace(trajectory.grade, reward=reward))

    return _each(groups, punished)


def n_regraded(before: Iterable[Group], after: Iterable[Group]) -> int:
    """How many attempts were given another grade."""
    pairs = zip(_attempts(before), _attempts(after), strict=True)
    return sum(one.grade != other.grade for one, other in pairs)


def _attempts(groups: Iterable[Group]) -> Iterator[Trajectory]:
    return (trajectory for group in groups for trajectory in group.trajectories)


def _each(groups: Iterable[Group], change: Callable[[Trajectory], Trajectory]) -> tuple[Group, ...]:
    return tuple(replace(g, trajectories=tuple(map(change, g.trajectories))) for g in groups)


def merge_by_task(groups: Sequence[Group]) -> list[Group]:
    """A task that was drawn twice is one group of all its attempts."""
    merged: dict[str, Group] = {}
    for group in groups:
        before = merged.get(group.task_key)
        attempts = before.trajectories + group.trajectories if before else group.trajectories
        merged[group.task_key] = replace(group, trajectories=attempts)
    return list(merged.values())


def fill_batch(
    groups: Sequence[Group], *, batch_size: int, tolerance: float = 1e-6
) -> FilterResult:
    """DAPO's (arXiv 2503.14476): the first `batch_size` informative groups of all played."""
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

    Where not more than `min_replace_ratio` of the batch is informative, another is wanted. A copy
    has a key of its own: to whatever counts prompts it is one more.
    """
    kept = drop_zero_variance(groups, tolerance=tolerance)
    good = list(kept.groups)
    if len(good) <= min_replace_ratio * batch_size:
        return FilterResult(groups=(), dropped=kept.dropped, wants_more=True)
    # Seeded by what was played: a resumed step chooses the same.
    draw, missing = Random("/".join(group.task_key for group in groups)), batch_size - len(good)
    chosen = draw.sample(good, missing) if missing <= len(good) else draw.choices(good, k=missing)
    filled = [*good, *(_copy(group, number) for number, group in enumerate(chosen, 1))]
    draw.shuffle(filled)  # or else the last mini-batch would be all copies
    return FilterResult(groups=tuple(filled), dropped=Counter({**kept.dropped, "copied": missing}))


def check_sample_batches(
    kept: FilterResult, groups: Sequence[Group], *, batch_size: int, max_sample_batches: int
) -> None:
    """Give up where so many batches, all that was played, were not enough; -1 never does."""
    if not kept.wants_more or not 0 < max_sample_batches <= len(groups) // batch_size:
        return
    unknown = describe_ungraded(groups)
    raise NoLearningSignalError(
        f"trainer.algorithm.dynamic_sampling.max_sample_batches={max_sample_batches} batches "
        "did not hold enough groups whose attempts earned different rewards; "
        + (f"{unknown}; or " if unknown else "")
        + "raise it, raise generator.n_samples_per_prompt, or choose tasks that are neither too hard "
        "nor too easy"
    )


def _copy(group: Group, number: int) -> Group:
    key = f"{group.task_key} (copy {number})"
    trajectories = tuple(replace(t, task_key=key) for t in group.trajectories)
    return replace(group, task_key=key, trajectories=trajectories)


def build_filter(config: RunConfig) -> Callable[[Sequence[Group]], FilterResult]:
    """All groups a step has played so far -> what to learn from, or that more are wanted."""
    algorithm, generator = config.trainer.algorithm, config.generator
    at_least = 1 if isinstance(estimator_of(algorithm), BatchEstimator) else 2

    def filter_groups(groups: Sequence[Group]) -> FilterResult:
        touched: Counter[str] = Counter()
        if generator.zero_reward_on_non_stop:
            earned, groups = groups, zero_unfinished(groups)
            touched["zeroed"] = n_regraded(earned, groups)
        if algorithm.overlong_buffer_len is not None:
            earned = groups
            groups = punish_overlong(
                groups,
                max_len=algorithm.overlong_max_len or generator.sampling_params.max_generate_length,
                buffer_len=algorithm.overlong_buffer_len,
                penalty_factor=algorithm.overlong_buffer_penalty_factor,
            )
            touched["punished"] = n_regraded(earned, groups)
        kept = _varied(config, groups, at_least)
        if generator.apply_overlong_filtering:
            unfinished = [t for group in kept.groups for t in group.graded if t.ending.truncated]
            touched["overlong"] = len(unfinished)
        check_sample_batches(
            kept,
            groups,
            batch_size=config.trainer.train_batch_size,
            max_sample_batches=algorithm.dynamic_sampling.max_sample_batches,
        )
        return replace(kept, touched=touched)

    return filter_groups


def _varied(config: RunConfig, groups: Sequence[Group], at_least: int) -> FilterResult:
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
    elif algorithm.zero_variance_filter:
        kept = drop_zero_variance(graded.groups, tolerance=tolerance)
    # Not `+`, which leaves out what was counted zero times.
    return FilterResult(
        groups=kept.groups,
        dropped=Counter({**graded.dropped, **kept.dropped}),
        wants_more=kept.wants_more,
    )

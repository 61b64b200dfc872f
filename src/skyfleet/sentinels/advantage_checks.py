"""Checks of filters and credit assignment: batch accounting, trained tokens and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from math import fsum, isclose, isfinite, sqrt
from statistics import fmean

import numpy as np

from skyfleet.algorithms.sample import Sample
from skyfleet.chat.transcript import Transcript
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import AdvantageStage, Invariants, SampleSums
from skyfleet.trajectories.trajectory import Group

ATTEMPTS, ADDED = "unknown_grade", "copied"
"""The filter reasons that count attempts and added groups; the others count dropped groups."""
TOLERANCE = 1e-3
ROUNDING = 1e-6
"""Advantages of equal rewards whose mean is rounded."""
NEAR_MEAN, AT_MEAN = 1e-4, 1e-9
"""Nearer to the mean than the first, rounding may change the sign; than the second, it is equal."""


def batch_accounting(stage: AdvantageStage) -> Finding | None:
    """All prompts times attempts were rolled out, and each is trained on or dropped for a reason."""
    return _check_groups(stage) or _check_counts(stage) or _check_rewards(stage)


def _check_groups(stage: AdvantageStage) -> Finding | None:
    expected, groups = stage.expected, stage.groups
    n_more = len(groups) - expected.batch_size
    # Groups that were replaced one by one are reported beside those of the batch.
    is_whole = n_more >= 0 if expected.refills else not len(groups) % expected.batch_size
    if not groups or not is_whole:
        return found(
            "the groups of the step are no whole number of batches",
            groups=len(groups),
            train_batch_size=expected.batch_size,
        )
    for group in groups:
        if any(attempt.task_key != group.task_key for attempt in group.trajectories):
            return found("a group holds an attempt at another task", task=group.task_key)
        if len(group.trajectories) != expected.n_samples:
            return found(
                "a group has another number of attempts than generator.n_samples_per_prompt",
                task=group.task_key,
                attempts=len(group.trajectories),
                wanted=expected.n_samples,
            )
    return None


def _check_counts(stage: AdvantageStage) -> Finding | None:
    kept, considered = stage.kept, _considered(stage.groups, stage.expected)
    keys = {group.task_key for group in kept.groups}
    if len(keys) != len(kept.groups) and len(considered) == len({g.task_key for g in considered}):
        return found(
            "two groups to train on have the same key, so they would be one group",
            groups=len(kept.groups),
            keys=len(keys),
        )
    if stage.expected.dynamic_sampling == "filter":
        n_considered = len({group.task_key for group in considered})
    else:
        n_considered = len(considered)
    dropped = {reason: n for reason, n in kept.dropped.items() if reason not in (ATTEMPTS, ADDED)}
    learned = len(kept.groups) - kept.dropped[ADDED]
    if learned + sum(dropped.values()) != n_considered:
        return found(
            "groups are neither trained on nor dropped for a reason",
            played=n_considered,
            learned=learned,
            **dropped,
        )
    unknown = sum(len(group.trajectories) - len(group.graded) for group in considered)
    if kept.dropped[ATTEMPTS] != unknown:
        return found(
            "the count of attempts without a grade is wrong",
            unknown=unknown,
            counted=kept.dropped[ATTEMPTS],
        )
    return None


def _check_rewards(stage: AdvantageStage) -> Finding | None:
    """The groups to train on hold the graded attempts of their task with their rewards."""
    earned: dict[str, list[float]] = {}
    for group in _considered(stage.groups, stage.expected):
        earned.setdefault(group.task_key, []).extend(group.rewards)
    kept: dict[str, list[float]] = {}
    for group in stage.kept.groups:
        kept.setdefault(group.task_key, []).extend(group.rewards)
    for task_key, rewards in kept.items():
        original = earned.get(task_key)
        if original is None:
            continue  # a copy, which has a key of its own
        same = stage.expected.changes_rewards or all(map(isclose, rewards, original))
        if (len(rewards) != len(original) or not same) and not _are_whole_groups(stage, task_key):
            return found(
                "the rewards trained on are not those that were earned",
                task=task_key,
                graded=len(original),
                kept=len(rewards),
                earned=sum(original),
                learned=sum(rewards),
            )
    return None


def _are_whole_groups(stage: AdvantageStage, task_key: str) -> bool:
    """Of a task that the step has twice, one group may be dropped: the others are as they were."""
    rewards = [g.rewards for g in stage.groups if g.task_key == task_key]
    for group in stage.kept.groups:
        if group.task_key != task_key:
            continue
        own = group.rewards
        same = (
            index
            for index, earned in enumerate(rewards)
            if len(earned) == len(own)
            and (stage.expected.changes_rewards or all(map(isclose, earned, own)))
        )
        if (index := next(same, None)) is None:
            return False
        del rewards[index]
    return True


def _considered(groups: Sequence[Group], expected: Invariants) -> Sequence[Group]:
    """`replace` considers the last batch only."""
    return groups[-expected.batch_size :] if expected.dynamic_sampling == "replace" else groups


def filters(stage: AdvantageStage) -> Finding | None:
    """An active zero-variance filter drops all groups of equal rewards."""
    if not stage.expected.drops_equal_rewards:
        return None
    for group in stage.kept.groups:
        rewards = group.rewards
        if len(rewards) > 1 and max(rewards) - min(rewards) <= stage.expected.tolerance:
            return found(
                "a group whose attempts all earned the same reward passed the zero-variance filter",
                task=group.task_key,
                attempts=len(rewards),
                reward=rewards[0],
            )
    return None


def trained_tokens(stage: AdvantageStage) -> Finding | None:
    """Every sample is a transcript of its attempt, up to its last action token."""
    for sample in stage.compared:
        attempt = stage.attempts.get((sample.task_key, sample.attempt))
        transcript = attempt and next(
            (t for t in attempt.transcripts if _starts_with(t, sample)), None
        )
        where: dict[str, float | str] = {"task": sample.task_key, "attempt": sample.attempt}
        if not transcript:
            return found(
                "a sample's tokens are in no transcript of its attempt",
                **where,
                tokens=len(sample.token_ids),
            )
        mask = tuple(transcript.loss_mask)[: len(sample.token_ids)]
        kept = sample.loss_mask
        if kept != mask and not (stage.expected.step_wise and _is_subset(kept, mask)):
            return found(
                "a sample's loss mask is not its transcript's",
                **where,
                trained=kept.count(True),
                sampled=mask.count(True),
            )
        if not _same_logprobs(sample, transcript):
            return found("a sample's logprobs are not its transcript's", **where)
    return None


def _starts_with(transcript: Transcript, sample: Sample) -> bool:
    # A tuple's slice up to its end is the tuple itself: mostly nothing is copied twice.
    return tuple(transcript.token_ids)[: len(sample.token_ids)] == sample.token_ids


def _is_subset(kept: Sequence[bool], mask: Sequence[bool]) -> bool:
    return all(compress(mask, kept))


def _same_logprobs(sample: Sample, transcript: Transcript) -> bool:
    if sample.logprobs == tuple(transcript.logprobs)[: len(sample.logprobs)]:
        return True
    expected = compress(transcript.logprobs, sample.loss_mask)
    return list(compress(sample.logprobs, sample.loss_mask)) == list(expected)


def token_conservation(stage: AdvantageStage) -> Finding | None:
    """The samples of an attempt hold every token that the engine sampled for it, once."""
    trained: dict[tuple[str, int], int] = {}
    for sample, sums in zip(stage.samples, stage.sums, strict=True):
        key = (sample.task_key, sample.attempt)
        trained[key] = trained.get(key, 0) + sums.n_action_tokens
    counts, mask_unfinished = stage.n_sampled, stage.expected.mask_unfinished
    for key, attempt in stage.attempts.items():
        is_masked = mask_unfinished and attempt.ending.truncated
        sampled = sum([counts[id(transcript)] for transcript in attempt.transcripts])
        if trained.get(key, 0) != (0 if is_masked else sampled):
            return found(
                "an attempt's samples hold another number of tokens than it sampled",
                task=key[0],
                attempt=key[1],
                sampled=sampled,
                trained=trained.get(key, 0),
                ending=str(attempt.ending),
            )
    return None


def advantages(stage: AdvantageStage) -> Finding | None:
    """Advantages have the properties that the estimator promises: centred, with the right sign."""
    if stage.expected.centred == "group":
        return _check_group_advantages(stage)
    if stage.expected.centred == "batch":
        return _check_batch_advantages(stage.samples)
    return None


def _check_batch_advantages(samples: Sequence[Sample]) -> Finding | None:
    values = np.array(
        [a for sample in samples for a in sample.select_action_tokens(sample.advantages)]
    )
    if len(values) < 2 or np.abs(values).max() < ROUNDING:
        return None
    mean, deviation = float(values.mean()), float(values.std())
    # Below 1 if tokens hardly differ: whitening divides by slightly more than the deviation.
    if abs(mean) < TOLERANCE and deviation < 1 + 1 / len(values) + TOLERANCE:
        return None
    return found(
        "the advantages of the batch have a mean other than 0 or a deviation above 1",
        mean=mean,
        deviation=deviation,
        tokens=len(values),
    )


def _check_group_advantages(stage: AdvantageStage) -> Finding | None:
    rewards: dict[str, list[float]] = {}
    for group in stage.kept.groups:
        rewards.setdefault(group.task_key, []).extend(group.rewards)
    values: dict[str, dict[int, float]] = {task_key: {} for task_key in rewards}
    for sample, sums in zip(stage.samples, stage.sums, strict=True):
        value = sample.advantages[-1]
        first = values.setdefault(sample.task_key, {}).setdefault(sample.attempt, value)
        if not ((first is value or isclose(first, value)) and _has_sum(value, sums)):
            return _uneven_finding(sample)
    if uneven := next((sample for sample in stage.compared if not _is_even(sample)), None):
        return _uneven_finding(uneven)
    return _check_by_task(values, rewards, unit_deviation=stage.expected.unit_deviation)


def check_learner_advantages(samples: Sequence[Sample], *, unit_deviation: bool) -> Finding | None:
    """The group check for advantages that the learner computed from penalized rewards."""
    earned: dict[str, list[float]] = {}
    values: dict[str, dict[int, float]] = {}
    for sample in samples:
        rewards = earned.setdefault(sample.task_key, list(sample.group_rewards))
        rewards[sample.attempt] -= fsum(sample.penalties)
        values.setdefault(sample.task_key, {})[sample.attempt] = sample.advantages[-1]
    return _check_by_task(values, earned, unit_deviation=unit_deviation)


def _check_by_task(
    values: Mapping[str, dict[int, float]],
    rewards: Mapping[str, Sequence[float]],
    *,
    unit_deviation: bool,
) -> Finding | None:
    """`values` holds the advantage of each attempt by task, `rewards` the rewards of all attempts."""
    for task_key, by_attempt in values.items():
        earned = rewards.get(task_key, ())
        wrong = _check_signs(task_key, by_attempt, earned) or _check_sum(
            task_key, by_attempt, earned, unit_deviation=unit_deviation
        )
        if wrong:
            return wrong
    return None


def _has_sum(value: float, sums: SampleSums) -> bool:
    """Whether the advantages sum to `value` times the number of action tokens."""
    expected = sums.n_action_tokens * value
    return isfinite(value) and isclose(sums.advantages, expected, rel_tol=1e-9, abs_tol=1e-9)


def _is_even(sample: Sample) -> bool:
    """Whether every action token has the same advantage, and no other token has one."""
    value = sample.advantages[-1]
    n_expected = sample.n_action_tokens if value else len(sample.advantages)
    return sample.advantages.count(value) == n_expected


def _uneven_finding(sample: Sample) -> Finding:
    return found(
        "the tokens of an attempt have different advantages, or observation tokens have some",
        task=sample.task_key,
        attempt=sample.attempt,
    )


def _check_signs(
    task_key: str, by_attempt: dict[int, float], earned: Sequence[float]
) -> Finding | None:
    """Above the mean reward the advantage is positive, at the mean it is 0."""
    mean = fmean(earned) if earned else 0.0
    for attempt, value in by_attempt.items():
        gain = earned[attempt] - mean if attempt < len(earned) else 0.0
        wrong_sign = abs(gain) > NEAR_MEAN and gain * value <= 0
        if wrong_sign or (abs(gain) < AT_MEAN and abs(value) > TOLERANCE):
            return found(
                "an advantage has the wrong sign for its reward relative to the group mean",
                task=task_key,
                attempt=attempt,
                above_mean=gain,
                advantage=value,
                graded=len(earned),
            )
    return None


def _check_sum(
    task_key: str, by_attempt: dict[int, float], earned: Sequence[float], *, unit_deviation: bool
) -> Finding | None:
    if len(by_attempt) < max(len(earned), 2):
        return None  # some attempts are left out of the loss, and their share of the sum is unknown
    total, size = fsum(by_attempt.values()), fsum(map(abs, by_attempt.values()))
    if abs(total) > TOLERANCE * size + ROUNDING:
        return found("a group's advantages do not sum to zero", task=task_key, sum=total, size=size)
    deviation = sqrt(fsum(value * value for value in by_attempt.values()) / (len(by_attempt) - 1))
    varies = bool(earned) and max(earned) - min(earned) > TOLERANCE
    if unit_deviation and varies and abs(deviation - 1) > 10 * TOLERANCE:
        return found(
            "the standard deviation of a group's advantages is not 1",
            task=task_key,
            deviation=deviation,
        )
    return None

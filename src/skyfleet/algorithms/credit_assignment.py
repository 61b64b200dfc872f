"""Credit assignment: turn graded groups into training samples with advantages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import fsum

from skyfleet.algorithms.advantages import (
    BatchEstimator,
    Estimator,
    GroupEstimator,
    estimator_of,
    normalize_batch,
    split_turns,
)
from skyfleet.algorithms.sample import Sample, runs_of
from skyfleet.chat.transcript import Transcript
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.trajectories.trajectory import Group, Trajectory


def assign_credit(
    groups: Iterable[Group], estimate: Estimator, *, mask_unfinished: bool = False
) -> list[Sample]:
    """One sample per transcript of every graded attempt; attempts at one task are one group.

    `mask_unfinished` is DAPO's overlong filter: an episode cut short counts in its group's mean
    and teaches nothing itself.
    """
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task_key, []).extend(group.graded)
    samples: list[Sample] = []
    for graded in by_task.values():
        rewards = tuple(t.grade.reward for t in graded if t.grade is not None)
        for attempt, trajectory in enumerate(graded):
            if mask_unfinished and trajectory.ending.truncated:
                continue
            told = (
                credited(trajectory, transcript, 0.0, attempt=attempt, group_rewards=rewards)
                for transcript in trajectory.transcripts
            )
            samples.extend(sample for sample in told if sample.token_ids)
    return credit(samples, estimate)


def credit(samples: Sequence[Sample], estimate: Estimator) -> list[Sample]:
    """The same samples with the advantages of their rewards, less their penalties."""
    if isinstance(estimate, BatchEstimator):
        return estimate.credit(samples)
    rewards_by_task: dict[str, list[float]] = {}
    for sample in samples:
        rewards = rewards_by_task.setdefault(sample.task_key, list(sample.group_rewards))
        if sample.penalties:
            rewards[sample.attempt] -= fsum(sample.penalties)
    advantages = {task: _advantages(estimate, r) for task, r in rewards_by_task.items()}
    return [
        replace(s, advantages=_spread(advantages[s.task_key][s.attempt], s.loss_mask))
        for s in samples
    ]


def credited(
    trajectory: Trajectory,
    transcript: Transcript,
    advantage: float,
    *,
    attempt: int = 0,
    group_rewards: tuple[float, ...] = (),
) -> Sample:
    """Up to the last chosen token: what an episode heard after it predicts nothing."""
    runs = runs_of(transcript.loss_mask)
    end = runs[-1][1] if runs else 0
    # A tuple's slice up to its end is the tuple itself: mostly nothing is copied twice.
    loss_mask = tuple(transcript.loss_mask)[:end]
    return Sample(
        task_key=trajectory.task_key,
        env_key=trajectory.env_key,
        token_ids=tuple(transcript.token_ids)[:end],
        loss_mask=loss_mask,
        logprobs=tuple(transcript.logprobs)[:end],
        advantages=_spread(advantage, loss_mask),
        # Weights may arrive between two turns; the oldest version decides how stale a sample is.
        policy_version=min(transcript.policy_versions, default=0),
        attempt=attempt,
        group_rewards=group_rewards,
    )


def _advantages(estimate: GroupEstimator, rewards: Sequence[float]) -> list[float]:
    advantages = list(map(float, estimate(rewards)))
    if len(advantages) != len(rewards):
        raise ConfigError(
            f"trainer.algorithm.advantage_estimator gave {len(advantages)} advantages for a group of "
            f"{len(rewards)} rewards; one is owed for each"
        )
    return advantages


def _spread(advantage: float, loss_mask: Sequence[bool]) -> tuple[float, ...]:
    if not advantage:
        return (0.0,) * len(loss_mask)
    spread = [0.0] * len(loss_mask)
    for begin, end in runs_of(loss_mask):
        spread[begin:end] = [advantage] * (end - begin)
    return tuple(spread)


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`loss/*`: the advantages the learner is given, over chosen tokens."""
    values = [
        value for sample in samples for value in sample.select_action_tokens(sample.advantages)
    ]
    if not values:
        return {"loss/num_samples": 0.0}
    return {
        "loss/num_samples": float(len(samples)),
        "loss/avg_raw_advantages": fsum(values) / len(values),
        "loss/avg_raw_advantages_abs": fsum(map(abs, values)) / len(values),
    }


def compute_advantages(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Advantages of the configured estimator, normalized and split per turn if configured."""
    algorithm = config.trainer.algorithm
    with_advantages = credit(samples, estimator_of(algorithm))
    if algorithm.advantage_batch_normalize:
        with_advantages = normalize_batch(with_advantages)
    if config.generator.step_wise_trajectories:
        return split_turns(with_advantages)
    return with_advantages


def build_estimator(config: RunConfig) -> Estimator:
    """The estimator the training loop uses on a batch.

    With KL in the reward the learner computes the advantages again, after it has the penalties.
    """
    algorithm = config.trainer.algorithm
    whole_batch = algorithm.advantage_batch_normalize or config.generator.step_wise_trajectories
    if whole_batch and not algorithm.use_kl_in_reward:
        return BatchEstimator(credit=partial(compute_advantages, config))
    return estimator_of(algorithm)

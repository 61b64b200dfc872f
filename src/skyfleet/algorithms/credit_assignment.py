"""Credit assignment: turn graded groups into training samples with advantages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import fsum, nan
from statistics import fmean

from skyfleet.algorithms.advantages import normalize_batch, split_turns
from skyfleet.algorithms.estimator import (
    ESTIMATOR_KEY,
    BatchEstimator,
    Estimator,
    GroupEstimator,
)
from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.sample import Sample, find_action_spans, name_samples
from skyfleet.chat.transcript import Transcript
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.terminal import add_note
from skyfleet.trajectories.trajectory import Group, Trajectory, Turn


def assign_credit(
    groups: Iterable[Group], estimator: Estimator, *, mask_unfinished: bool = False
) -> list[Sample]:
    """One sample per transcript of every graded attempt, with advantages.

    Attempts at one task form one group. `mask_unfinished` is DAPO's overlong filter: a truncated
    episode counts in its group's mean but is left out of the loss.
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
            made = (
                make_sample(
                    trajectory, transcript, 0.0, attempt=attempt, group_rewards=rewards, turns=turns
                )
                for transcript, turns in _divide_turns(trajectory)
            )
            samples.extend(sample for sample in made if sample.token_ids)
    return estimate_advantages(samples, estimator)


def estimate_advantages(samples: Sequence[Sample], estimator: Estimator) -> list[Sample]:
    """The samples with advantages for their rewards minus their penalties."""
    if isinstance(estimator, BatchEstimator):
        with name_samples(samples):
            return estimator.credit(samples)
    rewards_by_task: dict[str, list[float]] = {}
    for sample in samples:
        rewards = rewards_by_task.setdefault(sample.task_key, list(sample.group_rewards))
        if sample.penalties:
            rewards[sample.attempt] -= fsum(sample.penalties)
    advantages = {
        task: _group_advantages(estimator, rewards, task)
        for task, rewards in rewards_by_task.items()
    }
    return [
        replace(s, advantages=_broadcast(advantages[s.task_key][s.attempt], s.loss_mask))
        for s in samples
    ]


def make_sample(
    trajectory: Trajectory,
    transcript: Transcript,
    advantage: float,
    *,
    attempt: int = 0,
    group_rewards: tuple[float, ...] = (),
    turns: Sequence[Turn] = (),
) -> Sample:
    """A sample of one transcript, cut after the last action token: no action follows the rest.

    `turns` are those of this transcript.
    """
    mask = transcript.loss_mask[:]  # a list: searching the view is slower
    spans = find_action_spans(mask)
    end = spans[-1][1] if spans else 0
    loss_mask = tuple(mask[:end])
    return Sample(
        task_key=trajectory.task_key,
        env_key=trajectory.env_key,
        token_ids=tuple(transcript.token_ids[:end]),
        loss_mask=loss_mask,
        logprobs=tuple(transcript.logprobs[:end]),
        advantages=_broadcast(advantage, loss_mask),
        # Weights may change between two turns; the oldest version determines the staleness.
        policy_version=min(
            (*transcript.policy_versions, *(version for _, version in transcript.version_changes)),
            default=0,
        ),
        attempt=attempt,
        group_rewards=group_rewards,
        step_rewards=_list_step_rewards(turns, len(spans)) if turns else (),
    )


def _divide_turns(trajectory: Trajectory) -> Iterator[tuple[Transcript, Sequence[Turn]]]:
    """Each transcript with its turns: one per completion, in order."""
    begin = 0
    for transcript in trajectory.transcripts:
        # Transcripts of other programs have no versions.
        n = len(transcript.policy_versions) or len(find_action_spans(transcript.loss_mask[:]))
        yield transcript, trajectory.turns[begin : begin + n]
        begin += n


def _list_step_rewards(turns: Sequence[Turn], n_spans: int) -> tuple[float, ...]:
    """One reward per action span.

    A completion that the time limit separated from its step has no turn, and earns 0. A completion
    without tokens has no span: the last span gets what is left, so that the sum stays.
    """
    rewards = [turn.reward for turn in turns] + [0.0] * (n_spans - len(turns))
    if len(rewards) > n_spans > 0:
        rewards[n_spans - 1 :] = [fsum(rewards[n_spans - 1 :])]
    return tuple(rewards[:n_spans])


def _group_advantages(
    estimator: GroupEstimator, rewards: Sequence[float], task_key: str
) -> list[float]:
    try:
        advantages = list(map(float, estimator(rewards)))
    except Exception as error:
        add_note(error, f"raised by the advantage estimator on task {task_key}, rewards {rewards}")
        raise
    if len(advantages) != len(rewards):
        raise ConfigError(
            f"{ESTIMATOR_KEY} returned {len(advantages)} advantages for a group of {len(rewards)} "
            "rewards; return one per reward"
        )
    return advantages


def _broadcast(advantage: float, loss_mask: Sequence[bool]) -> tuple[float, ...]:
    """The advantage of an attempt on each of its action tokens."""
    if not advantage:
        return (0.0,) * len(loss_mask)
    advantages = [0.0] * len(loss_mask)
    for begin, end in find_action_spans(loss_mask):
        advantages[begin:end] = [advantage] * (end - begin)
    return tuple(advantages)


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`loss/*`: rewards and advantages of the samples that the learner gets.

    As in SkyRL the advantages are a mean over action tokens, and the rewards, before any KL
    penalty, a mean over attempts. The means of an empty batch are NaN, which is logged as null.
    """
    values = [
        value for sample in samples for value in sample.select_action_tokens(sample.advantages)
    ]
    rewards = {
        (s.task_key, s.attempt): s.group_rewards[s.attempt] for s in samples if s.group_rewards
    }
    return {
        "loss/num_samples": float(len(samples)),
        "loss/avg_raw_rewards": fmean(rewards.values()) if rewards else nan,
        "loss/avg_raw_advantages": fsum(values) / len(values) if values else nan,
        "loss/avg_raw_advantages_abs": fsum(map(abs, values)) / len(values) if values else nan,
    }


def compute_advantages(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Advantages of the configured estimator, normalized and split per turn if configured."""
    algorithm = config.trainer.algorithm
    with_advantages = estimate_advantages(samples, build_advantage_estimator(algorithm))
    if algorithm.advantage_batch_normalize:
        with_advantages = normalize_batch(with_advantages)
    if config.generator.step_wise_trajectories:
        return split_turns(with_advantages)
    return with_advantages


def build_estimator(config: RunConfig) -> Estimator:
    """The estimator that the training loop uses on a batch.

    With KL in the reward the learner computes the advantages again, after it has the penalties.
    """
    algorithm = config.trainer.algorithm
    whole_batch = algorithm.advantage_batch_normalize or config.generator.step_wise_trajectories
    if whole_batch and not algorithm.use_kl_in_reward:
        return BatchEstimator(credit=partial(compute_advantages, config))
    return build_advantage_estimator(algorithm)

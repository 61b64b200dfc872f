"""Credit: groups -> samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

from skyfleet.algorithms.advantages import Estimator
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.transcript import Transcript
from skyfleet.trajectories.trajectory import Group, Trajectory


def assign_credit(
    groups: Iterable[Group], estimate: Estimator, *, mask_unfinished: bool = False
) -> list[Sample]:
    """One sample per transcript of every graded attempt.

    `mask_unfinished` is DAPO's overlong filter: an episode cut short counts in its group's mean
    and teaches nothing itself.
    """
    samples: list[Sample] = []
    for group in groups:
        advantages = estimate(group.rewards)
        for trajectory, advantage in zip(group.graded, advantages, strict=True):
            if mask_unfinished and trajectory.ending.truncated:
                continue
            samples.extend(credited(trajectory, t, advantage) for t in trajectory.transcripts)
    return [sample for sample in samples if sample.n_chosen]


def credited(trajectory: Trajectory, transcript: Transcript, advantage: float) -> Sample:
    """Up to the last chosen token: what an episode heard after it predicts nothing."""
    end = max((at for at, chosen in enumerate(transcript.loss_mask, 1) if chosen), default=0)
    loss_mask = tuple(transcript.loss_mask[:end])
    return Sample(
        task_key=trajectory.task_key,
        env_key=trajectory.env_key,
        token_ids=tuple(transcript.token_ids[:end]),
        loss_mask=loss_mask,
        logprobs=tuple(transcript.logprobs[:end]),
        advantages=tuple(advantage if chosen else 0.0 for chosen in loss_mask),
        # Weights may arrive between two turns; the oldest version decides how stale a sample is.
        policy_version=min(transcript.policy_versions, default=0),
    )


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`loss/*`: the advantages the learner is given, over chosen tokens."""
    values = [
        advantage
        for sample in samples
        for advantage, chosen in zip(sample.advantages, sample.loss_mask, strict=True)
        if chosen
    ]
    if not values:
        return {"loss/num_samples": 0.0}
    return {
        "loss/num_samples": float(len(samples)),
        "loss/avg_raw_advantages": fsum(values) / len(values),
        "loss/avg_raw_advantages_abs": fsum(map(abs, values)) / len(values),
    }

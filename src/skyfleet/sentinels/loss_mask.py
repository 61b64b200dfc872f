"""The loss mask covers what the engine sampled, all of it and nothing else."""

from __future__ import annotations

from functools import partial

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.recording_engine import Speech
from skyfleet.sentinels.stages import Played


def loss_mask(played: Played) -> Finding | None:
    for speech in played.closely:
        mask, due = speech.transcript.loss_mask, _due(speech)
        if mask == due:
            continue
        both = sum(masked and sampled for masked, sampled in zip(mask, due, strict=False))
        found_in = partial(
            found,
            task=speech.trajectory.task_key,
            attempt=speech.trajectory.sample,
            sampled=due.count(True),
            masked=mask.count(True),
            both=both,
        )
        if mask.count(True) > both:
            return found_in("tokens that the policy was given would be trained on")
        return found_in("tokens that the policy sampled would not be trained on")
    return None


def _due(speech: Speech) -> list[bool]:
    """True where the engine spoke."""
    mask: list[bool] = []
    for said in speech.heard:
        mask += [False] * (said.prompt_length - len(mask))
        mask += [True] * len(said.completion.token_ids)
    return mask + [False] * (len(speech.transcript) - len(mask))

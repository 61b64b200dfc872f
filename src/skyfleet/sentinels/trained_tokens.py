"""Samples hold what their episodes hold: tokens, mask and logprobs; and no token is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from skyfleet.algorithms.sample import Sample
from skyfleet.chat.transcript import Transcript
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Credited


def trained_tokens(credited: Credited) -> Finding | None:
    """Every sample is a transcript of its attempt, up to its last chosen token."""
    for sample in credited.closely:
        attempt = credited.attempts.get((sample.task_key, sample.attempt))
        transcript = attempt and next((t for t in attempt.transcripts if _begins(t, sample)), None)
        where: dict[str, float | str] = {"task": sample.task_key, "attempt": sample.attempt}
        if not transcript:
            return found(
                "a sample's tokens are in no episode of its attempt",
                **where,
                tokens=len(sample.token_ids),
            )
        mask = tuple(transcript.loss_mask)[: len(sample.token_ids)]
        kept = sample.loss_mask
        if kept != mask and not (credited.expected.step_wise and _within(kept, mask)):
            return found(
                "a sample's mask is not its episode's",
                **where,
                trained=kept.count(True),
                sampled=mask.count(True),
            )
        if not _same_logprobs(sample, transcript):
            return found("a sample's logprobs are not its episode's", **where)
    return None


def token_conservation(credited: Credited) -> Finding | None:
    """What the engine sampled for kept attempts is what their samples hold; nothing twice or cut."""
    trained: dict[tuple[str, int], int] = {}
    for sample, digest in zip(credited.samples, credited.digests, strict=True):
        place = (sample.task_key, sample.attempt)
        trained[place] = trained.get(place, 0) + digest.n_action_tokens
    counts, masks = credited.sampled, credited.expected.mask_unfinished
    for place, attempt in credited.attempts.items():
        masked = masks and attempt.ending.truncated
        sampled = sum([counts[id(transcript)] for transcript in attempt.transcripts])
        if trained.get(place, 0) != (0 if masked else sampled):
            return found(
                "an attempt's samples hold another number of tokens than it sampled",
                task=place[0],
                attempt=place[1],
                sampled=sampled,
                trained=trained.get(place, 0),
                ending=str(attempt.ending),
            )
    return None


def _begins(transcript: Transcript, sample: Sample) -> bool:
    # A tuple's slice up to its end is the tuple itself: mostly nothing is copied twice.
    return tuple(transcript.token_ids)[: len(sample.token_ids)] == sample.token_ids


def _within(kept: Sequence[bool], mask: Sequence[bool]) -> bool:
    return all(compress(mask, kept))


def _same_logprobs(sample: Sample, transcript: Transcript) -> bool:
    if sample.logprobs == tuple(transcript.logprobs)[: len(sample.logprobs)]:
        return True
    given = compress(transcript.logprobs, sample.loss_mask)
    return list(compress(sample.logprobs, sample.loss_mask)) == list(given)

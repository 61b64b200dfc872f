"""Episodes hold what the engine sampled, token by token, after the prompt it was shown."""

from __future__ import annotations

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.recording_engine import Heard, Speech
from skyfleet.sentinels.stages import Played


def sampled_tokens(played: Played) -> Finding | None:
    for speech in played.closely:
        if wrong := _wrong(speech):
            sentence, numbers = wrong
            attempt = speech.trajectory
            return found(sentence, task=attempt.task_key, attempt=attempt.sample, **numbers)
    if played.lost_completions:
        return found(
            "the engine sampled completions that are in no episode",
            completions=played.lost_completions,
        )
    return None


def _wrong(speech: Speech) -> tuple[str, dict[str, int]] | None:
    turns, heard = len(speech.transcript.policy_versions), len(speech.heard)
    if turns != heard:
        numbers = {"turns": turns, "completions": heard}
        return "an episode has another number of turns than the engine spoke", numbers
    for turn, said in enumerate(speech.heard):
        if sentence := _wrong_turn(speech, said):
            return sentence, {"turn": turn, "sampled": len(said.completion.token_ids)}
    return None


def _wrong_turn(speech: Speech, said: Heard) -> str | None:
    kept, completion = speech.transcript, said.completion
    begin, end = said.prompt_length, said.prompt_length + len(completion.token_ids)
    if kept.token_ids[begin:end] != list(completion.token_ids):
        return "an episode's tokens are not those the engine sampled"
    if kept.logprobs[begin:end] != list(completion.logprobs):
        return "an episode's logprobs are not those the engine gave"
    if not said.follows(kept.token_ids):
        return "the engine was shown another prompt than is kept"
    return None

"""Checks of rollouts: sampled tokens, loss mask, policy version, limits, independent draws, grades."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.recording_engine import RecordedCompletion, RecordedTranscript
from skyfleet.sentinels.stages import RolloutStage
from skyfleet.trajectories.trajectory import Ending, first_grading_error

MIN_LOGPROB = -25.0
"""Two independent draws below this logprob are practically never equal."""
N_COMPARED = 32
"""First tokens of an attempt that are compared; more would not add certainty."""
MAX_UNGRADED = 0.25


def sampled_tokens(stage: RolloutStage) -> Finding | None:
    """Episodes hold the tokens that the engine sampled, after the prompt that it got."""
    for recorded in stage.compared:
        if wrong := _find_wrong_turn(recorded):
            sentence, numbers = wrong
            attempt = recorded.trajectory
            return found(sentence, task=attempt.task_key, attempt=attempt.sample, **numbers)
    if stage.lost_completions:
        return found(
            "the engine sampled completions that are in no episode",
            completions=stage.lost_completions,
        )
    return None


def _find_wrong_turn(recorded: RecordedTranscript) -> tuple[str, dict[str, int]] | None:
    turns, n_completions = len(recorded.transcript.policy_versions), len(recorded.completions)
    if turns != n_completions:
        numbers = {"turns": turns, "completions": n_completions}
        return "an episode has another number of turns than the engine sampled", numbers
    for turn, completion in enumerate(recorded.completions):
        if sentence := _describe_wrong_turn(recorded, completion):
            return sentence, {"turn": turn, "sampled": len(completion.completion.token_ids)}
    return None


def _describe_wrong_turn(recorded: RecordedTranscript, turn: RecordedCompletion) -> str | None:
    transcript, completion = recorded.transcript, turn.completion
    begin, end = turn.prompt_length, turn.prompt_length + len(completion.token_ids)
    if transcript.token_ids[begin:end] != list(completion.token_ids):
        return "an episode's tokens are not those the engine sampled"
    if transcript.logprobs[begin:end] != list(completion.logprobs):
        return "an episode's logprobs are not those the engine returned"
    if not turn.follows(transcript.token_ids[:]):
        return "the engine got another prompt than the transcript holds"
    return None


def loss_mask(stage: RolloutStage) -> Finding | None:
    """The loss mask covers exactly the tokens that the engine sampled."""
    for recorded in stage.compared:
        mask, expected = recorded.transcript.loss_mask[:], _expected_mask(recorded)
        if mask == expected:
            continue
        both = sum(masked and sampled for masked, sampled in zip(mask, expected, strict=False))
        found_in = partial(
            found,
            task=recorded.trajectory.task_key,
            attempt=recorded.trajectory.sample,
            sampled=expected.count(True),
            masked=mask.count(True),
            both=both,
        )
        if mask.count(True) > both:
            return found_in("observation tokens would be trained on")
        return found_in("tokens that the policy sampled would not be trained on")
    return None


def _expected_mask(recorded: RecordedTranscript) -> list[bool]:
    mask: list[bool] = []
    for turn in recorded.completions:
        mask += [False] * (turn.prompt_length - len(mask))
        mask += [True] * len(turn.completion.token_ids)
    return mask + [False] * (len(recorded.transcript) - len(mask))


def policy_version(stage: RolloutStage) -> Finding | None:
    """Every completion was sampled by the learner's current version.

    In an asynchronous run every token was sampled by one of the last `max_staleness_steps` + 1.
    """
    newest, bound = stage.policy_version, stage.expected.max_staleness
    for recorded in stage.transcripts:
        changes = [version for _, version in recorded.transcript.version_changes]
        for version in (
            *(turn.completion.policy_version for turn in recorded.completions),
            *changes,
        ):
            if not newest - bound <= version <= newest:
                return found(
                    "an episode was sampled by another policy version than the learner's"
                    if not bound
                    else "an episode was sampled by a newer policy version than the learner's, or by "
                    "one that is older than trainer.fully_async.max_staleness_steps allows",
                    task=recorded.trajectory.task_key,
                    sampled_by=version,
                    learner=newest,
                    **({"max_staleness_steps": bound} if bound else {}),
                )
    return None


def limits(stage: RolloutStage) -> Finding | None:
    """No episode exceeds its turns, its prompt length or its generation length."""
    allowed = stage.expected.limits
    for group in stage.groups:
        for attempt in group.trajectories:
            if len(attempt.turns) > allowed.max_turns:
                return found(
                    "an episode has more turns than generator.max_turns",
                    task=attempt.task_key,
                    turns=len(attempt.turns),
                    max_turns=allowed.max_turns,
                )
    for recorded in stage.transcripts:
        task = recorded.trajectory.task_key
        for turn in recorded.completions:
            length = len(turn.completion.token_ids)
            if length > turn.max_generate_length:
                return found(
                    "the engine sampled more tokens than max_generate_length",
                    task=task,
                    tokens=length,
                    asked=turn.max_generate_length,
                )
            if turn.prompt_length > allowed.max_input_length:
                return found(
                    "a turn has a prompt longer than generator.max_input_length",
                    task=task,
                    tokens=turn.prompt_length,
                    max_input_length=allowed.max_input_length,
                )
    return None


def repeated_draws(stage: RolloutStage) -> Finding | None:
    """Attempts at one task are sampled independently of each other."""
    starts: set[tuple[str, Sequence[int]]] = set()
    for recorded in stage.transcripts:
        if not recorded.completions:
            continue
        completion = recorded.completions[0].completion
        start = (recorded.trajectory.task_key, completion.token_ids[:N_COMPARED])
        if start in starts and (logprob := sum(completion.logprobs[:N_COMPARED])) < MIN_LOGPROB:
            return found(
                "two attempts at one task start with the same unlikely tokens; they share a seed",
                task=start[0],
                tokens=len(start[1]),
                logprob=logprob,
            )
        starts.add(start)
    return None


def env_balance(stage: RolloutStage) -> Finding | None:
    """Every batch holds `trainer.min_samples_per_env` tasks of every environment."""
    expected = stage.expected
    for start in range(0, len(stage.groups), expected.batch_size):
        batch = stage.groups[start : start + expected.batch_size]
        counts = Counter(group.env_key for group in batch)
        for env_key in sorted(expected.envs):
            if counts[env_key] < expected.min_per_env:
                return found(
                    "a batch has fewer tasks of an environment than trainer.min_samples_per_env",
                    env=env_key,
                    tasks=counts[env_key],
                    wanted=expected.min_per_env,
                )
    return None


def failed_grades(stage: RolloutStage) -> Finding | None:
    """A failed episode has no grade: training would attribute a 0 to the policy."""
    for group in stage.groups:
        for attempt in group.trajectories:
            # A timeout is graded in the state that it left.
            failed = attempt.failure is not None and attempt.ending is not Ending.TIMEOUT
            if failed and attempt.grade is not None:
                return found(
                    "a failed episode was graded",
                    task=attempt.task_key,
                    reward=attempt.grade.reward,
                    failure=attempt.failure.kind if attempt.failure else "none",
                )
    return None


def unknown_grades(stage: RolloutStage) -> Finding | None:
    """Few grades are missing, and never those of all truncated episodes."""
    attempts = [attempt for group in stage.groups for attempt in group.trajectories]
    ungraded = [attempt for attempt in attempts if attempt.grade is None]
    if attempts and len(ungraded) > MAX_UNGRADED * len(attempts):
        return found(
            f"more than {MAX_UNGRADED:.0%} of the grades are unknown; find out why episodes fail",
            unknown=len(ungraded),
            attempts=len(attempts),
            first=first_grading_error(stage.groups),
        )
    truncated = [attempt for attempt in attempts if attempt.ending.truncated]
    unexplained = [a for a in truncated if a.grade is None and a.failure is None]
    if len(truncated) > 1 and len(unexplained) == len(truncated):
        return found(
            "no truncated episode was graded, and none has an error",
            cut=len(truncated),
            attempts=len(attempts),
        )
    return None

"""A failed episode has no grade; and grades that are missing are few, and never a whole kind."""

from __future__ import annotations

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Played
from skyfleet.trajectories.trajectory import Ending, first_grading_error

TOO_MANY = 0.25


def failed_grades(played: Played) -> Finding | None:
    """A zero for an episode that broke would be learned from as if the policy had earned it."""
    for group in played.groups:
        for attempt in group.trajectories:
            # What ran out of time is graded as it was left.
            failed = attempt.failure is not None and attempt.ending is not Ending.TIMEOUT
            if failed and attempt.grade is not None:
                return found(
                    "an episode that failed was graded all the same",
                    task=attempt.task_key,
                    reward=attempt.grade.reward,
                    failure=attempt.failure.kind if attempt.failure else "none",
                )
    return None


def unknown_grades(played: Played) -> Finding | None:
    attempts = [attempt for group in played.groups for attempt in group.trajectories]
    unknown = [attempt for attempt in attempts if attempt.grade is None]
    if attempts and len(unknown) > TOO_MANY * len(attempts):
        return found(
            f"more than {TOO_MANY:.0%} of the grades are unknown; see why episodes fail",
            unknown=len(unknown),
            attempts=len(attempts),
            first=first_grading_error(played.groups),
        )
    cut = [attempt for attempt in attempts if attempt.ending.truncated]
    ungraded = [attempt for attempt in cut if attempt.grade is None and attempt.failure is None]
    if len(cut) > 1 and len(ungraded) == len(cut):
        return found(
            "no episode that was cut short was graded, and nobody says why",
            cut=len(cut),
            attempts=len(attempts),
        )
    return None

"""Failures: an episode that did not pass -> why, by rules that need no model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from skyfleet.analysis.failure_class import Evidence, FailureClass, complaint_kind
from skyfleet.analysis.tool_results import answers_of, standing_errors, unreadable_calls
from skyfleet.chat.message import Message
from skyfleet.envs.env import DONE
from skyfleet.envs.turns import SUBMIT_NAME
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

Rule = Callable[[Trajectory], Evidence | None]

_EXCERPT_CHARACTERS = 200
_TIMES = 3
"""So often in a row is a loop."""
_LONGEST_CIRCLE_TURNS = 3
_TAIL_CHARACTERS = 2000
_GRADING_FAILURES = ("VerifierError", "EpisodeTimeoutError", "OvertimeError")
"""Exceptions of the verifier. `OvertimeError` is the old name in recorded episodes."""

_SAME_WORDS = re.compile(r"(.{2,200}?)\1{2,}", re.DOTALL)
_MANY_CHARACTERS = 100
"""So much of the same is no accident."""
_DIGITS = re.compile(r"\d+")
_CANNOT = re.compile(
    r"(?:\b(?:can(?:no|')t|can not|could not|unable|not able|impossible|not possible|no way to"
    r"|gi(?:ve|ving) up|not have (?:the |any |a )?(?:access|tools?|ability|way)"
    r"|need more (?:information|details))"
    r"|n't (?:able|possible|have (?:the |any |a )?(?:access|tools?|ability|way))|couldn't)\b",
    re.IGNORECASE,
)
_CLAIM = re.compile(
    r"\b(?:i(?:'ve| have)|(?:has|have) been|(?:is|are) now|success\w*|complete\w*|finished|all set)\b",
    re.IGNORECASE,
)
_HANDS_OVER = re.compile(r"transfer_to_human|escalate|give_up|hand_?off")
_TOO_LONG = re.compile(
    r"context.?(?:length|window)|(?:prompt|input) is too long|maximum .{0,20}tokens", re.IGNORECASE
)


def _unjudged(trajectory: Trajectory) -> Evidence | None:
    if trajectory.grade is not None or _has_broken(trajectory):
        return None
    cause = trajectory.failure.detail if trajectory.failure else "no grade"
    return _evidence(FailureClass.VERIFIER_FAULT, len(trajectory.turns), cause)


def _broken(trajectory: Trajectory) -> Evidence | None:
    """The exception that ended it or kept its grade, by what it says."""
    if not _has_broken(trajectory):
        return None
    detail = trajectory.failure.detail if trajectory.failure else "no cause was kept"
    kind = FailureClass.ENVIRONMENT_FAULT
    if _TOO_LONG.search(detail):
        kind = FailureClass.CONTEXT_OVERFLOW
    elif complaint_kind(detail) is FailureClass.LIMIT:
        kind = FailureClass.LIMIT
    return _evidence(kind, len(trajectory.turns), detail)


def _stopped_from_outside(trajectory: Trajectory, kind: FailureClass) -> Evidence | None:
    """The last error of this kind that nothing later made good."""
    standing = [one for one in standing_errors(answers_of(trajectory)) if one.kind is kind]
    return _evidence(kind, standing[-1].turn, standing[-1].text) if standing else None


def _refused(trajectory: Trajectory) -> Evidence | None:
    """What most of the errors are about that nothing later made good; of equals, the earlier."""
    answers = answers_of(trajectory)
    standing = standing_errors(answers)
    # What was cut off may have been about to mend its last error, or its only one.
    if trajectory.ending.truncated and (len(standing) < 2 or not answers[-1].is_error):
        return None
    if not standing:
        return None
    # A Counter keeps the order in which it met its keys, also among equals.
    (kind, _), *_ = Counter(one.kind for one in standing).most_common()
    last = next(one for one in reversed(standing) if one.kind is kind)
    return _evidence(kind, last.turn, last.text)


def _in_a_circle(trajectory: Trajectory) -> Evidence | None:
    """The last calls, and what came back, are the same over and over; numbers in replies aside."""
    turns = trajectory.turns
    if trajectory.ending is Ending.DONE:
        turns = turns[:-1]
    deeds = [_deed(turn) for turn in turns]
    for length in range(1, _LONGEST_CIRCLE_TURNS + 1):
        tail = deeds[-length * _TIMES :]
        if len(tail) == length * _TIMES and tail == tail[:length] * _TIMES and all(tail):
            start = len(deeds) - length * _TIMES
            return _evidence(FailureClass.LOOP, start + 1, _said(turns[start].action))
    return None


def _in_the_same_words(trajectory: Trajectory) -> Evidence | None:
    if trajectory.ending is not Ending.LENGTH or not trajectory.turns:
        return None
    text = _words(trajectory.turns[-1].action)[-_TAIL_CHARACTERS:]
    repeated = max((match[0] for match in _SAME_WORDS.finditer(text)), key=len, default="")
    if len(repeated) < _MANY_CHARACTERS:
        return None
    return _evidence(FailureClass.LOOP, len(trajectory.turns), repeated)


def _gave_up(trajectory: Trajectory) -> Evidence | None:
    if trajectory.ending is not Ending.DONE or not trajectory.turns:
        return None
    calls = [call for turn in trajectory.turns for call in turn.action.tool_calls]
    said = _last_words(trajectory)
    tried = any(call.name != SUBMIT_NAME for call in calls)
    handed_over = bool(calls) and _HANDS_OVER.search(calls[-1].name) is not None
    if handed_over or _CANNOT.search(said) or not (tried or _CLAIM.search(said)):
        return _evidence(FailureClass.GAVE_UP, len(trajectory.turns), said or DONE)
    return None


def _ended(trajectory: Trajectory) -> Evidence:
    """Nothing on the way explains it, so how it ended does."""
    kind = {
        Ending.CONTEXT_FULL: FailureClass.CONTEXT_OVERFLOW,
        Ending.LENGTH: FailureClass.CONTEXT_OVERFLOW,
        Ending.TIMEOUT: FailureClass.LIMIT,
        Ending.MAX_TURNS: FailureClass.OUT_OF_TURNS,
    }.get(trajectory.ending, FailureClass.FALSE_COMPLETION)
    last = _last_words(trajectory) if trajectory.turns else ""
    return _evidence(kind, len(trajectory.turns), last or trajectory.ending.value)


RULES: tuple[Rule, ...] = (
    _unjudged,
    _broken,
    partial(_stopped_from_outside, kind=FailureClass.ENVIRONMENT_FAULT),
    partial(_stopped_from_outside, kind=FailureClass.LIMIT),
    _in_a_circle,
    _in_the_same_words,
    _refused,
    _gave_up,
    _ended,
)


def errors_seen(trajectory: Trajectory) -> Iterator[Evidence]:
    """Every error of a call, made good or not."""
    for answer in answers_of(trajectory):
        if answer.is_error:
            yield _evidence(answer.kind, answer.turn, answer.text)


def _has_broken(trajectory: Trajectory) -> bool:
    """Before its end, or after it, when the env could not be asked for the grade."""
    if trajectory.ending is Ending.FAILED:
        return True
    failure = trajectory.failure if trajectory.grade is None else None
    return failure is not None and not failure.kind.endswith(_GRADING_FAILURES)


def _deed(turn: Turn) -> tuple[object, ...]:
    """Equal for turns in which the same was done; empty where a call could not be read."""
    action = turn.action
    if unreadable_calls(action):
        return ()
    calls = [(call.name, dict(call.arguments)) for call in action.tool_calls]
    came_back = [
        _DIGITS.sub("#", reply.text) if isinstance(reply.content, str) else reply.content
        for reply in turn.replies
    ]
    return (calls or action.text, came_back)


def _said(action: Message) -> str:
    calls = (f"{call.name} {json.dumps(dict(call.arguments))}" for call in action.tool_calls)
    return " ".join((action.text, *calls))


def _words(action: Message) -> str:
    return "".join((action.reasoning or "", action.text, *action.malformed_calls))


def _last_words(trajectory: Trajectory) -> str:
    """Of the last message, and of the answer it submits."""
    action = trajectory.turns[-1].action
    answers = (call.arguments.get("answer", "") for call in action.tool_calls)
    return " ".join((action.text.replace(DONE, ""), *map(str, answers))).strip()


def _evidence(kind: FailureClass, turn: int, text: str) -> Evidence:
    return Evidence(
        failure_class=kind, turn=turn, excerpt=" ".join(text.split())[:_EXCERPT_CHARACTERS]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    primary: Evidence
    """Of the first rule that holds."""
    others: tuple[Evidence, ...]
    """Of the other rules that hold, then of every error seen on the way, by turn."""

    @property
    def failure_class(self) -> FailureClass:
        return self.primary.failure_class


def classify(trajectory: Trajectory) -> FailureClass | None:
    """Why it did not pass; None when it passed."""
    if trajectory.success:
        return None
    return next(filter(None, (rule(trajectory) for rule in RULES))).failure_class


def diagnose(trajectory: Trajectory) -> Diagnosis | None:
    """The class with all that speaks for it and for others; None when it passed."""
    if trajectory.success:
        return None
    primary, *others = filter(None, (rule(trajectory) for rule in RULES))
    seen = dict.fromkeys((*others, *errors_seen(trajectory)))
    return Diagnosis(primary=primary, others=tuple(one for one in seen if one != primary))


def failure_counts(trajectories: Iterable[Trajectory]) -> dict[FailureClass, int]:
    """How many there are of each class, the most frequent first; what passed is in none."""
    counts = Counter(filter(None, map(classify, trajectories)))
    return dict(counts.most_common())

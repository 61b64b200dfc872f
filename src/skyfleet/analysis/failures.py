"""Failure classification: why an episode failed, by fixed rules without a model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from skyfleet.analysis.failure_class import Evidence, FailureClass, classify_error_text
from skyfleet.analysis.tool_results import (
    find_malformed_calls,
    find_unresolved_errors,
    list_tool_results,
)
from skyfleet.chat.message import Message
from skyfleet.envs.env import DONE
from skyfleet.envs.tool_turns import SUBMIT_NAME
from skyfleet.trajectories.trajectory import Ending, Trajectory, Turn

Rule = Callable[[Trajectory], Evidence | None]

_EXCERPT_CHARACTERS = 200
_REPETITIONS = 3
"""This many repetitions in a row are a loop."""
_MAX_CYCLE_TURNS = 3
_TAIL_CHARACTERS = 2000
_GRADING_FAILURES = ("VerifierError", "EpisodeTimeoutError", "OvertimeError")
"""Exceptions of the verifier. `OvertimeError` is the old name in recorded episodes."""

_REPEATED_TEXT = re.compile(r"(.{2,200}?)\1{2,}", re.DOTALL)
_MIN_REPEATED_CHARACTERS = 100
"""Shorter repetitions occur in normal text."""
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


def _ungraded(trajectory: Trajectory) -> Evidence | None:
    if trajectory.grade is not None or _has_raised(trajectory):
        return None
    cause = trajectory.failure.detail if trajectory.failure else "no grade"
    return _evidence(FailureClass.VERIFIER_FAULT, len(trajectory.turns), cause)


def _raised(trajectory: Trajectory) -> Evidence | None:
    """The exception that ended the episode or prevented its grade, classified by its text."""
    if not _has_raised(trajectory):
        return None
    detail = trajectory.failure.detail if trajectory.failure else "no cause recorded"
    kind = FailureClass.ENVIRONMENT_FAULT
    if _TOO_LONG.search(detail):
        kind = FailureClass.CONTEXT_OVERFLOW
    elif classify_error_text(detail) is FailureClass.LIMIT:
        kind = FailureClass.LIMIT
    return _evidence(kind, len(trajectory.turns), detail)


def _external_error(trajectory: Trajectory, kind: FailureClass) -> Evidence | None:
    """The last unresolved error of this class."""
    results = list_tool_results(trajectory)
    unresolved = [error for error in find_unresolved_errors(results) if error.kind is kind]
    return _evidence(kind, unresolved[-1].turn, unresolved[-1].text) if unresolved else None


def _tool_errors(trajectory: Trajectory) -> Evidence | None:
    """The most frequent class of the unresolved errors; of equals, the earlier one."""
    results = list_tool_results(trajectory)
    unresolved = find_unresolved_errors(results)
    # A truncated episode might still have resolved its last, or only, error.
    if trajectory.ending.truncated and (len(unresolved) < 2 or not results[-1].is_error):
        return None
    if not unresolved:
        return None
    # most_common keeps the insertion order of equal counts.
    (kind, _), *_ = Counter(error.kind for error in unresolved).most_common()
    last = next(error for error in reversed(unresolved) if error.kind is kind)
    return _evidence(kind, last.turn, last.text)


def _repeated_calls(trajectory: Trajectory) -> Evidence | None:
    """The last calls and their results repeat; digits in results are ignored."""
    turns = trajectory.turns
    if trajectory.ending is Ending.DONE:
        turns = turns[:-1]
    normalized = [_normalize_turn(turn) for turn in turns]
    for length in range(1, _MAX_CYCLE_TURNS + 1):
        tail = normalized[-length * _REPETITIONS :]
        if (
            len(tail) == length * _REPETITIONS
            and tail == tail[:length] * _REPETITIONS
            and all(tail)
        ):
            start = len(normalized) - length * _REPETITIONS
            return _evidence(FailureClass.LOOP, start + 1, _format_action(turns[start].action))
    return None


def _repeated_text(trajectory: Trajectory) -> Evidence | None:
    if trajectory.ending is not Ending.LENGTH or not trajectory.turns:
        return None
    text = _full_text(trajectory.turns[-1].action)[-_TAIL_CHARACTERS:]
    repeated = max((match[0] for match in _REPEATED_TEXT.finditer(text)), key=len, default="")
    if len(repeated) < _MIN_REPEATED_CHARACTERS:
        return None
    return _evidence(FailureClass.LOOP, len(trajectory.turns), repeated)


def _gave_up(trajectory: Trajectory) -> Evidence | None:
    if trajectory.ending is not Ending.DONE or not trajectory.turns:
        return None
    calls = [call for turn in trajectory.turns for call in turn.action.tool_calls]
    text = _final_text(trajectory)
    tried = any(call.name != SUBMIT_NAME for call in calls)
    handed_over = bool(calls) and _HANDS_OVER.search(calls[-1].name) is not None
    if handed_over or _CANNOT.search(text) or not (tried or _CLAIM.search(text)):
        return _evidence(FailureClass.GAVE_UP, len(trajectory.turns), text or DONE)
    return None


def _by_ending(trajectory: Trajectory) -> Evidence:
    """The ending, if no other rule applies."""
    kind = {
        Ending.CONTEXT_FULL: FailureClass.CONTEXT_OVERFLOW,
        Ending.LENGTH: FailureClass.CONTEXT_OVERFLOW,
        Ending.TIMEOUT: FailureClass.LIMIT,
        Ending.MAX_TURNS: FailureClass.OUT_OF_TURNS,
    }.get(trajectory.ending, FailureClass.FALSE_COMPLETION)
    last = _final_text(trajectory) if trajectory.turns else ""
    return _evidence(kind, len(trajectory.turns), last or trajectory.ending.value)


RULES: tuple[Rule, ...] = (
    _ungraded,
    _raised,
    partial(_external_error, kind=FailureClass.ENVIRONMENT_FAULT),
    partial(_external_error, kind=FailureClass.LIMIT),
    _repeated_calls,
    _repeated_text,
    _tool_errors,
    _gave_up,
    _by_ending,
)


def list_errors(trajectory: Trajectory) -> Iterator[Evidence]:
    """Every error of a tool call, resolved or not."""
    for result in list_tool_results(trajectory):
        if result.is_error:
            yield _evidence(result.kind, result.turn, result.text)


def _has_raised(trajectory: Trajectory) -> bool:
    """Whether the environment raised, during the episode or when asked for the grade."""
    if trajectory.ending is Ending.FAILED:
        return True
    failure = trajectory.failure if trajectory.grade is None else None
    return failure is not None and not failure.kind.endswith(_GRADING_FAILURES)


def _normalize_turn(turn: Turn) -> tuple[object, ...]:
    """Equal for turns with the same calls and results; empty if a call does not parse."""
    action = turn.action
    if find_malformed_calls(action):
        return ()
    calls = [(call.name, dict(call.arguments)) for call in action.tool_calls]
    results = [
        _DIGITS.sub("#", reply.text) if isinstance(reply.content, str) else reply.content
        for reply in turn.replies
    ]
    return (calls or action.text, results)


def _format_action(action: Message) -> str:
    calls = (f"{call.name} {json.dumps(dict(call.arguments))}" for call in action.tool_calls)
    return " ".join((action.text, *calls))


def _full_text(action: Message) -> str:
    return "".join((action.reasoning or "", action.text, *action.malformed_calls))


def _final_text(trajectory: Trajectory) -> str:
    """The text of the last message and the answer it submits."""
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
    """From the first rule that matches."""
    others: tuple[Evidence, ...]
    """From the other rules that match, then every tool error, by turn."""

    @property
    def failure_class(self) -> FailureClass:
        return self.primary.failure_class


def classify(trajectory: Trajectory) -> FailureClass | None:
    """The failure class of an episode; None if it passed."""
    if trajectory.success:
        return None
    return next(filter(None, (rule(trajectory) for rule in RULES))).failure_class


def diagnose(trajectory: Trajectory) -> Diagnosis | None:
    """The failure class with its evidence, and the evidence for others; None if it passed."""
    if trajectory.success:
        return None
    primary, *others = filter(None, (rule(trajectory) for rule in RULES))
    evidence = dict.fromkeys((*others, *list_errors(trajectory)))
    return Diagnosis(primary=primary, others=tuple(e for e in evidence if e != primary))


def failure_counts(trajectories: Iterable[Trajectory]) -> dict[FailureClass, int]:
    """The number of failed episodes per class, most frequent first."""
    counts = Counter(filter(None, map(classify, trajectories)))
    return dict(counts.most_common())

"""Answers: every tool call of an episode with what came back, and which errors were overcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.analysis.failure_class import FailureClass, complaint_kind, is_complaint
from skyfleet.chat.message import Message, ToolCall
from skyfleet.trajectories.trajectory import Trajectory, Turn

_READS = re.compile(
    r"(?:\w+[.:/])?_*(?:list|get|read|search|find|show|view|fetch|look|check|query|describe|browse"
    r"|count|calculate|open|retrieve|screenshot|think)(?:_|\b|(?=[A-Z]))"
)
_STRAY_CALL = re.compile(r"</?(?:tool_call|function_call)>|\"arguments\"\s*:|<function=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    turn: int
    """From 1."""
    name: str
    """Of the tool; empty for what tried to be a call and could not be read."""
    text: str
    """What came back; of an unreadable call, the call."""
    is_error: bool

    @property
    def kind(self) -> FailureClass:
        """What an error is about."""
        return complaint_kind(self.text) if self.name else FailureClass.MALFORMED_CALL

    @property
    def harmless(self) -> bool:
        """As an error: it kept nothing from being done, because it only reads or reached no tool.

        Reading is told by the tool's name: the trajectory does not say which tools write.
        """
        return self.kind is FailureClass.MALFORMED_CALL or _READS.match(self.name) is not None


def answers_of(trajectory: Trajectory) -> list[Answer]:
    return [
        answer
        for number, turn in enumerate(trajectory.turns, start=1)
        for answer in _answers(number, turn)
    ]


def standing_errors(answers: Sequence[Answer]) -> list[Answer]:
    """The errors that nothing later made good.

    A call that writes is made good by the same tool; a call that only reads, or that reached no
    tool, by any that works.
    """
    standing: list[Answer] = []
    working: set[str] = set()
    for answer in reversed(answers):
        if not answer.is_error:
            working.add(answer.name)
        elif not (working if answer.harmless else answer.name in working):
            standing.append(answer)
    return standing[::-1]


def unreadable_calls(action: Message) -> tuple[str, ...]:
    """What tried to be a call, in a turn that has none that can be read."""
    if action.tool_calls:
        return ()
    stray = (action.text,) if _STRAY_CALL.search(action.text) else ()
    return action.malformed_calls or stray


def _answers(number: int, turn: Turn) -> list[Answer]:
    action = turn.action
    if unreadable := unreadable_calls(action):
        return [Answer(turn=number, name="", text=text, is_error=True) for text in unreadable]
    return [
        Answer(
            turn=number,
            name=call.name,
            text=reply.text,
            is_error=reply.is_error or is_complaint(reply.text),
        )
        for call, reply in _pairs(action.tool_calls, turn.replies)
    ]


def _pairs(calls: Sequence[ToolCall], replies: Sequence[Message]) -> list[tuple[ToolCall, Message]]:
    """By id where the replies carry one, otherwise in order."""
    by_id = {reply.tool_call_id: reply for reply in replies if reply.tool_call_id}
    if by_id:
        return [(call, by_id[call.id]) for call in calls if call.id in by_id]
    return list(zip(calls, replies, strict=False))

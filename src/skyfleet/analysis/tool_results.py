"""Tool results: the calls of an episode with their results, and which errors were resolved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.analysis.failure_class import FailureClass, classify_error_text, is_error_text
from skyfleet.chat.message import Message, ToolCall
from skyfleet.trajectories.trajectory import Trajectory, Turn

_READS = re.compile(
    r"(?:\w+[.:/])?_*(?:list|get|read|search|find|show|view|fetch|look|check|query|describe|browse"
    r"|count|calculate|open|retrieve|screenshot|think)(?:_|\b|(?=[A-Z]))"
)
_STRAY_CALL = re.compile(r"</?(?:tool_call|function_call)>|\"arguments\"\s*:|<function=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    turn: int
    """Counted from 1."""
    name: str
    """Of the tool; empty for a call that does not parse."""
    text: str
    """The result, or the text of a call that does not parse."""
    is_error: bool

    @property
    def kind(self) -> FailureClass:
        """The failure class of an error."""
        return classify_error_text(self.text) if self.name else FailureClass.MALFORMED_CALL

    @property
    def is_harmless(self) -> bool:
        """Whether the failed call changed nothing: it only reads, or no tool was run.

        Read-only tools are recognised by name, because a trajectory does not say which ones write.
        """
        return self.kind is FailureClass.MALFORMED_CALL or _READS.match(self.name) is not None


def list_tool_results(trajectory: Trajectory) -> list[ToolResult]:
    return [
        result
        for number, turn in enumerate(trajectory.turns, start=1)
        for result in _turn_results(number, turn)
    ]


def find_unresolved_errors(results: Sequence[ToolResult]) -> list[ToolResult]:
    """The errors that no later call resolved.

    A later success of the same tool resolves the error of a writing call; any later success
    resolves the error of a read-only call or of a call that reached no tool.
    """
    unresolved: list[ToolResult] = []
    succeeded: set[str] = set()
    for result in reversed(results):
        if not result.is_error:
            succeeded.add(result.name)
        elif not (succeeded if result.is_harmless else result.name in succeeded):
            unresolved.append(result)
    return unresolved[::-1]


def find_malformed_calls(action: Message) -> tuple[str, ...]:
    """The malformed calls of a turn without a valid call."""
    if action.tool_calls:
        return ()
    stray = (action.text,) if _STRAY_CALL.search(action.text) else ()
    return action.malformed_calls or stray


def _turn_results(number: int, turn: Turn) -> list[ToolResult]:
    action = turn.action
    if malformed := find_malformed_calls(action):
        return [ToolResult(turn=number, name="", text=text, is_error=True) for text in malformed]
    return [
        ToolResult(
            turn=number,
            name=call.name,
            text=reply.text,
            is_error=reply.is_error or is_error_text(reply.text),
        )
        for call, reply in _pairs(action.tool_calls, turn.replies)
    ]


def _pairs(calls: Sequence[ToolCall], replies: Sequence[Message]) -> list[tuple[ToolCall, Message]]:
    """Pair by id if the replies have one, otherwise in order."""
    by_id = {reply.tool_call_id: reply for reply in replies if reply.tool_call_id}
    if by_id:
        return [(call, by_id[call.id]) for call in calls if call.id in by_id]
    return list(zip(calls, replies, strict=False))

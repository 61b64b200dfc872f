"""Example: one episode of a step, to be read on the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from skyfleet.chat.message import Message
from skyfleet.trajectories.trajectory import Group, Trajectory


def example(step: int, groups: Iterable[Group]) -> str:
    """The best attempt at the first task: what a policy does right is seen before what it does not."""
    attempts = next(iter(groups)).trajectories
    best = max(attempts, key=lambda t: (t.reward is not None, t.reward or 0.0))
    earned = "an unknown grade" if best.reward is None else f"{best.reward:g}"
    head = f"step {step}, {best.task_key}: {best.ending}, earned {earned}"
    return "\n".join([head, *_told(best)])


def _told(trajectory: Trajectory) -> Iterator[str]:
    for message in trajectory.opening:
        yield from _lines(message)
    for turn in trajectory.turns:
        for message in (turn.action, *turn.replies):
            yield from _lines(message)


def _lines(message: Message) -> Iterator[str]:
    yield f"[{message.role}] {message.text}".rstrip()
    for call in message.tool_calls:
        yield f"-> {call.name}({dict(call.arguments)})"
    for text in message.malformed_calls:
        yield f"?? {text}"

"""A scripted agent, and environments that fail on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.transcript import Finish, Transcript
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, close_env, grade_env
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import open_world

Line = Message | Exception
"""A message of the agent; an exception is raised by its engine instead."""
Fault = Callable[[ToolCall], str | Exception | float | None]
"""How a call fails: an error text, an exception, a delay in seconds, or None."""

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    task: Task
    lines: Sequence[Line]
    forever: Sequence[Line] = ()
    """Repeated after the lines."""
    open_env: EnvFactory = open_world
    max_turns: int = 12
    max_input_length: int = 100_000
    seconds: float = 0.0
    cut_short: bool = False
    """Whether the token limit cuts off the last line."""
    refused: Sequence[int] = ()
    """The lines whose calls must fail; otherwise the episode is discarded."""
    taken: Sequence[int] = ()
    """The lines whose calls must succeed."""
    ending: Ending | None = None
    """The required ending; None for any."""


async def play(script: Script) -> Trajectory | None:
    """The episode; None if calls did not fail or succeed as required, or if the task passed."""
    limits = Limits(
        max_turns=len(script.lines) if script.cut_short else script.max_turns,
        max_input_length=script.max_input_length,
        trajectory_timeout_seconds=script.seconds,
    )
    episode = await run_episode(
        script.task,
        script.open_env,
        lambda _task, observation, _: _Agent(script, observation),
        limits,
    )
    refused = [any(reply.is_error for reply in turn.replies) for turn in episode.turns]
    as_meant = all(refused[n] for n in script.refused) and not any(refused[n] for n in script.taken)
    as_meant = as_meant and script.ending in (None, episode.ending)
    return episode if as_meant and not episode.success else None


class _Agent:
    def __init__(self, script: Script, observation: Observation) -> None:
        self._lines: Iterator[Line] = chain(script.lines, cycle(script.forever))
        self._left, self._cut_short = len(script.lines), script.cut_short
        self._n_characters = sum(len(message.text) for message in observation.messages)
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return ()

    @property
    def prompt_length(self) -> int:
        return self._n_characters // _CHARACTERS_PER_TOKEN

    async def generate(self) -> Message:
        line, self._left = next(self._lines), self._left - 1
        if isinstance(line, Exception):
            raise line
        self.finish = "length" if self._cut_short and self._left == 0 else "stop"
        self._n_characters += len(line.text)
        return line

    def observe(self, messages: Sequence[Message]) -> None:
        self._n_characters += sum(len(message.text) for message in messages)

    def truncate_history(self, *, keep_recent_turns: int) -> None: ...

    def restart(self, observation: Observation) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class FaultyEnv:
    """An environment that raises, delays or returns errors."""

    inner: Env
    fault: Fault
    at_reset: Exception | None = None

    async def reset(self) -> Observation:
        if self.at_reset is not None:
            raise self.at_reset
        return await self.inner.reset()

    async def step(self, action: Message) -> Step:
        for call in action.tool_calls:
            wrong = self.fault(call)
            if isinstance(wrong, Exception):
                raise wrong
            if isinstance(wrong, float):
                await asyncio.sleep(wrong)
            elif wrong is not None:
                reply = Message(role="tool", content=wrong, tool_call_id=call.id, is_error=True)
                return Step(messages=(reply,))
        return await self.inner.step(action)

    async def grade(self) -> Grade | None:
        return await grade_env(self.inner, ())

    async def close(self) -> None:
        await close_env(self.inner)


def faulty(fault: Fault, at_reset: Exception | None = None) -> EnvFactory:
    async def open_env(task: Task) -> FaultyEnv:
        return FaultyEnv(await open_world(task), fault, at_reset)

    return open_env

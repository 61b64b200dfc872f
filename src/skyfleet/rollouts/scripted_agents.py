"""Agents that follow a script: a task's reference solution, or a recorded trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion, Finish, Transcript
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import DONE, Observation
from skyfleet.errors import EpisodeError
from skyfleet.rollouts.conversation import AgentFactory, MessageConversation, TokenConversation
from skyfleet.rollouts.episode import Limits
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory


def reference_policy(renderer: Renderer) -> AgentFactory:
    """Speaks the solution in tokens, so that its transcripts can be learned from."""

    def start(task: Task, opening: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            opening,
            engine=ReferenceEngine(task.solution, renderer),
            renderer=renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


def oracle_policy(task: Task, opening: Observation, session: str) -> MessageConversation:
    """Speaks the solution in words: needs no tokenizer."""
    return MessageConversation(
        opening, model=ReferenceModel(task.solution), sampling=SamplingParams()
    )


def null_policy(task: Task, opening: Observation, session: str) -> MessageConversation:
    """Says it is done at once. A task it passes tells nothing."""
    return MessageConversation(opening, model=ReferenceModel(()), sampling=SamplingParams())


class ReferenceModel:
    """Makes the calls of a task's reference solution, then says it is done."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self._left = list(calls)

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if not self._left:
            return Message(role="assistant", content=DONE)
        call = self._left.pop(0)
        said = ToolCall(id="call_0", name=call.name, arguments=call.arguments)
        return Message(role="assistant", tool_calls=(said,))


class ReferenceEngine:
    """The reference solution as tokens: what the policy would have to sample to say it."""

    policy_version = 0

    def __init__(self, calls: Sequence[RecordedCall], renderer: Renderer) -> None:
        self._model, self._renderer = ReferenceModel(calls), renderer

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        said = tuple(self._renderer.write(await self._model.reply((), (), sampling)))
        return Completion(
            token_ids=said, logprobs=(0.0,) * len(said), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class ReplayExhaustedError(EpisodeError):
    """The recorded episode was broken off here, and what came next is not on record."""


class RecordedConversation:
    """Says what was said, whatever it hears."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._actions = [turn.action for turn in trajectory.turns]
        self._ending = trajectory.ending
        self.transcripts: tuple[Transcript, ...] = ()
        self.finish: Finish = "stop"

    @property
    def prompt_length(self) -> int:
        """Longer than `recorded_limits` allow, where the recorded one was too long."""
        return int(not self._actions and self._ending is Ending.CONTEXT_FULL)

    async def generate(self) -> Message:
        if not self._actions:
            raise ReplayExhaustedError(f"the recorded episode ended here: {self._ending}")
        action = self._actions.pop(0)
        if not self._actions and self._ending is Ending.LENGTH:
            self.finish = "length"
        return action

    def observe(self, messages: Sequence[Message]) -> None: ...

    def truncate_history(self, *, keep_recent_turns: int) -> None: ...

    def restart(self, opening: Observation) -> None: ...

    async def close(self) -> None: ...


def recorded_policy(trajectory: Trajectory) -> AgentFactory:
    """To be played under `recorded_limits` of the same trajectory."""

    def start(task: Task, opening: Observation, session: str) -> RecordedConversation:
        return RecordedConversation(trajectory)

    return start


def recorded_limits(trajectory: Trajectory, *, timeout_seconds: float) -> Limits:
    """As many turns as there were, and one more where it was not their number that ended it."""
    more = trajectory.ending is not Ending.MAX_TURNS
    return Limits(
        max_turns=len(trajectory.turns) + more,
        max_input_length=0,
        trajectory_timeout_seconds=timeout_seconds,
    )

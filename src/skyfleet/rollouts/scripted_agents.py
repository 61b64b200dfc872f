"""Agents that follow a script: a task's reference solution, or a recorded trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion, Finish, Transcript
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import DONE, Observation
from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.errors import EpisodeError
from skyfleet.rollouts.conversation import AgentFactory, MessageConversation, TokenConversation
from skyfleet.rollouts.episode import Limits
from skyfleet.tasks.task import RecordedCall, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory


def reference_policy(renderer: Renderer) -> AgentFactory:
    """Sample the tokens of the reference solution, so that its transcripts can be trained on."""

    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=ReferenceEngine(task.solution, renderer),
            renderer=renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


def oracle_policy(task: Task, observation: Observation, session: str) -> MessageConversation:
    """Send the messages of the reference solution; needs no tokenizer."""
    return MessageConversation(
        observation, model=ReferenceModel(task.solution), sampling=SamplingParams()
    )


def null_policy(task: Task, observation: Observation, session: str) -> MessageConversation:
    """Declare at once that it is done. A task that it passes measures nothing."""
    return MessageConversation(observation, model=ReferenceModel(()), sampling=SamplingParams())


class ReferenceModel:
    """Makes the calls of a task's reference solution, then declares that it is done."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self._remaining = list(calls)

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if not self._remaining:
            return Message(role="assistant", content=DONE)
        recorded = self._remaining.pop(0)
        if recorded.name == RESPOND_NAME and all(tool.name != RESPOND_NAME for tool in tools):
            return Message(role="assistant", content=str(recorded.arguments.get("content", "")))
        call = ToolCall(id="call_0", name=recorded.name, arguments=recorded.arguments)
        return Message(role="assistant", tool_calls=(call,))


class ReferenceEngine:
    """Returns the tokens that the policy would have to sample for the reference solution."""

    policy_version = 0

    def __init__(self, calls: Sequence[RecordedCall], renderer: Renderer) -> None:
        self._model, self._renderer = ReferenceModel(calls), renderer

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        written = tuple(self._renderer.render_completion(await self._model.reply((), (), sampling)))
        return Completion(
            token_ids=written, logprobs=(0.0,) * len(written), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class ReplayExhaustedError(EpisodeError):
    """The recorded episode ends here, so there is no next action to replay."""


class RecordedConversation:
    """Repeats the recorded actions, whatever it observes."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._turns = list(trajectory.turns)
        self._ending = trajectory.ending
        self.transcripts: tuple[Transcript, ...] = ()
        self.finish: Finish = "stop"

    @property
    def prompt_length(self) -> int:
        """Longer than `recorded_limits` allow if the recorded prompt was too long."""
        return int(not self._turns and self._ending is Ending.CONTEXT_FULL)

    async def generate(self) -> Message:
        if not self._turns:
            raise ReplayExhaustedError(f"the recorded episode ended here: {self._ending}")
        turn = self._turns.pop(0)
        # Records of earlier versions have no finish reason; their ending gives the last one.
        is_cut = not self._turns and self._ending is Ending.LENGTH
        self.finish = turn.finish_reason or ("length" if is_cut else "stop")
        return turn.action

    def observe(self, messages: Sequence[Message]) -> None: ...

    def truncate_history(self, *, keep_recent_turns: int) -> None: ...

    def restart(self, observation: Observation) -> None: ...

    async def close(self) -> None: ...


def recorded_policy(trajectory: Trajectory) -> AgentFactory:
    """Replay the trajectory; use the `recorded_limits` of the same trajectory."""

    def start(task: Task, observation: Observation, session: str) -> RecordedConversation:
        return RecordedConversation(trajectory)

    return start


def recorded_limits(trajectory: Trajectory, *, timeout_seconds: float) -> Limits:
    """Allow the recorded number of turns, and one more if another limit ended the episode.

    With exactly the recorded turns a last turn that was cut ends the replay as it ended the
    record, whether the environment was done or the turns were used up.
    """
    ended_by_turns = trajectory.ending in (Ending.MAX_TURNS, Ending.LENGTH)
    return Limits(
        max_turns=len(trajectory.turns) + (not ended_by_turns),
        max_input_length=0,
        trajectory_timeout_seconds=timeout_seconds,
    )

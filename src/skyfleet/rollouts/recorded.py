"""Recorded: an episode's own actions as a policy, so that its world can be asked once more."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.completion import Finish
from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Transcript
from skyfleet.envs.env import Opening
from skyfleet.errors import EpisodeError
from skyfleet.rollouts.conversation import Policy
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory


class RecordEndsError(EpisodeError):
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

    async def speak(self) -> Message:
        if not self._actions:
            raise RecordEndsError(f"the recorded episode ended here: {self._ending}")
        action = self._actions.pop(0)
        if not self._actions and self._ending is Ending.LENGTH:
            self.finish = "length"
        return action

    def hear(self, messages: Sequence[Message]) -> None: ...

    def forget(self, *, keep_recent_turns: int) -> None: ...

    def begin(self, opening: Opening) -> None: ...

    async def close(self) -> None: ...


def recorded_policy(trajectory: Trajectory) -> Policy:
    """To be played under `recorded_limits` of the same trajectory."""

    def start(task: Task, opening: Opening, session: str) -> RecordedConversation:
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

"""Fork: an episode replayed up to a turn, and from there on another policy's.

Where the other policy speaks in the recorded one's tokens, it goes on from exactly those;
elsewhere it is handed the same conversation in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Finish, Transcript
from skyfleet.envs.env import Observation
from skyfleet.errors import EnvError, TaskError
from skyfleet.rollouts.conversation import AgentFactory, Conversation, History
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory


class ReplayDiffersError(EnvError):
    """The world did not answer as recorded, so there is no such state to fork from."""


def forked_policy(trajectory: Trajectory, policy: AgentFactory, *, turn: int) -> AgentFactory:
    """Says the first `turn` recorded actions, then whatever `policy` says."""
    if not 0 <= turn < len(trajectory.turns):
        raise TaskError(
            f"turn {turn + 1}: the episode has {len(trajectory.turns)} turns, counted from 1; "
            "fork at one of them"
        )

    def start(task: Task, opening: Observation, session: str) -> ForkedConversation:
        def hand_over(said: History) -> Conversation:
            conversation = policy(task, said.resumed(opening.tools), session)
            tokens = tokens_before(trajectory, turn)
            if not _begins_alike(policy(task, opening, session), trajectory):
                tokens = None
            if tokens is not None:
                # The messages written anew may be other tokens than those that were sampled.
                transcript = conversation.transcripts[0]
                for column in (transcript.token_ids, transcript.loss_mask, transcript.logprobs):
                    column.clear()
                transcript.append_prompt(tokens)
            return conversation

        return ForkedConversation(trajectory, turn, History(opening), hand_over)

    return start


def tokens_before(trajectory: Trajectory, turn: int) -> list[int] | None:
    """What its policy had before it when it spoke this turn, from 0.

    None where the record has not a completion a turn, or where two cannot be told apart.
    """
    transcripts = trajectory.transcripts
    if sum(len(each.policy_versions) for each in transcripts) != len(trajectory.turns):
        return None
    for transcript in transcripts:
        n_spoken, mask = len(transcript.policy_versions), transcript.loss_mask
        if turn < n_spoken:
            begins = [at for at, chosen in enumerate(mask) if chosen and not (at and mask[at - 1])]
            return transcript.token_ids[: begins[turn]] if len(begins) == n_spoken else None
        turn -= n_spoken
    return None


def same_tokens(recorded: Trajectory, forked: Trajectory, *, turn: int) -> bool:
    """Whether the fork went on from exactly the recorded tokens, or else from words."""
    tokens = tokens_before(recorded, turn)
    if tokens is None or not forked.transcripts:
        return False
    return forked.transcripts[0].token_ids[: len(tokens)] == tokens


def _begins_alike(conversation: Conversation, trajectory: Trajectory) -> bool:
    """The same opening in the same tokens: one tokenizer and one template."""
    transcripts = conversation.transcripts
    return bool(transcripts) and transcripts[0].token_ids == tokens_before(trajectory, 0)


class ForkedConversation:
    def __init__(
        self,
        trajectory: Trajectory,
        turn: int,
        said: History,
        hand_over: Callable[[History], Conversation],
    ) -> None:
        self._left = list(trajectory.turns[:turn])
        self._said, self._hand_over = said, hand_over
        self._other = None if self._left else hand_over(said)
        self.finish: Finish = "stop"

    @property
    def prompt_length(self) -> int:
        return self._other.prompt_length if self._other else 0

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return self._other.transcripts if self._other else ()

    async def generate(self) -> Message:
        if self._other is None:
            self._said.say(self._left[0].action)
            return self._left[0].action
        action = await self._other.generate()
        self.finish = self._other.finish
        return action

    def observe(self, messages: Sequence[Message]) -> None:
        if self._other is not None:
            self._other.observe(messages)
            return
        turn = self._left.pop(0)
        if tuple(messages) != turn.replies:
            raise ReplayDiffersError(
                f"the world answered {_texts(messages)} where {_texts(turn.replies)} is recorded; "
                "fork with the tasks and the code of the run"
            )
        self._said.messages.extend(messages)
        if not self._left:
            self._other = self._hand_over(self._said)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        if self._other is not None:
            self._other.truncate_history(keep_recent_turns=keep_recent_turns)
        else:
            self._said.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, opening: Observation) -> None:
        if self._other is None:
            raise ReplayDiffersError(
                "the environment began another conversation before the turn to fork at; "
                "fork at an earlier one"
            )
        self._other.restart(opening)

    async def close(self) -> None:
        if self._other is not None:
            await self._other.close()


def _texts(messages: Sequence[Message]) -> str:
    return repr(" ".join(message.text for message in messages))[:200]

"""Fork an episode: replay it up to a turn and continue from there with another agent.

If the other agent renders the prompt to the recorded tokens, it continues from exactly the recorded
tokens; otherwise it receives the same conversation as messages.
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
    """The environment did not answer as recorded, so there is no state to fork from."""


def forked_policy(trajectory: Trajectory, policy: AgentFactory, *, turn: int) -> AgentFactory:
    """Repeat the first `turn` recorded actions, then let `policy` act."""
    if not 0 <= turn < len(trajectory.turns):
        raise TaskError(
            f"turn {turn + 1}: the episode has {len(trajectory.turns)} turns, counted from 1; "
            "fork at one of them"
        )

    def start(task: Task, observation: Observation, session: str) -> ForkedConversation:
        def hand_over(history: History) -> Conversation:
            # Rendered again, the messages may give other tokens than those that were sampled.
            has_same_prompt = _starts_equally(policy(task, observation, session), trajectory)
            token_ids = tokens_before(trajectory, turn) if has_same_prompt else None
            return policy(
                task, history.resume(observation.tools, prompt_token_ids=token_ids), session
            )

        return ForkedConversation(trajectory, turn, History(observation), hand_over)

    return start


def tokens_before(trajectory: Trajectory, turn: int) -> list[int] | None:
    """Return the tokens that the recorded policy had as prompt in this turn, counted from 0.

    None if the record does not have one completion per turn, or two cannot be separated.
    """
    transcripts = trajectory.transcripts
    if sum(len(each.policy_versions) for each in transcripts) != len(trajectory.turns):
        return None
    for transcript in transcripts:
        n_completions, mask = len(transcript.policy_versions), transcript.loss_mask
        if turn < n_completions:
            starts = [
                at for at, sampled in enumerate(mask) if sampled and not (at and mask[at - 1])
            ]
            return (
                list(transcript.token_ids[: starts[turn]]) if len(starts) == n_completions else None
            )
        turn -= n_completions
    return None


def same_tokens(recorded: Trajectory, forked: Trajectory, *, turn: int) -> bool:
    """Whether the fork continued from exactly the recorded tokens rather than from messages."""
    tokens = tokens_before(recorded, turn)
    if tokens is None or not forked.transcripts:
        return False
    return forked.transcripts[0].token_ids[: len(tokens)] == tokens


def _starts_equally(conversation: Conversation, trajectory: Trajectory) -> bool:
    """Whether the prompt has the recorded tokens, that is the same tokenizer and template."""
    transcripts = conversation.transcripts
    return bool(transcripts) and transcripts[0].token_ids == tokens_before(trajectory, 0)


class ForkedConversation:
    def __init__(
        self,
        trajectory: Trajectory,
        turn: int,
        history: History,
        hand_over: Callable[[History], Conversation],
    ) -> None:
        self._recorded = list(trajectory.turns[:turn])
        self._history, self._hand_over = history, hand_over
        self._other = None if self._recorded else hand_over(history)
        self.finish: Finish = "stop"

    @property
    def prompt_length(self) -> int:
        return self._other.prompt_length if self._other else 0

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return self._other.transcripts if self._other else ()

    async def generate(self) -> Message:
        if self._other is None:
            turn = self._recorded[0]
            self.finish = turn.finish_reason or "stop"
            self._history.add_turn(turn.action)
            return turn.action
        action = await self._other.generate()
        self.finish = self._other.finish
        return action

    def observe(self, messages: Sequence[Message]) -> None:
        if self._other is not None:
            self._other.observe(messages)
            return
        turn = self._recorded.pop(0)
        if tuple(messages) != turn.replies:
            raise ReplayDiffersError(
                f"the environment answered {_format(messages)}, recorded is "
                f"{_format(turn.replies)}; fork with the tasks and the code of the run"
            )
        self._history.messages.extend(messages)
        if not self._recorded:
            self._other = self._hand_over(self._history)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        if self._other is not None:
            self._other.truncate_history(keep_recent_turns=keep_recent_turns)
        else:
            self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, observation: Observation) -> None:
        if self._other is None:
            raise ReplayDiffersError(
                "the environment restarted the conversation before the turn to fork at; "
                "fork at an earlier turn"
            )
        self._other.restart(observation)

    async def close(self) -> None:
        if self._other is not None:
            await self._other.close()


def _format(messages: Sequence[Message]) -> str:
    return repr(" ".join(message.text for message in messages))[:200]

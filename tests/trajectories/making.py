"""Small trajectories, made by hand for tests."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, Turn

PROMPT = Message(role="user", content="do it")


def call_turn(*, malformed: bool = False, is_error: bool = False) -> Turn:
    """One tool call and its answer, or one that did not parse."""
    call = ToolCall(id="0", name="press", arguments={})
    action = Message(
        role="assistant",
        tool_calls=() if malformed else (call,),
        malformed_calls=("{",) if malformed else (),
    )
    reply = Message(role="tool", content="ok", tool_call_id="0", is_error=is_error)
    return Turn(action=action, replies=(reply,), reward=0.0, engine_seconds=1.0, env_seconds=0.5)


def transcript(sampled_tokens: int) -> Transcript:
    """Two given tokens, then `sampled_tokens` that the policy chose."""
    return Transcript(
        token_ids=[1] * (2 + sampled_tokens),
        loss_mask=[False] * 2 + [True] * sampled_tokens,
        logprobs=[0.0] * 2 + [-0.5] * sampled_tokens,
        policy_versions=[0],
    )


def attempt(
    reward: float | None,
    *,
    success: bool | None = None,
    task_key: str = "t",
    env_key: str = "github",
    prompt: tuple[Message, ...] = (PROMPT,),
    turns: tuple[Turn, ...] = (),
    transcripts: tuple[Transcript, ...] = (),
    ending: Ending = Ending.DONE,
) -> Trajectory:
    """An attempt of this reward, a success at 1; None is an unknown grade."""
    won = reward == 1.0 if success is None else success
    return Trajectory(
        task_key=task_key,
        env_key=env_key,
        sample=0,
        prompt=prompt,
        turns=turns,
        transcripts=transcripts,
        ending=ending,
        grade=None if reward is None else Grade(reward=reward, success=won),
    )


def group(
    rewards: Sequence[float | None], *, task_key: str = "t", env_key: str = "github"
) -> Group:
    attempts = tuple(attempt(reward, task_key=task_key, env_key=env_key) for reward in rewards)
    return Group(task_key=task_key, env_key=env_key, trajectories=attempts)


def played(*attempts: Trajectory) -> list[Group]:
    """Each attempt as a group of its own."""
    return [Group(task_key=a.task_key, env_key=a.env_key, trajectories=(a,)) for a in attempts]

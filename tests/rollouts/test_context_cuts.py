"""A cut of the history starts a new transcript; the prompt stays in view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.credit_assignment import assign_credit
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import ContextEnv, format_turns
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import HISTORY_CUT, AgentFactory, History, MessageConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.fork import forked_policy, same_tokens, tokens_before
from skyfleet.rollouts.scripted_agents import recorded_limits, recorded_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Group

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)
CUT_TO = '{"name": "manage_context", "arguments": {"keep_recent_turns": %d}}'
LINES = (PRESS % 1, PRESS % 1, PRESS % 1, CUT_TO % 1, "done")


def result(n: int, hidden: int) -> str:
    return (
        f"{format_turns(hidden)} went out of view; the task and the last {format_turns(n)} stay. "
        "search_history finds what is out of view."
    )


def counting() -> ContextEnv:
    return ContextEnv(CounterEnv(), page_characters=1000)


async def test_a_cut_starts_a_transcript_with_the_reason_and_the_prompt() -> None:
    trajectory = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*LINES)), LIMITS
    )
    assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)
    first, second = trajectory.transcripts
    assert (first.reason, second.reason) == ("", HISTORY_CUT)
    text = "".join(chr(token) if token else "|" for token in second.token_ids)
    # The calls of kept turns are no words to this renderer: an empty message stands for each.
    assert text == f"reach 3||3||{result(1, 2)}|done|"
    assert sum(first.loss_mask) == sum(len(line) + 1 for line in LINES[:4])
    assert sum(second.loss_mask) == len("done|")


async def test_every_transcript_of_a_cut_episode_is_trained_on() -> None:
    played = [
        await run_episode(
            TASK, make_factory(counting()), token_agent(ScriptedEngine(*lines)), LIMITS, sample=n
        )
        for n, lines in enumerate((LINES, (*LINES[:2], "done")))
    ]
    group = Group(task_key=TASK.key, env_key=TASK.env_key, trajectories=tuple(played))
    won, also_won, lost = assign_credit([group], grpo)
    assert set(won.select_action_tokens(won.advantages)) == set(
        also_won.select_action_tokens(also_won.advantages)
    )
    assert (
        won.select_action_tokens(won.advantages)[0]
        > 0
        > lost.select_action_tokens(lost.advantages)[0]
    )
    assert won.n_action_tokens + also_won.n_action_tokens == sum(len(line) + 1 for line in LINES)


async def test_a_cut_makes_room_where_the_context_would_be_full() -> None:
    # 7|, three calls of 42| and their counts 1|, and the cut 67|: 213 tokens are not too many.
    limits = replace(LIMITS, max_input_length=240)
    lines = (*(PRESS % 1,) * 3, CUT_TO % 0, *(PRESS % 1,) * 2, "done")
    trajectory = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*lines)), limits
    )
    assert trajectory.ending is Ending.DONE
    assert len(trajectory.transcripts) == 2  # what follows a cut goes on where the cut began
    uncut = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*(PRESS % 1,) * 8)), limits
    )
    assert uncut.ending is Ending.CONTEXT_FULL


def test_the_prompt_is_never_cut_whatever_its_roles() -> None:
    example = (Message(role="user", content="eg"), Message(role="assistant", content="so"))
    task = Message(role="user", content="the task")
    history = History(Observation(messages=(*example, task)))
    for n in range(4):
        history.add_turn(Message(role="assistant", content=f"a{n}"))
        if n < 3:
            # As worlds of SkyRL-Gym may: what the world says is no turn of the agent's.
            history.messages.append(Message(role="assistant", content=f"t{n}"))
    assert not History(Observation(messages=(task,))).cut(keep_recent_turns=0)
    assert history.cut(keep_recent_turns=1)
    assert [m.text for m in history.messages] == ["eg", "so", "the task", "a2", "t2", "a3"]
    assert not history.cut(keep_recent_turns=1)
    assert history.cut(keep_recent_turns=0)
    assert [m.text for m in history.messages] == ["eg", "so", "the task", "a3"]


class Listening:
    """Returns its lines and records the messages before each."""

    def __init__(self, *lines: str) -> None:
        self.received: list[list[str]] = []
        self._lines = list(lines)

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        self.received.append([message.text for message in messages])
        return CharRenderer().parse([*map(ord, self._lines.pop(0))])


def in_words(model: Listening) -> AgentFactory:
    def start(task: Task, opened: Observation, session: str) -> MessageConversation:
        return MessageConversation(opened, model=model, sampling=SamplingParams())

    return start


async def test_a_chat_model_gets_the_same_cut_history() -> None:
    model = Listening(*LINES)
    trajectory = await run_episode(TASK, make_factory(counting()), in_words(model), LIMITS)
    assert trajectory.transcripts == ()
    assert model.received[3] == ["reach 3", "", "1", "", "2", "", "3"]
    assert model.received[4] == ["reach 3", "", "3", "", result(1, 2)]


async def test_a_cut_episode_replays_and_forks() -> None:
    recorded = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*LINES)), LIMITS
    )
    limits = recorded_limits(recorded, timeout_seconds=5)
    again = await run_episode(TASK, make_factory(counting()), recorded_policy(recorded), limits)
    assert [turn.replies for turn in again.turns] == [turn.replies for turn in recorded.turns]

    model = Listening("done")
    policy = forked_policy(recorded, in_words(model), turn=4)
    forked = await run_episode(TASK, make_factory(counting()), policy, LIMITS)
    assert forked.reward == 1.0
    assert model.received == [["reach 3", "", "3", "", result(1, 2)]]


@pytest.mark.parametrize("turn", range(5))
async def test_a_fork_of_a_cut_episode_goes_on_from_the_tokens_of_its_turn(turn: int) -> None:
    recorded = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*LINES)), LIMITS
    )
    policy = forked_policy(recorded, token_agent(ScriptedEngine(*LINES[turn:])), turn=turn)
    forked = await run_episode(TASK, make_factory(counting()), policy, LIMITS)
    assert same_tokens(recorded, forked, turn=turn)
    # The same lines once more: whatever follows is the same too, and so is where it is cut.
    assert [t.token_ids for t in forked.transcripts] == [
        t.token_ids for t in recorded.transcripts[turn == 4 :]
    ]


async def test_completions_without_a_gap_between_them_cannot_be_separated() -> None:
    recorded = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*LINES)), LIMITS
    )
    first, second = recorded.transcripts
    merged = replace(first, loss_mask=[True] * len(first))
    assert tokens_before(replace(recorded, transcripts=(merged, second)), 1) is None
    assert tokens_before(replace(recorded, transcripts=(merged, second)), 4) is not None
    assert tokens_before(replace(recorded, transcripts=(second,)), 0) is None


async def test_replayed_turns_are_cut_like_others() -> None:
    recorded = await run_episode(
        TASK, make_factory(counting()), token_agent(ScriptedEngine(*LINES)), LIMITS
    )
    model = Listening(CUT_TO % 1, "done")
    policy = forked_policy(recorded, in_words(model), turn=3)
    await run_episode(TASK, make_factory(counting()), policy, LIMITS)
    assert model.received == [
        ["reach 3", "", "1", "", "2", "", "3"],
        ["reach 3", "", "3", "", result(1, 2)],
    ]

"""The context status line is part of the observation and is not trained on."""

from __future__ import annotations

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine

from skyfleet.chat.message import Image, Message, Text
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.context_env import CONTEXT_TOOLS, ContextEnv
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import AgentFactory, ContextStatus, TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.fork import forked_policy
from skyfleet.tasks.task import Task

STATUS = ContextStatus(max_input_length=1000, max_turns=8, warning_threshold=0.9)
ANSWER = Message(role="tool", content="3", tool_call_id="0")
TOOLS = tuple(tool.spec for tool in CONTEXT_TOOLS.values())


LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)
CUT_ALL = '{"name": "manage_context", "arguments": {"keep_recent_turns": 0}}'


def annotate(*lines: str) -> AgentFactory:
    engine = ScriptedEngine(*lines)

    def start(task: Task, opened: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            opened,
            engine=engine,
            renderer=CharRenderer(),
            sampling=SamplingParams(),
            session=session,
            status=STATUS,
        )

    return start


async def test_the_line_follows_the_answer_and_is_not_trained_on() -> None:
    policy = annotate(PRESS % 3, "done")
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    (transcript,) = trajectory.transcripts
    text = "".join(chr(token) if token else "|" for token in transcript.token_ids)
    output = f"reach 3|{PRESS % 3}|"
    # The number counts the answer but not the line itself.
    used = len(output) + len("3|")
    line = f"[Context: {used} of 1,000 tokens used ({used / 10:.0f}%), 7 turns left]"
    assert text == f"{output}3\n{line}|done|"
    chosen = "".join(c for c, mine in zip(text, transcript.loss_mask, strict=True) if mine)
    assert chosen == f"{PRESS % 3}|done|"
    assert trajectory.turns[0].replies[0].text == "3"


async def test_after_a_cut_the_line_counts_the_remaining_tokens_and_every_turn() -> None:
    env = ContextEnv(CounterEnv(), page_characters=1000)
    policy = annotate(PRESS % 1, PRESS % 2, CUT_ALL, "done")
    trajectory = await run_episode(TASK, make_factory(env), policy, LIMITS)
    _, second = trajectory.transcripts
    text = "".join(chr(token) if token else "|" for token in second.token_ids)
    # The call that cut is no words to this renderer: an empty message stands for it.
    stays = f"reach 3||{trajectory.turns[2].replies[0].text}"
    used = len(f"{stays}|")
    line = f"[Context: {used} of 1,000 tokens used ({used / 10:.0f}%), 5 turns left]"
    assert text == f"{stays}\n{line}|done|"


@pytest.mark.parametrize("turn", range(4))
async def test_a_fork_counts_as_many_turns_as_the_recorded_episode(turn: int) -> None:
    lines = (PRESS % 1, PRESS % 1, PRESS % 1, "done")
    recorded = await run_episode(TASK, make_factory(CounterEnv()), annotate(*lines), LIMITS)
    policy = forked_policy(recorded, annotate(*lines[turn:]), turn=turn)
    forked = await run_episode(TASK, make_factory(CounterEnv()), policy, LIMITS)
    assert [t.token_ids for t in forked.transcripts] == [t.token_ids for t in recorded.transcripts]


@pytest.mark.parametrize(
    ("used_tokens", "line"),
    [
        (899, "[Context: 899 of 1,000 tokens used (90%), 5 turns left]"),
        (900, "[Context warning: 900 of 1,000 tokens used (90%), 5 turns left; finish soon]"),
    ],
)
def test_from_the_threshold_on_it_is_a_warning(used_tokens: int, line: str) -> None:
    (answer,) = STATUS.annotate([ANSWER], used_tokens=used_tokens, turns=3, tools=())
    assert answer.text == f"3\n{line}"
    assert (answer.role, answer.tool_call_id) == ("tool", "0")


def test_the_warning_names_the_tool_that_makes_room_where_there_is_one() -> None:
    (warned,) = STATUS.annotate([ANSWER], used_tokens=1000, turns=3, tools=TOOLS)
    assert warned.text.endswith("5 turns left; finish soon, or make room with manage_context]")


def test_the_last_answer_carries_it_beside_its_picture_or_it_stands_alone() -> None:
    seen = Message(role="tool", content=(Text("see"), Image(b"png")))
    first, last = STATUS.annotate([ANSWER, seen], used_tokens=1, turns=0, tools=())
    assert first is ANSWER
    assert last.content[:2] == (Text("see"), Image(b"png"))
    assert last.text.startswith("see\n[Context: 1 of")
    (alone,) = STATUS.annotate([], used_tokens=1, turns=0, tools=())
    assert (alone.role, alone.text) == (
        "user",
        "[Context: 1 of 1,000 tokens used (0%), 8 turns left]",
    )
    (last_but_one,) = STATUS.annotate([], used_tokens=1, turns=7, tools=())
    assert last_but_one.text.endswith("1 turn left]")

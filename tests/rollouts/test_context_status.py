"""The agent is told how much room it has left; the line is the world's, and nobody learns it."""

from __future__ import annotations

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, opening
from tests.fakes.scripted_engine import ScriptedEngine

from skyfleet.chat.message import Image, Message, Text
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.context_tools import CONTEXT_TOOLS
from skyfleet.envs.env import Opening
from skyfleet.rollouts.context_status import ContextStatus
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.task import Task

STATUS = ContextStatus(max_input_length=1000, max_turns=8, warning_threshold=0.9)
ANSWER = Message(role="tool", content="3", tool_call_id="0")
TOOLS = tuple(tool.spec for tool in CONTEXT_TOOLS.values())


async def test_the_line_follows_the_answer_and_is_not_trained_on() -> None:
    engine = ScriptedEngine(PRESS % 3, "done")

    def start(task: Task, opened: Opening, session: str) -> TokenConversation:
        return TokenConversation(
            opened,
            engine=engine,
            renderer=CharRenderer(),
            sampling=SamplingParams(),
            session=session,
            status=STATUS,
        )

    limits = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)
    trajectory = await run_episode(TASK, opening(CounterEnv()), start, limits)
    (transcript,) = trajectory.transcripts
    text = "".join(chr(token) if token else "|" for token in transcript.token_ids)
    said = f"reach 3|{PRESS % 3}|"
    # What is told is what stands before the line: the answer counts, the line itself does not.
    used = len(said) + len("3|")
    line = f"[Context: {used} of 1,000 tokens used ({used / 10:.0f}%), 7 turns left]"
    assert text == f"{said}3\n{line}|done|"
    chosen = "".join(c for c, mine in zip(text, transcript.loss_mask, strict=True) if mine)
    assert chosen == f"{PRESS % 3}|done|"
    assert trajectory.turns[0].replies[0].text == "3"


@pytest.mark.parametrize(
    ("used_tokens", "line"),
    [
        (899, "[Context: 899 of 1,000 tokens used (90%), 5 turns left]"),
        (900, "[Context warning: 900 of 1,000 tokens used (90%), 5 turns left; finish soon]"),
    ],
)
def test_from_the_threshold_on_it_is_a_warning(used_tokens: int, line: str) -> None:
    (told,) = STATUS.told([ANSWER], used_tokens=used_tokens, turns=3, tools=())
    assert told.text == f"3\n{line}"
    assert (told.role, told.tool_call_id) == ("tool", "0")


def test_the_warning_names_the_tool_that_makes_room_where_there_is_one() -> None:
    (told,) = STATUS.told([ANSWER], used_tokens=1000, turns=3, tools=TOOLS)
    assert told.text.endswith("5 turns left; finish soon, or make room with manage_context]")


def test_the_last_answer_carries_it_beside_its_picture_or_it_stands_alone() -> None:
    seen = Message(role="tool", content=(Text("see"), Image(b"png")))
    first, last = STATUS.told([ANSWER, seen], used_tokens=1, turns=0, tools=())
    assert first is ANSWER
    assert last.content[:2] == (Text("see"), Image(b"png"))
    assert last.text.startswith("see\n[Context: 1 of")
    (alone,) = STATUS.told([], used_tokens=1, turns=0, tools=())
    assert (alone.role, alone.text) == (
        "user",
        "[Context: 1 of 1,000 tokens used (0%), 8 turns left]",
    )

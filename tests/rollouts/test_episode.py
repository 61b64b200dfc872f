"""An episode ends in a named way, is graded as it stands, and keeps every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)


def sampled_text(trajectory: Trajectory) -> str:
    """What the loss mask says the policy chose, `|` for its stop token."""
    (transcript,) = trajectory.transcripts
    pairs = zip(transcript.token_ids, transcript.loss_mask, strict=True)
    return "".join(chr(token) if token else "|" for token, chosen in pairs if chosen)


async def test_the_transcript_is_what_the_engine_received_and_sampled() -> None:
    env, engine = CounterEnv(), ScriptedEngine(PRESS % 1, PRESS % 2, "done")
    trajectory = await run_episode(TASK, make_factory(env), token_agent(engine), LIMITS, sample=3)
    assert (trajectory.ending, trajectory.reward, trajectory.failure) == (Ending.DONE, 1.0, None)
    assert sampled_text(trajectory) == f"{PRESS % 1}|{PRESS % 2}|done|"
    (transcript,) = trajectory.transcripts
    text = "".join(chr(token) if token else "|" for token in transcript.token_ids)
    assert text == f"reach 3|{PRESS % 1}|1|{PRESS % 2}|3|done|"
    assert [p for p, c in zip(transcript.logprobs, transcript.loss_mask, strict=True) if not c] == (
        [0.0] * len("reach 3|1|3|")
    )
    assert [len(turn.replies) for turn in trajectory.turns] == [1, 1, 0]
    assert env.closed == 1
    assert engine.released == ["t/3"]


async def test_the_last_turn_allowed_ends_the_episode_and_it_is_graded() -> None:
    engine = ScriptedEngine(PRESS % 1, PRESS % 2, "never said")
    limits = replace(LIMITS, max_turns=2)
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), token_agent(engine), limits)
    assert (trajectory.ending, trajectory.reward) == (Ending.MAX_TURNS, 1.0)
    assert len(trajectory.turns) == 2


async def test_a_turn_cut_by_its_length_is_given_to_the_environment_and_graded() -> None:
    env, engine = CounterEnv(), ScriptedEngine(PRESS % 3, finish="length")
    limits = replace(LIMITS, max_turns=1)
    trajectory = await run_episode(TASK, make_factory(env), token_agent(engine), limits)
    assert (trajectory.ending, trajectory.reward) == (Ending.LENGTH, 1.0)
    assert env.count == 3
    assert sampled_text(trajectory) == PRESS % 3
    assert [turn.finish_reason for turn in trajectory.turns] == ["length"]


async def test_an_observer_sees_the_prompt_and_every_action_and_reply_in_order() -> None:
    seen: list[str] = []
    await run_episode(
        TASK,
        make_factory(CounterEnv()),
        token_agent(ScriptedEngine(PRESS % 1, "done")),
        LIMITS,
        on_messages=lambda messages: seen.extend(
            message.text or message.tool_calls[0].name for message in messages
        ),
    )
    assert seen == ["reach 3", "press", "1", "done"]


async def test_a_first_prompt_over_the_limit_ends_before_a_word_and_is_graded() -> None:
    engine = ScriptedEngine()
    limits = replace(LIMITS, max_input_length=len("reach 3"))  # the closing token is too much
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), token_agent(engine), limits)
    assert (trajectory.ending, trajectory.reward) == (Ending.CONTEXT_FULL, 0.0)
    assert trajectory.turns == ()
    (transcript,) = trajectory.transcripts
    assert not any(transcript.loss_mask)


async def test_a_prompt_of_exactly_the_limit_is_begun() -> None:
    limits = replace(LIMITS, max_input_length=len("reach 3|"))
    trajectory = await run_episode(
        TASK, make_factory(CounterEnv()), token_agent(ScriptedEngine("done")), limits
    )
    assert trajectory.ending is Ending.DONE


async def test_a_reply_that_fills_the_context_ends_the_episode() -> None:
    class Talkative(CounterEnv):
        async def step(self, action: Message) -> Step:
            return Step(messages=(Message(role="tool", content="x" * 2000),))

    trajectory = await run_episode(
        TASK, make_factory(Talkative()), token_agent(ScriptedEngine("hi")), LIMITS
    )
    assert (trajectory.ending, trajectory.reward) == (Ending.CONTEXT_FULL, 0.0)
    assert len(trajectory.turns) == 1


async def test_a_turn_that_cannot_be_joined_begins_another_transcript() -> None:
    class Forgetful(CharRenderer):
        def render_continuation(
            self, last_token: int, messages: Sequence[Message]
        ) -> list[int] | None:
            return None

    engine = ScriptedEngine(PRESS % 3, "done")

    def start(task: Task, opened: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            opened,
            engine=engine,
            renderer=Forgetful(),
            sampling=SamplingParams(),
            session=session,
        )

    trajectory = await run_episode(TASK, make_factory(CounterEnv()), start, LIMITS)
    first, second = trajectory.transcripts
    assert sum(first.loss_mask) == len(PRESS % 3) + 1
    assert sum(second.loss_mask) == len("done|")
    assert CharRenderer().text(second.token_ids).endswith("3done")


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_an_empty_completion_is_an_action(finish: str) -> None:
    engine = ScriptedEngine("", finish=finish)  # type: ignore[arg-type]
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), token_agent(engine), LIMITS)
    assert trajectory.reward == 0.0
    assert trajectory.turns[0].action.text == ""


async def test_an_aborted_turn_is_not_given_to_the_environment() -> None:
    engine = ScriptedEngine("I will ca", finish="abort")
    trajectory = await run_episode(TASK, make_factory(CounterEnv()), token_agent(engine), LIMITS)
    assert trajectory.turns == ()
    assert "the engine aborted the turn after 9 tokens" in str(trajectory.failure)
    assert trajectory.reward is None

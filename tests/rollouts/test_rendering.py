"""Long texts are measured and tokenized beside the event loop, and give the same tokens."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine

from skyfleet.chat.message import Image, Message, ToolSpec, UnsupportedMessageError
from skyfleet.chat.tokenizer import encode_text, use_tokenizer_copies
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.rollouts.conversation import TokenConversation
from skyfleet.rollouts.episode import RECORDED_CHARACTERS, Limits, run_episode
from skyfleet.rollouts.rendering import LARGE_CHARACTERS, exceeds
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=3, max_input_length=500_000, trajectory_timeout_seconds=20)


class Talkative(CounterEnv):
    def __init__(self, reply: Message, *, opens: bool = False) -> None:
        super().__init__()
        self._reply, self._opens = reply, opens

    async def reset(self) -> Observation:
        observation = await super().reset()
        return replace(observation, messages=(self._reply,)) if self._opens else observation

    async def step(self, action: Message) -> Step:
        return replace(await super().step(action), messages=(self._reply,))


class WellEquipped(CounterEnv):
    """Has tools of so many characters, from the start or after a restart."""

    def __init__(self, n_characters: int, *, opens: bool) -> None:
        super().__init__()
        self._n_characters, self._opens = n_characters, opens

    def _equip(self, observation: Observation) -> Observation:
        tools = tuple(
            ToolSpec(name=f"t{i}", description="x" * (self._n_characters // 20), parameters={})
            for i in range(20)
        )
        return replace(observation, tools=tools)

    async def reset(self) -> Observation:
        observation = await super().reset()
        return self._equip(observation) if self._opens else observation

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        opening = Observation(messages=(Message(role="user", content="again"),))
        return step if self._opens else replace(step, opening=self._equip(opening))


class WatchedRenderer(CharRenderer):
    """Notes the threads in which it renders long texts."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def _note(self, messages: Any) -> None:
        if any(len(message.text) > LARGE_CHARACTERS for message in messages):
            self.threads.add(threading.current_thread().name)
        if any(not isinstance(message.content, str) for message in messages):
            raise UnsupportedMessageError("a tool message contains an image")

    def render_prompt(self, messages: Any, tools: Any) -> list[int]:
        self._note(messages)
        if sum(len(tool.description) for tool in tools) > LARGE_CHARACTERS:
            self.threads.add(threading.current_thread().name)
        return super().render_prompt(messages, tools)

    def render_continuation(self, last_token: int, messages: Any) -> list[int] | None:
        self._note(messages)
        return super().render_continuation(last_token, messages)


async def played(env: CounterEnv, limits: Limits = LIMITS) -> tuple[Trajectory, WatchedRenderer]:
    renderer = WatchedRenderer()

    def start_agent(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=ScriptedEngine(PRESS % 3, "done"),
            renderer=renderer,
            sampling=SamplingParams(),
            session=session,
            max_input_length=limits.max_input_length,
        )

    return await run_episode(TASK, make_factory(env), start_agent, limits), renderer


@pytest.mark.parametrize("opens", [False, True])
async def test_a_long_text_that_fits_is_rendered_in_another_thread(opens: bool) -> None:
    text = "word " * 30_000
    env = Talkative(Message(role="user", content=text), opens=opens)
    trajectory, renderer = await played(env)
    assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)
    assert len(renderer.threads) == 1
    assert threading.current_thread().name not in renderer.threads
    assert len(trajectory.transcripts[0]) > len(text)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("n_characters", [1_000_000, 11_000_000])
async def test_a_text_that_cannot_fit_ends_the_episode_as_context_full(
    n_characters: int, opens: bool
) -> None:
    env = Talkative(Message(role="user", content="x" * n_characters), opens=opens)
    trajectory, renderer = await played(env)
    graded_as_it_stands = 0.0 if opens else 1.0
    assert (trajectory.ending, trajectory.reward) == (Ending.CONTEXT_FULL, graded_as_it_stands)
    assert renderer.threads == set(), "it is not rendered as a whole"
    recorded = trajectory.prompt if opens else trajectory.turns[0].replies
    is_cut = n_characters > LIMITS.max_observation_chars
    assert len(recorded[0].text) <= (RECORDED_CHARACTERS + 100 if is_cut else n_characters)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize(
    ("n_characters", "fits"), [(100_000, True), (1_900_000, False), (11_000_000, False)]
)
async def test_long_tools_are_rendered_in_another_thread_or_not_at_all(
    n_characters: int, fits: bool, opens: bool
) -> None:
    limits = replace(LIMITS, max_input_length=LIMITS.max_input_length // 4)
    trajectory, renderer = await played(WellEquipped(n_characters, opens=opens), limits)
    assert trajectory.failure is None
    assert (trajectory.ending is Ending.CONTEXT_FULL) is not fits
    assert len(renderer.threads) == fits
    assert threading.current_thread().name not in renderer.threads


async def test_a_message_that_the_chat_format_cannot_express_fails_its_episode() -> None:
    env = Talkative(Message(role="tool", content=(Image(b"x"),)))
    trajectory, _ = await played(env)
    assert trajectory.failure is not None
    assert (trajectory.ending, trajectory.failure.kind) == (Ending.FAILED, "EnvError")
    assert "contains an image" in trajectory.failure.detail


def test_a_text_exceeds_a_limit_only_if_its_tokens_do() -> None:
    renderer = CharRenderer()
    text = Message(role="user", content="x" * 100_000)
    assert exceeds(renderer, [text], 99_000)
    assert not exceeds(renderer, [text], 100_000)
    assert not exceeds(renderer, [Message(role="user", content="x" * 60_000)], 10)


def test_a_thread_with_tokenizer_copies_never_touches_the_original() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def encode(self, text: str, /, **_: Any) -> list[int]:
            self.calls.append(text)
            return [len(text)]

        def decode(self, token_ids: list[int], /, **_: Any) -> str:
            return ""

    tokenizer, results = Counting(), []

    def encode() -> None:
        use_tokenizer_copies()
        results.append(encode_text(tokenizer, "four"))

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert (results, tokenizer.calls) == ([[4]], [])

"""What a chat server left unread is read here, and prompts that it renders differently are reported."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.rollouts.test_native_tool_calling import LIMITS, Script

from skyfleet.chat.lenient_renderer import LenientRenderer
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import QUESTION, TOOLS
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation, Step
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.rollouts.served_turns import ServedTurns
from skyfleet.tasks.task import Task

RENDERER = make_renderer(small_tokenizer(chatml_template()))
GOOD = '<tool_call>\n{"name": "look_up", "arguments": {"word": "heron"}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "look_up", "arguments": {"word" "heron"}}\n</tool_call>'


def read(content: str, **fields: tuple[ToolCall, ...]) -> Message:
    message = Message(role="assistant", content=content, **fields)  # type: ignore[arg-type]
    return ServedTurns(RENDERER).read_left_over(message, TOOLS)


def test_a_call_that_the_server_left_in_the_text_is_malformed() -> None:
    """vLLM's hermes parser returns the whole turn as content if one call in it is not JSON."""
    message = read(f"I look it up.\n{BAD}")
    assert (message.content, message.malformed_calls) == ("I look it up.", (BAD,))


def test_the_good_call_beside_a_malformed_one_is_a_call() -> None:
    message = read(f"{GOOD}\n{BAD}")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("look_up", {"word": "heron"})
    ]
    assert message.malformed_calls == (BAD,)


def test_calls_that_the_server_parsed_stay_with_their_ids() -> None:
    parsed = ToolCall(id="chatcmpl-tool-1", name="look_up", arguments={"word": "wren"})
    message = read(f"Then:\n{GOOD}", tool_calls=(parsed,))
    assert message.tool_calls[0] == parsed
    assert len(message.tool_calls) == 2


def test_text_without_a_call_is_left_alone() -> None:
    message = Message(role="assistant", content='Birds have {"wings": 2}. </b>')
    assert ServedTurns(RENDERER).read_left_over(message, TOOLS) is message
    assert (
        ServedTurns(RENDERER).read_left_over(Message(role="assistant", content=BAD), ()).content
        == BAD
    )


def test_lenient_parsing_repairs_what_the_server_left() -> None:
    lenient = ServedTurns(LenientRenderer(RENDERER))
    text = '```json\n{"name": "look_up", "arguments": {"word": "heron"}}\n```'
    message = lenient.read_left_over(Message(role="assistant", content=text), TOOLS)
    assert [call.repair for call in message.tool_calls] == ["fenced JSON"]


def test_an_equal_prompt_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    turns = ServedTurns(RENDERER)
    turns.compare_prompt(RENDERER.render_prompt([QUESTION], TOOLS), [QUESTION], TOOLS)
    assert (turns.n_different_prompts, caplog.messages) == (0, [])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("look_up", "look__up"), "JSON of tools or calls"),
        (lambda text: text.replace("\n", "\n\n", 1), "other white space"),
        (lambda text: text.replace("<tools>", "<list>"), "<tools> is only here"),
    ],
)
def test_a_prompt_in_other_tokens_is_reported_once_with_place_and_reason(
    change: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    turns, text = ServedTurns(RENDERER), RENDERER.text(RENDERER.render_prompt([QUESTION], TOOLS))
    other = small_tokenizer(chatml_template()).encode(change(text))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        turns.compare_prompt(other, [QUESTION], TOOLS)
        turns.compare_prompt(other, [QUESTION], TOOLS)
    assert turns.n_different_prompts == 2
    (sentence,) = caplog.messages
    assert "other tokens than this process" in sentence
    assert why in sentence
    assert "at token " in sentence


def test_the_same_text_in_other_tokens_is_called_so() -> None:
    whole = RENDERER.render_prompt([QUESTION], ())
    letters = [
        token for letter in "heron" for token in small_tokenizer(chatml_template()).encode(letter)
    ]
    merged = small_tokenizer(chatml_template()).encode("heron")
    if letters == merged:
        pytest.skip("this tokenizer has no merges")
    sentence = ServedTurns(RENDERER).describe_difference([*whole, *merged], [*whole, *letters])
    assert sentence is not None
    assert sentence.startswith("the same text in other tokens")


def test_a_malformed_call_of_a_served_turn_is_answered_with_an_error() -> None:
    """As in every other path: the environment gets it in `malformed_calls`."""
    seen: list[Message] = []

    class Watching(CounterEnv):
        async def step(self, action: Message) -> Step:
            seen.append(action)
            return await super().step(action)

    engine = Script((Message(role="assistant", content=BAD), (1, 2), (3, 4)))

    def start(task: Task, observation: Observation, session: str) -> NativeToolConversation:
        return NativeToolConversation(
            Observation(messages=observation.messages, tools=tuple(TOOLS)),
            engine=engine,
            sampling=SamplingParams(),
            session=session,
            max_input_length=LIMITS.max_input_length,
            served_turns=ServedTurns(RENDERER),
        )

    asyncio.run(run_episode(TASK, make_factory(Watching()), start, LIMITS))
    assert seen[0].malformed_calls == (BAD,)

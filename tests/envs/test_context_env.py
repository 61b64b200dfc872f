"""Context tools cut old turns, search the history and show long answers in pages."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.shouting_env import ShoutingEnv

from skyfleet.chat.message import Image, Message, Text, ToolCall, ToolSpec
from skyfleet.config.loading import load_config
from skyfleet.envs.context_env import ContextEnv
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.registry import env_factory
from skyfleet.errors import EnvError
from skyfleet.worlds.catalog import generate_world_tasks, open_world


class Echo(ShoutingEnv):
    """Answers each call with its `text`; without a call it says so; counts what reaches it."""

    steps = 0

    async def step(self, action: Message) -> Step:
        self.steps += 1
        answers = tuple(
            Message(role="tool", content=call.arguments["text"], tool_call_id=call.id)
            for call in action.tool_calls
        )
        produced = Message(role="user", content="no call")
        return Step(messages=answers or (produced,), done="<done>" in action.text, reward=0.5)


def call(name: str, id: str = "0", **arguments: Any) -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


def calling(*calls: ToolCall, text: str = "") -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


async def opened(env: Any = None, *, page_characters: int = 10) -> ContextEnv:
    context = ContextEnv(env or Echo(), page_characters=page_characters)
    await context.reset()
    return context


async def answer(env: ContextEnv, name: str, **arguments: Any) -> str:
    step = await env.step(calling(call(name, **arguments)))
    (message,) = step.messages
    return message.text


async def test_the_tools_are_shown_beside_the_envs_own() -> None:
    observation = await ContextEnv(ShoutingEnv(), page_characters=10).reset()
    names = [tool.name for tool in observation.tools]
    assert names == ["shout", "manage_context", "search_history", "view_tool_output"]
    assert observation.tools[1].parameters == {
        "type": "object",
        "properties": {"keep_recent_turns": {"type": "integer", "minimum": 0}},
        "required": [],
    }


async def test_a_cut_keeps_the_requested_turns_and_does_not_step_the_environment() -> None:
    inner = Echo()
    env = await opened(inner)
    for _ in range(3):
        assert (await env.step(calling(call("echo", text="hi")))).keep_recent_turns is None
    step = await env.step(calling(call("manage_context", "c", keep_recent_turns=1)))
    assert (step.keep_recent_turns, step.done, step.reward, inner.steps) == (1, False, 0.0, 3)
    (message,) = step.messages
    assert (message.role, message.tool_call_id, message.is_error) == ("tool", "c", False)
    assert message.text.startswith("2 turns went out of view; the task and the last 1 turn stay.")
    # One was kept, and the turn that cut is the second: so many are in view now.
    assert await answer(env, "manage_context", keep_recent_turns=2) == (
        "Nothing to cut: 2 turns in view."
    )
    assert (await env.step(calling(call("echo", text="hi")))).keep_recent_turns is None
    cut = await env.step(calling(call("manage_context", keep_recent_turns=0)))
    assert cut.messages[0].text.startswith("4 turns went out of view")


async def test_five_turns_stay_where_no_number_is_given() -> None:
    env = await opened()
    for _ in range(6):
        await env.step(calling(call("echo", text="hi")))
    assert (await env.step(calling(call("manage_context")))).keep_recent_turns == 5


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("manage_context", {"keep_recent_turns": -1}, "keep_recent_turns is -1; "),
        ("manage_context", {"keep_recent_turns": "2"}, "keep_recent_turns is '2'; "),
        ("manage_context", {"turns": 2}, "manage_context has no 'turns'; it takes "),
        ("search_history", {}, "search_history needs pattern; "),
        ("search_history", {"pattern": ""}, "pattern is ''; "),
        ("view_tool_output", {}, "every answer so far was shown whole"),
    ],
)
async def test_an_invalid_argument_is_an_error_and_cuts_nothing(
    name: str, arguments: dict[str, Any], error: str
) -> None:
    env = await opened()
    for _ in range(3):
        await env.step(calling(call("echo", text="hi")))
    step = await env.step(calling(call(name, **arguments)))
    (message,) = step.messages
    assert message.is_error
    assert message.text.startswith(f"Error: {error}")
    assert step.keep_recent_turns is None


async def test_pages_put_together_are_the_answer() -> None:
    env = await opened(page_characters=10)
    text = "0123456789abcdefghijABC"
    shown = await answer(env, "echo", text=text)
    assert shown == (
        "0123456789\n[page 1 of 3 of output 1; view_tool_output(output=1, page=2) reads on]"
    )
    pages = [(await answer(env, "view_tool_output", page=n)).split("\n")[0] for n in (1, 2, 3)]
    assert "".join(pages) == text
    assert await answer(env, "view_tool_output", page=3) == "ABC\n[page 3 of 3 of output 1]"
    assert await answer(env, "view_tool_output", page=4) == "Error: page is 4; output 1 has 3 pages"
    await answer(env, "echo", text="x" * 11)
    assert (await answer(env, "view_tool_output", page=2)).startswith("x\n[page 2 of 2 of output 2")
    assert (await answer(env, "view_tool_output", page=2, output=1)).startswith("abcdefghij\n")
    assert "output is 3; 2 answers have pages" in await answer(env, "view_tool_output", output=3)


async def test_an_answer_of_exactly_a_page_is_shown_whole() -> None:
    assert await answer(await opened(page_characters=10), "echo", text="0123456789") == "0123456789"


async def test_a_picture_stays_beside_the_first_page() -> None:
    class Pictured(ShoutingEnv):
        async def step(self, action: Message) -> Step:
            content = (Text("long " * 3), Image(b"png"))
            return Step(messages=(Message(role="tool", content=content),))

    (message,) = (await (await opened(Pictured())).step(calling(call("look")))).messages
    assert message.text.startswith("long long \n[page 1 of 2")
    assert message.content[1] == Image(b"png")


async def test_what_is_out_of_view_and_beyond_the_first_page_is_found() -> None:
    env = await opened(page_characters=20)
    await env.step(calling(call("echo", text=f"{'-' * 300}The Heron sleeps{'-' * 300}")))
    await env.step(calling(call("echo", text="nothing"), text="A heron?"))
    await env.step(calling(call("manage_context", keep_recent_turns=0)))
    found = (await answer(env, "search_history", pattern="heron")).split("\n")
    # What the agent called is on record too; its own searches are not.
    assert [line.split(":")[0] for line in found if line.startswith("turn")] == [
        "turn 1, assistant",
        "turn 1, tool",
        "turn 2, assistant",
    ]
    assert found[1] == f"turn 1, tool: …{'-' * 96}The Heron sleeps{'-' * 88}…"  # 200 characters
    assert await answer(env, "search_history", pattern="h.ron") == "Nobody said 'h.ron'."
    again = await answer(env, "search_history", pattern="heron")
    assert again.split("\n") == found


async def test_the_prompt_is_searched_too() -> None:
    env = await opened(page_characters=20)
    assert await answer(env, "search_history", pattern="SHOUT") == "opening, user: shout"


async def test_ten_hits_are_shown_and_the_rest_are_counted() -> None:
    env = await opened(page_characters=100)
    for _ in range(12):
        await env.step(Message(role="assistant", content="heron"))
    hits = (await answer(env, "search_history", pattern="HERON")).split("\n")
    assert len(hits) == 11
    assert hits[-1] == "[2 more; search for longer words]"


async def test_reset_clears_the_history() -> None:
    env = await opened(page_characters=10)
    await env.step(calling(call("echo", text="heron " * 10)))
    await env.reset()
    assert await answer(env, "search_history", pattern="heron") == "Nobody said 'heron'."
    assert await answer(env, "view_tool_output") == "Error: every answer so far was shown whole"
    assert await answer(env, "manage_context", keep_recent_turns=2) == (
        "Nothing to cut: 2 turns in view."
    )


async def test_several_calls_are_answered_in_their_order() -> None:
    env = await opened()
    step = await env.step(
        calling(
            call("echo", "a", text="one"),
            call("search_history", "b", pattern="two"),
            call("echo", "c", text="two"),
        )
    )
    assert [m.tool_call_id for m in step.messages] == ["a", "b", "c"]
    assert [m.text for m in step.messages][::2] == ["one", "two"]
    assert step.reward == 0.5


async def test_done_beside_a_context_tool_ends_the_episode() -> None:
    inner = Echo()
    env = await opened(inner)
    step = await env.step(calling(call("manage_context"), text="<done>"))
    assert (step.done, inner.steps) == (True, 1)


async def test_a_turn_without_a_call_goes_to_the_environment() -> None:
    inner = Echo()
    step = await (await opened(inner)).step(Message(role="assistant", content="hm"))
    assert [m.text for m in step.messages] == ["no call"]
    malformed = calling(call("manage_context"))
    assert inner.steps == 1
    await (await opened(inner)).step(
        Message(role="assistant", tool_calls=malformed.tool_calls, malformed_calls=("{",))
    )
    assert inner.steps == 2


async def test_an_environment_with_a_tool_of_the_same_name_is_rejected() -> None:
    class Taken(ShoutingEnv):
        async def reset(self) -> Observation:
            tool = ToolSpec(name="manage_context", description="", parameters={})
            return Observation(messages=(), tools=(tool,))

    with pytest.raises(
        EnvError,
        match=r"has its own tools named manage_context; set environment\.enable_context_tools",
    ):
        await ContextEnv(Taken(), page_characters=1).reset()


@pytest.mark.parametrize(
    ("words", "wrapped"),
    [
        ((), False),
        (("environment.enable_context_tools=true",), True),
        (("environment.skyrl_gym.fleet_task.enable_context_tools=true",), False),
        (
            (
                "environment.env_class=fleet_task",
                "environment.skyrl_gym.fleet_task.api_key=k",
                "environment.skyrl_gym.fleet_task.enable_context_tools=true",
            ),
            True,
        ),
    ],
)
async def test_the_configuration_says_which_envs_have_them(
    words: tuple[str, ...], wrapped: bool
) -> None:
    (task,) = generate_world_tasks("github", split="train", count=1)
    env = await env_factory(load_config("", words))(task)
    assert isinstance(env, ContextEnv) == wrapped


async def test_a_world_of_ours_answers_and_is_graded_through_them() -> None:
    (task,) = generate_world_tasks("github", split="train", count=1)
    env = ContextEnv(await open_world(task), page_characters=10_000)
    await env.reset()
    for done in task.solution:
        await env.step(calling(call(done.name, **done.arguments)))
    await env.step(Message(role="assistant", content="<done>"))
    grade = await env.grade()
    await env.close()
    assert grade is not None
    assert grade.success

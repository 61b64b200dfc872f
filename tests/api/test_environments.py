"""Environments from functions and classes: tools, arguments by name, errors and rewards."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest

import skyfleet as sf
from skyfleet.api.envs import resolve_env
from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Env, Observation, Step, close_env, grade_env
from skyfleet.envs.guard import Isolation
from skyfleet.envs.python_env import as_env_factory
from skyfleet.envs.python_tools import build_tool
from skyfleet.errors import EnvError, NothingGradedError
from skyfleet.rollouts.conversation import MessageConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending

TASK = Task(key="press-3", env_key="env", prompt="Press it 3 times.", metadata={"times": 3})


def press(state: dict[str, int], times: int, mode: Literal["soft", "hard"] = "soft") -> str:
    """Press the button."""
    if times < 0:
        raise sf.ToolError("times is negative; give 0 or more")
    state["n"] += times
    return f"pressed {state['n']} times"


def call(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="1", name=name, arguments=arguments),))


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


async def play(env: object, *actions: Message, task: Task = TASK) -> tuple[list[Step], Any, Env]:
    opened: Any = await as_env_factory(env)(task)
    try:
        await opened.reset()
        steps = [await opened.step(action) for action in actions]
        return steps, await grade_env(opened, steps), opened
    finally:
        await close_env(opened)


def counting(**settings: Any) -> sf.ToolEnv:
    reward = settings.pop("reward", lambda task, state: float(state["n"] == task["times"]))
    return sf.ToolEnv([press], setup=lambda: {"n": 0}, reward=reward, **settings)


def test_a_function_becomes_a_tool_from_its_signature_and_docstring() -> None:
    spec = build_tool(press).spec
    assert (spec.name, spec.description) == ("press", "Press the button.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "times": {"type": "integer"},
            "mode": {"type": "string", "enum": ["soft", "hard"]},
        },
        "required": ["times"],
    }


def test_tools_may_be_methods_partials_objects_and_async_functions() -> None:
    class Dial:
        def turn(self, number: int) -> int:
            return number

        def __call__(self, number: int) -> int:
            return number

    async def look(state: object) -> str:
        return "a safe"

    functions: list[Callable[..., Any]] = [Dial().turn, Dial(), look, partial(press, mode="hard")]
    assert [build_tool(f).spec.name for f in functions] == ["turn", "Dial", "look", "press"]


def test_a_task_parameter_with_a_type_is_the_agents_own() -> None:
    def add(state: object, task: str) -> str:
        return task

    def check(task, note: str) -> str:  # type: ignore[no-untyped-def]
        return note

    assert list(build_tool(add).spec.parameters["properties"]) == ["task"]
    assert list(build_tool(check).spec.parameters["properties"]) == ["note"]


def test_a_parameter_without_a_type_names_the_tool_and_the_remedy() -> None:
    def search(state, query):  # type: ignore[no-untyped-def]
        return query

    with pytest.raises(sf.ConfigError, match="tool search: parameter 'query' has no type; write"):
        build_tool(search)


async def test_an_episode_calls_tools_with_its_own_state_and_is_graded_by_name() -> None:
    steps, grade, _ = await play(counting(), call("press", times=1), call("press", times=2))
    assert [step.messages[0].text for step in steps] == ["pressed 1 times", "pressed 3 times"]
    assert (grade.reward, grade.success) == (1.0, True)
    _, other, _ = await play(counting(), call("press", times=1))
    assert other.reward == 0.0


async def test_a_message_without_a_tool_call_ends_the_episode() -> None:
    (step,), _, _ = await play(counting(), say("Done."))
    assert step.done
    assert step.messages == ()


async def test_a_tool_error_answers_the_agent_and_any_other_exception_fails_the_episode() -> None:
    def explode(state: object) -> str:
        raise KeyError("boom")

    env = sf.ToolEnv([press, explode], setup=lambda: {"n": 0}, reward=lambda: 0.0)
    steps, _, _ = await play(env, call("press", times=-1), call("press"), call("unknown"))
    texts = [step.messages[0].text for step in steps]
    assert texts[0] == "Error: times is negative; give 0 or more"
    assert texts[1].startswith("Error: press needs times")
    assert texts[2].startswith("Error: no tool 'unknown'")
    assert all(step.messages[0].is_error for step in steps)
    with pytest.raises(KeyError, match="boom"):
        await play(env, call("explode"))


async def test_a_reward_receives_the_arguments_that_it_names() -> None:
    seen: dict[str, Any] = {}

    async def score(answer: str, messages: list[Message], trajectory: sf.Trajectory) -> sf.Grade:
        seen.update(answer=answer, roles=[m.role for m in messages], turns=len(trajectory.turns))
        return sf.Grade(reward=0.5, success=False, parts={"half": 0.5})

    _, grade, _ = await play(
        counting(reward=score, system_prompt="Be brief."), call("press", times=1), say("1")
    )
    assert grade.parts == {"half": 0.5}
    assert seen == {
        "answer": "1",
        "roles": ["system", "user", "assistant", "tool", "assistant"],
        "turns": 2,
    }


async def test_a_reward_of_none_is_an_unknown_grade() -> None:
    assert (await play(counting(reward=lambda: None), say("Hello")))[1] is None


def test_a_reward_with_an_unknown_parameter_is_refused_in_the_callers_terms() -> None:
    def f(task: object, x: object) -> float:
        return 0.0

    expected = r"sf.train\(..., reward=f\): f takes \(task, x\); it may take task, answer, messages, trajectory"
    with pytest.raises(sf.ConfigError, match=expected):
        sf.train("tiny", reward=f, tasks=[{"prompt": "Hello"}])
    with pytest.raises(sf.ConfigError, match=r"<lambda> takes \(completions\); it may take task"):
        sf.train("tiny", reward=lambda completions, **k: [0.0], tasks=[{"prompt": "Hello"}])
    with pytest.raises(sf.ConfigError, match=r"setup=.*it may take task"):
        sf.ToolEnv([press], setup=lambda state: state, reward=lambda: 0.0)


async def test_sync_functions_of_an_episode_share_one_thread() -> None:
    """SQLite refuses a connection from another thread than the one that opened it."""

    def count(state: sqlite3.Connection) -> int:
        return int(state.execute("select count(*) from notes").fetchone()[0])

    def setup() -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:")
        connection.execute("create table notes (text)")
        return connection

    def reward(state: sqlite3.Connection) -> float:
        rows = float(count(state))
        state.close()
        return rows

    env = sf.ToolEnv([count], setup=setup, reward=reward)
    (step,), grade, _ = await play(env, call("count"))
    assert step.messages[0].text == "0"
    assert grade.reward == 0.0


async def test_a_blocking_tool_does_not_stop_other_episodes() -> None:
    loop, opened = asyncio.get_running_loop(), asyncio.Event()

    def wait(state: object) -> str:
        asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(timeout=10)
        return "opened"

    def unlock(state: object) -> None:
        loop.call_soon_threadsafe(opened.set)

    env = sf.ToolEnv([wait, unlock], reward=lambda: 0.0)
    played = await asyncio.gather(play(env, call("wait")), play(env, call("unlock")))
    assert played[0][0][0].messages[0].text == "opened"


class Safe(sf.Env):
    closed = 0

    def __init__(self, task: Any) -> None:
        self.secret, self.open = task["times"], False

    def reset(self) -> sf.Observation:
        return sf.Observation("Open the safe.", tools=[self.turn_dial])

    @sf.tool(name="dial", writes=True)
    def turn_dial(self, number: int) -> str:
        """Turn the dial."""
        self.open = number == self.secret
        return "open" if self.open else "closed"

    def grade(self) -> float:
        return float(self.open)

    def close(self) -> None:
        Safe.closed += 1


async def test_an_env_class_is_one_instance_per_episode_and_is_closed() -> None:
    before = Safe.closed
    (step,), grade, _ = await play(Safe, call("dial", number=3))
    assert step.messages[0].text == "open"
    assert grade.reward == 1.0
    assert (await play(Safe, call("dial", number=4)))[1].reward == 0.0
    assert Safe.closed == before + 2


async def test_a_step_of_ones_own_may_call_the_tools_and_change_the_answer() -> None:
    class Counted(Safe):
        async def step(self, message: Message) -> Any:
            step = await super().step(message)
            return sf.Step(step.messages, reward=0.25, info={"calls": 1})

    (step,), _, _ = await play(Counted, call("dial", number=3))
    assert (step.reward, step.info, step.messages[0].text) == (0.25, {"calls": 1}, "open")


async def test_an_env_without_a_grade_earns_the_sum_of_its_step_rewards() -> None:
    class Talk(sf.Env):
        def step(self, message: Message) -> sf.Step:
            return sf.Step("Go on.", reward=0.5)

    steps, grade, _ = await play(Talk, say("a"), say("b"))
    assert [step.messages[0].text for step in steps] == ["Go on.", "Go on."]
    assert (grade.reward, grade.success) == (1.0, True)


async def test_an_env_without_a_grade_keeps_its_steps_success_and_rewards() -> None:
    class Talk(sf.Env):
        def step(self, message: Message) -> sf.Step:
            return sf.Step("Go on.", reward=0.5, success=message.text == "b")

    _, grade, _ = await play(Talk, say("a"), say("b"))
    assert (grade.reward, grade.success) == (1.0, True)
    assert grade.parts == {"turn_0": 0.5, "turn_1": 0.5}
    _, grade, _ = await play(Talk, say("b"), say("a"))
    assert (grade.reward, grade.success) == (1.0, False)


def test_dict_messages_are_those_of_openai() -> None:
    function = {"name": "press", "arguments": '{"times": 2}'}
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}}
    observation = sf.Observation(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Press"}, "it."]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "user", "content": [{"type": "text", "text": "Look:"}, pixel]},
        ]
    )
    system, user, assistant, tool, shown = observation.messages
    assert system == Message(role="system", content="Be brief.")
    assert user == Message(role="user", content="Pressit.")
    call = ToolCall(id="c1", name="press", arguments={"times": 2})
    assert assistant == Message(role="assistant", tool_calls=(call,))
    assert tool == Message(role="tool", content="ok", tool_call_id="c1")
    assert shown.content == (Text("Look:"), Image(b"\x00\x01\x02", "image/png"))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "robot", "content": "x"},
            "the role 'robot'; use system, user, assistant or tool",
        ),
        ({"content": [{"type": "audio"}]}, "is not a part of a message; use a text part"),
    ],
)
def test_a_dict_that_is_no_message_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvError, match=says):
        sf.Step(message)


class OneTurn(sf.Env):
    """Has no end of its own, and shows its reward function's trajectory."""

    def step(self, message: Message) -> sf.Step:
        return sf.Step("Go on." * (100 if message.text == "more" else 1))

    def grade(self, trajectory: sf.Trajectory) -> sf.Grade:
        texts = "|".join(message.text[:6] for message in trajectory.messages)
        return sf.Grade(reward=0.0, success=False, explanation=f"{trajectory.ending} {texts}")


@pytest.mark.parametrize("isolation", ["none", "thread", "process"])
@pytest.mark.parametrize(
    ("text", "ending", "seen"),
    [
        ("hello", Ending.MAX_TURNS, "max_turns Press |hello|Go on."),
        ("more", Ending.CONTEXT_FULL, "context_full Press |more|Go on."),
    ],
)
async def test_a_reward_gets_the_messages_and_the_true_ending(
    isolation: Any, text: str, ending: Ending, seen: str
) -> None:
    class Repeats:
        async def reply(self, *_: object) -> Message:
            return say(text)

    trajectory = await run_episode(
        TASK,
        as_env_factory(OneTurn, spec=f"{__name__}:OneTurn"),
        lambda _, observation, __: MessageConversation(
            observation, model=Repeats(), sampling=SamplingParams()
        ),
        Limits(
            max_turns=1,
            max_input_length=100,
            max_observation_chars=100,
            trajectory_timeout_seconds=0,
            isolation=Isolation(mode=isolation),
        ),
    )
    assert (trajectory.ending, trajectory.grade and trajectory.grade.explanation) == (ending, seen)


async def test_grade_gets_the_state_that_reset_made() -> None:
    class Stateful(sf.Env):
        def reset(self) -> sf.Observation:
            self.state = {"n": 0}
            return sf.Observation("Press it.", tools=[press])

        def grade(self, state: dict[str, int]) -> float:
            return float(state["n"])

    assert (await play(Stateful, call("press", times=2)))[1].reward == 2.0


async def test_the_arguments_of_a_grade_are_checked_before_the_episode() -> None:
    class Wrong(sf.Env):
        def grade(self, question: str) -> float:
            return 0.0

    says = r"Wrong.grade: grade takes \(question\); it may take task, state, answer"
    with pytest.raises(sf.ConfigError, match=says):
        as_env_factory(Wrong())
    with pytest.raises(EnvError, match=says):
        await as_env_factory(lambda task: Wrong())(TASK)


async def test_a_complete_async_class_may_take_arguments_in_grade() -> None:
    class Complete:
        async def reset(self) -> Observation:
            return Observation(messages=(Message(role="user", content="Hello"),))

        async def step(self, action: Message) -> Step:
            return Step(done=True)

        async def grade(self, answer: str) -> sf.Grade:
            return sf.Grade(reward=float(answer == "hi"), success=False)

        async def close(self) -> None: ...

    assert (await play(Complete, say("hi")))[1].reward == 1.0


async def test_a_restarted_conversation_has_the_tools_of_its_new_observation() -> None:
    class Rooms(sf.Env):
        def look(self) -> str:
            "Look around."
            return "a window"

        def reset(self) -> sf.Observation:
            return sf.Observation("The hall.", tools=[])

        def step(self, message: Message) -> Any:
            if message.tool_calls:
                return super().step(message)
            return sf.Step(opening=sf.Observation("The cellar.", tools=[self.look]))

    steps, _, _ = await play(Rooms, say("down"), call("look"))
    assert steps[0].opening is not None
    assert [spec.name for spec in steps[0].opening.tools] == ["look"]
    assert steps[1].messages[0].text == "a window"


async def test_an_instance_is_copied_for_each_episode() -> None:
    class Talk(sf.Env):
        turns = 0

        def step(self, message: Message) -> sf.Step:
            self.turns += 1
            return sf.Step("Go on.")

        def grade(self) -> float:
            return float(self.turns)

    shared = Talk()
    assert (await play(shared, say("a"), say("b")))[1].reward == 2.0
    assert (await play(shared, say("a")))[1].reward == 1.0
    assert shared.turns == 0


async def test_a_function_may_open_the_environment_and_an_async_env_is_used_as_it_is() -> None:
    class Plain:
        async def reset(self) -> Observation:
            return Observation(messages=(Message(role="user", content="Hello"),))

        async def step(self, action: Message) -> Step:
            return Step(done=True, reward=1.0)

        async def grade(self) -> None: ...

        async def close(self) -> None: ...

    async def open_plain(task: Any) -> Plain:
        assert task["times"] == 3
        return Plain()

    opened = await as_env_factory(open_plain)(TASK)
    assert isinstance(opened, Plain)


async def test_a_step_that_returns_neither_step_nor_text_fails() -> None:
    class Broken(sf.Env):
        def step(self, message: Message) -> int:
            return 3

    with pytest.raises(EnvError, match=r"step\(\) returned 3; return sf.Step\(...\) or a text"):
        await play(Broken, say("a"))


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(sf.ConfigError, match=r"3 is not an environment; pass sf\.ToolEnv"):
        sf.rollout("null", 3, {"prompt": "Hello"})
    with pytest.raises(sf.ConfigError, match="pass one of them"):
        sf.rollout("null", Safe, {"prompt": "Hello"}, reward=lambda: 0.0)


def test_named_environments_become_configuration_keys() -> None:
    assert sf.env("mcp", command=["server"]).overrides == {
        "environment.env_class": "mcp",
        "environment.mcp.command": ["server"],
    }
    assert sf.env("gsm8k").overrides == {
        "environment.env_class": "skyrl_gym",
        "environment.skyrl_gym.env_id": "gsm8k",
    }
    world = sf.env("world:github", partial_reward=True)
    assert world.overrides["environment.partial_reward"] is True
    assert world.tasks == "world:github?split=train&count=400"


def test_attempts_without_a_grade_are_noted_and_a_set_without_any_is_an_error() -> None:
    def broken(task: Any) -> float:
        if task.prompt == "Hello":
            raise KeyError("no field")
        return 0.0

    tasks = [{"prompt": "Hello"}, {"prompt": "Goodbye"}]
    evaluation = sf.evaluate("null", reward=broken, tasks=tasks, baselines=False)
    assert evaluation.success_rate == 0.0
    assert "1 of 2 attempts have no grade" in str(evaluation)
    with pytest.raises(NothingGradedError, match=r"no attempt could be graded, .*no field"):
        sf.evaluate("null", reward=broken, tasks=tasks[:1], baselines=False)


def test_a_built_in_environment_is_played_by_name() -> None:
    task = sf.evaluate(
        "oracle", "world:github", "world:github?split=train&count=3", baselines=False
    )
    assert task.success_rate == 1.0


def test_a_world_is_evaluated_on_tasks_that_are_not_trained_on() -> None:
    chosen = resolve_env("world:github", None, where="sf.evaluate", default_name=None)
    assert chosen.tasks == "world:github?split=train&count=400"
    assert chosen.eval_tasks == "world:github?split=unseen_tasks&count=120"
    own = resolve_env("world:github?split=all&count=3", None, where="", default_name=None)
    assert own.eval_tasks == "world:github?split=all&count=3"

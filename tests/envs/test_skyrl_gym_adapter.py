"""Any BaseTextEnv of skyrl-gym runs as it does in SkyRL."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from tests.fakes.gym_tasks import CASES, MAX_TURNS, RLM, gym_case

from skyfleet.chat.message import Message, ToolCall
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.skyrl_gym import SkyrlGymEnv, SkyrlGymSettings, format_action, skyrl_gym_factory
from skyfleet.errors import ConfigError, EnvError, MissingExtraError
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.rollouts.conversation import MessageConversation
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Group

TASK = Task(key="t", env_key="own", prompt="Say it.", metadata={"seen": []})


class OwnEnv(BaseTextEnv):  # type: ignore[misc]
    """Ends at the action `end`; other actions trigger the behaviour they name."""

    last: OwnEnv

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.config, self.extras = env_config, extras
        self.threads = {threading.current_thread()}
        self.n_metrics = 0
        self.released, self.closed = threading.Event(), threading.Event()
        OwnEnv.last = self

    def step(self, action: str) -> dict[str, Any]:
        self.threads.add(threading.current_thread())
        self.turns += 1
        output = {"observations": [], "reward": 0.25, "done": action == "end", "metadata": {}}
        if action == "end":
            output["metadata"] = {"score": 2, "note": "not a number"}
        if action == "hang":
            self.released.wait()
        elif action == "exit":
            raise SystemExit(3)
        elif action == "trim":
            output["postprocessed_action"] = "tri"
        elif action == "forget":
            output["metadata"] = {"modified_chat_history": []}
        elif action == "show":
            content = [{"type": "image_url", "image_url": "data:"}]
            output["observations"] = [{"role": "user", "content": content}]
        return output

    def get_metrics(self) -> dict[str, Any]:
        self.n_metrics += 1
        return {"turns": self.turns, "early": True, "note": "not a number"}

    def close(self) -> None:
        self.threads.add(threading.current_thread())
        self.closed.set()


class AwaitedEnv(OwnEnv):
    """Has async twins: its blocking methods are never called."""

    def step(self, action: str) -> dict[str, Any]:
        raise AssertionError("blocking")

    async def step_async(self, action: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"observations": [], "reward": 2, "done": True}


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


async def _open(name: str = "OwnEnv", **settings: Any) -> SkyrlGymEnv:
    known = SkyrlGymSettings(env_id=f"{__name__}:{name}", max_turns=4, **settings)
    env = await skyrl_gym_factory(known)(TASK)
    await env.reset()
    return env


# lcb forks, which Python 3.12 warns of where there are threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("env_id", CASES)
async def test_each_env_of_skyrl_gym_gives_a_right_answer_its_reward(
    env_id: str, tmp_path: Path
) -> None:
    with gym_case(env_id, tmp_path) as (settings, task):
        env = await skyrl_gym_factory(settings)(task)
        observation = await env.reset()
        assert any("Do it." in message.text for message in observation.messages)
        *before, last = [await env.step(_say(text)) for text in CASES[env_id].says]
        assert [step.done for step in before] == [False] * len(before)
        assert all(step.messages for step in before)
        assert last.done
        grade = await env.grade()
        assert grade is not None
        assert grade.success
        assert grade.reward == pytest.approx(1.0 + (0.2 / MAX_TURNS) * ("multi" in env_id))
        await env.close()


def test_there_is_a_case_for_every_env_that_is_registered() -> None:
    assert set(CASES) - {RLM} == set(skyrl_gym.registry)


async def test_tools_of_an_env_really_run(tmp_path: Path) -> None:
    for env_id, shown in [
        ("text2sql", "pen"),
        ("search", "capital of France: Paris"),
        ("searchcode", "4"),
        (RLM, "REPL variables: ['context_0', 'context', 'answer']"),
    ]:
        with gym_case(env_id, tmp_path) as (settings, task):
            env = await skyrl_gym_factory(settings)(task)
            await env.reset()
            step = await env.step(_say(CASES[env_id].says[0]))
            assert shown in step.messages[0].text
            await env.close()


async def test_the_constructor_gets_skyrls_keywords_and_its_own_copies() -> None:
    config = {"db": {"path": "/x"}}
    first = await _open(env_config=config)
    one = OwnEnv.last
    second = await _open(env_config=config)
    assert one.extras == {"task_key": "t", "seen": [], "max_turns": 4}
    assert (one.config.db.path, one.config["db"]["path"]) == ("/x", "/x")
    one.extras["seen"].append(1)
    one.config.db.path = "/y"
    assert OwnEnv.last.extras["seen"] == TASK.metadata["seen"] == []
    assert OwnEnv.last.config.db.path == "/x"
    await first.close()
    await second.close()


@pytest.mark.parametrize(("max_turns", "ending"), [(4, Ending.DONE), (2, Ending.MAX_TURNS)])
async def test_metrics_of_the_episode_are_taken_once_at_its_end(
    max_turns: int, ending: Ending
) -> None:
    texts = iter(["on", "on", "end"])

    class Says:
        async def reply(self, *_: object) -> Message:
            return _say(next(texts))

    trajectory = await run_episode(
        TASK,
        skyrl_gym_factory(SkyrlGymSettings(env_id=f"{__name__}:OwnEnv", max_turns=4)),
        lambda _, observation, __: MessageConversation(
            observation, model=Says(), sampling=SamplingParams()
        ),
        Limits(max_turns=max_turns, max_input_length=100, trajectory_timeout_seconds=0),
    )
    n = len(trajectory.turns)
    assert (trajectory.ending, OwnEnv.last.n_metrics) == (ending, 1)
    assert [turn.info.get("turns") for turn in trajectory.turns] == [None] * (n - 1) + [float(n)]
    group = Group(task_key="t", env_key="own", trajectories=(trajectory,))
    assert episode_metrics([group])["environment/own/turns"] == n


async def test_rewards_add_up_to_the_grade_and_numbers_are_info() -> None:
    env = await _open()
    steps = [await env.step(_say(text)) for text in ("on", "on", "end")]
    assert [step.reward for step in steps] == [0.25, 0.25, 0.25]
    assert [step.info for step in steps] == [{}, {}, {"score": 2.0}]
    grade = await env.grade()
    assert grade is not None
    assert (grade.reward, grade.success) == (0.75, False)
    assert grade.parts == {"turn_0": 0.25, "turn_1": 0.25, "turn_2": 0.25}
    with pytest.raises(EnvError, match="task t: the env is done; open another"):
        await env.step(_say("on"))
    await env.close()


async def test_an_env_lives_in_one_thread_that_is_not_the_event_loops() -> None:
    env = await _open()
    await env.step(_say("on"))
    await env.close()
    (thread,) = OwnEnv.last.threads
    assert thread is not threading.main_thread()


async def test_no_workers_means_the_event_loops_thread() -> None:
    env = await _open(max_env_workers=0)
    await env.step(_say("end"))
    await env.close()
    assert OwnEnv.last.threads == {threading.main_thread()}


async def test_an_async_method_is_preferred() -> None:
    env = await _open("AwaitedEnv")
    assert (await env.step(_say("on"))).reward == 2.0
    await env.close()


async def test_a_step_that_hangs_holds_neither_its_deadline_nor_its_siblings() -> None:
    one_worker = SkyrlGymSettings(env_id=f"{__name__}:OwnEnv", max_turns=4, max_env_workers=1)
    factory = skyrl_gym_factory(one_worker)
    hung = await factory(TASK)
    await hung.reset()
    stuck = OwnEnv.last
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await hung.step(_say("hang"))
    async with asyncio.timeout(1):
        sibling = await factory(TASK)
        await sibling.reset()
        assert (await sibling.step(_say("end"))).done
        await sibling.close()
        await hung.close()
    assert not stuck.closed.is_set()
    stuck.released.set()
    assert await asyncio.to_thread(stuck.closed.wait, 1)


async def test_an_env_that_exits_ends_its_episode_only() -> None:
    env = await _open()
    with pytest.raises(EnvError, match=r"the env raised SystemExit\(3\)"):
        await env.step(_say("exit"))
    await env.close()


@pytest.mark.parametrize(
    ("produced", "reason"),
    [
        ("trim", r"rewrites the model's text \(postprocessed_action\); end it earlier"),
        ("forget", r"rewrites the conversation so far \(modified_chat_history\); disable its"),
        (
            "show",
            "the env returned the message {'role': 'user', 'content': .*; use a role of system, user",
        ),
    ],
)
async def test_what_an_env_may_not_do_is_refused_with_a_reason(produced: str, reason: str) -> None:
    env = await _open()
    with pytest.raises(EnvError, match=f"task t: .*{reason}"):
        await env.step(_say(produced))
    await env.close()


def test_the_env_reads_all_that_the_model_wrote() -> None:
    call = ToolCall(id="0", name="find", arguments={"city": "Zürich"})
    action = Message(
        role="assistant",
        content="Now.",
        reasoning="Where?",
        tool_calls=(call,),
        malformed_calls=("<tool_call>{",),
    )
    assert format_action(action) == (
        "<think>\nWhere?\n</think>\n\nNow.\n"
        '<tool_call>\n{"name": "find", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        "<tool_call>{"
    )
    assert format_action(Message(role="assistant")) == ""


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("gms8k", "env_id='gms8k' is not registered; choose from aime, gsm8k"),
        ("no_such_room:Env", "env_id='no_such_room:Env' cannot be imported: No module"),
        ("skyrl_gym:Nothing", "env_id='skyrl_gym:Nothing' cannot be imported: module"),
    ],
)
def test_an_env_that_does_not_exist_is_named(env_id: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.skyrl_gym.{sentence}"):
        skyrl_gym_factory(SkyrlGymSettings(env_id=env_id, max_turns=1))


def test_a_package_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(MissingExtraError, match=r"skyrl-gym is not installed.*\.\[skyrl-gym\]"):
        skyrl_gym_factory(SkyrlGymSettings(env_id="gsm8k", max_turns=1))


async def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    with gym_case("search", tmp_path) as (_, task):
        settings = SkyrlGymSettings(env_id="search", max_turns=1, env_config={"topk": 1})
        env = await skyrl_gym_factory(settings)(task)
        with pytest.raises(AttributeError, match="search_url"):
            await env.reset()
        await env.close()

"""The `environment` section selects the adapter of a task; an invalid name is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from skyfleet.chat.message import Message
from skyfleet.config.loading import load_config
from skyfleet.envs.agentdojo.env import AgentDojoEnv
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
from skyfleet.envs.env import EnvFactory, close_env
from skyfleet.envs.fleet.env import FleetEnv
from skyfleet.envs.mcp.client import MCPEnv
from skyfleet.envs.openenv.client import OpenEnvEnv
from skyfleet.envs.registry import check_task_classes, env_factory
from skyfleet.envs.skyrl_gym import SkyrlGymEnv
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks
from skyfleet.worlds.env import WorldEnv


def factory(*words: str) -> EnvFactory:
    return env_factory(load_config("", words))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("world",), WorldEnv),
        (("openenv", "environment.openenv.base_url=http://127.0.0.1:9"), OpenEnvEnv),
        (
            (
                "mcp",
                "environment.mcp.url=http://127.0.0.1:9/mcp",
                "environment.mcp.reward=math:fsum",
            ),
            MCPEnv,
        ),
        (("fleet_task", "environment.skyrl_gym.fleet_task.api_key=secret"), FleetEnv),
        (("skyrl_gym", "environment.skyrl_gym.env_id=gsm8k"), SkyrlGymEnv),
        (("skyfleet.worlds.catalog:open_world",), WorldEnv),
    ],
)
async def test_an_env_class_is_a_known_name_or_a_function_of_your_own(
    words: tuple[str, ...], kind: type
) -> None:
    env_class, *others = words
    (task,) = generate_world_tasks("github", split="train", count=1)
    assert isinstance(await factory(f"environment.env_class={env_class}", *others)(task), kind)


async def test_one_environment_may_have_a_class_of_its_own() -> None:
    open_env = factory("environment.env_classes={agentdojo-slack: agentdojo}")
    (task,) = generate_world_tasks("github", split="train", count=1)
    assert isinstance(await open_env(task), WorldEnv)
    assert isinstance(await open_env(agentdojo_tasks("slack")[0]), AgentDojoEnv)


async def test_a_world_of_ones_own_can_be_named() -> None:
    open_env = factory("environment.worlds=[skyfleet.worlds.github:github]")
    (task,) = generate_world_tasks("github", split="train", count=1)
    assert isinstance(await open_env(task), WorldEnv)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["environment.env_class=wrold"], "'wrold' is unknown; did you mean world?"),
        (["environment.env_class=zzz"], "env_class='zzz' is unknown; choose from world, fleet"),
        (["environment.env_class=tests.no_such_room:f"], "cannot be imported: No module"),
        (["environment.env_class=tests.fakes.counter_env:f"], "cannot be imported: module"),
        (["environment.env_class=:f"], "environment.env_class=':f' cannot be imported"),
        (["environment.env_class=.worlds:f"], "'.worlds:f' cannot be imported"),
        (["environment.env_classes={shop: wrold}"], r"env_classes\.shop='wrold' is unknown"),
        (["environment.env_class=openenv"], r"environment\.openenv\.base_url is not set"),
        (["environment.env_class=mcp"], "environment.mcp does not say how to grade"),
        (["environment.env_class=skyrl_gym"], r"skyrl_gym\.env_id is not set"),
        (["environment.env_class=fleet_task"], "api_key is empty; set FLEET_API_KEY"),
        (["environment.worlds=[math:pi]"], "name a World"),
        (
            [
                "environment.env_class=fleet_task",
                "environment.skyrl_gym.fleet_task.api_key=key",
                "environment.skyrl_gym.fleet_task.ttl_seconds=60",
            ],
            r"ttl_seconds=60 is below generator\.trajectory_timeout_seconds=900",
        ),
    ],
)
def test_an_env_that_cannot_be_found_is_one_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=sentence) as caught:
        factory(*words)
    assert "\n" not in str(caught.value)


def gym_task(**fields: object) -> Task:
    """A row in SkyRL's format: the columns besides the prompt are metadata."""
    return Task(
        key="g",
        env_key="gsm8k",
        prompt="What is 48 + 24?",
        metadata={"reward_spec": {"ground_truth": "72"}, "extra_info": {"split": "train"}},
    ).model_copy(update=fields)


class Row(Task):
    """A row as SkyRL's parquet files hold it: chat messages and its own environment."""

    messages: tuple[Mapping[str, str], ...] = ()
    env_class: str | None = None

    @property
    def chat(self) -> list[dict[str, str]]:
        return [dict(message) for message in self.messages]


def row(**fields: object) -> Row:
    return Row(**gym_task().model_dump()).model_copy(update=fields)


async def test_an_environment_of_skyrl_gym_is_named_by_its_own_name() -> None:
    env = await factory("environment.env_class=gsm8k")(gym_task())
    assert isinstance(env, SkyrlGymEnv)
    await env.reset()
    step = await env.step(Message(role="assistant", content="#### 72"))
    assert (step.done, step.reward) == (True, 1.0)
    await env.close()


async def test_the_messages_of_a_row_are_the_prompt() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 48 + 24?"},
    ]
    env = await factory("environment.env_class=gsm8k")(row(messages=tuple(chat)))
    observation = await env.reset()
    assert [(one.role, one.text) for one in observation.messages] == [
        ("system", "Be brief."),
        ("user", "What is 48 + 24?"),
    ]
    await close_env(env)


async def test_a_row_may_name_its_own_environment() -> None:
    open_env = factory("environment.env_class=world")
    assert isinstance(await open_env(row(env_class="gsm8k")), SkyrlGymEnv)
    (task,) = generate_world_tasks("github", split="train", count=1)
    assert isinstance(await open_env(task), WorldEnv)


async def test_env_classes_of_the_run_come_before_the_rows_own() -> None:
    open_env = factory("environment.env_classes={github: world}")
    (task,) = generate_world_tasks("github", split="train", count=1)
    named = Row(**task.model_dump()).model_copy(update={"env_class": "gsm8k"})
    assert isinstance(await open_env(named), WorldEnv)


@pytest.mark.parametrize(
    ("env_class", "sentence"),
    [
        ("gms8k", "env_class of task g='gms8k' is unknown; did you mean gsm8k?"),
        ("os:system", r"env_class='os:system' of task g names code; set environment\.env_class"),
    ],
)
async def test_a_row_with_an_unknown_environment_is_named(env_class: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        await factory()(row(env_class=env_class))
    with pytest.raises(ConfigError, match=sentence):
        check_task_classes(load_config("", []), [gym_task(), row(env_class=env_class)])


def test_rows_with_known_environments_pass_the_check() -> None:
    check_task_classes(load_config("", []), [gym_task(), row(env_class="gsm8k")])
    own = load_config("", ["environment.env_classes={gsm8k: world}"])
    check_task_classes(own, [row(env_class="no_such_env")])


def test_without_skyrl_gym_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ConfigError, match="such as gsm8k, need the extra skyrl-gym"):
        factory("environment.env_class=gsm8k")

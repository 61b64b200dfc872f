"""`environment` names what opens a task's env; what it does not name well is one sentence."""

from __future__ import annotations

import pytest

from skyfleet.config.loading import load_config
from skyfleet.envs.agentdojo.env import AgentDojoEnv
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.fleet.env import FleetEnv
from skyfleet.envs.mcp.client import MCPEnv
from skyfleet.envs.openenv.client import OpenEnvEnv
from skyfleet.envs.registry import env_factory
from skyfleet.envs.skyrl_gym import SkyrlGymEnv
from skyfleet.errors import ConfigError
from skyfleet.worlds.catalog import world_tasks
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
    (task,) = world_tasks("github", split="train", count=1)
    assert isinstance(await factory(f"environment.env_class={env_class}", *others)(task), kind)


async def test_one_environment_may_have_a_class_of_its_own() -> None:
    open_env = factory("environment.env_classes={agentdojo-slack: agentdojo}")
    (task,) = world_tasks("github", split="train", count=1)
    assert isinstance(await open_env(task), WorldEnv)
    assert isinstance(await open_env(agentdojo_tasks("slack")[0]), AgentDojoEnv)


async def test_a_world_of_ones_own_can_be_named() -> None:
    open_env = factory("environment.worlds=[skyfleet.worlds.github:github]")
    (task,) = world_tasks("github", split="train", count=1)
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

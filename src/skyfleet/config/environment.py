"""Environment: the world a task runs in when its row does not say."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr

from skyfleet.config.section import Section, StrList


class FleetTask(Section):
    tasks_file: str | None = None
    """Task definitions as Fleet exports them."""
    api_key: SecretStr | None = None
    """Write ${oc.env:FLEET_API_KEY}; it is never shown."""
    ttl_seconds: int = Field(600, ge=1)
    """How long a hosted instance lives."""
    enable_context_tools: bool = False
    """The same as environment.enable_context_tools, for Fleet's envs alone."""
    partial_reward: bool = False
    """Reward the share of checks passed rather than all or nothing."""
    enable_hints: bool = False
    """Retry a failed task with a hint."""


class TauBench(Section):
    use_native_tool_calling: bool = False
    """The environments' half of generator.use_native_tool_calling, for all of them."""


class SkyrlGym(Section):
    env_id: str | None = None
    """For env_class=skyrl_gym: a registered name such as gsm8k, or module:Class."""
    env_config: dict[str, Any] = Field({})
    """What its constructor gets as env_config."""
    max_env_workers: int = Field(32, ge=0)
    """Threads for environments that block; 0 runs them inline."""
    fleet_task: FleetTask = FleetTask()
    tau_bench: TauBench = TauBench()


class OpenEnv(Section):
    base_url: str | None = None
    """An OpenEnv server, http://host:port."""
    message_timeout_seconds: float = Field(60, gt=0)
    capacity_wait_seconds: float = Field(300, ge=0)
    """How long a server that is full or restarting is tried again."""


class Mcp(Section):
    url: str | None = None
    """A server over streamable HTTP; {task_key} in it is the task's."""
    command: StrList = Field([])
    """Or one over stdio, started for every episode."""
    environment: dict[str, SecretStr] = Field({})
    """Variables for the command, such as {TOKEN: ${oc.env:TOKEN}}; they are never shown."""
    headers: dict[str, SecretStr] = Field({})
    """Sent to the url with every request; never shown."""
    call_timeout_seconds: float = Field(60, gt=0)
    reward: str | None = None
    """Your own module:function(task, messages) that gives a reward, a Grade or None."""
    grade_url: str | None = None
    """Or where the server itself tells the grade of a session."""
    seed_uri: str | None = None
    """Or, for the task's verifier: the resource that is the database before,"""
    current_uri: str | None = None
    """and the one that is the database now."""


class Environment(Section):
    env_class: str = "world"
    """What runs tasks: world, fleet_task, openenv, mcp, skyrl_gym, agentdojo, or module:function."""
    env_classes: dict[str, str] = Field({})
    """The same for single environments, by env_key, where a run mixes several kinds."""
    worlds: StrList = Field([])
    """Worlds of your own, module:name."""
    partial_reward: bool = False
    """In worlds: reward the share of checks passed rather than all or nothing."""
    enable_context_tools: bool = False
    """In every env: give the agent tools that shorten and search its own history, and show long \
answers in pages."""
    max_output_chars: int = Field(10_000, ge=1)
    """With those tools: a page."""
    openenv: OpenEnv = OpenEnv()
    mcp: Mcp = Mcp()
    skyrl_gym: SkyrlGym = SkyrlGym()

"""Environment: what runs a task, and the settings of each kind of environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr

from skyfleet.config.section import Section, StrList
from skyfleet.config.simulated_user import SimulatedUser


class FleetTask(Section):
    api_key: SecretStr | None = None
    """Write ${oc.env:FLEET_API_KEY}; it is redacted in every output."""
    ttl_seconds: int = Field(600, ge=1)
    """Lifetime of a hosted instance."""
    enable_context_tools: bool = False
    """environment.enable_context_tools for Fleet's environments only."""
    partial_reward: bool = False
    """Reward the share of checks passed instead of all or nothing."""


class TauBench(Section):
    use_native_tool_calling: bool = False
    """Whether environments offer native tool calling; generator.use_native_tool_calling must be set too."""


class SkyrlGym(Section):
    env_id: str | None = None
    """With env_class=skyrl_gym: a registered name such as gsm8k, or module:Class."""
    env_config: dict[str, Any] = Field({})
    """Passed to the environment's constructor as env_config."""
    max_env_workers: int = Field(32, ge=0)
    """Threads for environments that block; 0 runs them inline."""
    fleet_task: FleetTask = FleetTask()
    tau_bench: TauBench = TauBench()


class TauSuites(Section):
    package_user: Literal["llm", "react", "verify", "reflection"] | None = None
    """A user simulator of tau-bench, or with llm tau2's, instead of environment.user; needs litellm."""
    user_model: str = "gpt-4o"
    """What litellm calls the model of that simulator."""
    user_provider: str = "openai"
    """litellm's provider of that model."""


class OpenEnv(Section):
    base_url: str | None = None
    """An OpenEnv server, http://host:port."""
    headers: dict[str, SecretStr] = Field({})
    """Sent when a session is opened, such as {Authorization: Bearer ${oc.env:SKYFLEET_API_KEY}}; \
redacted in every output."""
    message_timeout_seconds: float = Field(60, gt=0)
    capacity_wait_seconds: float = Field(300, ge=0)
    """How long to retry a server that is full or restarting."""


class Mcp(Section):
    url: str | None = None
    """A server over streamable HTTP; {task_key} in it is replaced by the task's key."""
    command: StrList = Field([])
    """Or a server over stdio, started once per episode."""
    environment: dict[str, SecretStr] = Field({})
    """Variables for the command, such as {TOKEN: ${oc.env:TOKEN}}; redacted in every output."""
    headers: dict[str, SecretStr] = Field({})
    """Sent with every request to the url, and to a grade_url of the same server; redacted in every \
output."""
    call_timeout_seconds: float = Field(60, gt=0)
    reward: str | None = None
    """Your own module:function(task, messages), which returns a reward, a Grade or None."""
    grade_url: str | None = None
    """Or the URL at which the server returns the grade of a session."""
    seed_uri: str | None = None
    """Or, for the task's verifier: the resource that holds the database before the episode,"""
    current_uri: str | None = None
    """and the resource that holds the database now."""


class Verifier(Section):
    timeout_seconds: float = Field(30, gt=0)
    """Time for one verification; to wait for a worker does not count."""
    allow_unconfined: bool = False
    """Run verifiers of others even where neither bubblewrap nor the system call filter works."""


class Environment(Section):
    env_class: str = "world"
    """What runs tasks: world, fleet_task, openenv_fleet, openenv, mcp, skyrl_gym, agentdojo, tau_bench, tau2, \
bfcl, the name of a skyrl-gym environment such as gsm8k, or module:function."""
    env_classes: dict[str, str] = Field({})
    """env_class per env_key, for a run that mixes several kinds."""
    worlds: StrList = Field([])
    """Worlds of your own, each as module:name."""
    partial_reward: bool = False
    """In worlds: reward the share of checks passed instead of all or nothing."""
    verifier: Verifier = Verifier()
    """How verifier_code of tasks is run."""
    enable_context_tools: bool = False
    """In every environment: give the agent tools that shorten and search its own history, and split \
long tool results into pages."""
    max_output_chars: int = Field(10_000, ge=1)
    """Characters per page, with enable_context_tools."""
    isolation: Literal["auto", "none", "thread", "process"] = "auto"
    """Where an environment of your own (module:function, or a Python object) runs: in the event loop, \
in a thread per episode, or in worker processes. auto moves the later episodes of one that blocks."""
    worker_memory_gb: float = Field(8, ge=0)
    """Address space of a worker process; 0 sets no limit."""
    close_timeout_seconds: float = Field(30, gt=0)
    """For closing an environment, and for a cancelled call to end before it is abandoned."""
    max_observation_chars: int = Field(10_000_000, ge=0)
    """An observation with more characters ends its episode as context_full, unread; 0 disables it."""
    user: SimulatedUser = SimulatedUser()
    """Who talks to the agent in conversational environments."""
    tau_bench: TauSuites = TauSuites()
    """Of env_class tau_bench and tau2."""
    openenv: OpenEnv = OpenEnv()
    mcp: Mcp = Mcp()
    skyrl_gym: SkyrlGym = SkyrlGym()

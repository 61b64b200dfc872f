"""Environment: the world a task runs in when its row does not say."""

from __future__ import annotations

from pydantic import Field, SecretStr

from skyfleet.config.section import Section


class FleetTask(Section):
    tasks_file: str | None = None
    """Task definitions as Fleet exports them."""
    api_key: SecretStr | None = None
    """Write ${oc.env:FLEET_API_KEY}; it is never shown."""
    ttl_seconds: int = Field(600, ge=1)
    """How long a hosted instance lives."""
    enable_context_tools: bool = False
    """Give the agent tools that shorten its own history."""
    partial_reward: bool = False
    """Reward the share of checks passed rather than all or nothing."""
    enable_hints: bool = False
    """Retry a failed task with a hint."""


class TauBench(Section):
    use_native_tool_calling: bool = False
    """The engine renders the tools and parses the calls itself."""


class SkyrlGym(Section):
    max_env_workers: int = Field(32, ge=0)
    """Threads for environments that block; 0 runs them inline."""
    fleet_task: FleetTask = FleetTask()
    tau_bench: TauBench = TauBench()


class Environment(Section):
    env_class: str = "world"
    """What runs a task whose row names none; SkyRL's default is gsm8k."""
    skyrl_gym: SkyrlGym = SkyrlGym()

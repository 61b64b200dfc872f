"""FleetSettings: address, credentials, timeouts and retries of the Fleet adapter."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skyfleet.config.environment import FleetTask
from skyfleet.errors import ConfigError

FLEET_URL = "https://orchestrator.fleetai.com"
_GRADING_SECONDS = 300


def _base_url() -> str:
    return os.environ.get("FLEET_BASE_URL") or FLEET_URL


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    api_key: str = field(repr=False)
    base_url: str = field(default_factory=_base_url)
    """FLEET_BASE_URL if it is set, as in Fleet's own client."""
    ttl_seconds: int = FleetTask().ttl_seconds
    """How long Fleet keeps an instance that is not closed."""
    partial_reward: bool = False
    """A failed task earns the share of its checks that passed."""
    provisioning_tries: int = 5
    provisioning_timeout_seconds: float = 900
    """Per try: a node may have to be started."""
    tools_deadline_seconds: float = 60
    """How long a new instance may take to list its tools."""
    call_deadline_seconds: float = 90
    """Per tool call, retries included."""
    verifier_tries: int = 4
    verifier_timeout_seconds: float = 120
    first_wait_seconds: float = 2
    """Between two tries; it doubles each time."""
    max_result_characters: int = 100_000
    """A longer tool result is cut, with a note."""

    def __post_init__(self) -> None:
        if not self.api_key:
            raise ConfigError(
                "environment.skyrl_gym.fleet_task.api_key is empty; set FLEET_API_KEY"
            )
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"FLEET_BASE_URL={self.base_url!r}; write https://host")

    @classmethod
    def from_config(cls, section: FleetTask, *, trajectory_timeout_seconds: float) -> FleetSettings:
        api_key = section.api_key.get_secret_value() if section.api_key else None
        return cls(
            api_key=api_key or os.environ.get("FLEET_API_KEY", ""),
            ttl_seconds=_choose_ttl_seconds(section, trajectory_timeout_seconds),
            partial_reward=section.partial_reward,
        )

    def waits_seconds(self, tries: int) -> list[float]:
        """Return the pauses between so many tries."""
        return [self.first_wait_seconds * 2**n for n in range(tries - 1)]


def _choose_ttl_seconds(section: FleetTask, trajectory_timeout_seconds: float) -> int:
    """An instance must outlive its episode and the grading after it."""
    ttl_seconds = section.ttl_seconds
    if ttl_seconds == FleetTask().ttl_seconds:
        return max(ttl_seconds, int(trajectory_timeout_seconds) + _GRADING_SECONDS)
    if ttl_seconds < trajectory_timeout_seconds:
        raise ConfigError(
            f"environment.skyrl_gym.fleet_task.ttl_seconds={ttl_seconds} is below "
            f"generator.trajectory_timeout_seconds={trajectory_timeout_seconds:g}: an instance "
            "would end before its episode; raise the former or lower the latter"
        )
    return ttl_seconds

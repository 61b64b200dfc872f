"""FleetSettings: where Fleet is, who asks, and how long to wait for what."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skyfleet.config.environment import FleetTask
from skyfleet.errors import ConfigError

FLEET_URL = "https://orchestrator.fleetai.com"


def _base_url() -> str:
    return os.environ.get("FLEET_BASE_URL") or FLEET_URL


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    api_key: str = field(repr=False)
    base_url: str = field(default_factory=_base_url)
    """FLEET_BASE_URL where that is set, as in Fleet's own client."""
    ttl_seconds: int = FleetTask().ttl_seconds
    """How long Fleet keeps an instance that nobody closed."""
    partial_reward: bool = False
    """A failed task is worth the share of its checks that passed."""
    provisioning_tries: int = 5
    provisioning_timeout_seconds: float = 900
    """For one try: a node may have to be started."""
    tools_deadline_seconds: float = 60
    """How long a new instance may take until it lists its tools."""
    call_deadline_seconds: float = 90
    """For one tool call, retries included."""
    verifier_tries: int = 4
    verifier_timeout_seconds: float = 120
    first_wait_seconds: float = 2
    """Between two tries; it doubles each time."""
    max_result_characters: int = 100_000
    """Longer tool results are cut, and say so."""

    def __post_init__(self) -> None:
        if not self.api_key:
            raise ConfigError(
                "environment.skyrl_gym.fleet_task.api_key is empty; set FLEET_API_KEY"
            )
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"FLEET_BASE_URL={self.base_url!r}; write https://host")

    def waits_seconds(self, tries: int) -> list[float]:
        """The pauses between so many tries."""
        return [self.first_wait_seconds * 2**n for n in range(tries - 1)]

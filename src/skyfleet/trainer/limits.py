"""Build the limits of an episode from the configuration; needs no torch."""

from __future__ import annotations

from skyfleet.config.root import RunConfig
from skyfleet.envs.guard import Isolation
from skyfleet.rollouts.episode import Limits


def build_limits(config: RunConfig) -> Limits:
    return Limits(
        max_turns=config.generator.max_turns,
        max_input_length=config.generator.max_input_length,
        trajectory_timeout_seconds=config.generator.trajectory_timeout_seconds,
        close_timeout_seconds=config.environment.close_timeout_seconds,
        max_observation_chars=config.environment.max_observation_chars,
        isolation=Isolation(
            mode=config.environment.isolation,
            worker_memory_gb=config.environment.worker_memory_gb,
            max_observation_chars=config.environment.max_observation_chars,
        ),
    )

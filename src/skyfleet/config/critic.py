"""Critic: the model that expects rewards, for gae, and its optimiser."""

from __future__ import annotations

from pydantic import Field

from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.section import Section


class CriticModel(Section):
    path: str | None = Field(None, min_length=1)
    """As for the policy. The policy's own path begins with the policy as it stands when
    reinforcement begins; null has no critic."""


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(5e-6, gt=0)
    """SkyRL's default: a value head has more to learn than a policy."""


class Critic(Section):
    """Only for gae."""

    model: CriticModel = CriticModel()
    optimizer_config: CriticOptimizerConfig = CriticOptimizerConfig()

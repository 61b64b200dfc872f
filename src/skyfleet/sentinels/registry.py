"""Registry of all sentinels, in the order of a step; adding one is adding its line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyfleet.config.trainer import Mode, Sentinels
from skyfleet.errors import ConfigError, NoLearningSignalError
from skyfleet.sentinels import (
    advantage_checks,
    rollout_checks,
    sync_checks,
    trend_checks,
    update_checks,
)
from skyfleet.sentinels.finding import Sentinel
from skyfleet.sentinels.stages import (
    AdvantageStage,
    MetricsStage,
    RolloutStage,
    SyncStage,
    UpdateStage,
)

SENTINELS: tuple[Sentinel[Any], ...] = (
    Sentinel(RolloutStage, rollout_checks.sampled_tokens),
    Sentinel(RolloutStage, rollout_checks.loss_mask),
    Sentinel(RolloutStage, rollout_checks.policy_version),
    Sentinel(RolloutStage, rollout_checks.limits),
    Sentinel(RolloutStage, rollout_checks.repeated_draws),
    Sentinel(RolloutStage, rollout_checks.env_balance),
    Sentinel(RolloutStage, rollout_checks.failed_grades),
    Sentinel(RolloutStage, rollout_checks.unknown_grades, is_invariant=False),
    Sentinel(AdvantageStage, advantage_checks.batch_accounting),
    Sentinel(AdvantageStage, advantage_checks.filters),
    Sentinel(AdvantageStage, advantage_checks.trained_tokens),
    Sentinel(AdvantageStage, advantage_checks.token_conservation),
    Sentinel(AdvantageStage, advantage_checks.advantages),
    Sentinel(UpdateStage, update_checks.loss_inputs),
    Sentinel(UpdateStage, update_checks.loss_advantages),
    Sentinel(UpdateStage, update_checks.gradient),
    Sentinel(UpdateStage, update_checks.reference),
    Sentinel(UpdateStage, update_checks.logprob_gap),
    Sentinel(UpdateStage, update_checks.moved_weights),
    Sentinel(SyncStage, sync_checks.served_version),
    Sentinel(SyncStage, sync_checks.engine_weights),
    Sentinel(MetricsStage, trend_checks.nothing_graded, error=NoLearningSignalError),
    Sentinel(MetricsStage, trend_checks.nothing_learned),
    Sentinel(MetricsStage, trend_checks.finite_numbers, is_invariant=False),
    Sentinel(MetricsStage, trend_checks.entropy_collapse, is_invariant=False),
    Sentinel(MetricsStage, trend_checks.parse_failures, is_invariant=False),
    Sentinel(MetricsStage, trend_checks.equal_rewards, is_invariant=False),
    Sentinel(MetricsStage, trend_checks.idle_filter, is_invariant=False),
)


def build_modes(section: Sentinels) -> Mapping[str, Mode]:
    """The mode of each sentinel. A warning stops a run only if its own mode says so."""
    names = [sentinel.name for sentinel in SENTINELS]
    if unknown := sorted(section.modes.keys() - set(names)):
        raise ConfigError(
            f"trainer.sentinels.modes.{unknown[0]} is not a sentinel; choose from {sorted(names)}"
        )
    defaults: dict[str, Mode] = {
        sentinel.name: section.mode if sentinel.is_invariant or section.mode == "off" else "warn"
        for sentinel in SENTINELS
    }
    return defaults | section.modes

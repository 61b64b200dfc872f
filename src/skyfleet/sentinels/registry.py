"""Roster: every sentinel, in the order of a step; adding one is adding its line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyfleet.config.sentinels import Mode, Sentinels
from skyfleet.errors import ConfigError, NoLearningSignalError
from skyfleet.sentinels import trend_checks as signs
from skyfleet.sentinels.advantages import advantages
from skyfleet.sentinels.batch_accounting import batch_accounting
from skyfleet.sentinels.engine_weights import engine_weights
from skyfleet.sentinels.env_balance import env_balance
from skyfleet.sentinels.filters import filters
from skyfleet.sentinels.finding import Sentinel
from skyfleet.sentinels.grades import failed_grades, unknown_grades
from skyfleet.sentinels.gradient import gradient, moved_weights
from skyfleet.sentinels.limits import limits
from skyfleet.sentinels.logprob_gap import logprob_gap
from skyfleet.sentinels.loss_inputs import loss_advantages, loss_inputs
from skyfleet.sentinels.loss_mask import loss_mask
from skyfleet.sentinels.policy_version import policy_version, served_version
from skyfleet.sentinels.reference import reference
from skyfleet.sentinels.repeated_draws import repeated_draws
from skyfleet.sentinels.sampled_tokens import sampled_tokens
from skyfleet.sentinels.stages import Credited, Learned, Played, Synced, Told
from skyfleet.sentinels.trained_tokens import token_conservation, trained_tokens

ROSTER: tuple[Sentinel[Any], ...] = (
    Sentinel(Played, sampled_tokens),
    Sentinel(Played, loss_mask),
    Sentinel(Played, policy_version),
    Sentinel(Played, limits),
    Sentinel(Played, repeated_draws),
    Sentinel(Played, env_balance),
    Sentinel(Played, failed_grades),
    Sentinel(Played, unknown_grades, promise=False),
    Sentinel(Credited, batch_accounting),
    Sentinel(Credited, filters),
    Sentinel(Credited, trained_tokens),
    Sentinel(Credited, token_conservation),
    Sentinel(Credited, advantages),
    Sentinel(Learned, loss_inputs),
    Sentinel(Learned, loss_advantages),
    Sentinel(Learned, gradient),
    Sentinel(Learned, reference),
    Sentinel(Learned, logprob_gap),
    Sentinel(Learned, moved_weights),
    Sentinel(Synced, served_version),
    Sentinel(Synced, engine_weights),
    Sentinel(Told, signs.nothing_graded, error=NoLearningSignalError),
    Sentinel(Told, signs.nothing_learned),
    Sentinel(Told, signs.finite_numbers, promise=False),
    Sentinel(Told, signs.entropy_collapse, promise=False),
    Sentinel(Told, signs.parse_failures, promise=False),
    Sentinel(Told, signs.equal_rewards, promise=False),
    Sentinel(Told, signs.idle_filter, promise=False),
)


def build_modes(section: Sentinels) -> Mapping[str, Mode]:
    """What each does when it finds something. A sign stops a run only where it is told to."""
    names = [sentinel.name for sentinel in ROSTER]
    if unknown := sorted(section.modes.keys() - set(names)):
        raise ConfigError(
            f"trainer.sentinels.modes.{unknown[0]} is no sentinel; choose from {sorted(names)}"
        )
    usual: dict[str, Mode] = {
        sentinel.name: section.mode if sentinel.promise or section.mode == "off" else "warn"
        for sentinel in ROSTER
    }
    return usual | section.modes

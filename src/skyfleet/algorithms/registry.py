"""Registry: estimators and policy losses by the names that a configuration uses.

A name is a built-in one (listed in `skyfleet.config.algorithm`), `module:object` of a user's module,
or `python:NAME` of an object that the running program registered.
"""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar, cast

from skyfleet.algorithms.estimator import (
    ESTIMATOR_KEY,
    AdvantageEstimator,
    BatchEstimator,
    Estimator,
    estimator_from_function,
)
from skyfleet.algorithms.losses.loss import (
    LOSS_KEY,
    LossFunction,
    PolicyLoss,
    Selector,
    loss_from_function,
)
from skyfleet.algorithms.losses.off_policy import with_correction
from skyfleet.config.algorithm import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    Algorithm,
)
from skyfleet.config.imports import import_named
from skyfleet.errors import ConfigError

_PREFIX = "python:"

_registered_estimators: dict[str, AdvantageEstimator] = {}
_registered_losses: dict[str, PolicyLoss] = {}

T = TypeVar("T", AdvantageEstimator, PolicyLoss)


def register_estimator(estimator: AdvantageEstimator) -> str:
    """Make an estimator usable in this process; returns its name in a configuration.

    A later registration replaces an earlier one of the same name, as a notebook cell that runs
    again needs it.
    """
    _registered_estimators[estimator.name] = estimator
    return f"{_PREFIX}{estimator.name}"


def register_policy_loss(loss: PolicyLoss) -> str:
    """Make a policy loss usable in this process; returns its name in a configuration."""
    _registered_losses[loss.name] = loss
    return f"{_PREFIX}{loss.name}"


def get_estimator(name: str) -> AdvantageEstimator:
    """The estimator that `trainer.algorithm.advantage_estimator` names; imports a user's module."""
    if known := find_estimator(name):
        return known
    target = import_named(name, key=ESTIMATOR_KEY)
    if isinstance(target, AdvantageEstimator):
        return target
    if isinstance(target, BatchEstimator):
        return estimator_from_function(target.credit, name=name, scope="batch", key_value=name)
    if not callable(target):
        raise ConfigError(
            f"{ESTIMATOR_KEY}={name!r} is a {type(target).__name__}; name a function of a group's "
            "rewards, an AdvantageEstimator or a BatchEstimator"
        )
    return estimator_from_function(target, name=name, key_value=name)


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss that `trainer.algorithm.policy_loss_type` names; imports a user's module."""
    if known := find_policy_loss(name):
        return known
    target = import_named(name, key=LOSS_KEY)
    if isinstance(target, PolicyLoss):
        return target
    return loss_from_function(target, name=name, key_value=name)


def find_estimator(name: str) -> AdvantageEstimator | None:
    """A built-in or registered estimator; None for one in a user's module, which is not imported."""
    return _find(name, ADVANTAGE_ESTIMATORS, _registered_estimators, key=ESTIMATOR_KEY)


def find_policy_loss(name: str) -> PolicyLoss | None:
    """A built-in or registered loss; None for one in a user's module, which is not imported."""
    return _find(name, POLICY_LOSSES, _registered_losses, key=LOSS_KEY)


def built_in_estimators() -> list[AdvantageEstimator]:
    return [get_estimator(name) for name in ADVANTAGE_ESTIMATORS]


def built_in_losses() -> list[PolicyLoss]:
    return [get_policy_loss(name) for name in POLICY_LOSSES]


def build_advantage_estimator(algorithm: Algorithm) -> Estimator:
    """The configured estimator, with its settings."""
    return get_estimator(algorithm.advantage_estimator).build(algorithm)


def build_policy_loss(algorithm: Algorithm) -> LossFunction:
    """The configured loss, with its settings and its off-policy correction."""
    loss = get_policy_loss(algorithm.policy_loss_type).build(algorithm)
    return with_correction(loss, algorithm.off_policy_correction)


def build_selector(algorithm: Algorithm) -> Selector | None:
    """The token selector of a loss that compares the tokens of a whole mini-batch."""
    build = get_policy_loss(algorithm.policy_loss_type).build_selector
    return build(algorithm) if build else None


def _find(name: str, built_in: dict[str, str], registered: dict[str, T], *, key: str) -> T | None:
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return cast("T", getattr(import_module(module), attribute))
    if name.startswith(_PREFIX):
        if (registered_name := name.removeprefix(_PREFIX)) in registered:
            return registered[registered_name]
        raise ConfigError(
            f"{key}={name!r} is not registered in this process; registered are "
            f"{sorted(registered)}. Pass the object again, as the script that started the run did"
        )
    if ":" not in name:
        raise ConfigError(f"{key}={name!r}; choose from {sorted(built_in)}, or module:function")
    return None

"""Estimators by name: those of the package, and any other as `module:function`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from skyfleet.algorithms.advantages import Estimator, WholeBatch, grpo, maxrl, rloo
from skyfleet.algorithms.token_credit import (
    distillation,
    generalized_advantage,
    reinforce_plus_plus,
)
from skyfleet.config.algorithm import Algorithm
from skyfleet.config.imports import import_named, with_kwargs
from skyfleet.errors import ConfigError

_KEY = "trainer.algorithm.advantage_estimator"


def estimator_of(algorithm: Algorithm) -> Estimator:
    """One's own takes a group's rewards and returns an advantage each, or is a `WholeBatch`."""
    name = algorithm.advantage_estimator
    if ":" in name:
        return _own(name, algorithm.advantage_estimator_kwargs)
    named: dict[str, Estimator] = {
        "grpo": partial(grpo, norm_by_std=algorithm.grpo_norm_by_std),
        "rloo": rloo,
        "maxrl": maxrl,
        "reinforce++": WholeBatch(credit=partial(reinforce_plus_plus, gamma=algorithm.gamma)),
        "gae": WholeBatch(
            credit=partial(generalized_advantage, gamma=algorithm.gamma, lambd=algorithm.lambd)
        ),
        "distillation": WholeBatch(credit=distillation),
    }
    if name not in named:
        raise ConfigError(f"{_KEY}={name!r}; choose from {sorted(named)}, or module:function")
    return named[name]


def _own(name: str, kwargs: Mapping[str, Any]) -> Estimator:
    own = import_named(name, key=_KEY)
    given = partial(with_kwargs, kwargs=kwargs, named=f"{_KEY}={name!r}", key=f"{_KEY}_kwargs")
    if isinstance(own, WholeBatch):
        return WholeBatch(credit=given(own.credit, takes="a batch's samples"))
    if callable(own):
        return given(own, takes="a group's rewards")
    raise ConfigError(
        f"{_KEY}={name!r} is a {type(own).__name__}; name a function of a group's rewards, or a "
        "WholeBatch"
    )

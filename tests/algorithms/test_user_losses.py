"""A policy loss from a user's module: found by name, called with its settings, output checked."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from tests.algorithms.test_losses import inputs

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.policy_gradient import importance_sampling
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.registry import build_policy_loss
from skyfleet.config.algorithm import Algorithm, OffPolicyCorrection
from skyfleet.errors import ConfigError

CLIP: dict[str, Any] = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
PPO = "skyfleet.algorithms.losses.ppo:ppo_clip"


def test_a_users_loss_is_named_by_module_and_function() -> None:
    name = "skyfleet.algorithms.losses.policy_gradient:importance_sampling"
    given = inputs([3.0, 0.1], [1.0, -2.0])
    own = build_policy_loss(Algorithm(policy_loss_type=name))(given)
    assert torch.equal(own.loss_T, importance_sampling(given).loss_T)
    with pytest.raises(ConfigError, match="policy_loss_type='nowhere:loss' cannot be imported"):
        build_policy_loss(Algorithm(policy_loss_type="nowhere:loss"))


def test_a_users_loss_gets_its_settings() -> None:
    given = inputs([1.0, 9.0], [1.0, 1.0])
    own = build_policy_loss(Algorithm(policy_loss_type=PPO, policy_loss_kwargs=CLIP))(given)
    assert torch.equal(own.loss_T, ppo_clip(given, **CLIP).loss_T)


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({}, "missing a required "),
        (CLIP | {"eps_clip": 0.2}, "got an unexpected keyword argument 'eps_clip'"),
        (CLIP | {"inputs": 1}, "multiple values for argument 'inputs'"),
    ],
)
def test_settings_that_a_users_loss_does_not_take_are_refused(
    kwargs: dict[str, float], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_policy_loss(Algorithm(policy_loss_type=PPO, policy_loss_kwargs=kwargs))
    error = str(caught.value)
    assert error.startswith(
        f"trainer.algorithm.policy_loss_type='{PPO}' is called with LossInputs and "
        f"trainer.algorithm.policy_loss_kwargs={kwargs}: {complaint}"
    )
    assert error.endswith(
        "; beside LossInputs it takes eps_clip_low, eps_clip_high; see examples/add_a_loss"
    )


def test_an_object_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a callable object; name a function"):
        build_policy_loss(Algorithm(policy_loss_type="math:pi"))


def averaged(given: LossInputs) -> LossOutput:
    return LossOutput(loss_T=-(given.logprobs_T * given.advantages_T).mean())


def counted_once(given: LossInputs) -> LossOutput:
    return LossOutput(loss_T=-given.logprobs_T, metrics_B={"x": given.advantages_T})


def spread_once(given: LossInputs) -> LossOutput:
    return LossOutput(loss_T=-given.logprobs_T, stats_T={"x": given.advantages_T[:1]})


def bare(given: LossInputs) -> Any:
    return -given.logprobs_T


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        (
            "averaged",
            r"averaged' returned loss_T of shape \(\), expected \(2,\); leave the mean to",
        ),
        (
            "counted_once",
            r"counted_once' returned metrics_B\['x'\] of shape \(2,\), expected \(1,\)",
        ),
        (
            "spread_once",
            r"spread_once' returned stats_T\['x'\] of shape \(1,\), expected \(2,\)",
        ),
        ("bare", "bare' returns a Tensor; return a LossOutput"),
    ],
)
@pytest.mark.parametrize("correction", [None, "token"])
def test_an_output_of_another_shape_is_refused_before_it_broadcasts(
    own: str, complaint: str, correction: Literal["token"] | None
) -> None:
    algorithm = Algorithm(
        policy_loss_type=f"{__name__}:{own}",
        off_policy_correction=OffPolicyCorrection(tis_ratio_type=correction),
    )
    with pytest.raises(ConfigError, match=complaint):
        build_policy_loss(algorithm)(inputs([1.0, 1.1], [1.0, -1.0]))

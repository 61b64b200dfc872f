"""A key that is set while another key disables it is reported with that key."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from skyfleet.algorithms.advantages import BatchEstimator, estimator_of
from skyfleet.algorithms.losses.registry import build_policy_loss
from skyfleet.config.algorithm import POLICY_LOSSES, Algorithm
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.config.warnings import ALGORITHM_DEPENDENCIES, DEPENDENCIES, warn_unused_keys

ALGORITHM = "trainer.algorithm"
NO_KL = f"{ALGORITHM}.use_kl_loss=false"
ADAPTIVE = f"{ALGORITHM}.kl_ctrl.type=adaptive"


def warn(*overrides: str) -> list[str]:
    return list(warn_unused_keys(load_config("", overrides)))


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("kl_ctrl.type=adaptive", "use_kl_in_reward=false"),
        ("kl_ctrl.horizon=500", "use_kl_in_reward=false"),
        ("entropy_loss_coef=0.1", "use_entropy_loss=false"),
        ("overlong_max_len=100", "overlong_buffer_len=null"),
        ("overlong_buffer_penalty_factor=0.5", "overlong_buffer_len=null"),
        ("gamma=0.9", "advantage_estimator=grpo"),
        ("value_clip=null", "advantage_estimator=grpo"),
        ("clip_ratio_c=4.0", "policy_loss_type=regular"),
        ('policy_loss_kwargs={"width": 0.1}', "policy_loss_type=regular"),
        ('advantage_estimator_kwargs={"bar": 0.1}', "advantage_estimator=grpo"),
        ("cispo.cispo_anchor=rollout", "policy_loss_type=regular"),
        ("max_seq_len=100", "loss_reduction=token_mean"),
        ("dynamic_sampling.max_sample_batches=5", "dynamic_sampling.type=null"),
        ("dynamic_sampling.min_replace_ratio=0.5", "dynamic_sampling.type=null"),
        (
            "off_policy_correction.geo_mask_high=1.1",
            "off_policy_correction.sequence_mask_metric=null",
        ),
    ],
)
def test_an_unused_key_is_reported_with_the_key_that_disables_it(override: str, cause: str) -> None:
    assert warn(f"{ALGORITHM}.{override}") == [
        f"{ALGORITHM}.{override} has no effect while {ALGORITHM}.{cause}"
    ]


def test_keys_of_one_cause_are_one_sentence() -> None:
    overrides = ("trainer.ref.model.path=other", f"{ALGORITHM}.kl_loss_coef=0.1", ADAPTIVE)
    assert warn(NO_KL, *overrides, "trainer.critic.optimizer_config.lr=0.1") == [
        f"{', '.join(overrides)} have no effect while {NO_KL} and {ALGORITHM}.use_kl_in_reward=false",
        "trainer.critic.optimizer_config.lr=0.1 has no effect while "
        f"{ALGORITHM}.advantage_estimator=grpo",
    ]


def test_lora_keys_are_unused_without_a_rank() -> None:
    lora = "trainer.policy.model.lora"
    overrides = (
        f"{lora}.alpha=32",
        f'{lora}.target_modules=["q_proj"]',
        f"{lora}.exclude_modules=v_proj",
    )
    assert warn(*overrides) == [f"{', '.join(overrides)} have no effect while {lora}.rank=0"]
    assert warn(*overrides, f"{lora}.rank=8") == []
    assert warn(f"{lora}.dropout=0.1") == []  # refused, whatever the rank


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ALGORITHM}.kl_loss_coef=0.1", "trainer.update_ref_every_epoch=true"),
        (NO_KL, f"{ALGORITHM}.use_kl_in_reward=true", ADAPTIVE, f"{ALGORITHM}.kl_ctrl.horizon=99"),
        (f"{ALGORITHM}.dynamic_sampling.type=filter", f"{ALGORITHM}.zero_variance_filter_tol=0.1"),
        (NO_KL, f"{ALGORITHM}.gamma=1.0", f"{ALGORITHM}.kl_loss_coef=0.001"),
        (f"{ALGORITHM}.policy_loss_type=my:loss", f"{ALGORITHM}.policy_loss_kwargs.width=0.1"),
        (
            f"{ALGORITHM}.advantage_estimator=my:bar",
            f"{ALGORITHM}.advantage_estimator_kwargs.by=1",
        ),
    ],
)
def test_a_key_that_is_read_or_holds_its_default_is_not_reported(
    overrides: tuple[str, ...],
) -> None:
    assert warn(*overrides) == []


def test_a_key_that_follows_another_is_set_once_it_differs() -> None:
    assert warn("trainer.policy.model.path=mine", NO_KL, "trainer.policy_mini_batch_size=2") == []
    (sentence,) = warn("trainer.critic_mini_batch_size=2")
    assert sentence.startswith("trainer.critic_mini_batch_size=2 has no effect while")


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "math:sqrt"])
def test_the_clip_is_unused_for_exactly_the_losses_that_do_not_take_it(name: str) -> None:
    reads = "eps_clip_high" in _keywords(build_policy_loss(Algorithm(policy_loss_type=name)))
    overrides = (f"{ALGORITHM}.policy_loss_type={name}", f"{ALGORITHM}.eps_clip_high=0.3")
    assert bool(warn(*overrides)) != reads


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++", "gae", "math:sqrt"])
@pytest.mark.parametrize("key", ["gamma", "lambd"])
def test_discounts_are_unused_for_exactly_the_estimators_that_do_not_take_them(
    name: str, key: str
) -> None:
    estimate = estimator_of(Algorithm(advantage_estimator=name))
    given = estimate.credit if isinstance(estimate, BatchEstimator) else estimate
    critic = ["trainer.critic.model.path=tiny"] if name == "gae" else []
    overrides = (f"{ALGORITHM}.advantage_estimator={name}", f"{ALGORITHM}.{key}=0.9", *critic)
    assert bool(warn(*overrides)) == (key not in _keywords(given))


def test_the_table_names_keys_that_exist() -> None:
    names = {
        f"trainer.{name}"
        for dependency in (*DEPENDENCIES, *ALGORITHM_DEPENDENCIES)
        for name in (*dependency.enabled_by, *dependency.keys)
    }
    keys = [f"{key}." for key in known_keys()]
    assert [name for name in names if not any(key.startswith(f"{name}.") for key in keys)] == []


def _keywords(function: Any) -> dict[str, Any]:
    return function.keywords if isinstance(function, partial) else {}

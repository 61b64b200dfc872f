"""A key that was set and that nobody reads is told so, with the key that would have it read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from skyfleet.algorithms.advantages import estimator_of
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.losses.registry import build_policy_loss
from skyfleet.config.algorithm import POLICY_LOSSES, Algorithm
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.config.unused_keys import GATES, idle_keys

ALGORITHM = "trainer.algorithm"
NO_KL = f"{ALGORITHM}.use_kl_loss=false"
ADAPTIVE = f"{ALGORITHM}.kl_ctrl.type=adaptive"


def told(*words: str) -> list[str]:
    return list(idle_keys(load_config("", words)))


@pytest.mark.parametrize(
    ("word", "cause"),
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
def test_a_key_that_nobody_reads_is_named_with_the_one_that_shuts_it(word: str, cause: str) -> None:
    assert told(f"{ALGORITHM}.{word}") == [
        f"{ALGORITHM}.{word} does nothing while {ALGORITHM}.{cause}"
    ]


def test_keys_of_one_cause_are_one_sentence() -> None:
    words = ("trainer.ref.model.path=other", f"{ALGORITHM}.kl_loss_coef=0.1", ADAPTIVE)
    assert told(NO_KL, *words, "trainer.critic.optimizer_config.lr=0.1") == [
        f"{', '.join(words)} do nothing while {NO_KL} and {ALGORITHM}.use_kl_in_reward=false",
        "trainer.critic.optimizer_config.lr=0.1 does nothing while "
        f"{ALGORITHM}.advantage_estimator=grpo",
    ]


def test_adapters_are_idle_without_a_rank() -> None:
    lora = "trainer.policy.model.lora"
    words = (
        f"{lora}.alpha=32",
        f'{lora}.target_modules=["q_proj"]',
        f"{lora}.exclude_modules=v_proj",
    )
    assert told(*words) == [f"{', '.join(words)} do nothing while {lora}.rank=0"]
    assert told(*words, f"{lora}.rank=8") == []
    assert told(f"{lora}.dropout=0.1") == []  # refused, whatever the rank


@pytest.mark.parametrize(
    "words",
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
def test_what_is_read_or_left_at_its_default_is_not_spoken_of(words: tuple[str, ...]) -> None:
    assert told(*words) == []


def test_a_key_that_follows_another_is_set_once_it_differs() -> None:
    assert told("trainer.policy.model.path=mine", NO_KL, "trainer.policy_mini_batch_size=2") == []
    (sentence,) = told("trainer.critic_mini_batch_size=2")
    assert sentence.startswith("trainer.critic_mini_batch_size=2 does nothing while")


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "math:sqrt"])
def test_the_clip_is_idle_for_just_those_losses_that_are_not_given_it(name: str) -> None:
    reads = "eps_clip_high" in _keywords(build_policy_loss(Algorithm(policy_loss_type=name)))
    words = (f"{ALGORITHM}.policy_loss_type={name}", f"{ALGORITHM}.eps_clip_high=0.3")
    assert bool(told(*words)) != reads


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++", "gae", "math:sqrt"])
@pytest.mark.parametrize("key", ["gamma", "lambd"])
def test_discounts_are_idle_for_just_those_estimators_that_are_not_given_them(
    name: str, key: str
) -> None:
    estimate = estimator_of(Algorithm(advantage_estimator=name))
    given = estimate.credit if isinstance(estimate, BatchEstimator) else estimate
    critic = ["trainer.critic.model.path=tiny"] if name == "gae" else []
    words = (f"{ALGORITHM}.advantage_estimator={name}", f"{ALGORITHM}.{key}=0.9", *critic)
    assert bool(told(*words)) == (key not in _keywords(given))


def test_the_table_names_keys_that_exist() -> None:
    names = {f"trainer.{name}" for gate in GATES for name in (*gate.opens, *gate.behind)}
    keys = [f"{key}." for key in known_keys()]
    assert [name for name in names if not any(key.startswith(f"{name}.") for key in keys)] == []


def _keywords(function: Any) -> dict[str, Any]:
    return function.keywords if isinstance(function, partial) else {}

"""A configuration is validated against the facts of its estimator and its policy loss."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.registry import build_advantage_estimator, build_policy_loss
from skyfleet.algorithms.validation import (
    algorithm_errors,
    algorithm_warnings,
    check_algorithm,
    unused_algorithm_keys,
)
from skyfleet.config.algorithm import POLICY_LOSSES, Algorithm
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.errors import ConfigError

ALGORITHM = "trainer.algorithm"
MAXRL = f"{ALGORITHM}.advantage_estimator=maxrl"
KL_IN_REWARD = (f"{ALGORITHM}.use_kl_in_reward=true", f"{ALGORITHM}.use_kl_loss=false")
GAE = (f"{ALGORITHM}.advantage_estimator=gae", "trainer.critic.model.path=tiny")
FILTER = f"{ALGORITHM}.zero_variance_filter=true"
REINFORCE = f"{ALGORITHM}.advantage_estimator=reinforce++"


def errors(*overrides: str) -> str:
    return "\n".join(algorithm_errors(load_config("", overrides)))


def warnings(*overrides: str) -> list[str]:
    return algorithm_warnings(load_config("", overrides))


def unused(*overrides: str) -> list[str]:
    return list(unused_algorithm_keys(load_config("", overrides)))


def test_all_errors_are_raised_together() -> None:
    config = load_config("", [MAXRL, *KL_IN_REWARD, GAE[1]])
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config)
    assert len(str(caught.value).splitlines()) == 2
    check_algorithm(load_config("", [MAXRL]))


def test_validation_needs_no_torch() -> None:
    code = (
        "import sys; from skyfleet.algorithms.validation import algorithm_warnings, check_algorithm\n"
        "from skyfleet.config.loading import load_config\n"
        f"config = load_config('', ['{ALGORITHM}.policy_loss_type=kl_cov'])\n"
        "check_algorithm(config); algorithm_warnings(config); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_maxrl_is_refused_if_a_mean_reward_can_be_negative() -> None:
    assert "use_kl_in_reward can push to 0 and below" in errors(MAXRL, *KL_IN_REWARD)
    overlong = (f"{ALGORITHM}.overlong_buffer_len=64", f"{ALGORITHM}.overlong_max_len=128")
    assert "overlong_buffer_len can push to 0 and below" in errors(MAXRL, *overlong)
    assert errors(MAXRL) == ""


def test_the_facts_of_a_users_estimator_object_are_validated() -> None:
    users = f"{ALGORITHM}.advantage_estimator=skyfleet.algorithms.advantages"
    assert "needs a critic, but trainer.critic.model.path is unset" in errors(f"{users}:GAE")
    assert "uses no critic" in errors(f"{users}:rloo", GAE[1])
    assert errors(f"{users}:rloo") == ""


def test_overlong_filtering_is_refused_with_kl_in_reward_for_group_estimators() -> None:
    masked = "generator.apply_overlong_filtering=true"
    assert "would pay no KL and raise the mean of their group" in errors(masked, *KL_IN_REWARD)
    assert errors(masked) == ""
    assert errors(masked, REINFORCE, *KL_IN_REWARD) == ""


def test_gae_needs_a_critic_and_no_other_estimator_accepts_one() -> None:
    config = load_config("", [*GAE, "trainer.policy_mini_batch_size=2"])
    check_algorithm(config)
    assert config.trainer.critic.optimizer_config.lr == 5e-6
    assert config.trainer.critic_mini_batch_size == 2  # the policy's by default
    assert "trainer.critic.model.path is unset; set it, for example to the policy's" in errors(
        GAE[0]
    )
    assert "advantage_estimator=grpo uses no critic; unset it or use gae" in errors(GAE[1])


def test_gae_needs_whole_attempts_and_whole_mini_batches() -> None:
    assert "set it to false" in errors(*GAE, "generator.step_wise_trajectories=true")
    assert "critic_mini_batch_size=3; set that to a divisor of 4" in errors(
        *GAE, "trainer.critic_mini_batch_size=3"
    )
    assert errors("trainer.critic_mini_batch_size=3") == ""


def test_distillation_needs_the_kl_to_its_teacher() -> None:
    teacher = f"{ALGORITHM}.advantage_estimator=distillation"
    assert f"set {ALGORITHM}.use_kl_loss=false, use_kl_in_reward=true" in errors(teacher)
    assert "kl_estimator_type=k1" in errors(teacher, *KL_IN_REWARD)
    k1 = (teacher, *KL_IN_REWARD, f"{ALGORITHM}.kl_estimator_type=k1")
    assert "1.5B-Instruct' is the initial policy; set it to the teacher" in errors(*k1)
    other = (*k1, "trainer.ref.model.path=other")
    assert errors(*other) == ""
    assert "set it to fixed" in errors(*other, f"{ALGORITHM}.kl_ctrl.type=adaptive")
    for drops in ("zero_variance_filter=true", "dynamic_sampling.type=replace"):
        assert f"{drops} drops groups by their rewards" in errors(*other, f"{ALGORITHM}.{drops}")


def test_an_off_policy_correction_must_fit_the_loss() -> None:
    tis = f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"
    clip_cov = f"{ALGORITHM}.policy_loss_type=clip_cov"
    assert "policy_loss_type=clip_cov compares uncorrected tokens" in errors(tis, clip_cov)
    anchored = (f"{ALGORITHM}.policy_loss_type=cispo", f"{ALGORITHM}.cispo.cispo_anchor=rollout")
    error = errors(tis, *anchored)
    assert "both weight by the ratio to the engine's logprobs" in error
    assert error.endswith("tis_ratio_type or set trainer.algorithm.cispo.cispo_anchor=old")
    for loss in ("rollout_is", "dppo"):
        error = errors(tis, f"{ALGORITHM}.policy_loss_type={loss}")
        assert error.endswith("which would count squared; unset tis_ratio_type")
    assert errors(tis, f"{ALGORITHM}.policy_loss_type=importance_sampling") == ""


def test_losses_that_use_engine_logprobs_are_refused_with_truncated_sampling() -> None:
    top_p = "generator.sampling_params.top_p=0.9"
    for compares in (
        f"{ALGORITHM}.policy_loss_type=rollout_is",
        f"{ALGORITHM}.policy_loss_type=dppo",
        f"{ALGORITHM}.off_policy_correction.sequence_mask_metric=geometric",
    ):
        assert "set generator.sampling_params.top_p=1" in errors(compares, top_p)
        assert errors(compares) == ""
    assert errors(top_p, f"{ALGORITHM}.policy_loss_type=gspo") == ""


def test_losses_that_use_engine_logprobs_are_refused_at_another_temperature() -> None:
    hotter = f"{ALGORITHM}.temperature=1.5"
    assert errors(hotter) == ""
    assert "leave trainer.algorithm.temperature out" in errors(
        hotter, f"{ALGORITHM}.policy_loss_type=dppo"
    )


def test_batch_estimators_warn_about_filters_of_equal_rewards() -> None:
    assert warnings(REINFORCE, FILTER) == [
        f"{FILTER} drops groups whose attempts all earned the same reward, from which "
        f"{REINFORCE} would learn too; unset it"
    ]
    dynamic = f"{ALGORITHM}.dynamic_sampling.type=filter"
    (warning,) = warnings(*GAE, dynamic)
    assert warning.startswith(f"{dynamic} drops groups")
    assert "gae and its critic would learn too" in warning
    assert warnings(*GAE) == warnings(FILTER) == []
    assert warnings(REINFORCE, FILTER, "generator.n_samples_per_prompt=1") == []


def test_the_preset_of_a_first_run_warns_about_its_filter_with_gae() -> None:
    (warning,) = algorithm_warnings(load_config_file("tiny", GAE))
    assert warning.startswith(f"{FILTER} drops groups")


def test_grpo_warns_if_kl_penalties_are_scaled_by_their_own_deviation() -> None:
    assert max(grpo([1 - 1e-6 * penalty for penalty in range(4)])) > 0.5
    (warning,) = warnings(*KL_IN_REWARD)
    assert f"set {FILTER} or grpo_norm_by_std=false" in warning
    assert warnings(*KL_IN_REWARD, FILTER) == []
    assert warnings(*KL_IN_REWARD, f"{ALGORITHM}.grpo_norm_by_std=false") == []
    assert warnings(*KL_IN_REWARD, f"{ALGORITHM}.advantage_estimator=rloo") == []


def test_gspo_warns_about_a_clip_range_for_tokens() -> None:
    gspo, low, high = (
        f"{ALGORITHM}.{word}"
        for word in ("policy_loss_type=gspo", "eps_clip_low=3e-4", "eps_clip_high=4e-4")
    )
    for words in ([gspo], [gspo, low]):
        (warning,) = warnings(*words)
        assert warning.startswith(f"{gspo} with eps_clip_low=")
        assert "set eps_clip_low=3e-4 and eps_clip_high=4e-4" in warning
    assert warnings(gspo, low, high) == warnings() == []


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_group_estimators_warn_about_groups_of_one(estimator: str) -> None:
    chosen = f"{ALGORITHM}.advantage_estimator={estimator}"
    (warning,) = warnings(chosen, "generator.n_samples_per_prompt=1")
    assert warning.startswith("generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_")
    assert warnings(chosen) == []


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("gamma=0.9", "advantage_estimator=grpo"),
        ("value_clip=null", "advantage_estimator=grpo"),
        ("clip_ratio_c=4.0", "policy_loss_type=regular"),
        ('policy_loss_kwargs={"width": 0.1}', "policy_loss_type=regular"),
        ('advantage_estimator_kwargs={"bar": 0.1}', "advantage_estimator=grpo"),
        ("cispo.cispo_anchor=rollout", "policy_loss_type=regular"),
    ],
)
def test_a_key_that_the_algorithm_does_not_read_is_named_with_the_algorithm(
    word: str, cause: str
) -> None:
    assert unused(f"{ALGORITHM}.{word}") == [
        f"{ALGORITHM}.{word} has no effect while {ALGORITHM}.{cause}"
    ]


def test_keys_with_the_same_cause_share_a_sentence() -> None:
    words = (f"{ALGORITHM}.gamma=0.9", f"{ALGORITHM}.lambd=0.5", "trainer.critic_mini_batch_size=2")
    (sentence,) = unused(*words)
    assert sentence.endswith(f" have no effect while {ALGORITHM}.advantage_estimator=grpo")
    assert all(word in sentence for word in words)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (f"{ALGORITHM}.gamma=1.0",),
        (f"{ALGORITHM}.policy_loss_type=my:loss", f"{ALGORITHM}.policy_loss_kwargs.width=0.1"),
        (
            f"{ALGORITHM}.advantage_estimator=my:bar",
            f"{ALGORITHM}.advantage_estimator_kwargs.by=1",
        ),
    ],
)
def test_keys_that_are_read_or_hold_their_default_are_not_named(words: tuple[str, ...]) -> None:
    assert unused(*words) == []


def test_a_default_that_follows_another_key_is_not_named() -> None:
    assert unused("trainer.policy_mini_batch_size=2") == []
    (sentence,) = unused("trainer.critic_mini_batch_size=2")
    assert sentence.startswith("trainer.critic_mini_batch_size=2 has no effect while")


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "math:sqrt"])
def test_the_clip_range_is_unused_by_exactly_the_losses_that_do_not_take_it(name: str) -> None:
    reads = "eps_clip_high" in _keywords(build_policy_loss(Algorithm(policy_loss_type=name)))
    words = (f"{ALGORITHM}.policy_loss_type={name}", f"{ALGORITHM}.eps_clip_high=0.3")
    assert bool(unused(*words)) != reads


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++", "gae", "math:sqrt"])
@pytest.mark.parametrize("key", ["gamma", "lambd"])
def test_discounts_are_unused_by_exactly_the_estimators_that_do_not_take_them(
    name: str, key: str
) -> None:
    estimator = build_advantage_estimator(Algorithm(advantage_estimator=name))
    function = estimator.credit if isinstance(estimator, BatchEstimator) else estimator
    critic = ["trainer.critic.model.path=tiny"] if name == "gae" else []
    words = (f"{ALGORITHM}.advantage_estimator={name}", f"{ALGORITHM}.{key}=0.9", *critic)
    assert bool(unused(*words)) == (key not in _keywords(function))


def _keywords(function: Any) -> dict[str, Any]:
    return function.keywords if isinstance(function, partial) else {}

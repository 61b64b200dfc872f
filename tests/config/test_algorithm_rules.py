"""Algorithms whose settings contradict each other are refused before a run begins."""

from __future__ import annotations

import pytest
from tests.config.test_config_validation import broken

from skyfleet.algorithms.kl import adaptive_control
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.config.generator import SamplingParams
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config

ALGORITHM = "trainer.algorithm"
MAXRL = f"{ALGORITHM}.advantage_estimator=maxrl"
KL_IN_REWARD = (f"{ALGORITHM}.use_kl_in_reward=true", f"{ALGORITHM}.use_kl_loss=false")
BUFFER = f"{ALGORITHM}.overlong_buffer_len"
GAE = (f"{ALGORITHM}.advantage_estimator=gae", "trainer.critic.model.path=tiny")


def test_maxrl_is_refused_where_a_mean_reward_can_be_negative() -> None:
    load_config("", [MAXRL])
    assert "use_kl_in_reward can push to 0 and below" in broken(MAXRL, *KL_IN_REWARD)
    punished = (f"{BUFFER}=64", f"{ALGORITHM}.overlong_max_len=128")
    assert "overlong_buffer_len can push to 0 and below" in broken(MAXRL, *punished)


def test_an_adaptive_coefficient_keeps_its_sign() -> None:
    adaptive = (f"{ALGORITHM}.kl_ctrl.type=adaptive", *KL_IN_REWARD)
    horizon = f"{ALGORITHM}.kl_ctrl.horizon"
    assert adaptive_control(0.1, 0.0, 16, kl_target=0.1, horizon=3) < 0
    assert f"{horizon}=3 with 16 sequences a step" in broken(*adaptive, f"{horizon}=3")
    assert "set it to 16 or more" in broken(*adaptive, f"{horizon}=3")
    assert adaptive_control(0.1, 0.0, 16, kl_target=0.1, horizon=4) > 0
    load_config("", [*adaptive, f"{horizon}=4"])
    load_config("", [adaptive[0], f"{horizon}=3"])  # a KL in the loss has no such coefficient


def test_an_attempt_that_is_left_out_of_the_loss_pays_its_kl_or_there_is_none() -> None:
    masked = "generator.apply_overlong_filtering=true"
    assert "would pay no KL and lift their group's mean" in broken(masked, *KL_IN_REWARD)
    load_config("", [masked])
    by_token = f"{ALGORITHM}.advantage_estimator=reinforce++"
    load_config("", [masked, by_token, *KL_IN_REWARD])


def test_gae_asks_a_critic_and_nobody_else_does() -> None:
    config = load_config("", [*GAE, "trainer.policy_mini_batch_size=2"])
    assert config.trainer.critic.optimizer_config.lr == 5e-6
    assert config.trainer.critic_mini_batch_size == 2  # the policy's, where nobody says another
    assert "trainer.critic.model.path is unset; set it, for example to the policy's" in broken(
        GAE[0]
    )
    assert "advantage_estimator=grpo asks no critic; unset it or use gae" in broken(GAE[1])


def test_gae_looks_over_a_whole_attempt_in_whole_mini_batches() -> None:
    assert "set it to false" in broken(*GAE, "generator.step_wise_trajectories=true")
    assert "critic_mini_batch_size=3; set that to a divisor of 4" in broken(
        *GAE, "trainer.critic_mini_batch_size=3"
    )
    load_config("", ["trainer.critic_mini_batch_size=3"])


def test_a_reference_that_is_another_model_does_not_follow_the_policy() -> None:
    follows = "trainer.update_ref_every_epoch=true"
    load_config("", [follows])
    assert "'other' is another model than the policy" in broken(
        follows, "trainer.ref.model.path=other"
    )


def test_at_another_temperature_nothing_is_compared_with_the_engine() -> None:
    hotter = f"{ALGORITHM}.temperature=1.5"
    load_config("", [hotter])
    assert "leave trainer.algorithm.temperature out" in broken(
        hotter, f"{ALGORITHM}.policy_loss_type=dppo"
    )


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_groups_of_one_are_not_searched_for_different_rewards(kind: str) -> None:
    chosen = f"{ALGORITHM}.dynamic_sampling.type={kind}"
    assert f"type={kind} looks for groups" in broken(chosen, "generator.n_samples_per_prompt=1")
    load_config("", [chosen, "generator.n_samples_per_prompt=2"])


@pytest.mark.parametrize(
    ("low", "upper"),
    [
        ("clip_cov.clip_cov_lb=9", "5.0"),
        ("off_policy_correction.geo_mask_low=1.2", "1.01"),
        ("off_policy_correction.product_mask_low=2", "2.0"),
    ],
)
def test_bounds_leave_something_between_them(low: str, upper: str) -> None:
    assert f"is not below its upper bound, {upper}" in broken(f"{ALGORITHM}.{low}")


@pytest.mark.parametrize("name", ["token_mask", "outlier_token"])
def test_bounds_that_may_be_unset_are_ordered_too(name: str) -> None:
    prefix = f"{ALGORITHM}.off_policy_correction.{name}_is_threshold"
    assert "is not below its upper bound, 2.0" in broken(f"{prefix}_low=3", f"{prefix}_high=2")
    load_config("", [f"{prefix}_low=0.5", f"{prefix}_high=2"])


def test_the_buffer_before_the_longest_attempt_is_no_longer_than_it() -> None:
    longest = f"{ALGORITHM}.overlong_max_len=1024"
    assert "more than the 1024 tokens" in broken(f"{BUFFER}=4096", longest)
    load_config("", [f"{BUFFER}=1024", longest])
    one_turn = ("generator.max_turns=1", "generator.sampling_params.max_generate_length=32")
    assert "more than the 32 tokens" in broken(f"{BUFFER}=64", *one_turn)


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_what_leaves_tokens_out_truncates(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert SamplingParams.model_validate({name: value}).truncates
    assert not SamplingParams().truncates


def test_the_parser_key_names_every_format() -> None:
    meaning = known_keys()["generator.tool_call_parser"].meaning
    assert [name for name in FORMATS if name not in meaning] == []

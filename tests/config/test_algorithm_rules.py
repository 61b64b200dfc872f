"""Settings of `trainer.algorithm` that contradict each other are refused when a config loads."""

from __future__ import annotations

import pytest
from tests.config.test_config_validation import broken

from skyfleet.algorithms.kl import adaptive_control
from skyfleet.chat.tool_calls.formats import FORMATS
from skyfleet.config.generator import SamplingParams
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config

ALGORITHM = "trainer.algorithm"
KL_IN_REWARD = (f"{ALGORITHM}.use_kl_in_reward=true", f"{ALGORITHM}.use_kl_loss=false")
BUFFER = f"{ALGORITHM}.overlong_buffer_len"


def test_an_adaptive_horizon_that_flips_the_sign_of_the_coefficient_is_refused() -> None:
    adaptive = (f"{ALGORITHM}.kl_ctrl.type=adaptive", *KL_IN_REWARD)
    horizon = f"{ALGORITHM}.kl_ctrl.horizon"
    assert adaptive_control(0.1, 0.0, 16, kl_target=0.1, horizon=3) < 0
    assert f"{horizon}=3 with 16 sequences per step" in broken(*adaptive, f"{horizon}=3")
    assert "set it to 16 or more" in broken(*adaptive, f"{horizon}=3")
    assert adaptive_control(0.1, 0.0, 16, kl_target=0.1, horizon=4) > 0
    load_config("", [*adaptive, f"{horizon}=4"])
    load_config("", [adaptive[0], f"{horizon}=3"])  # a KL in the loss has no such coefficient


def test_a_reference_that_is_another_model_cannot_be_updated_every_epoch() -> None:
    follows = "trainer.update_ref_every_epoch=true"
    load_config("", [follows])
    assert "'other' is another model than the policy" in broken(
        follows, "trainer.ref.model.path=other"
    )


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_dynamic_sampling_is_refused_for_groups_of_one(kind: str) -> None:
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
def test_a_lower_bound_is_below_its_upper_bound(low: str, upper: str) -> None:
    assert f"is not below its upper bound, {upper}" in broken(f"{ALGORITHM}.{low}")


@pytest.mark.parametrize("name", ["token_mask", "outlier_token"])
def test_optional_bounds_are_ordered_too(name: str) -> None:
    prefix = f"{ALGORITHM}.off_policy_correction.{name}_is_threshold"
    assert "is not below its upper bound, 2.0" in broken(f"{prefix}_low=3", f"{prefix}_high=2")
    load_config("", [f"{prefix}_low=0.5", f"{prefix}_high=2"])


def test_the_overlong_buffer_is_at_most_the_longest_attempt() -> None:
    longest = f"{ALGORITHM}.overlong_max_len=1024"
    assert "more than the 1024 tokens" in broken(f"{BUFFER}=4096", longest)
    load_config("", [f"{BUFFER}=1024", longest])
    one_turn = ("generator.max_turns=1", "generator.sampling_params.max_generate_length=32")
    assert "more than the 32 tokens" in broken(f"{BUFFER}=64", *one_turn)


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_top_p_top_k_and_min_p_truncate(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert SamplingParams.model_validate({name: value}).truncates
    assert not SamplingParams().truncates


def test_the_meaning_of_the_parser_key_names_every_format() -> None:
    meaning = known_keys()["generator.tool_call_parser"].meaning
    assert [name for name in FORMATS if name not in meaning] == []

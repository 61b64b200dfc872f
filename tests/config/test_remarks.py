"""What runs and is seldom meant is told as a run starts, and refused to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfleet.algorithms.advantages import grpo
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.config.warnings import remarks

ALGORITHM = "trainer.algorithm"
FILTER = f"{ALGORITHM}.zero_variance_filter=true"
REINFORCE = f"{ALGORITHM}.advantage_estimator=reinforce++"
GAE = (f"{ALGORITHM}.advantage_estimator=gae", "trainer.critic.model.path=tiny")
IN_REWARD = (f"{ALGORITHM}.use_kl_in_reward=true", f"{ALGORITHM}.use_kl_loss=false")


def told(*words: str) -> list[str]:
    return remarks(load_config("", words))


def test_who_compares_with_no_group_is_told_that_a_filter_takes_from_the_batch() -> None:
    assert told(REINFORCE, FILTER) == [
        f"{FILTER} leaves out groups whose attempts earned the same, from which "
        f"{REINFORCE} would learn too; unset it"
    ]
    dynamic = f"{ALGORITHM}.dynamic_sampling.type=filter"
    (sentence,) = told(*GAE, dynamic)
    assert sentence.startswith(f"{dynamic} leaves out groups")
    assert "gae and its critic would learn too" in sentence
    assert told(*GAE) == told(FILTER) == []
    assert told(REINFORCE, FILTER, "generator.n_samples_per_prompt=1") == []


def test_the_preset_of_a_first_run_says_so_when_only_gae_is_set() -> None:
    preset = Path(__file__).parents[2] / "configs/local_tiny_cpu.yaml"
    (sentence,) = remarks(load_config_file(preset, GAE))
    assert sentence.startswith(f"{FILTER} leaves out groups")


def test_a_kl_that_is_scaled_to_its_own_deviation_is_told() -> None:
    assert max(grpo([1 - 1e-6 * penalty for penalty in range(4)])) > 0.5
    (sentence,) = told(*IN_REWARD)
    assert f"set {FILTER} or grpo_norm_by_std=false" in sentence
    assert told(*IN_REWARD, FILTER) == []
    assert told(*IN_REWARD, f"{ALGORITHM}.grpo_norm_by_std=false") == []
    assert told(*IN_REWARD, f"{ALGORITHM}.advantage_estimator=rloo") == []


@pytest.mark.parametrize("learnt", [0.5, 1.5])
def test_an_update_at_another_temperature_than_the_rollouts_is_told(learnt: float) -> None:
    (sentence,) = told(f"{ALGORITHM}.temperature={learnt}")
    assert sentence.startswith(
        f"{ALGORITHM}.temperature={learnt} and generator.sampling_params.temperature=1.0: "
    )
    assert told("generator.sampling_params.temperature=0.5") == []


def test_gspo_with_the_clip_of_a_tokens_ratio_is_told_its_own() -> None:
    gspo, low, high = (
        f"{ALGORITHM}.{word}"
        for word in ("policy_loss_type=gspo", "eps_clip_low=3e-4", "eps_clip_high=4e-4")
    )
    for words in ([gspo], [gspo, low]):
        (sentence,) = told(*words)
        assert sentence.startswith(f"{gspo} with eps_clip_low=")
        assert "set eps_clip_low=3e-4 and eps_clip_high=4e-4" in sentence
    assert told(gspo, low, high) == told() == []


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_one_attempt_has_nobody_to_be_compared_with(estimator: str) -> None:
    words = [f"trainer.algorithm.advantage_estimator={estimator}"]
    alone = load_config("", [*words, "generator.n_samples_per_prompt=1"])
    (sentence,) = remarks(alone)
    assert sentence.startswith("generator.n_samples_per_prompt=1 with trainer.algorithm.advantage_")
    assert remarks(load_config("", words)) == []

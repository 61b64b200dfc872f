"""Remarks: what loads and runs and is seldom what was meant, told as a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyfleet.config.algorithm_rules import equal_rewards_drop
from skyfleet.config.root import RunConfig
from skyfleet.config.unused_keys import idle_keys


def remarks(config: RunConfig) -> list[str]:
    return [sentence for remark in REMARKS for sentence in remark(config)]


def _equal_rewards_teach(config: RunConfig) -> Iterator[str]:
    """Who compares with the batch, or a critic, learns from tasks that always or never succeed."""
    name, dropping = config.trainer.algorithm.advantage_estimator, equal_rewards_drop(config)
    if name in ("reinforce++", "gae") and dropping:
        critic = " and its critic" if name == "gae" else ""
        yield (
            f"{dropping} leaves out groups whose attempts earned the same, from which "
            f"trainer.algorithm.advantage_estimator={name}{critic} would learn too; unset it"
        )


def _an_attempt_compares_with_others(config: RunConfig) -> Iterator[str]:
    name = config.trainer.algorithm.advantage_estimator
    if name in ("grpo", "rloo", "maxrl") and config.generator.n_samples_per_prompt == 1:
        yield (
            "generator.n_samples_per_prompt=1 with "
            f"trainer.algorithm.advantage_estimator={name}: an attempt is compared with the others at "
            "its task, and there are none to learn from; set it to 2 or more"
        )


def _equal_rewards_stay_equal(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    scaled = algorithm.advantage_estimator == "grpo" and algorithm.grpo_norm_by_std
    if scaled and algorithm.use_kl_in_reward and not equal_rewards_drop(config):
        yield (
            "trainer.algorithm.use_kl_in_reward=true with grpo_norm_by_std=true: where all attempts "
            "of a group earned the same, their KL alone is divided by its own deviation, however "
            "small; set trainer.algorithm.zero_variance_filter=true or grpo_norm_by_std=false"
        )


def _the_policy_that_played_is_updated(config: RunConfig) -> Iterator[str]:
    learnt, played = config.trainer.algorithm, config.generator.sampling_params
    if learnt.temperature != played.temperature:
        yield (
            f"trainer.algorithm.temperature={learnt.temperature} and "
            f"generator.sampling_params.temperature={played.temperature}: the policy that is updated "
            "is not the one that played, nothing corrects for it, and the sentinel logprob_gap does "
            "not look; leave trainer.algorithm.temperature out"
        )


def _a_sequence_has_its_own_clip(config: RunConfig) -> Iterator[str]:
    """A mean over tokens moves far less than one of them."""
    algorithm = config.trainer.algorithm
    low, high = algorithm.eps_clip_low, algorithm.eps_clip_high
    if algorithm.policy_loss_type == "gspo" and max(low, high) >= 0.1:
        yield (
            f"trainer.algorithm.policy_loss_type=gspo with eps_clip_low={low} and "
            f"eps_clip_high={high}: that is for a token's ratio, and a sequence's mean ratio hardly "
            "ever leaves it; set eps_clip_low=3e-4 and eps_clip_high=4e-4, as in GSPO's paper"
        )


REMARKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    idle_keys,
    _an_attempt_compares_with_others,
    _equal_rewards_teach,
    _equal_rewards_stay_equal,
    _the_policy_that_played_is_updated,
    _a_sequence_has_its_own_clip,
)

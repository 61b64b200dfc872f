"""Algorithm rules: checks of `trainer.algorithm` that need no estimator or loss object.

Those that depend on the estimator or the loss are in `skyfleet.algorithms.validation`.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyfleet.config.root import RunConfig


def equal_rewards_drop(config: RunConfig) -> str | None:
    """The setting, if one is on, that leaves out groups whose attempts earned the same."""
    algorithm, kind = config.trainer.algorithm, config.trainer.algorithm.dynamic_sampling.type
    if config.generator.n_samples_per_prompt == 1:
        return None  # one attempt is always kept
    if kind is not None:
        return f"trainer.algorithm.dynamic_sampling.type={kind}"
    return "trainer.algorithm.zero_variance_filter=true" if algorithm.zero_variance_filter else None


def _check_max_seq_len(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        length = generator.max_input_length + generator.sampling_params.max_generate_length
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by "
            f"trainer.algorithm.max_seq_len, which is unset; set it, for example to {length}: "
            "generator.max_input_length + generator.sampling_params.max_generate_length"
        )


def _check_single_kl(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true "
            "would count the KL twice; set one of them to false"
        )


def _check_adaptive_horizon(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    horizon = algorithm.kl_ctrl.horizon
    sequences = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    adapts = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    # With a low KL a step multiplies the coefficient by 1 - 0.2 * sequences / horizon.
    if adapts and sequences >= 5 * horizon:
        yield (
            f"trainer.algorithm.kl_ctrl.horizon={horizon} with {sequences} sequences per step would "
            f"take the adaptive coefficient to 0 or below; set it to {sequences} or more, so that "
            "the coefficient changes by a fifth per step at most"
        )


def _check_token_mask_bounds(config: RunConfig) -> Iterator[str]:
    rules = config.trainer.algorithm.off_policy_correction
    if (rules.token_mask_is_threshold_low is None) != (rules.token_mask_is_threshold_high is None):
        yield (
            "trainer.algorithm.off_policy_correction.token_mask_is_threshold_* has one bound; set "
            "both or neither"
        )


def _check_reference_update(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    path = trainer.ref.model.path
    if trainer.update_ref_every_epoch and path != trainer.policy.model.path:
        yield (
            f"trainer.update_ref_every_epoch=true, but trainer.ref.model.path={path!r} is another "
            "model than the policy; set it to false or leave trainer.ref.model.path out"
        )


def _check_overlong_buffer(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    buffer, longest = algorithm.overlong_buffer_len, algorithm.overlong_max_len
    if buffer is None:
        return
    if longest is None and generator.max_turns > 1:
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} with "
            f"generator.max_turns={generator.max_turns} needs trainer.algorithm.overlong_max_len: "
            "the tokens that an attempt may sample in all its turns; set it"
        )
    elif buffer > (longest := longest or generator.sampling_params.max_generate_length):
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} is more than the {longest} tokens that "
            "an attempt may sample, so an empty answer would be penalized; set it below "
            "trainer.algorithm.overlong_max_len"
        )


def _check_dynamic_sampling_group(config: RunConfig) -> Iterator[str]:
    kind = config.trainer.algorithm.dynamic_sampling.type
    if kind is not None and config.generator.n_samples_per_prompt == 1:
        yield (
            f"trainer.algorithm.dynamic_sampling.type={kind} looks for groups whose attempts earned "
            "different rewards, but generator.n_samples_per_prompt=1; set it to 2 or more"
        )


def _check_bounds_order(config: RunConfig) -> Iterator[str]:
    cov, masks = config.trainer.algorithm.clip_cov, config.trainer.algorithm.off_policy_correction
    bounds = {
        "clip_cov.clip_cov_lb": (cov.clip_cov_lb, cov.clip_cov_ub),
        "off_policy_correction.geo_mask_low": (masks.geo_mask_low, masks.geo_mask_high),
        "off_policy_correction.product_mask_low": (masks.product_mask_low, masks.product_mask_high),
        "off_policy_correction.outlier_token_is_threshold_low": (
            masks.outlier_token_is_threshold_low,
            masks.outlier_token_is_threshold_high,
        ),
        "off_policy_correction.token_mask_is_threshold_low": (
            masks.token_mask_is_threshold_low,
            masks.token_mask_is_threshold_high,
        ),
    }
    for key, (low, high) in bounds.items():
        if low is not None and high is not None and low >= high:
            yield (f"trainer.algorithm.{key}={low} is not below its upper bound, {high}; lower it")


ALGORITHM_RULES = (
    _check_max_seq_len,
    _check_single_kl,
    _check_adaptive_horizon,
    _check_token_mask_bounds,
    _check_reference_update,
    _check_overlong_buffer,
    _check_dynamic_sampling_group,
    _check_bounds_order,
)

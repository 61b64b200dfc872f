"""Algorithm rules: what the keys of `trainer.algorithm` owe each other and the generator."""

from __future__ import annotations

from collections.abc import Iterator

from skyfleet.config.algorithm import Algorithm
from skyfleet.config.root import RunConfig


def equal_rewards_drop(config: RunConfig) -> str | None:
    """The setting, if one is on, that leaves out groups whose attempts earned the same."""
    algorithm, kind = config.trainer.algorithm, config.trainer.algorithm.dynamic_sampling.type
    if config.generator.n_samples_per_prompt == 1:
        return None  # one attempt is always kept
    if kind is not None:
        return f"trainer.algorithm.dynamic_sampling.type={kind}"
    return "trainer.algorithm.zero_variance_filter=true" if algorithm.zero_variance_filter else None


def _weighs_by_the_engine(algorithm: Algorithm) -> bool:
    """The loss's own ratio is to the engine's logprobs."""
    loss = algorithm.policy_loss_type
    anchored = loss == "cispo" and algorithm.cispo.cispo_anchor == "rollout"
    return anchored or loss in ("rollout_is", "dppo")


def _reduction_has_its_constant(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        length = generator.max_input_length + generator.sampling_params.max_generate_length
        yield (
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by "
            f"trainer.algorithm.max_seq_len, which is unset; set it, for example to {length}: "
            "generator.max_input_length + generator.sampling_params.max_generate_length"
        )


def _kl_counts_once(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss=true and trainer.algorithm.use_kl_in_reward=true "
            "would count the KL twice; set one of them to false"
        )


def _the_coefficient_keeps_its_sign(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    horizon = algorithm.kl_ctrl.horizon
    sequences = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    adapts = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    # A step multiplies it by 1 - 0.2 * sequences / horizon where the KL is low.
    if adapts and sequences >= 5 * horizon:
        yield (
            f"trainer.algorithm.kl_ctrl.horizon={horizon} with {sequences} sequences a step would "
            f"take the adaptive coefficient to 0 or below; set it to {sequences} or more, and the "
            "coefficient moves by a fifth a step at most"
        )


def _distillation_has_its_kl(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator != "distillation":
        return
    if not algorithm.use_kl_in_reward or algorithm.kl_estimator_type != "k1":
        yield (
            "trainer.algorithm.advantage_estimator=distillation learns from the KL to "
            "trainer.ref.model.path, token by token; set trainer.algorithm.use_kl_loss=false, "
            "use_kl_in_reward=true, kl_estimator_type=k1 and kl_loss_coef=1"
        )
    if algorithm.kl_ctrl.type == "adaptive":
        yield (
            "trainer.algorithm.kl_ctrl.type=adaptive would have "
            "trainer.algorithm.advantage_estimator=distillation learn the slower the nearer it is to "
            "its teacher; set it to fixed"
        )


def _distillation_has_its_teacher(config: RunConfig) -> Iterator[str]:
    trainer, path = config.trainer, config.trainer.ref.model.path
    if trainer.algorithm.advantage_estimator != "distillation":
        return
    if path == trainer.policy.model.path:
        yield (
            "trainer.algorithm.advantage_estimator=distillation learns from another model, and "
            f"trainer.ref.model.path={path!r} is the policy as it began; set it to the teacher"
        )
    if dropping := equal_rewards_drop(config):
        yield (
            f"{dropping} leaves out groups by their rewards, at which "
            "trainer.algorithm.advantage_estimator=distillation does not look; unset it"
        )


def _gae_has_its_critic(config: RunConfig) -> Iterator[str]:
    trainer, path = config.trainer, config.trainer.critic.model.path
    if trainer.algorithm.advantage_estimator != "gae":
        if path is not None:
            yield (
                f"trainer.critic.model.path={path!r} and trainer.algorithm.advantage_estimator="
                f"{trainer.algorithm.advantage_estimator} asks no critic; unset it or use gae"
            )
        return
    if path is None:
        yield (
            "trainer.algorithm.advantage_estimator=gae asks a critic, and trainer.critic.model.path "
            f"is unset; set it, for example to the policy's: {trainer.policy.model.path}"
        )
    if config.generator.step_wise_trajectories:
        yield (
            "generator.step_wise_trajectories=true cuts an attempt into turns, over which "
            "trainer.algorithm.advantage_estimator=gae would not look; set it to false"
        )
    batch, mini = trainer.train_batch_size, trainer.critic_mini_batch_size
    if batch % mini:
        yield (
            f"trainer.train_batch_size={batch} is not a multiple of "
            f"trainer.critic_mini_batch_size={mini}; set that to a divisor of {batch}"
        )


def _corrections_fit_the_loss(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    loss, rules = algorithm.policy_loss_type, algorithm.off_policy_correction
    prefix = "trainer.algorithm.off_policy_correction"
    if rules.active and loss in ("clip_cov", "kl_cov"):
        yield (
            f"{prefix} is set and trainer.algorithm.policy_loss_type={loss} compares tokens as "
            "they are; unset the one or choose another loss"
        )
    if (rules.token_mask_is_threshold_low is None) != (rules.token_mask_is_threshold_high is None):
        yield f"{prefix}.token_mask_is_threshold_* has one bound; set both or neither"
    if rules.tis_ratio_type and _weighs_by_the_engine(algorithm):
        way_out = " or set trainer.algorithm.cispo.cispo_anchor=old" if loss == "cispo" else ""
        yield (
            f"{prefix}.tis_ratio_type={rules.tis_ratio_type} and "
            f"trainer.algorithm.policy_loss_type={loss} both weigh by the engine's logprobs, and a "
            f"ratio would count as its square; leave tis_ratio_type out{way_out}"
        )


def _engine_logprobs_compare(config: RunConfig) -> Iterator[str]:
    """After top-p and its like the engine's logprobs are of a part of the vocabulary."""
    algorithm, sampling = config.trainer.algorithm, config.generator.sampling_params
    if not sampling.truncates and sampling.temperature == algorithm.temperature:
        return
    loss = algorithm.policy_loss_type
    if _weighs_by_the_engine(algorithm) or algorithm.off_policy_correction.active:
        yield (
            f"trainer.algorithm.policy_loss_type={loss} or its off_policy_correction compares the "
            "learner's logprobs with the engine's, which sampled from a part of the vocabulary or at "
            "another temperature; set generator.sampling_params.top_p=1, top_k=-1 and min_p=0, and "
            "leave trainer.algorithm.temperature out"
        )


def _reference_can_follow(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    path = trainer.ref.model.path
    if trainer.update_ref_every_epoch and path != trainer.policy.model.path:
        yield (
            f"trainer.update_ref_every_epoch=true and trainer.ref.model.path={path!r} is another "
            "model than the policy; set it to false or leave trainer.ref.model.path out"
        )


def _overlong_has_its_limit(config: RunConfig) -> Iterator[str]:
    algorithm, generator = config.trainer.algorithm, config.generator
    buffer, longest = algorithm.overlong_buffer_len, algorithm.overlong_max_len
    if buffer is None:
        return
    if longest is None and generator.max_turns > 1:
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} with "
            f"generator.max_turns={generator.max_turns}: say in trainer.algorithm.overlong_max_len "
            "how many tokens an attempt may say in all its turns"
        )
    elif buffer > (longest := longest or generator.sampling_params.max_generate_length):
        yield (
            f"trainer.algorithm.overlong_buffer_len={buffer} is more than the {longest} tokens an "
            "attempt may say: silence would be punished; set it below "
            "trainer.algorithm.overlong_max_len"
        )


def _maxrl_has_its_mean(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    punished = algorithm.overlong_buffer_len is not None
    if algorithm.advantage_estimator == "maxrl" and (algorithm.use_kl_in_reward or punished):
        why = "overlong_buffer_len" if punished else "use_kl_in_reward"
        yield (
            "trainer.algorithm.advantage_estimator=maxrl divides by a group's mean reward, which "
            f"trainer.algorithm.{why} can push to 0 and below; unset that or use grpo"
        )


def _masked_attempts_are_priced(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    compares = algorithm.advantage_estimator not in ("reinforce++", "gae", "distillation")
    if config.generator.apply_overlong_filtering and algorithm.use_kl_in_reward and compares:
        yield (
            "generator.apply_overlong_filtering=true with trainer.algorithm.use_kl_in_reward=true: "
            "attempts left out of the loss would pay no KL and lift their group's mean; "
            "set trainer.algorithm.use_kl_loss=true and use_kl_in_reward=false"
        )


def _groups_can_differ(config: RunConfig) -> Iterator[str]:
    kind = config.trainer.algorithm.dynamic_sampling.type
    if kind is not None and config.generator.n_samples_per_prompt == 1:
        yield (
            f"trainer.algorithm.dynamic_sampling.type={kind} looks for groups whose attempts earned "
            "different rewards, and generator.n_samples_per_prompt=1; set it to 2 or more"
        )


def _bounds_are_ordered(config: RunConfig) -> Iterator[str]:
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
            yield (
                f"trainer.algorithm.{key}={low} is not below its upper bound, {high}: nothing lies "
                "between them; lower it"
            )


ALGORITHM_RULES = (
    _reduction_has_its_constant,
    _kl_counts_once,
    _the_coefficient_keeps_its_sign,
    _distillation_has_its_kl,
    _distillation_has_its_teacher,
    _gae_has_its_critic,
    _corrections_fit_the_loss,
    _engine_logprobs_compare,
    _reference_can_follow,
    _overlong_has_its_limit,
    _maxrl_has_its_mean,
    _masked_attempts_are_priced,
    _groups_can_differ,
    _bounds_are_ordered,
)

"""The learner and what it learns from, from configuration."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from skyfleet.algorithms.advantages import Estimator, WholeBatch
from skyfleet.algorithms.credit import credit
from skyfleet.algorithms.dynamic_sampling import (
    check_sample_batches,
    fill_batch,
    merge_by_task,
    replace_uninformative,
)
from skyfleet.algorithms.estimators import estimator_of
from skyfleet.algorithms.filters import (
    Kept,
    drop_zero_variance,
    keep_graded,
    punish_overlong,
    zero_unfinished,
)
from skyfleet.algorithms.kl import adaptive_control, fixed_control, kl_estimator
from skyfleet.algorithms.losses.choosing import policy_loss_of, selector_of
from skyfleet.algorithms.reduction import reduction
from skyfleet.algorithms.reward_kl import RewardKl
from skyfleet.algorithms.sample import Sample
from skyfleet.algorithms.token_credit import normalize_batch, split_turns
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError, ModelError
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single import LearnerSettings, SingleLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model, load_weights, save_model
from skyfleet.trainer.assemble_policy import Speaker, longest_episode
from skyfleet.trajectories.trajectory import Group


def assemble_learner(
    config: RunConfig,
    speaker: Speaker,
    reference_folder: Path,
    *,
    watched: Callable[[LearnerSettings], LearnerSettings] = lambda settings: settings,
) -> SingleLearner:
    """`reference_folder` is where the policy before reinforcement is kept, for the KL term.

    `watched` stands around what the learner computes with.
    """
    algorithm = config.trainer.algorithm
    needs_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    return SingleLearner(
        speaker.decoder,
        watched(learner_settings(config)),
        make_reference=_reference_maker(config, speaker, reference_folder)
        if needs_reference
        else None,
        save_policy=partial(save_model, speaker.loaded),
        load_policy=partial(load_weights, speaker.loaded.module),
    )


def learner_settings(config: RunConfig) -> LearnerSettings:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    optimizer = trainer.policy.optimizer_config
    sampling = config.generator.sampling_params
    return LearnerSettings(
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            adam_betas=optimizer.adam_betas,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            num_warmup_steps=optimizer.num_warmup_steps,
        ),
        warm_start_optimizer=OptimizerSettings(
            lr=trainer.warm_start.lr,
            num_warmup_steps=trainer.warm_start.steps // 20,
            decay_steps=max(trainer.warm_start.steps, 1),
        ),
        policy_loss=policy_loss_of(algorithm),
        select=selector_of(algorithm),
        reduce=reduction(
            algorithm.loss_reduction,
            max_seq_len=algorithm.max_seq_len,
            block_size=trainer.micro_train_batch_size_per_gpu,
        ),
        temperature=algorithm.temperature,
        policy_mini_batch_size=trainer.policy_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch
        if trainer.max_tokens_per_microbatch > 0
        else trainer.micro_train_batch_size_per_gpu * longest_episode(config),
        truncated_sampling=sampling.truncates,
        recompute_old_logprobs=algorithm.off_policy_correction.active,
        kl=kl_estimator(algorithm.kl_estimator_type) if algorithm.use_kl_loss else None,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_loss_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        reward_kl=_reward_kl(config) if algorithm.use_kl_in_reward else None,
    )


def estimate_of(config: RunConfig) -> Estimator:
    """How the loop credits a batch. With KL in the reward the learner does it over, to the end."""
    algorithm = config.trainer.algorithm
    changed = algorithm.advantage_batch_normalize or config.generator.step_wise_trajectories
    if changed and not algorithm.use_kl_in_reward:
        return WholeBatch(credit=partial(_credit, config))
    return estimator_of(algorithm)


def sift_of(config: RunConfig) -> Callable[[Sequence[Group]], Kept]:
    """All groups a step has played so far -> what to learn from, or that more are wanted."""
    algorithm, generator = config.trainer.algorithm, config.generator
    at_least = 1 if isinstance(estimator_of(algorithm), WholeBatch) else 2

    def sift(groups: Sequence[Group]) -> Kept:
        if generator.zero_reward_on_non_stop:
            groups = zero_unfinished(groups)
        if algorithm.overlong_buffer_len is not None:
            groups = punish_overlong(
                groups,
                max_len=algorithm.overlong_max_len or generator.sampling_params.max_generate_length,
                buffer_len=algorithm.overlong_buffer_len,
                penalty_factor=algorithm.overlong_buffer_penalty_factor,
            )
        kept = _varied(config, groups, at_least)
        check_sample_batches(
            kept,
            len(groups) // config.trainer.train_batch_size,
            max_sample_batches=algorithm.dynamic_sampling.max_sample_batches,
        )
        return kept

    return sift


def _varied(config: RunConfig, groups: Sequence[Group], at_least: int) -> Kept:
    algorithm, batch_size = config.trainer.algorithm, config.trainer.train_batch_size
    dynamic, tolerance = algorithm.dynamic_sampling, algorithm.zero_variance_filter_tol
    if dynamic.type == "filter":
        groups = merge_by_task(groups)
    elif dynamic.type == "replace":
        groups = groups[-batch_size:]
    graded = kept = keep_graded(groups, at_least=at_least)
    if dynamic.type == "filter":
        kept = fill_batch(graded.groups, batch_size=batch_size, tolerance=tolerance)
    elif dynamic.type == "replace":
        kept = replace_uninformative(
            graded.groups,
            batch_size=batch_size,
            min_replace_ratio=dynamic.min_replace_ratio,
            tolerance=tolerance,
        )
    elif algorithm.zero_variance_filter:
        kept = drop_zero_variance(graded.groups, tolerance=tolerance)
    # Not `+`, which leaves out what was counted zero times.
    return Kept(
        groups=kept.groups,
        dropped=Counter({**graded.dropped, **kept.dropped}),
        wants_more=kept.wants_more,
    )


def _credit(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Advantages, and all that is done to them afterwards."""
    credited = credit(samples, estimator_of(config.trainer.algorithm))
    if config.trainer.algorithm.advantage_batch_normalize:
        credited = normalize_batch(credited)
    return split_turns(credited) if config.generator.step_wise_trajectories else credited


def _reward_kl(config: RunConfig) -> RewardKl:
    algorithm, control = config.trainer.algorithm, config.trainer.algorithm.kl_ctrl
    return RewardKl(
        estimate=kl_estimator(algorithm.kl_estimator_type),
        coef=algorithm.kl_loss_coef,
        control=partial(adaptive_control, kl_target=control.kl_target, horizon=control.horizon)
        if control.type == "adaptive"
        else fixed_control,
        credit=partial(_credit, config),
    )


def _reference_maker(config: RunConfig, speaker: Speaker, folder: Path) -> Callable[[], Decoder]:
    """Another model is read at once, for what is wrong with it to be said at once."""
    path = config.trainer.ref.model.path
    if path == config.trainer.policy.model.path:
        return partial(_policy_as_it_began, config, speaker, folder)
    weights = next(speaker.loaded.module.parameters())
    try:
        loaded = load_model(path, dtype=weights.dtype, device=weights.device, config_kwargs={})
    except ModelError as error:
        raise ModelError(f"trainer.ref.model.path={path!r}: {error}") from error
    if loaded.tokenizer.get_vocab() != speaker.loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"trainer.ref.model.path={path!r} has another vocabulary than the policy, so its "
            "logprobs are of other tokens; take a model of the policy's family"
        )
    decoder = _frozen(loaded.module, config)
    return lambda: decoder


def _policy_as_it_began(config: RunConfig, speaker: Speaker, folder: Path) -> Decoder:
    """A frozen copy of the policy as it was before the first reinforcement step."""
    if not folder.exists():
        raise CheckpointError(
            f"{folder} is missing: trainer.algorithm.use_kl_loss or use_kl_in_reward compares with "
            "the policy before reinforcement; copy that checkpoint there or switch the KL off"
        )
    module = copy.deepcopy(speaker.loaded.module)
    load_weights(module, folder)
    return _frozen(module, config)


def _frozen(module: nn.Module, config: RunConfig) -> Decoder:
    module.requires_grad_(False)
    return Decoder(module, max_positions=longest_episode(config))

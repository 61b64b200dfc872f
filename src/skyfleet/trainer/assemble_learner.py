"""The learner and what it learns from, from configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from skyfleet.algorithms.advantages import (
    BatchEstimator,
    Estimator,
    estimator_of,
    normalize_batch,
    split_turns,
)
from skyfleet.algorithms.credit_assignment import credit
from skyfleet.algorithms.filters import (
    FilterResult,
    check_sample_batches,
    drop_zero_variance,
    fill_batch,
    keep_graded,
    merge_by_task,
    n_regraded,
    punish_overlong,
    replace_uninformative,
    zero_unfinished,
)
from skyfleet.algorithms.kl import RewardKl, adaptive_control, fixed_control, kl_estimator
from skyfleet.algorithms.losses.registry import build_policy_loss, selector_of
from skyfleet.algorithms.reduction import reduction
from skyfleet.algorithms.sample import Sample
from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.root import RunConfig
from skyfleet.learner.critic import Critic
from skyfleet.learner.optimizer import OptimizerSettings, linear_to_a_tenth, schedule_named
from skyfleet.learner.single import LearnerSettings, SingleLearner
from skyfleet.models.adapter_files import load_adapted, refuse_adapted
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_weights, save_model
from skyfleet.models.lora import adapt
from skyfleet.trainer.assemble_policy import PolicyModel, longest_episode
from skyfleet.trainer.assemble_reference import reference_maker
from skyfleet.trajectories.trajectory import Group


def assemble_learner(
    config: RunConfig,
    policy_model: PolicyModel,
    reference_folder: Callable[[], Path],
    *,
    total_steps: int,
    critic: Critic | None = None,
    watched: Callable[[LearnerSettings], LearnerSettings] = lambda settings: settings,
) -> SingleLearner:
    """`reference_folder` is where the policy that is the KL's reference is kept.

    `total_steps` are the run's; `watched` stands around what the learner computes with.
    """
    algorithm = config.trainer.algorithm
    needs_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    module, lora = policy_model.loaded.module, config.trainer.policy.model.lora
    if lora.rank:
        adapt(module, lora, seed=config.trainer.seed)
    return SingleLearner(
        policy_model.decoder,
        watched(learner_settings(config, policy_model.decoder, total_steps=total_steps)),
        make_reference=reference_maker(config, policy_model, reference_folder)
        if needs_reference
        else None,
        critic=critic,
        save_policy=partial(save_model, policy_model.loaded),
        load_policy=partial(load_adapted if lora.rank else _load_whole, module),
    )


def _load_whole(module: nn.Module, folder: Path) -> None:
    refuse_adapted(folder)
    load_weights(module, folder)


def is_exact(decoder: Decoder) -> bool:
    """Whether a token is scored alike wherever it stands in a batch, up to the rounding of float32.

    So much was shown of float32, and of bfloat16 over our own kernels on a Hopper GPU.
    """
    if decoder.dtype == torch.float32:
        return True
    own_kernels = decoder.is_fused and decoder.device.type == "cuda"
    return own_kernels and torch.cuda.get_device_capability(decoder.device)[0] == 9


def learner_settings(config: RunConfig, decoder: Decoder, *, total_steps: int) -> LearnerSettings:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    return LearnerSettings(
        optimizer=optimizer_settings(
            trainer.policy.optimizer_config,
            total_steps=total_steps * updates_a_step(config, trainer.policy_mini_batch_size),
        ),
        warm_start_optimizer=OptimizerSettings(
            lr=trainer.warm_start.lr,
            schedule=partial(
                linear_to_a_tenth,
                num_warmup_steps=trainer.warm_start.steps // 20,
                total_steps=max(trainer.warm_start.steps, 1),
            ),
        ),
        policy_loss=build_policy_loss(algorithm),
        select=selector_of(algorithm),
        reduce=reduction(
            algorithm.loss_reduction,
            max_seq_len=algorithm.max_seq_len,
            block_size=trainer.micro_train_batch_size_per_gpu,
        ),
        temperature=algorithm.temperature,
        policy_mini_batch_size=trainer.policy_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=max_tokens_per_microbatch(config),
        loss_chunk_size=trainer.loss_chunk_size,
        gradient_checkpointing=trainer.gradient_checkpointing,
        comparable_logprobs=comparable_logprobs(config),
        # What another engine says is near to the learner's, and a ratio would clip the rest.
        recompute_old_logprobs=algorithm.off_policy_correction.active
        or config.generator.backend != "embedded"
        or not is_exact(decoder)
        # Its gradient is a sign, and knows no small distance.
        or algorithm.policy_loss_type == "kl_cov",
        kl=kl_estimator(algorithm.kl_estimator_type) if algorithm.use_kl_loss else None,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_loss_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        reward_kl=_reward_kl(config) if algorithm.use_kl_in_reward else None,
        track_extra_gradient_metrics=trainer.policy.track_extra_gradient_metrics,
        offload_reference=trainer.ref.fsdp_config.cpu_offload,
    )


def optimizer_settings(section: OptimizerConfig, *, total_steps: int) -> OptimizerSettings:
    """`total_steps` are the optimiser's, of the whole run."""
    return OptimizerSettings(
        lr=section.lr,
        adam_betas=section.adam_betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        schedule=schedule_named(
            section.scheduler, num_warmup_steps=section.num_warmup_steps, total_steps=total_steps
        ),
        offload_after_step=section.offload_after_step,
    )


def comparable_logprobs(config: RunConfig) -> bool:
    """Whether engine and learner score tokens under the same distribution."""
    sampling = config.generator.sampling_params
    return not sampling.truncates and sampling.temperature == config.trainer.algorithm.temperature


def updates_a_step(config: RunConfig, mini_batch_size: int) -> int:
    """Optimiser steps, where no filter leaves fewer."""
    trainer = config.trainer
    return trainer.update_epochs_per_batch * (trainer.train_batch_size // mini_batch_size)


def max_tokens_per_microbatch(config: RunConfig) -> int:
    trainer = config.trainer
    if trainer.max_tokens_per_microbatch > 0:
        return trainer.max_tokens_per_microbatch
    return trainer.micro_train_batch_size_per_gpu * longest_episode(config)


def build_estimator(config: RunConfig) -> Estimator:
    """How the loop credits a batch. With KL in the reward the learner does it over, to the end."""
    algorithm = config.trainer.algorithm
    changed = algorithm.advantage_batch_normalize or config.generator.step_wise_trajectories
    if changed and not algorithm.use_kl_in_reward:
        return BatchEstimator(credit=partial(credited_by, config))
    return estimator_of(algorithm)


def build_filter(config: RunConfig) -> Callable[[Sequence[Group]], FilterResult]:
    """All groups a step has played so far -> what to learn from, or that more are wanted."""
    algorithm, generator = config.trainer.algorithm, config.generator
    at_least = 1 if isinstance(estimator_of(algorithm), BatchEstimator) else 2

    def filter_groups(groups: Sequence[Group]) -> FilterResult:
        touched: Counter[str] = Counter()
        if generator.zero_reward_on_non_stop:
            earned, groups = groups, zero_unfinished(groups)
            touched["zeroed"] = n_regraded(earned, groups)
        if algorithm.overlong_buffer_len is not None:
            earned = groups
            groups = punish_overlong(
                groups,
                max_len=algorithm.overlong_max_len or generator.sampling_params.max_generate_length,
                buffer_len=algorithm.overlong_buffer_len,
                penalty_factor=algorithm.overlong_buffer_penalty_factor,
            )
            touched["punished"] = n_regraded(earned, groups)
        kept = _varied(config, groups, at_least)
        if generator.apply_overlong_filtering:
            unfinished = [t for group in kept.groups for t in group.graded if t.ending.truncated]
            touched["overlong"] = len(unfinished)
        check_sample_batches(
            kept,
            groups,
            batch_size=config.trainer.train_batch_size,
            max_sample_batches=algorithm.dynamic_sampling.max_sample_batches,
        )
        return replace(kept, touched=touched)

    return filter_groups


def _varied(config: RunConfig, groups: Sequence[Group], at_least: int) -> FilterResult:
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
    return FilterResult(
        groups=kept.groups,
        dropped=Counter({**graded.dropped, **kept.dropped}),
        wants_more=kept.wants_more,
    )


def credited_by(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
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
        credit=partial(credited_by, config),
    )

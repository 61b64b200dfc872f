"""The learner and what it learns from, from configuration."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from skyfleet.algorithms.advantages import Estimator, estimator, grpo
from skyfleet.algorithms.filters import Kept, drop_zero_variance, keep_graded, zero_unfinished
from skyfleet.algorithms.kl import kl_estimator
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import reduction
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single import LearnerSettings, SingleLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_weights, save_model
from skyfleet.trainer.assemble_policy import Speaker, longest_episode
from skyfleet.trajectories.trajectory import Group


def assemble_learner(config: RunConfig, speaker: Speaker, reference_folder: Path) -> SingleLearner:
    """`reference_folder` is where the policy before reinforcement is kept, for the KL term."""
    return SingleLearner(
        speaker.decoder,
        learner_settings(config),
        make_reference=partial(_reference, config, speaker, reference_folder)
        if config.trainer.algorithm.use_kl_loss
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
        policy_loss=partial(
            ppo_clip, eps_clip_low=algorithm.eps_clip_low, eps_clip_high=algorithm.eps_clip_high
        ),
        reduce=reduction(algorithm.loss_reduction, max_seq_len=algorithm.max_seq_len),
        temperature=algorithm.temperature,
        policy_mini_batch_size=trainer.policy_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch
        if trainer.max_tokens_per_microbatch > 0
        else trainer.micro_train_batch_size_per_gpu * longest_episode(config),
        truncated_sampling=sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0,
        kl=kl_estimator(algorithm.kl_estimator_type) if algorithm.use_kl_loss else None,
        kl_loss_coef=algorithm.kl_loss_coef,
    )


def estimate_of(config: RunConfig) -> Estimator:
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator == "grpo":
        return partial(grpo, norm_by_std=algorithm.grpo_norm_by_std)
    return estimator(algorithm.advantage_estimator)


def sift_of(config: RunConfig) -> Callable[[Sequence[Group]], Kept]:
    algorithm = config.trainer.algorithm

    def sift(groups: Sequence[Group]) -> Kept:
        if config.generator.zero_reward_on_non_stop:
            groups = zero_unfinished(groups)
        kept = keep_graded(groups)
        if not algorithm.zero_variance_filter:
            return kept
        varied = drop_zero_variance(kept.groups, tolerance=algorithm.zero_variance_filter_tol)
        # Not `+`, which leaves out what was counted zero times.
        return Kept(varied.groups, Counter({**kept.dropped, **varied.dropped}))

    return sift


def _reference(config: RunConfig, speaker: Speaker, folder: Path) -> Decoder:
    """A frozen copy of the policy as it was before the first reinforcement step."""
    if not folder.exists():
        raise CheckpointError(
            f"{folder} is missing: trainer.algorithm.use_kl_loss compares with the policy before "
            "reinforcement; copy that checkpoint there or switch the KL loss off"
        )
    module = copy.deepcopy(speaker.loaded.module)
    load_weights(module, folder)
    module.requires_grad_(False)
    return Decoder(module, max_positions=longest_episode(config))

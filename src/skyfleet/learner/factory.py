"""Build the learner, its critic and its KL reference from the configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from skyfleet.algorithms.credit_assignment import compute_advantages
from skyfleet.algorithms.kl import RewardKl, adaptive_control, fixed_control, kl_estimator
from skyfleet.algorithms.losses.registry import build_policy_loss, selector_of
from skyfleet.algorithms.reduction import reduction
from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.learner.critic import Critic, CriticSettings
from skyfleet.learner.optimizer import OptimizerSettings, linear_to_a_tenth, schedule_named
from skyfleet.learner.policy_model import PolicyModel, rope_overrides
from skyfleet.learner.single import LearnerSettings, SingleLearner
from skyfleet.models.adapter_files import load_adapted, refuse_adapted
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import load_model, load_weights, save_model
from skyfleet.models.lora import adapt, without_adapters


def build_reference(
    config: RunConfig, policy_model: PolicyModel, folder: Callable[[], Path]
) -> Callable[[], Decoder]:
    """`folder` is where the policy that is compared with was saved, when it is asked for.

    Another model is read at once, for what is wrong with it to be said at once.
    """
    path = config.trainer.ref.model.path
    if path == config.trainer.policy.model.path:
        return lambda: _load_initial_policy(config, policy_model, folder())
    decoder = _freeze(
        load_auxiliary_model(config, policy_model, path, key="trainer.ref.model.path"), config
    )
    return lambda: decoder


def load_auxiliary_model(
    config: RunConfig, policy_model: PolicyModel, path: str, *, key: str
) -> nn.Module:
    """Another model that is to read the policy's tokens, on its device."""
    weights = next(policy_model.loaded.module.parameters())
    # Of what changes the policy, only this: whoever reads an episode has to reach its end.
    kwargs = config.trainer.policy.model_config_kwargs
    stretched = {name: kwargs[name] for name in kwargs if name == "rope_parameters"}
    loaded = load_model(
        path,
        dtype=weights.dtype,
        device=weights.device,
        config_kwargs=rope_overrides(config) | stretched,
        key=key,
    )
    if loaded.tokenizer.get_vocab() != policy_model.loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"{key}={path!r} has another vocabulary than the policy, so it would read other tokens; "
            "take a model of the policy's family"
        )
    return loaded.module


def _load_initial_policy(config: RunConfig, policy_model: PolicyModel, folder: Path) -> Decoder:
    """The policy before the first reinforcement step, or after the last whole epoch; frozen."""
    trainer = config.trainer
    moved = trainer.warm_start.steps or trainer.update_ref_every_epoch
    if trainer.policy.model.lora.rank and not moved:
        return _freeze(without_adapters(policy_model.loaded.module, merged=False), config)
    if not folder.exists():
        raise CheckpointError(
            f"{folder} is missing: trainer.algorithm.use_kl_loss or use_kl_in_reward compares with "
            "the policy before reinforcement; copy that checkpoint there or switch the KL off"
        )
    module = copy_policy(policy_model)
    load_weights(module, folder)
    return _freeze(module, config)


def copy_policy(policy_model: PolicyModel) -> nn.Module:
    """The policy as it stands, in tensors of its own."""
    return copy.deepcopy(without_adapters(policy_model.loaded.module, merged=True))


def _freeze(module: nn.Module, config: RunConfig) -> Decoder:
    module.requires_grad_(False)
    return make_decoder(module, max_positions=config.max_episode_tokens)


def build_learner(
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
        make_reference=build_reference(config, policy_model, reference_folder)
        if needs_reference
        else None,
        critic=critic,
        save_policy=partial(save_model, policy_model.loaded),
        load_policy=partial(load_adapted if lora.rank else _load_full_weights, module),
    )


def _load_full_weights(module: nn.Module, folder: Path) -> None:
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
            total_steps=total_steps
            * optimizer_steps_per_step(config, trainer.policy_mini_batch_size),
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


def optimizer_steps_per_step(config: RunConfig, mini_batch_size: int) -> int:
    """Optimiser steps, where no filter leaves fewer."""
    trainer = config.trainer
    return trainer.update_epochs_per_batch * (trainer.train_batch_size // mini_batch_size)


def max_tokens_per_microbatch(config: RunConfig) -> int:
    trainer = config.trainer
    if trainer.max_tokens_per_microbatch > 0:
        return trainer.max_tokens_per_microbatch
    return trainer.micro_train_batch_size_per_gpu * config.max_episode_tokens


def _reward_kl(config: RunConfig) -> RewardKl:
    algorithm, control = config.trainer.algorithm, config.trainer.algorithm.kl_ctrl
    return RewardKl(
        estimate=kl_estimator(algorithm.kl_estimator_type),
        coef=algorithm.kl_loss_coef,
        control=partial(adaptive_control, kl_target=control.kl_target, horizon=control.horizon)
        if control.type == "adaptive"
        else fixed_control,
        credit=partial(compute_advantages, config),
    )


def build_critic(
    config: RunConfig, policy_model: PolicyModel, *, total_steps: int
) -> Critic | None:
    """`total_steps` are the run's."""
    trainer, path = config.trainer, config.trainer.critic.model.path
    if path is None:
        return None
    updates = optimizer_steps_per_step(config, trainer.critic_mini_batch_size)
    settings = CriticSettings(
        optimizer=optimizer_settings(
            trainer.critic.optimizer_config, total_steps=total_steps * updates
        ),
        value_clip=trainer.algorithm.value_clip,
        credit=partial(compute_advantages, config),
        critic_mini_batch_size=trainer.critic_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=max_tokens_per_microbatch(config),
        gradient_checkpointing=trainer.gradient_checkpointing,
    )
    return Critic(_build_critic_decoder(config, policy_model, path), settings)


def _build_critic_decoder(
    config: RunConfig, policy_model: PolicyModel, path: str
) -> Callable[[], Decoder]:
    """Another model is read at once, for what is wrong with it to be said at once."""
    longest = config.max_episode_tokens
    if path == config.trainer.policy.model.path:
        return lambda: make_decoder(copy_policy(policy_model), max_positions=longest)
    body = make_decoder(
        load_auxiliary_model(config, policy_model, path, key="trainer.critic.model.path"),
        max_positions=longest,
    )
    return lambda: body

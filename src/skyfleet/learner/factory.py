"""Build the learner, its critic and its KL reference from the configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from skyfleet.algorithms.credit_assignment import compute_advantages
from skyfleet.algorithms.kl import RewardKl, adaptive_control, fixed_control, get_kl_estimator
from skyfleet.algorithms.reduction import build_reduction
from skyfleet.algorithms.registry import build_policy_loss, build_selector, get_policy_loss
from skyfleet.config.policy import OptimizerConfig
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.learner.critic import Critic, CriticSettings
from skyfleet.learner.optimizer import OptimizerSettings, build_lr_schedule, linear_to_a_tenth
from skyfleet.learner.policy_model import PolicyModel, rope_overrides
from skyfleet.learner.single_device import LearnerSettings, SingleDeviceLearner
from skyfleet.models.adapter_files import load_adapters, reject_adapter_checkpoint
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import load_model, load_weights, save_model
from skyfleet.models.lora import add_adapters, strip_adapters


def build_learner(
    config: RunConfig,
    policy_model: PolicyModel,
    reference_folder: Callable[[], Path],
    *,
    total_steps: int,
    critic: Critic | None = None,
    wrap_settings: Callable[[LearnerSettings], LearnerSettings] = lambda settings: settings,
    memory_plan: str = "",
) -> SingleDeviceLearner:
    """The learner of a run of `total_steps` steps.

    `reference_folder` returns the folder of the policy that is the KL reference. Sentinels wrap the
    loss and the KL estimator of the settings to record their inputs.
    """
    module, lora = policy_model.loaded.module, config.trainer.policy.model.lora
    if lora.rank:
        add_adapters(module, lora, seed=config.trainer.seed)
    return SingleDeviceLearner(
        policy_model.decoder,
        wrap_settings(
            build_learner_settings(config, policy_model.decoder, total_steps=total_steps)
        ),
        make_reference=build_reference(config, policy_model, reference_folder)
        if needs_reference(config)
        else None,
        critic=critic,
        save_policy=partial(save_model, policy_model.loaded),
        memory_plan=memory_plan,
        load_policy=partial(load_adapters if lora.rank else _load_full_weights, module),
    )


def needs_reference(config: RunConfig) -> bool:
    algorithm = config.trainer.algorithm
    return algorithm.use_kl_loss or algorithm.use_kl_in_reward


def _load_full_weights(module: nn.Module, folder: Path) -> None:
    reject_adapter_checkpoint(folder)
    load_weights(module, folder)


def build_learner_settings(
    config: RunConfig, decoder: Decoder, *, total_steps: int
) -> LearnerSettings:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    return LearnerSettings(
        optimizer=_build_optimizer_settings(
            trainer.policy.optimizer_config,
            total_steps=total_steps * _updates_per_step(config, trainer.policy_mini_batch_size),
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
        select=build_selector(algorithm),
        reduce=build_reduction(
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
        comparable_logprobs=has_comparable_logprobs(config),
        # Logprobs of another engine are only close to the learner's, and a narrow clip would cut
        # off tokens in between.
        recompute_old_logprobs=algorithm.off_policy_correction.active
        or config.generator.backend != "embedded"
        or not has_exact_logprobs(decoder)
        or get_policy_loss(algorithm.policy_loss_type).recomputes_old_logprobs,
        kl=get_kl_estimator(algorithm.kl_estimator_type) if algorithm.use_kl_loss else None,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_loss_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        reward_kl=_build_reward_kl(config) if algorithm.use_kl_in_reward else None,
        track_extra_gradient_metrics=trainer.policy.track_extra_gradient_metrics,
        offload_reference=trainer.ref.fsdp_config.cpu_offload,
    )


def has_exact_logprobs(decoder: Decoder) -> bool:
    """Whether a token has the same logprob at every position of a batch, up to float32 rounding.

    This was measured for float32, and for bfloat16 with our own kernels on a Hopper GPU.
    """
    if decoder.dtype == torch.float32:
        return True
    own_kernels = decoder.is_fused and decoder.device.type == "cuda"
    return own_kernels and torch.cuda.get_device_capability(decoder.device)[0] == 9


def has_comparable_logprobs(config: RunConfig) -> bool:
    """Whether engine and learner compute logprobs of the same distribution."""
    sampling = config.generator.sampling_params
    return not sampling.truncates and sampling.temperature == config.trainer.algorithm.temperature


def _build_optimizer_settings(section: OptimizerConfig, *, total_steps: int) -> OptimizerSettings:
    """`total_steps` is the number of optimizer steps of the whole run."""
    return OptimizerSettings(
        lr=section.lr,
        adam_betas=section.adam_betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        schedule=build_lr_schedule(
            section.scheduler, num_warmup_steps=section.num_warmup_steps, total_steps=total_steps
        ),
        offload_after_step=section.offload_after_step,
    )


def _updates_per_step(config: RunConfig, mini_batch_size: int) -> int:
    """Optimizer steps per training step, if no filter drops groups."""
    trainer = config.trainer
    return trainer.update_epochs_per_batch * (trainer.train_batch_size // mini_batch_size)


def max_tokens_per_microbatch(config: RunConfig) -> int:
    trainer = config.trainer
    if trainer.max_tokens_per_microbatch > 0:
        return trainer.max_tokens_per_microbatch
    return trainer.micro_train_batch_size_per_gpu * config.max_episode_tokens


def _build_reward_kl(config: RunConfig) -> RewardKl:
    algorithm, control = config.trainer.algorithm, config.trainer.algorithm.kl_ctrl
    return RewardKl(
        estimate=get_kl_estimator(algorithm.kl_estimator_type),
        coef=algorithm.kl_loss_coef,
        control=partial(adaptive_control, kl_target=control.kl_target, horizon=control.horizon)
        if control.type == "adaptive"
        else fixed_control,
        compute_advantages=partial(compute_advantages, config),
    )


def build_reference(
    config: RunConfig, policy_model: PolicyModel, folder: Callable[[], Path]
) -> Callable[[], Decoder]:
    """A function that loads the reference model (ref_model) of the KL term.

    `folder` returns where the initial policy is saved. A reference that is another model is loaded
    at once, so that its errors appear at once.
    """
    path = config.trainer.ref.model.path
    if path == config.trainer.policy.model.path:
        return lambda: _load_initial_policy(config, policy_model, folder())
    decoder = _freeze(
        load_auxiliary_model(config, policy_model, path, key="trainer.ref.model.path"), config
    )
    return lambda: decoder


def _load_initial_policy(config: RunConfig, policy_model: PolicyModel, folder: Path) -> Decoder:
    """The policy before the first RL step, or at the end of the last epoch; frozen."""
    trainer = config.trainer
    differs_from_base = trainer.warm_start.steps or trainer.update_ref_every_epoch
    if trainer.policy.model.lora.rank and not differs_from_base:
        return _freeze(strip_adapters(policy_model.loaded.module, merged=False), config)
    if not folder.exists():
        raise CheckpointError(
            f"{folder} is missing: trainer.algorithm.use_kl_loss or use_kl_in_reward compares with "
            "the policy before reinforcement learning; copy that checkpoint there or switch the KL "
            "off"
        )
    module = copy_policy(policy_model)
    load_weights(module, folder)
    return _freeze(module, config)


def copy_policy(policy_model: PolicyModel) -> nn.Module:
    """A copy of the policy's current weights, with LoRA adapters merged."""
    return copy.deepcopy(strip_adapters(policy_model.loaded.module, merged=True))


def copy_for_engine(config: RunConfig, policy_model: PolicyModel) -> PolicyModel:
    """The policy with a copy of its weights, which an engine samples from during updates."""
    return replace(policy_model, decoder=_freeze(copy_policy(policy_model), config))


def _freeze(module: nn.Module, config: RunConfig) -> Decoder:
    module.requires_grad_(False)
    return make_decoder(module, max_positions=config.max_episode_tokens)


def load_auxiliary_model(
    config: RunConfig,
    policy_model: PolicyModel,
    path: str,
    *,
    key: str,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Load a model that scores the policy's tokens, a reference or a critic.

    It gets the policy's type and device unless they are given.
    """
    weights = next(policy_model.loaded.module.parameters())
    # Of the policy's overrides only this one applies: every model must fit the longest episode.
    kwargs = config.trainer.policy.model_config_kwargs
    rope = {name: kwargs[name] for name in kwargs if name == "rope_parameters"}
    loaded = load_model(
        path,
        dtype=dtype or weights.dtype,
        device=device or weights.device,
        config_kwargs=rope_overrides(config) | rope,
        key=key,
        trust_remote_code=config.trainer.policy.model.trust_remote_code,
    )
    if loaded.tokenizer.get_vocab() != policy_model.loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"{key}={path!r} has another vocabulary than the policy, so the same token ids mean "
            "other tokens; use a model of the policy's family"
        )
    return loaded.module


def build_critic(
    config: RunConfig, policy_model: PolicyModel, *, total_steps: int
) -> Critic | None:
    """The critic of a run of `total_steps` steps; None without `trainer.critic.model.path`."""
    path = config.trainer.critic.model.path
    if path is None:
        return None
    settings = build_critic_settings(config, total_steps=total_steps)
    return Critic(_build_critic_body(config, policy_model, path), settings)


def build_critic_settings(config: RunConfig, *, total_steps: int) -> CriticSettings:
    trainer = config.trainer
    updates = _updates_per_step(config, trainer.critic_mini_batch_size)
    return CriticSettings(
        optimizer=_build_optimizer_settings(
            trainer.critic.optimizer_config, total_steps=total_steps * updates
        ),
        value_clip=trainer.algorithm.value_clip,
        compute_advantages=partial(compute_advantages, config),
        critic_mini_batch_size=trainer.critic_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=max_tokens_per_microbatch(config),
        gradient_checkpointing=trainer.gradient_checkpointing,
    )


def _build_critic_body(
    config: RunConfig, policy_model: PolicyModel, path: str
) -> Callable[[], Decoder]:
    """Another model than the policy is loaded at once, so that its errors appear at once."""
    max_positions = config.max_episode_tokens
    if path == config.trainer.policy.model.path:
        return lambda: make_decoder(copy_policy(policy_model), max_positions=max_positions)
    body = make_decoder(
        load_auxiliary_model(config, policy_model, path, key="trainer.critic.model.path"),
        max_positions=max_positions,
    )
    return lambda: body

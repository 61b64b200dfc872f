"""The models that stand beside the policy and read its tokens, from configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from torch import nn

from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import load_model, load_weights
from skyfleet.models.lora import without_adapters
from skyfleet.trainer.assemble_policy import PolicyModel, longest_episode, rope_changes


def reference_maker(
    config: RunConfig, policy_model: PolicyModel, folder: Callable[[], Path]
) -> Callable[[], Decoder]:
    """`folder` is where the policy that is compared with was saved, when it is asked for.

    Another model is read at once, for what is wrong with it to be said at once.
    """
    path = config.trainer.ref.model.path
    if path == config.trainer.policy.model.path:
        return lambda: _policy_as_it_was(config, policy_model, folder())
    decoder = _frozen(read_beside(config, policy_model, path, key="trainer.ref.model.path"), config)
    return lambda: decoder


def read_beside(config: RunConfig, policy_model: PolicyModel, path: str, *, key: str) -> nn.Module:
    """Another model that is to read the policy's tokens, on its device."""
    weights = next(policy_model.loaded.module.parameters())
    # Of what changes the policy, only this: whoever reads an episode has to reach its end.
    kwargs = config.trainer.policy.model_config_kwargs
    stretched = {name: kwargs[name] for name in kwargs if name == "rope_parameters"}
    loaded = load_model(
        path,
        dtype=weights.dtype,
        device=weights.device,
        config_kwargs=rope_changes(config) | stretched,
        key=key,
    )
    if loaded.tokenizer.get_vocab() != policy_model.loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"{key}={path!r} has another vocabulary than the policy, so it would read other tokens; "
            "take a model of the policy's family"
        )
    return loaded.module


def _policy_as_it_was(config: RunConfig, policy_model: PolicyModel, folder: Path) -> Decoder:
    """The policy before the first reinforcement step, or after the last whole epoch; frozen."""
    trainer = config.trainer
    moved = trainer.warm_start.steps or trainer.update_ref_every_epoch
    if trainer.policy.model.lora.rank and not moved:
        return _frozen(without_adapters(policy_model.loaded.module, merged=False), config)
    if not folder.exists():
        raise CheckpointError(
            f"{folder} is missing: trainer.algorithm.use_kl_loss or use_kl_in_reward compares with "
            "the policy before reinforcement; copy that checkpoint there or switch the KL off"
        )
    module = copied(policy_model)
    load_weights(module, folder)
    return _frozen(module, config)


def copied(policy_model: PolicyModel) -> nn.Module:
    """The policy as it stands, in tensors of its own."""
    return copy.deepcopy(without_adapters(policy_model.loaded.module, merged=True))


def _frozen(module: nn.Module, config: RunConfig) -> Decoder:
    module.requires_grad_(False)
    return make_decoder(module, max_positions=longest_episode(config))

"""The critic, from configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from skyfleet.config.root import RunConfig
from skyfleet.learner.critic import Critic, CriticSettings
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.trainer.assemble_learner import (
    credited_by,
    max_tokens_per_microbatch,
    optimizer_settings,
    updates_a_step,
)
from skyfleet.trainer.assemble_policy import PolicyModel, longest_episode
from skyfleet.trainer.assemble_reference import copied, read_beside


def assemble_critic(
    config: RunConfig, policy_model: PolicyModel, *, total_steps: int
) -> Critic | None:
    """`total_steps` are the run's."""
    trainer, path = config.trainer, config.trainer.critic.model.path
    if path is None:
        return None
    updates = updates_a_step(config, trainer.critic_mini_batch_size)
    settings = CriticSettings(
        optimizer=optimizer_settings(
            trainer.critic.optimizer_config, total_steps=total_steps * updates
        ),
        value_clip=trainer.algorithm.value_clip,
        credit=partial(credited_by, config),
        critic_mini_batch_size=trainer.critic_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        max_tokens_per_microbatch=max_tokens_per_microbatch(config),
        gradient_checkpointing=trainer.gradient_checkpointing,
    )
    return Critic(_body_maker(config, policy_model, path), settings)


def _body_maker(config: RunConfig, policy_model: PolicyModel, path: str) -> Callable[[], Decoder]:
    """Another model is read at once, for what is wrong with it to be said at once."""
    longest = longest_episode(config)
    if path == config.trainer.policy.model.path:
        return lambda: make_decoder(copied(policy_model), max_positions=longest)
    body = make_decoder(
        read_beside(config, policy_model, path, key="trainer.critic.model.path"),
        max_positions=longest,
    )
    return lambda: body

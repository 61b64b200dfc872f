"""Policy rules: what adapters and longer contexts owe the model they are for."""

from __future__ import annotations

from collections.abc import Iterator

from skyfleet.config.root import RunConfig


def _adapters_have_a_base(config: RunConfig) -> Iterator[str]:
    model = config.trainer.policy.model
    if model.lora.rank and model.path == "tiny":
        yield (
            f"trainer.policy.model.lora.rank={model.lora.rank} adapts a trained model, and "
            "trainer.policy.model.path=tiny is made of random weights; set the rank to 0"
        )


def _a_trained_context_is_stretched(config: RunConfig) -> Iterator[str]:
    if config.trainer.rope_scaling and config.trainer.policy.model.path == "tiny":
        yield (
            "trainer.rope_scaling stretches the context of a trained model, and a tiny one is made "
            "with any; set trainer.policy.model_config_kwargs.max_position_embeddings"
        )


def _a_context_is_stretched_once(config: RunConfig) -> Iterator[str]:
    if (
        config.trainer.rope_scaling
        and "rope_parameters" in config.trainer.policy.model_config_kwargs
    ):
        yield (
            "trainer.rope_scaling and trainer.policy.model_config_kwargs.rope_parameters both "
            "stretch the context; keep one"
        )


def tiny_strangers(config: RunConfig) -> Iterator[str]:
    """Loads, because a run's own file names its reference, and a policy of it may only be played."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    beside = {"trainer.critic.model.path": trainer.critic.model.path}
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        beside["trainer.ref.model.path"] = trainer.ref.model.path
    for key, path in beside.items():
        if path == "tiny" and trainer.policy.model.path != "tiny":
            yield (
                f"{key}=tiny is made from scratch with the words of its tasks, and cannot read what "
                f"trainer.policy.model.path={trainer.policy.model.path!r} writes; set it to that, or "
                "to a model of its family"
            )


POLICY_RULES = (
    _adapters_have_a_base,
    _a_trained_context_is_stretched,
    _a_context_is_stretched_once,
)

"""Who plays: the policy of a checkpoint, or a scripted agent to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skyfleet.cli.arguments import torch_needed
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.rollouts.conversation import Policy

Agent = Annotated[
    Literal["policy", "oracle", "null"],
    typer.Option(help="The policy, the reference solution, or an agent that does nothing."),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(help="A global_step_N folder or a model folder; by default the run's newest."),
]


async def policy_of(config: RunConfig, agent: str, checkpoint: Path | None) -> Policy:
    from skyfleet.config.rules import unsupported
    from skyfleet.rollouts.reference import null_policy, oracle_policy

    if agent == "oracle":
        return oracle_policy
    if agent == "null":
        return null_policy
    if gaps := unsupported(config):
        raise ConfigError("\n".join(gaps))
    with torch_needed():
        from skyfleet.envs.registry import env_factory
        from skyfleet.trainer.assemble_policy import assemble_speaker, sampling_of
    folder = _policy_folder(config, checkpoint)
    speaker = await assemble_speaker(config, [], env_factory(config), policy_folder=folder)
    sampling = sampling_of(config.generator.eval_sampling_params, seed=config.trainer.seed)
    return speaker.policy(sampling)


def step_of(config: RunConfig, agent: str, checkpoint: Path | None) -> int:
    """The step whose policy plays; 0 for whatever was not trained here."""
    folder = _policy_folder(config, checkpoint) if agent == "policy" else None
    number = folder.parent.name.removeprefix("global_step_") if folder else ""
    return int(number) if number.isdecimal() else 0


def _policy_folder(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """None leaves the model that the configuration names."""
    from skyfleet.checkpoints.checkpoint import read_checkpoint
    from skyfleet.checkpoints.resume import find_checkpoint, verified

    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {checkpoint}: no such folder")
    if checkpoint is not None and not (checkpoint / "policy").exists():
        return checkpoint
    if checkpoint is not None:
        return verified(read_checkpoint(checkpoint), "policy")
    newest = find_checkpoint(Path(config.trainer.ckpt_path), "latest")
    if newest is not None:
        return verified(newest, "policy")
    if config.trainer.policy.model.path == "tiny":
        raise ConfigError(
            f"{config.trainer.ckpt_path} holds no checkpoint yet, and a tiny policy is made by "
            "training: run `skyfleet train` first, or choose --agent oracle"
        )
    return None

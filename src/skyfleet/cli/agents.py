"""Agents of the command line: its options as the model that the Python API takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skyfleet.errors import ConfigError, require_torch
from skyfleet.storage.store import is_remote

if TYPE_CHECKING:
    from skyfleet.api.models import ModelSource
    from skyfleet.api.policy import Policy
    from skyfleet.checkpoints.checkpoint import Checkpoint
    from skyfleet.config.root import RunConfig

Agent = Annotated[
    Literal["policy", "oracle", "null", "random"],
    typer.Option(
        help="The policy, the reference solution, an agent that does nothing, or one that calls "
        "random tools."
    ),
]
CheckpointPath = Annotated[
    str | None,
    typer.Option(
        help="A run folder, a global_step_N folder or a model folder, or the s3:// address of a run's checkpoints or one of them; by default the run's newest, or with "
        "trainer.resume_mode=none the base model."
    ),
]


def select_agent(config: RunConfig, agent: str, checkpoint: Path | str | None) -> Policy | str:
    """The policy, whose weights are found but not loaded, or the name of a scripted agent."""
    if agent == "policy":
        return select_policy(config, checkpoint)
    if checkpoint is not None:
        raise ConfigError(
            f"--agent {agent} uses no checkpoint; remove --agent or --checkpoint {checkpoint}"
        )
    return agent


def select_policy(config: RunConfig, checkpoint: Path | str | None) -> Policy:
    from skyfleet.api.models import ModelSource
    from skyfleet.api.policy import Policy
    from skyfleet.config.validation import find_unsupported_values

    if refused := find_unsupported_values(config):
        raise ConfigError("\n".join(refused))
    if not config.generator.is_remote:
        return Policy(_find_weights(config, checkpoint), config)
    if checkpoint is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint} and generator.backend={config.generator.backend!r}: "
            "a server has its own weights; remove --checkpoint or change the backend"
        )
    return Policy(ModelSource(path=config.trainer.policy.model.path), config)


def plan_memory(agent: Policy | str) -> list[str]:
    """The memory plan of the engine, for a dry run; ConfigError if the engine cannot fit."""
    if isinstance(agent, str) or agent.source.url is not None:
        return []
    if agent.config.generator.backend != "embedded":
        return []
    require_torch()
    from skyfleet.trainer.fit_memory import fit_inference

    return fit_inference(agent.config, agent.source.folder, may_download=False).notes()


def describe_agent(agent: Policy | str) -> str:
    """The agent in words, for the console."""
    if isinstance(agent, str):
        return f"the {agent} agent"
    if agent.config.generator.is_remote:
        return f"the model at {', '.join(agent.config.generator.remote_inference_engine_urls)}"
    return agent.source.name


def _find_weights(config: RunConfig, checkpoint: Path | str | None) -> ModelSource:
    from skyfleet.api.models import ModelSource

    folder = find_policy_folder(config, checkpoint)
    if folder is None:
        return ModelSource(path=config.trainer.policy.model.path)
    number = folder.parent.name.removeprefix("global_step_")
    step = int(number) if number.isdecimal() else 0
    return ModelSource(path=str(folder), folder=folder, run_config=config, step=step)


def find_policy_folder(config: RunConfig, checkpoint: Path | str | None) -> Path | None:
    """The folder of the checkpoint's policy; None for the configured base model."""
    from skyfleet.checkpoints.fetching import fetch_policy
    from skyfleet.checkpoints.resume import find_checkpoint, verify_part

    if checkpoint is not None:
        if is_remote(checkpoint):
            return verify_part(fetch_policy(str(checkpoint)), "policy")
        return _find_in_folder(Path(checkpoint))
    trainer = config.trainer
    if trainer.resume_mode == "from_path" and is_remote(str(trainer.resume_path)):
        return verify_part(fetch_policy(str(trainer.resume_path)), "policy")
    found = find_checkpoint(Path(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path)
    if found is None and trainer.resume_mode == "latest":
        found = _fetch_newest(config)
    if found is not None:
        return verify_part(found, "policy")
    if trainer.policy.model.path == "tiny" and trainer.resume_mode == "none":
        raise ConfigError(
            "trainer.resume_mode='none' uses the base model, and a tiny policy has none: training "
            "builds it; remove trainer.resume_mode"
        )
    if trainer.policy.model.path == "tiny":
        raise ConfigError(
            f"{trainer.ckpt_path} holds no checkpoint yet, and a tiny policy is built by "
            "training: run `skyfleet train` first, select another run with trainer.run_name or "
            "--checkpoint, or use --agent oracle"
        )
    return None


def _find_in_folder(checkpoint: Path) -> Path:
    from skyfleet.checkpoints.checkpoint import read_checkpoint
    from skyfleet.checkpoints.resume import find_checkpoint, verify_part

    if not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {checkpoint}: no such folder")
    if (checkpoint / "policy").exists():
        return verify_part(read_checkpoint(checkpoint), "policy")
    if (checkpoint / "config.json").is_file():
        return checkpoint
    newest = find_checkpoint(checkpoint / "checkpoints", "latest")
    if newest is None:
        raise ConfigError(
            f"--checkpoint {checkpoint}: the folder holds no model; name a run folder, its "
            "checkpoints/global_step_N, or a folder with a config.json"
        )
    return verify_part(newest, "policy")


def _fetch_newest(config: RunConfig) -> Checkpoint | None:
    """Of the run in `trainer.ckpt_bucket`; None without a bucket, credentials or a checkpoint."""
    from skyfleet.checkpoints.fetching import fetch_policy
    from skyfleet.trainer.bucket_layout import (
        drop_buckets_without_credentials,
        locate_checkpoints,
    )

    bucket = locate_checkpoints(drop_buckets_without_credentials(config))
    if bucket is None or bucket.find_newest() is None:
        return None
    return fetch_policy(bucket.address)

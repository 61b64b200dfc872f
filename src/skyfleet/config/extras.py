"""The extras of the package that a configuration needs, for launching and preflight."""

from __future__ import annotations

from collections.abc import Iterator

from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer

_BY_ENV_CLASS = {
    "openenv": "openenv",
    "openenv_fleet": "fleet",
    "mcp": "mcp",
    "skyrl_gym": "skyrl-gym",
    "agentdojo": "agentdojo",
    "tau2": "tau2",
    "bfcl": "bfcl",
}
_BUCKETS = ("s3://", "gs://", "az://")


def list_extras(config: RunConfig) -> list[str]:
    """Names of pyproject.toml's optional dependencies, each once."""
    return list(dict.fromkeys(_find_extras(config)))


def _find_extras(config: RunConfig) -> Iterator[str]:
    trainer, environment = config.trainer, config.environment
    yield "train"
    if trainer.policy.model.path == "smollm2":
        yield "smollm2"
    yield from (name for name in trainer.logger if name not in ("console", "jsonl"))
    if trainer.alerts.slack_channel is not None:
        yield "slack"
    if trainer.prometheus.port is not None:
        yield "prometheus"
    if trainer.tracing:
        yield "otel"
    if trainer.placement.use_ray:
        yield "ray"
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        yield "vllm"
    sources = [
        *config.data.train_data,
        *(s for names in config.data.eval_sets.values() for s in names),
    ]
    if any(source.startswith(_BUCKETS) for source in sources) or _has_buckets(trainer):
        yield "s3"
    for env_class in (environment.env_class, *environment.env_classes.values()):
        if env_class in _BY_ENV_CLASS:
            yield _BY_ENV_CLASS[env_class]
    for name in ("agentdojo", "tau2", "bfcl"):
        if any(source.startswith(f"{name}:") for source in sources):
            yield name


def _has_buckets(trainer: Trainer) -> bool:
    """A path needs no client of a cloud."""
    buckets = (trainer.ckpt_bucket, trainer.trajectory_bucket)
    return any(name is not None and not name.startswith(("/", ".", "~")) for name in buckets)

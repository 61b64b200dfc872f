"""Fit a run into the memory there is before anything is loaded, or refuse it in one sentence.

What a file, a preset or a default sets is lowered where that changes results by rounding at most:
sequences that the engine runs at once, recomputed activations, the size of a micro-batch. What an
override sets is never changed; if it cannot fit, the run is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.learner.policy_model import choose_device, choose_dtype, rope_overrides
from skyfleet.models.loading import LoadedModel
from skyfleet.models.shape import ModelShape, read_model_shape, shape_of_module
from skyfleet.trainer.available_memory import (
    AvailableMemory,
    format_gib,
    read_cpu_memory,
    read_gpu_memory,
)
from skyfleet.trainer.fit_ranks import plan_ranks
from skyfleet.trainer.memory_parts import MemoryPlan, Models
from skyfleet.trainer.memory_plan import (
    engine_bytes_per_row,
    plan_host,
    plan_inference,
    plan_training,
)
from skyfleet.trainer.update_memory import tokens_per_forward_pass

logger = logging.getLogger(__name__)

MARGIN = 0.9
"""Share of the memory that is planned with; what exceeds it is lowered, what exceeds all refused."""
_ROWS, _RECOMPUTE = "generator.max_num_seqs", "trainer.gradient_checkpointing"
_TOKENS = "trainer.max_tokens_per_microbatch"
_SEQUENCES = "trainer.micro_train_batch_size_per_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConfig:
    config: RunConfig
    plan: MemoryPlan | None = None
    """None if the model's shape or the available memory is unknown."""
    available: AvailableMemory | None = None
    changes: tuple[str, ...] = ()
    """One sentence per setting that was lowered."""

    @property
    def learner_bytes(self) -> int:
        """What the learner adds to the weights, which an engine on its GPU must leave free."""
        return self.plan.learner_bytes if self.plan is not None else 0

    def notes(self) -> list[str]:
        """The plan and its changes, for a dry run."""
        return [
            self.describe()
            or "memory is not checked: the model's config.json cannot be read here, or the device is "
            "not on this machine",
            *self.changes,
        ]

    def log_changes(self) -> None:
        if self.changes:
            logger.warning("to fit: %s; %s", "; ".join(self.changes), self.describe())

    def describe(self) -> str:
        """The plan in one line; empty if there is none."""
        if self.plan is None or self.available is None:
            return ""
        return _describe_need(self.plan, self.available)


def fit_training(
    config: RunConfig,
    *,
    model: LoadedModel | None = None,
    may_download: bool = True,
    available: AvailableMemory | None = None,
) -> FittedConfig:
    """The configuration of a training run that fits, or a ConfigError.

    `model` is a policy that is in memory already. Without `available`, the system is asked.
    """
    if not _has_device(config):
        return FittedConfig(config=config)
    models = _read_models(config, model, may_download=may_download)
    if models is None:
        return FittedConfig(config=config)
    if models.on_gpu:
        _check_host(config, models)
    available = available or _read_available(models)
    if available is None:
        return FittedConfig(config=config)
    if models.on_gpu and config.trainer.strategy == "fsdp":
        ranks = plan_ranks(config, models)
        _refuse_misfit(ranks, available)
        return FittedConfig(config=config, plan=ranks, available=available)
    config, changes = _fit_update(config, models, available)
    is_fixed = _ROWS in config.override_keys
    if is_fixed:
        rows = _count_running(config)
    else:
        rows = _count_rows(config, models, available, plan_training(config, models, rows=0))
    plan = plan_training(config, models, rows=rows)
    _refuse_misfit(plan, available)
    if plan.peak_bytes > _left(available):
        changes.append("memory is tight, and the run may not finish")
    if not is_fixed:
        if rows < min(config.generator.max_num_seqs, _count_episodes(config)):
            changes.append(_describe_rows(config, rows))
        config = _set(config, _ROWS, rows)
    return FittedConfig(config=config, plan=plan, available=available, changes=tuple(changes))


def fit_inference(
    config: RunConfig,
    folder: Path | None = None,
    *,
    model: LoadedModel | None = None,
    may_download: bool = True,
    available: AvailableMemory | None = None,
) -> FittedConfig:
    """The configuration of an embedded engine that fits; `folder` holds its weights, if given."""
    if config.generator.backend != "embedded" or not _has_device(config):
        return FittedConfig(config=config)
    path, kwargs = config.trainer.policy.model.path, config.trainer.policy.model_config_kwargs
    if folder is not None:
        path, kwargs = str(folder), {}
    shape = _read_shape(config, path, kwargs, model, may_download=may_download)
    if shape is None:
        return FittedConfig(config=config)
    models = _describe_models(config, shape, is_loaded=model is not None)
    available = available or _read_available(models)
    if available is None:
        return FittedConfig(config=config)
    rows = config.generator.max_num_seqs
    if _ROWS not in config.override_keys:
        rows = _count_rows(config, models, available, plan_inference(config, models, rows=0))
    changes = [_describe_rows(config, rows)] if rows < config.generator.max_num_seqs else []
    plan = plan_inference(config, models, rows=rows)
    _refuse_misfit(plan, available)
    return FittedConfig(
        config=_set(config, _ROWS, rows), plan=plan, available=available, changes=tuple(changes)
    )


def _fit_update(
    config: RunConfig, models: Models, available: AvailableMemory
) -> tuple[RunConfig, list[str]]:
    """Recompute activations, then shrink micro-batches, until an update fits."""
    changes: list[str] = []

    def fits() -> bool:
        plan = plan_training(config, models, rows=1)
        return plan.peak_bytes <= MARGIN * _left(available)

    if not (fits() or config.trainer.gradient_checkpointing or _RECOMPUTE in config.override_keys):
        config = _set(config, _RECOMPUTE, True)
        changes.append(
            f"{_RECOMPUTE}=true instead of false: the same numbers, and about a third more time per "
            "update"
        )
    before = tokens = tokens_per_forward_pass(config)
    may_shrink = not config.override_keys & {_TOKENS, _SEQUENCES}
    while may_shrink and not fits() and tokens > config.max_episode_tokens:
        tokens = max(tokens // 2, config.max_episode_tokens)
        config = _set(config, _TOKENS, tokens)
    if tokens < before:
        changes.append(f"{_TOKENS}={tokens} instead of {before}: more and smaller micro-batches")
    return config, changes


def _count_rows(
    config: RunConfig, models: Models, available: AvailableMemory, without: MemoryPlan
) -> int:
    """Sequences that the engine can hold at once beside the plan `without` any, at least one."""
    wanted = config.generator.max_num_seqs
    # The CUDA engine sizes its pool itself, from what is free when it starts.
    if models.on_gpu or config.generator.backend != "embedded":
        return wanted
    left = MARGIN * _left(available) - without.generation_bytes
    rows = int(left // engine_bytes_per_row(config, models))
    if rows >= wanted:
        return wanted
    # A power of two, so that a little more or less free memory changes nothing on resume.
    return 1 << (rows.bit_length() - 1) if rows > 0 else 1


def _count_episodes(config: RunConfig) -> int:
    """Those of training that may run at once."""
    trainer = config.trainer
    groups = trainer.train_batch_size
    if trainer.fully_async.enabled:
        groups = trainer.fully_async.count_workers(groups)
    return groups * config.generator.n_samples_per_prompt


def _count_running(config: RunConfig) -> int:
    """The most sequences at once; how many tasks an evaluation has is not known yet."""
    trainer, rows = config.trainer, config.generator.max_num_seqs
    evaluates = trainer.eval_before_train or trainer.eval_interval > 0
    if evaluates and config.data.eval_sets:
        return rows
    return min(rows, _count_episodes(config))


def _refuse_misfit(plan: MemoryPlan, available: AvailableMemory) -> None:
    """Raise ConfigError if the plan cannot fit, even if every estimate in it is too high."""
    if plan.least_bytes <= _left(available):
        return
    parts = sorted(plan.peak_parts, key=lambda part: -part.n_bytes)
    remedies = [
        part.remedy for part in parts if part.remedy and 4 * part.n_bytes >= parts[0].n_bytes
    ]
    remedy = "; or ".join(dict.fromkeys(remedies[:2]))
    raise ConfigError(f"{_describe_need(plan, available)}; use {remedy}")


def _describe_need(plan: MemoryPlan, available: AvailableMemory) -> str:
    parts = sorted(plan.peak_parts, key=lambda part: -part.n_bytes)
    largest = [f"{part.name} {format_gib(part.n_bytes)}" for part in parts[:4] if part.n_bytes]
    return (
        f"the run needs {format_gib(plan.peak_bytes + available.held_bytes)} of memory "
        f"({', '.join(largest)}), and it can have {format_gib(available.n_bytes)} "
        f"({available.source})"
    )


def _describe_rows(config: RunConfig, rows: int) -> str:
    return f"{_ROWS}={rows} instead of {config.generator.max_num_seqs}: fewer sequences at once"


def _check_host(config: RunConfig, models: Models) -> None:
    """Weights are loaded into the machine's memory before they move to the GPU."""
    host = read_cpu_memory()
    if host is not None:
        _refuse_misfit(plan_host(config, models), host)


def _has_device(config: RunConfig) -> bool:
    """False in a dry run for another machine; loading the policy there reports it."""
    return config.trainer.device != "cuda" or torch.cuda.is_available()


def _left(available: AvailableMemory) -> int:
    return available.n_bytes - available.held_bytes


def _read_available(models: Models) -> AvailableMemory | None:
    return read_gpu_memory() if models.on_gpu else read_cpu_memory()


def _read_models(
    config: RunConfig, model: LoadedModel | None, *, may_download: bool
) -> Models | None:
    """The shapes of all models of a training run; None if one of them is unknown."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    path, kwargs = trainer.policy.model.path, trainer.policy.model_config_kwargs
    policy = _read_shape(config, path, kwargs, model, may_download=may_download)
    if policy is None:
        return None
    others: list[ModelShape | None] = []
    needs_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    for other in (trainer.ref.model.path if needs_reference else None, trainer.critic.model.path):
        same = other is None or other == path
        shape = None if same else read_model_shape(str(other), {}, may_download=may_download)
        others.append(policy if other == path else shape)
        if other is not None and others[-1] is None:
            return None
    return _describe_models(
        config, policy, reference=others[0], critic=others[1], is_loaded=model is not None
    )


def _read_shape(
    config: RunConfig,
    path: str,
    kwargs: Mapping[str, Any],
    model: LoadedModel | None,
    *,
    may_download: bool,
) -> ModelShape | None:
    lora = config.trainer.policy.model.lora
    if model is not None:
        return shape_of_module(model.module, path, lora=lora)
    changes = {**rope_overrides(config), **kwargs}
    return read_model_shape(path, changes, lora=lora, may_download=may_download)


def _describe_models(
    config: RunConfig,
    policy: ModelShape,
    *,
    reference: ModelShape | None = None,
    critic: ModelShape | None = None,
    is_loaded: bool,
) -> Models:
    device = choose_device(config.trainer.device)
    return Models(
        policy=policy,
        reference=reference,
        critic=critic,
        on_gpu=device.type == "cuda",
        itemsize=choose_dtype(config.trainer.bf16, device).itemsize,
        is_loaded=is_loaded,
    )


def _set(config: RunConfig, key: str, value: object) -> RunConfig:
    """The configuration with one changed key of the form section.name."""
    section, name = key.split(".")
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})

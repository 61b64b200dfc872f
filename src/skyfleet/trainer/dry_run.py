"""Plan a training run without loading a model: what it would do, and all that keeps it from running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from skyfleet.algorithms.validation import check_algorithm, correct_stale_samples
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import find_unsupported_values, find_untrainable
from skyfleet.envs.registry import check_task_classes, env_factory
from skyfleet.envs.verifiers.confinement import check_verifiers
from skyfleet.errors import SkyfleetError, require_torch
from skyfleet.storage.store import is_remote
from skyfleet.tasks.task import Task
from skyfleet.trainer.bucket_layout import drop_buckets_without_credentials
from skyfleet.trainer.preflight import find_training_warnings, reference_checks
from skyfleet.trainer.restoring import find_newer_in_bucket, open_bucket_step
from skyfleet.trainer.resuming import check_startable, describe_start
from skyfleet.trainer.tasks import (
    build_sampler,
    build_schedule,
    check_disjoint,
    load_sources,
    load_training_tasks,
)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DryRunPlan:
    """One sentence each."""

    steps: list[str] = field(default_factory=list)
    """What the run would do; what a problem makes unknown is left out."""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything that keeps the run from starting, with its remedy."""

    def check(self, checker: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a checker; what it raises becomes problems, and then the result is None."""
        try:
            return checker(*args, **kwargs)
        except SkyfleetError as error:
            sentences = str(error).splitlines()
            self.problems.extend(line for line in sentences if line not in self.problems)
            return None


def plan_dry_run(config: RunConfig) -> DryRunPlan:
    """Check all that can be checked before a model is loaded, and go on after a problem."""
    plan = DryRunPlan(
        warnings=find_training_warnings(config),
        problems=[*find_unsupported_values(config), *find_untrainable(config)],
    )
    plan.check(check_algorithm, config)
    start = plan.check(_find_start, config) or _Start()
    plan.check(env_factory, config)
    for check in reference_checks(config):
        plan.check(check)
    for own_check in (_check_sentinels, _check_own_loss, _check_gpus):
        plan.check(own_check, config)
    fitted = plan.check(_fit_memory, config)
    tasks = plan.check(load_training_tasks, config)
    if tasks is not None:
        _plan_steps(config, tasks, plan, start.step)
    if start.sentence:
        plan.steps.append(start.sentence)
    _plan_evaluations(config, tasks, plan)
    plan.steps.extend(fitted or ())
    return plan


class _Start(NamedTuple):
    sentence: str | None = None
    step: int = 0
    """The step from which the run resumes."""


def _find_start(config: RunConfig) -> _Start:
    checkpoint = check_startable(config)
    newer = find_newer_in_bucket(drop_buckets_without_credentials(config))
    path = str(config.trainer.resume_path)
    if newer is None and config.trainer.resume_mode == "from_path" and is_remote(path):
        newer = path  # or what the command has saved since
    if newer is not None:
        step = open_bucket_step(newer)[1]
        return _Start(f"would download {newer} and resume from it", step)
    return _Start(describe_start(config, checkpoint), checkpoint.step if checkpoint else 0)


def _plan_steps(config: RunConfig, tasks: list[Task], plan: DryRunPlan, resume_step: int) -> None:
    trainer, n_samples = config.trainer, config.generator.n_samples_per_prompt
    plan.check(build_sampler, config, tasks)
    plan.check(check_task_classes, config, tasks)
    plan.check(check_verifiers, config, tasks)
    schedule = build_schedule(config, n_tasks=len(tasks))
    envs = ", ".join(f"{n} {env}" for env, n in Counter(t.env_key for t in tasks).items())
    plan.steps.append(f"would train {trainer.policy.model.path} on {len(tasks)} tasks ({envs}):")
    steps = f"{schedule.warm_start_steps} warm-start steps, then {schedule.total_steps} steps"
    if resume_step:
        steps = f"{max(0, schedule.total_steps - resume_step)} of {schedule.total_steps} steps"
    plan.steps.append(
        f"{steps} of {trainer.train_batch_size} x {n_samples} = "
        f"{trainer.train_batch_size * n_samples} episodes"
    )
    if trainer.fully_async.enabled:
        plan.steps.append(_describe_async(config))


def _describe_async(config: RunConfig) -> str:
    before, after = config.trainer.algorithm, correct_stale_samples(config).trainer.algorithm
    added = ""
    if before.off_policy_correction != after.off_policy_correction:
        added = "; no correction is configured, so tis_ratio_type=token is added"
    return (
        "asynchronous: rollouts and updates at the same time, a token at most "
        f"{config.trainer.fully_async.max_staleness_steps} updates old{added}"
    )


def _plan_evaluations(config: RunConfig, tasks: list[Task] | None, plan: DryRunPlan) -> None:
    for name, sources in config.data.eval_sets.items():
        held = plan.check(load_sources, sources, key=f"data.val_data.{name}")
        if held is None:
            continue
        plan.check(check_task_classes, config, held)
        plan.check(check_verifiers, config, held)
        if tasks is None:
            continue
        plan.check(check_disjoint, tasks, {name: held}, allow=config.data.allow_overlap)
        schedule = build_schedule(config, n_tasks=len(tasks))
        if any(map(schedule.evaluates_at, range(schedule.total_steps + 1))):
            plan.steps.append(f"evaluating {name} on {len(held)} tasks")


def _check_sentinels(config: RunConfig) -> None:
    if config.trainer.sentinels.modes:
        require_torch()
        from skyfleet.sentinels.registry import build_modes

        build_modes(config.trainer.sentinels)


def _check_own_loss(config: RunConfig) -> None:
    if ":" in config.trainer.algorithm.policy_loss_type:
        require_torch()
        from skyfleet.algorithms.registry import build_policy_loss

        build_policy_loss(config.trainer.algorithm)


def _fit_memory(config: RunConfig) -> list[str]:
    """The memory plan and the settings that are lowered to fit."""
    require_torch()
    from skyfleet.trainer.fit_memory import fit_training

    return fit_training(config, may_download=False).notes()


def _check_gpus(config: RunConfig) -> None:
    if config.generator.backend == "vllm" and not config.generator.is_remote:
        require_torch()
        from skyfleet.engines.factory import check_gpus

        check_gpus(config, learns=True)

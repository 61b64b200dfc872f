"""Evaluate every named set at one step; store reports, trajectories and dumps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyfleet.config.root import RunConfig
from skyfleet.engines.factory import build_sampling_params
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.grading_code import GradingCode
from skyfleet.envs.registry import is_remote_env
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.baselines import Baseline, baseline_faults, measure_baselines
from skyfleet.evaluation.evaluate import GradedSets, evaluate
from skyfleet.evaluation.model_selection import select_best_step
from skyfleet.evaluation.report import (
    MAIN_PREFIX,
    EvalReport,
    load_report,
    metric_prefix,
    save_report,
)
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import EpisodeRunner, Limits
from skyfleet.sentinels.registry import build_modes
from skyfleet.tasks.task import Task
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.tracing import RolloutTracer
from skyfleet.trainer.callbacks import Callbacks
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.policy_client import PolicyClient
from skyfleet.trajectories.archive import EpisodeWriter, eval_path
from skyfleet.trajectories.skyrl_dump import dump_folder, write_dump
from skyfleet.trajectories.trajectory import Group, Trajectory, describe_ungraded

Dump = Callable[[str, int, Sequence[Group], Mapping[str, float]], None]
"""Evaluation set, step, its groups and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    folder: Path
    sets: Mapping[str, Sequence[Task]]
    """By name; the first decides which step is the best."""
    open_env: EnvFactory
    agent: AgentFactory
    agent_info: AgentInfo
    grading_code: GradingCode | None
    limits: Limits
    n_samples: int
    max_concurrent: int
    trained_envs: frozenset[str]
    costly_envs: frozenset[str]
    """Every episode there costs a remote instance, so no baselines are measured."""
    console: ConsoleTracker
    verify: Callable[[], Awaitable[None]]
    """Raises if an engine sampled with other weights than the last ones pushed."""
    callbacks: Callbacks
    dump: Dump | None = None
    tracer: RolloutTracer | None = None
    run: EpisodeRunner | None = None
    baselines: dict[str, Mapping[str, Baseline]] = field(default_factory=dict)
    """By set; measured once, at the set's first evaluation."""
    graded_sets: GradedSets = field(default_factory=GradedSets)

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        policy_client: PolicyClient,
        sets: Mapping[str, Sequence[Task]],
        *,
        open_env: EnvFactory,
        grading_code: GradingCode | None,
        trained_envs: Collection[str],
        console: ConsoleTracker,
        verify: Callable[[], Awaitable[None]],
        callbacks: Callbacks,
        tracer: RolloutTracer | None = None,
        run: EpisodeRunner | None = None,
    ) -> Evaluator:
        trainer, generator = config.trainer, config.generator
        sampling = build_sampling_params(generator.eval_sampling_params, seed=trainer.seed)
        return cls(
            folder=Path(trainer.run_path),
            sets=sets,
            open_env=open_env,
            agent=policy_client.agent(sampling),
            agent_info=AgentInfo(
                model=trainer.policy.model.path,
                temperature=sampling.temperature,
                max_turns=generator.max_turns,
            ),
            grading_code=grading_code,
            limits=build_limits(config),
            n_samples=generator.eval_n_samples_per_prompt,
            max_concurrent=count_concurrent(config),
            trained_envs=frozenset(trained_envs),
            costly_envs=frozenset(
                task.env_key
                for tasks in sets.values()
                for task in tasks
                if is_remote_env(config, task.env_key)
            ),
            console=console,
            verify=verify,
            callbacks=callbacks,
            graded_sets=GradedSets(
                stops=build_modes(trainer.sentinels)["nothing_graded"] == "stop"
            ),
            tracer=tracer,
            run=run,
            dump=_build_dump(config, policy_client) if trainer.dump_eval_results else None,
        )

    async def evaluate_all(self, step: int) -> dict[str, float]:
        """The metrics of all sets."""
        metrics: dict[str, float] = {}
        total = sum(len(tasks) for tasks in self.sets.values()) * self.n_samples
        with self.console.progress(f"evaluate at step {step}", total) as advance:
            for name, tasks in self.sets.items():
                _, set_metrics = await self.evaluate_set(name, tasks, step, advance)
                metrics |= set_metrics
        return metrics

    async def evaluate_set(
        self, name: str, tasks: Sequence[Task], step: int, advance: Callable[[], None]
    ) -> tuple[EvalReport, dict[str, float]]:
        baselines = await self._measure_baselines(name, tasks)
        with EpisodeWriter(eval_path(self.folder / "trajectories", name, step)) as archive:

            def store(trajectory: Trajectory) -> None:
                archive.add(trajectory)
                advance()

            report, groups = await evaluate(
                name,
                tasks,
                self.open_env,
                self.agent,
                self.limits,
                step=step,
                n_samples=self.n_samples,
                max_concurrent=self.max_concurrent,
                trained_envs=self.trained_envs,
                baselines=baselines,
                agent_info=self.agent_info,
                grading_code=self.grading_code,
                on_finished=store,
                tracer=self.tracer and self.tracer.bind(set=name, step=step),
                run=self.run,
            )
        await self.verify()
        if ungraded := describe_ungraded(groups):
            self.console.note(f"{name}: {ungraded}")
        prefix = metric_prefix(name, is_main=name == next(iter(self.sets)))
        metrics = report.metrics(prefix)
        if self.dump is not None:
            self.dump(name, step, groups, metrics | _rollout_metrics(groups, prefix))
        save_report(self.folder, report)
        self.callbacks.evaluation(report)
        self.graded_sets.check(name, groups)
        return report, metrics

    def select_best_step(self, evaluated_steps: Sequence[int], *, default: int) -> int:
        """The best step by a test over all evaluations of the first set."""
        deciding = next(iter(self.sets))
        reports = [
            report
            for step in evaluated_steps
            if (report := load_report(self.folder, deciding, step))
        ]
        graded = any(outcome.rewards for r in reports for outcome in r.outcomes.values())
        return select_best_step(reports).step if graded else default

    async def _measure_baselines(self, name: str, tasks: Sequence[Task]) -> Mapping[str, Baseline]:
        if name not in self.baselines:
            self.baselines[name] = await measure_baselines(
                [task for task in tasks if task.env_key not in self.costly_envs],
                self.open_env,
                self.limits,
                max_concurrent=self.max_concurrent,
                run=self.run,
            )
            for sentence in baseline_faults(self.baselines[name]):
                self.console.note(f"{name}: {sentence}")
        return self.baselines[name]


def count_concurrent(config: RunConfig) -> int:
    """Episodes at once."""
    generator, batch = config.generator, config.trainer.eval_batch_size
    if batch is None:
        return generator.max_num_seqs
    return min(generator.max_num_seqs, batch * generator.eval_n_samples_per_prompt)


def _rollout_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    """SkyRL's rollout metrics of an evaluation, such as `eval/all/generate/avg_num_tokens`."""
    overall = f"{prefix}/all" if prefix == MAIN_PREFIX else prefix
    return {
        f"{overall}/{key}": value
        for key, value in episode_metrics(groups).items()
        if key.startswith(("generate/", "environment/"))
    }


def _build_dump(config: RunConfig, policy_client: PolicyClient) -> Dump:
    """Writes evaluations in SkyRL's dump format."""

    def dump(name: str, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        write_dump(
            dump_folder(Path(config.trainer.export_path), step, name),
            groups,
            metrics,
            text=policy_client.renderer.text,
            env_class=config.environment.env_class,
            max_turns=config.generator.max_turns,
        )

    return dump

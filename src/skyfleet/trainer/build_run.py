"""Build the parts of a run that need its engines, tasks and learner, and the `Run` that holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyfleet.algorithms.credit_assignment import assign_credit, build_estimator
from skyfleet.algorithms.filters import build_filter
from skyfleet.cluster.cluster import Cluster
from skyfleet.cluster.engine_sync import GuardedLearner
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.factory import build_sampling_params
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.grading_code import GradingCode
from skyfleet.learner.learner import Learner
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.learner.sharded import ShardedLearner
from skyfleet.learner.single_device import SingleDeviceLearner
from skyfleet.learner.threaded import ThreadedLearner
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.sentinels.build import build_checker
from skyfleet.sentinels.constant_metrics import constant_metrics
from skyfleet.sentinels.recording_engine import RecordingChat, RecordingEngine
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.prometheus_tracker import PrometheusTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tracing import build_tracer
from skyfleet.trainer.alerting import build_alerts
from skyfleet.trainer.callbacks import Callbacks
from skyfleet.trainer.evaluation import Evaluator
from skyfleet.trainer.exports import Exports
from skyfleet.trainer.group_journal import GroupJournal
from skyfleet.trainer.group_rollouts import GroupRollouts
from skyfleet.trainer.journal import Journal
from skyfleet.trainer.learning import Learning
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.open_groups import OpenGroups
from skyfleet.trainer.policy_client import PolicyClient
from skyfleet.trainer.rollouts import RolloutCollector
from skyfleet.trainer.run import Inference, Run, TrainerState, WarmStart
from skyfleet.trainer.tasks import RunTasks
from skyfleet.trainer.trackers import build_trackers


def build_run(
    config: RunConfig,
    tasks: RunTasks,
    open_env: EnvFactory,
    policy_model: PolicyModel,
    learning: Learning,
    policy_client: PolicyClient,
    inference: Inference,
    callbacks: Callbacks,
    journal: Journal,
    grading_code: GradingCode | None,
    cluster: Cluster | None,
    *,
    resume_step: int | None,
    given_paths: Mapping[str, Any],
) -> Run:
    trainer, generator, limits = config.trainer, config.generator, build_limits(config)
    recording_engine = RecordingEngine(policy_client.engine)
    alerts = build_alerts(config, learning.state.sent_alerts)
    checker = build_checker(
        config,
        policy_model.decoder,
        policy_client.engines,
        learning.learner,
        limits,
        envs=tasks.trained_envs,
        recording_engine=recording_engine,
        losses=learning.losses,
        reference_interval=tasks.schedule.reference_interval,
        on_warning=alerts.report_warning,
    )
    filter_groups, estimator = build_filter(config), build_estimator(config)
    sharded = learning.learner if isinstance(learning.learner, ShardedLearner) else None
    exports = Exports.from_config(config, policy_model, None if sharded is None else sharded.export)
    # Trackers are built last: they are the first to write to the run directory.
    trackers = build_trackers(config, resume_step, tasks.schedule.total_steps, given_paths)
    console = next(tracker for tracker in trackers if isinstance(tracker, ConsoleTracker))
    tracer = build_tracer(trainer.run_name) if trainer.tracing else None
    for tracker in trackers:
        if isinstance(tracker, PrometheusTracker):
            console.note(f"metrics for Prometheus: {tracker.url}")
    for key, reason in constant_metrics(config).items():
        console.note(f"{key} {reason}")
    runner = None if cluster is None else cluster.run_episode
    rollouts = RolloutCollector(
        sampler=tasks.sampler,
        open_env=open_env,
        agent=_agent_by_step(config, _record(policy_client, recording_engine)),
        limits=limits,
        n_samples=generator.n_samples_per_prompt,
        max_concurrent=generator.max_num_seqs,
        filter_groups=filter_groups,
        tracer=tracer,
        run=runner,
    )
    learner: Learner = learning.learner
    rules, group_rollouts, eval_prefix = trainer.fully_async, None, ""
    if rules.enabled:
        if isinstance(learning.learner, SingleDeviceLearner):
            learner = ThreadedLearner(learning.learner)
        group_rollouts = _build_group_rollouts(
            config, tasks, learning.state, rollouts, journal, policy_client.engine
        )
        journal = group_rollouts.journal
        # Only then training episodes are played during an evaluation.
        eval_prefix = "eval/" if rules.max_staleness_steps else ""
    if cluster is not None and cluster.actors is not None:
        learner = GuardedLearner(learner, cluster.actors.weights)
    return Run(
        folder=Path(trainer.run_path),
        checkpoints=Path(trainer.ckpt_path),
        schedule=tasks.schedule,
        state=learning.state,
        rollouts=rollouts,
        compute_samples=lambda groups: assign_credit(
            groups, estimator, mask_unfinished=generator.apply_overlong_filtering
        ),
        learner=learner,
        critic=learning.critic,
        inference=inference,
        evaluator=Evaluator.from_config(
            config,
            replace(policy_client, session_prefix=eval_prefix),
            tasks.eval_sets,
            open_env=open_env,
            grading_code=grading_code,
            trained_envs=tasks.trained_envs,
            console=console,
            verify=inference.verify,
            callbacks=callbacks,
            tracer=tracer,
            run=runner,
        ),
        checker=checker,
        log=StepLog(*trackers),
        console=console,
        exports=exports,
        journal=journal,
        warm_start=WarmStart(batch_size=trainer.warm_start.batch_size, seed=trainer.seed),
        callbacks=callbacks,
        alerts=alerts,
        tracer=tracer,
        group_rollouts=group_rollouts,
    )


def _build_group_rollouts(
    config: RunConfig,
    tasks: RunTasks,
    state: TrainerState,
    rollouts: RolloutCollector,
    journal: Journal,
    engine: Engine,
) -> GroupRollouts:
    trainer, rules = config.trainer, config.trainer.fully_async
    groups = OpenGroups(
        tasks.train,
        batch_size=trainer.train_batch_size,
        max_staleness_steps=rules.max_staleness_steps,
        total_steps=tasks.schedule.total_steps,
    )
    groups.load_state_dict(state.open_groups)
    workers = rules.count_workers(trainer.train_batch_size)
    # A group that only waits for a place in the engine would be stale before its first token.
    places = max(1, -(-rollouts.max_concurrent // rollouts.n_samples))
    return GroupRollouts(
        collector=rollouts,
        groups=groups,
        journal=GroupJournal.extend_journal(journal, groups),
        get_version=lambda: engine.policy_version,
        n_workers=min(workers, places) if rules.max_staleness_steps else workers,
        refills=rules.sample_full_batch,
        max_refill_batches=trainer.algorithm.dynamic_sampling.max_sample_batches,
    )


def _record(policy_client: PolicyClient, recording_engine: RecordingEngine) -> PolicyClient:
    """The client whose turns are recorded, also those that a server renders."""
    chat = policy_client.chat and RecordingChat(
        policy_client.chat, recording_engine, max_input_length=policy_client.max_input_length
    )
    return replace(policy_client, engine=recording_engine, chat=chat)


def _agent_by_step(config: RunConfig, policy_client: PolicyClient) -> Callable[[int], AgentFactory]:
    def agent(step: int) -> AgentFactory:
        seed = config.trainer.seed * 1_000_003 + step
        return policy_client.agent(
            build_sampling_params(config.generator.sampling_params, seed=seed)
        )

    return agent

"""`skyfleet train`: train or resume a run."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, require_torch, show_plan
from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted
from skyfleet.errors import NoLearningSignalError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig


def train_command(config_args: ConfigArgs = None, dry_run: DryRun = False) -> None:
    """Train a policy, or resume an interrupted run."""
    config = config_from(config_args)
    if dry_run:
        from skyfleet.trainer.preflight import check_trainable

        show_plan(config, _plan(config))
        check_trainable(config)
        return
    from skyfleet.trainer.training_run import run_training

    progress = partial(print, "setting up:", flush=True)
    try:
        with require_torch():
            outcome = asyncio.run(_run_until_signal(run_training(config, on_progress=progress)))
    except (KeyboardInterrupt, _TerminatedError) as end:
        sent = end.sent if isinstance(end, _TerminatedError) else signal.SIGINT
        exit_interrupted(partial(_describe_interruption, config), sent)
    except NoLearningSignalError as error:
        raise type(error)(f"{error}. {_describe_saved(config)}") from None
    if outcome.table:
        print(f"\n{outcome.table}")
    folder = config.trainer.run_path
    print(
        f"The run is in {folder}: config, metrics, trajectories, checkpoints.\n"
        f"Its report: {folder}/report.html. Its episodes: skyfleet view {folder}"
    )


T = TypeVar("T")


class _TerminatedError(Exception):
    """The process got SIGTERM or SIGHUP."""

    def __init__(self, sent: signal.Signals) -> None:
        self.sent = sent


async def _run_until_signal(training: Coroutine[Any, Any, T]) -> T:
    """SIGTERM, which clusters send to end a job, saves a checkpoint as Ctrl-C does.

    So does SIGHUP, which a closed terminal sends, unless nohup ignores it.
    """
    running = asyncio.ensure_future(cancel_on_ctrl_c(training))
    received: list[signal.Signals] = []

    def end(sent: signal.Signals) -> None:
        received.append(sent)
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await running
    except asyncio.CancelledError:
        if received:
            raise _TerminatedError(received[0]) from None
        raise


def _describe_interruption(config: RunConfig) -> str:
    return f"Interrupted. {_describe_saved(config)}"


def _describe_saved(config: RunConfig) -> str:
    from skyfleet.checkpoints.resume import find_checkpoint

    saved = find_checkpoint(Path(config.trainer.ckpt_path), "latest")
    if saved is None:
        return "Nothing was saved yet."
    return f"The last checkpoint is {saved.folder}. To resume: {shlex.join(sys.argv)}"


def _plan(config: RunConfig) -> list[str]:
    """Describe the run without loading a model."""
    from skyfleet.envs.registry import env_factory
    from skyfleet.tasks.sampling import check_batch_size
    from skyfleet.trainer.preflight import check_references, find_training_warnings
    from skyfleet.trainer.resuming import check_startable, describe_start
    from skyfleet.trainer.tasks import (
        build_schedule,
        check_disjoint,
        load_sources,
        load_training_tasks,
    )

    start = describe_start(config, check_startable(config))
    env_factory(config)
    check_references(config)
    if config.trainer.sentinels.modes:
        with require_torch():
            from skyfleet.sentinels.registry import build_modes

            build_modes(config.trainer.sentinels)
    if ":" in config.trainer.algorithm.policy_loss_type:
        with require_torch():
            from skyfleet.algorithms.registry import build_policy_loss

            build_policy_loss(config.trainer.algorithm)
    tasks = load_training_tasks(config)
    check_batch_size(tasks, config.trainer.train_batch_size, config.trainer.min_samples_per_env)
    schedule = build_schedule(config, n_tasks=len(tasks))
    envs = ", ".join(f"{n} {env}" for env, n in Counter(t.env_key for t in tasks).items())
    rollouts = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    plan = [
        f"would train {config.trainer.policy.model.path} on {len(tasks)} tasks ({envs}):",
        f"{schedule.warm_start_steps} warm-start steps, then {schedule.total_steps} steps of "
        f"{config.trainer.train_batch_size} x {config.generator.n_samples_per_prompt} = {rollouts} "
        "episodes",
    ]
    if start:
        plan.append(start)
    eval_sets = {
        name: load_sources(sources, key=f"data.val_data.{name}")
        for name, sources in config.data.eval_sets.items()
    }
    check_disjoint(tasks, eval_sets, allow=config.data.allow_overlap)
    if any(map(schedule.evaluates_at, range(schedule.total_steps + 1))):
        plan += [f"evaluating {name} on {len(held)} tasks" for name, held in eval_sets.items()]
    return [*plan, *find_training_warnings(config)]

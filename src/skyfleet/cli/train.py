"""`skyfleet train`: train or resume a run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted, repeat_command
from skyfleet.errors import ConfigError, NoLearningSignalError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig


def train_command(config_args: ConfigArgs = None, dry_run: DryRun = False) -> None:
    """Train a policy, or resume an interrupted run."""
    config = config_from(config_args)
    if dry_run:
        _show_dry_run(config)
        return
    if _has_ranks() and os.environ.get("RANK", "0") != "0" and _serve_rank(config):
        return
    from skyfleet.api.training import train_async
    from skyfleet.envs.event_loop import run_loop

    directory = Path.cwd()  # an environment may change it
    try:
        result = run_loop(_run_until_signal(train_async(config=config)))
    except (KeyboardInterrupt, _TerminatedError) as end:
        sent = end.sent if isinstance(end, _TerminatedError) else signal.SIGINT
        exit_interrupted(partial(_describe_interruption, config, directory), sent)
    except NoLearningSignalError as error:
        raise type(error)(f"{error}. {_describe_saved(config, directory)}") from None
    if result.table:
        print(f"\n{result.table}")
    folder = config.trainer.run_path
    if (plan := directory / folder / "plan.md").is_file():
        print(f"Plan and reality:\n\n{plan.read_text(encoding='utf-8')}")
    print(
        f"The run is in {folder}: config, metrics, trajectories, checkpoints.\n"
        f"Its report: {folder}/report.html. Its episodes: skyfleet view {folder}"
    )
    if addresses := _list_addresses(config):
        print(f"Its copies: {' and '.join(addresses)}")


def _list_addresses(config: RunConfig) -> list[str]:
    from skyfleet.storage.objects import has_credentials
    from skyfleet.trainer.bucket_layout import locate_locks

    return [address for address in locate_locks(config) if has_credentials(address)]


def _has_ranks() -> bool:
    """Whether torchrun started this process as one rank of several; the first runs the loop."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _serve_rank(config: RunConfig) -> bool:
    from skyfleet.trainer.sharded_run import serve_other_rank

    return serve_other_rank(config)


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

    # torchrun sends Ctrl-C to its processes, which have already got it from the terminal: a second
    # one must not end the checkpoint of the first.
    is_rank = _has_ranks()

    def end(sent: signal.Signals) -> None:
        received.append(sent)
        if len(received) == 1 or not is_rank:
            running.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP, *((signal.SIGINT,) if is_rank else ())):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await running
    except asyncio.CancelledError:
        if received:
            raise _TerminatedError(received[0]) from None
        raise


def _describe_interruption(config: RunConfig, directory: Path) -> str:
    return f"Interrupted. {_describe_saved(config, directory)}"


def _describe_saved(config: RunConfig, directory: Path) -> str:
    from skyfleet.checkpoints.resume import find_checkpoint

    given = Path(config.trainer.ckpt_path)
    saved = find_checkpoint(directory / given, "latest")
    if saved is None:
        return "Nothing was saved yet."
    return f"The last checkpoint is {given / saved.folder.name}. To resume: {repeat_command()}"


def _show_dry_run(config: RunConfig) -> None:
    """Print the configuration and the plan; with problems only these, so that they fit a screen."""
    from skyfleet.trainer.dry_run import plan_dry_run

    plan = plan_dry_run(config)
    if plan.problems:
        print("\n".join(f"# {line}" for line in (*plan.steps, *plan.warnings)), flush=True)
        raise ConfigError("\n".join(plan.problems))
    show_plan(config, [*plan.steps, *plan.warnings])

"""One training run from its configuration to its report: resume, train, compare, conclude."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyfleet.analysis.html.page import write_report
from skyfleet.analysis.run_folder import open_run
from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.keys import diff, dump_yaml
from skyfleet.config.loading import load_recorded_config
from skyfleet.config.redaction import differs_in_secrets_only
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.report import load_report
from skyfleet.evaluation.table import comparison_table
from skyfleet.storage.local import write_atomically

if TYPE_CHECKING:
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.run import Run


logger = logging.getLogger(__name__)

CONFIG, REPORT = "config.yaml", "report.html"

# Keys that may change when a run is resumed: duration, intervals, outputs, servers.
FREE_KEYS = (
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.algorithm.dynamic_sampling.max_sample_batches",
    "trainer.eval_interval",
    "trainer.ckpt_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.hf_save_interval",
    "trainer.print_example_interval",
    "trainer.dump_data_batch",
    "trainer.dump_training_trajectories",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.logger",
    "generator.remote_inference_engine_urls",
    "generator.weight_sync_dir",
    "generator.probe_timeout_seconds",
    "trainer.sentinels.mode",
    "trainer.sentinels.modes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """What a finished run concluded."""

    folder: Path
    step: int
    best_step: int
    comparisons: tuple[Comparison, ...] = ()
    """Every evaluation set before training and after it."""
    table: str | None = None
    """The comparisons as text, as in results.md."""


async def run_training(
    config: RunConfig,
    *,
    given: GivenObjects | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TrainingOutcome:
    """Train or resume a run, compare before with after, and write the report."""
    from skyfleet.trainer.loop import train

    async with open_training_run(config, given=given, on_progress=on_progress) as run:
        await train(run)
        outcome = conclude(run)
    write_run_report(outcome.folder)
    return outcome


@asynccontextmanager
async def open_training_run(
    config: RunConfig,
    *,
    given: GivenObjects | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Run]:
    """A run ready to train, resumed if it has a checkpoint; closed on exit.

    `on_progress` gets one line per set-up step. A configuration error leaves the run directory
    unchanged.
    """
    checkpoint = find_resume_checkpoint(config)
    if checkpoint:
        on_progress(describe_resume(config, checkpoint))
    on_progress("loading torch and transformers")
    # Imported here, because it takes seconds and the checks above need none of it.
    from skyfleet.trainer.assemble import assemble

    run = await assemble(config, checkpoint=checkpoint, given=given, on_progress=on_progress)
    try:
        write_atomically(run.folder / CONFIG, dump_yaml(config))
        with tuned_gc():
            yield run
    finally:
        await run.close()


def write_run_report(folder: Path) -> None:
    """Write report.html; a failure is logged, because the training itself succeeded."""
    try:
        write_report([open_run(folder)], folder / REPORT)
    except Exception as error:
        logger.warning("cannot write the report: %s; try `skyfleet report %s`", error, folder)


def find_resume_checkpoint(config: RunConfig) -> Checkpoint | None:
    """The checkpoint this run resumes from, or None to start; writes nothing.

    Raises ConfigError if the run directory belongs to another run.
    """
    trainer = config.trainer
    found = find_checkpoint(Path(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path)
    if found:
        _reject_later_checkpoints(config, found)
    _reject_other_run(config, Path(trainer.run_path), resumed=found is not None)
    return found


def describe_resume(config: RunConfig, checkpoint: Checkpoint) -> str:
    return f"resuming {config.trainer.run_name} at step {checkpoint.step} from {checkpoint.folder}"


def _reject_later_checkpoints(config: RunConfig, checkpoint: Checkpoint) -> None:
    """A later checkpoint would be what the next `resume_mode=latest` finds."""
    newest = find_checkpoint(Path(config.trainer.ckpt_path), "latest")
    if newest is not None and newest.step > checkpoint.step:
        raise ConfigError(
            f"trainer.resume_path={config.trainer.resume_path!r} is step {checkpoint.step} and "
            f"{newest.folder} is later; move it away, or give trainer.run_name another name"
        )


def _reject_other_run(config: RunConfig, folder: Path, *, resumed: bool) -> None:
    """One directory holds one run."""
    path = folder / CONFIG
    if resumed and path.exists():
        changed = {
            key: values
            for key, values in diff(load_recorded_config(path), config).items()
            if key not in FREE_KEYS and not differs_in_secrets_only(*values)
        }
        if changed:
            key, (before, now) = next(iter(changed.items()))
            raise ConfigError(
                f"{folder} was started with {key}={before!r} and this run has {now!r}; "
                "give trainer.run_name another name, or trainer.resume_mode=none with an empty folder"
            )
    elif not resumed and _has_rows(folder / "metrics.jsonl"):
        raise ConfigError(
            f"{folder} already holds a run; give trainer.run_name another name, "
            "move the folder away, or resume it with trainer.resume_mode=latest"
        )


def conclude(run: Run) -> TrainingOutcome:
    """Compare every set before training with the same set now; writes results.md."""
    comparisons = tuple(c for name in run.evaluator.sets if (c := _compare_set(run, name)))
    table = None
    if comparisons:
        best, deciding = run.state.best_step, next(iter(run.evaluator.sets))
        table = comparison_table(comparisons) + f"\nBest step, by {deciding}: {best}.\n"
        write_atomically(run.folder / "results.md", table)
    return TrainingOutcome(
        folder=run.folder,
        step=run.state.step,
        best_step=run.state.best_step,
        comparisons=comparisons,
        table=table,
    )


def _compare_set(run: Run, name: str) -> Comparison | None:
    before = load_report(run.folder, name, 0)
    after = load_report(run.folder, name, run.state.step)
    if not before or not after or run.state.step == 0:
        return None
    try:
        return compare(before, after)
    except TaskError as error:  # no task is graded in both; the other sets still count
        run.console.note(f"{name} is not in the table: {error}")
        return None


def _has_rows(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0


@contextmanager
def tuned_gc() -> Iterator[None]:
    """Freeze what set-up allocated: scanning it costs rollouts a tenth of their time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # An episode is thousands of small objects, and hardly any of them are in cycles.
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

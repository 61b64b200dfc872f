"""Session: one call of `skyfleet train`, from a configuration to a concluded run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skyfleet.analysis.html.page import write_report
from skyfleet.analysis.run_folder import open_run
from skyfleet.checkpoints.checkpoint import Checkpoint
from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.explain import as_yaml, diff
from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.report import load_report
from skyfleet.evaluation.table import comparison_table
from skyfleet.storage.local import write_atomically
from skyfleet.trainer.garbage import settled

if TYPE_CHECKING:
    from skyfleet.trainer.run import Run


logger = logging.getLogger(__name__)

CONFIG, REPORT = "config.yaml", "report.html"

# What may change between the sessions of one run: how long, how often, and who is told.
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
    "trainer.sentinels.mode",
    "trainer.sentinels.modes",
)


async def run_training(
    config: RunConfig, *, say: Callable[[str], None] = lambda _: None
) -> str | None:
    """Train, or go on training, and conclude. Returns the final table, if there is one.

    `say` is told what is being set up, until there is a console. A run that is refused leaves its
    folder as it was.
    """
    folder = Path(config.trainer.run_path)
    checkpoint = starting_point(config)
    if checkpoint:
        say(resuming(config, checkpoint))
    say("loading torch and transformers")
    # Here, because they take seconds, and what is above is said at once.
    from skyfleet.trainer.assemble import assemble
    from skyfleet.trainer.loop import train

    run = await assemble(config, checkpoint=checkpoint, say=say)
    try:
        write_atomically(folder / CONFIG, as_yaml(config))
        with settled():
            await train(run)
        table = conclude(run)
    finally:
        await run.close()
    try:
        write_report([open_run(folder)], folder / REPORT)
    except Exception as error:  # hours of training must not end in a page's traceback
        logger.warning(
            "the report could not be written: %s; try `skyfleet report %s`", error, folder
        )
    return table


def starting_point(config: RunConfig) -> Checkpoint | None:
    """The checkpoint to go on from. Refuses a folder that this run may not go on in; writes nothing."""
    trainer = config.trainer
    found = find_checkpoint(Path(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path)
    if found:
        _refuse_later_checkpoints(config, found)
    _refuse_another_run(config, Path(trainer.run_path), resumed=found is not None)
    return found


def resuming(config: RunConfig, checkpoint: Checkpoint) -> str:
    return f"resuming {config.trainer.run_name} at step {checkpoint.step} from {checkpoint.folder}"


def _refuse_later_checkpoints(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Else the next `latest` would go on from a future that this run has left."""
    newest = find_checkpoint(Path(config.trainer.ckpt_path), "latest")
    if newest is not None and newest.step > checkpoint.step:
        raise ConfigError(
            f"trainer.resume_path={config.trainer.resume_path!r} is step {checkpoint.step} and "
            f"{newest.folder} is later; move it away, or give trainer.run_name another name"
        )


def _refuse_another_run(config: RunConfig, folder: Path, *, resumed: bool) -> None:
    """Two runs are never mixed in one folder."""
    path = folder / CONFIG
    if resumed and path.exists():
        changed = {
            key: values
            for key, values in diff(load_config_file(str(path)), config).items()
            if key not in FREE_KEYS
        }
        if changed:
            key, (before, now) = next(iter(changed.items()))
            raise ConfigError(
                f"{folder} was begun with {key}={before!r} and this run says {now!r}; "
                "give trainer.run_name another name, or trainer.resume_mode=none with an empty folder"
            )
    elif not resumed and _has_rows(folder / "metrics.jsonl"):
        raise ConfigError(
            f"{folder} holds a run already; give trainer.run_name another name, "
            "move the folder away, or go on with trainer.resume_mode=latest"
        )


def conclude(run: Run) -> str | None:
    """Compare every set before training with the same set now; the table is also kept."""
    comparisons = [c for name in run.evals.sets if (c := _compared(run, name))]
    if not comparisons:
        return None
    best = run.state.best_step
    deciding = next(iter(run.evals.sets))
    table = comparison_table(comparisons) + f"\nBest step, by {deciding}: {best}.\n"
    write_atomically(run.folder / "results.md", table)
    return table


def _compared(run: Run, name: str) -> Comparison | None:
    before = load_report(run.folder, name, 0)
    after = load_report(run.folder, name, run.state.step)
    if not before or not after or run.state.step == 0:
        return None
    try:
        return compare(before, after)
    except TaskError as error:  # nothing graded in common: the other sets still count
        run.console.note(f"{name} is not in the table: {error}")
        return None


def _has_rows(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0

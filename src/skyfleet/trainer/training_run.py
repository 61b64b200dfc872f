"""One training run from its configuration to its report: resume, train, compare, conclude."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from skyfleet.analysis.html.page import write_report
from skyfleet.analysis.missing_episodes import find_missing_episodes
from skyfleet.analysis.plan_comparison import compare_plan
from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.run_plan import PLAN
from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import LearnerLostError, SkyfleetError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.held_out import compare_held_out
from skyfleet.evaluation.model_selection import describe_best_step
from skyfleet.evaluation.report import EvalReport, load_report
from skyfleet.evaluation.table import comparison_table
from skyfleet.storage.bucket_lock import lock_addresses
from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import write_atomically
from skyfleet.trainer.attachments import RESULTS, attach_inputs, attach_results
from skyfleet.trainer.bucket_layout import (
    REPORT,
    check_buckets,
    drop_buckets_without_credentials,
    locate_locks,
)
from skyfleet.trainer.output_paths import anchor_paths, list_given_paths
from skyfleet.trainer.resuming import (
    CONFIG,
    METRICS,
    describe_start,
    discard_replayed_steps,
    hold_run_folders,
    prepare_folders,
)
from skyfleet.trainer.trajectory_downloads import download_episodes
from skyfleet.trainer.uploads import RunUploads
from skyfleet.trainer.usage import record_usage

if TYPE_CHECKING:
    from skyfleet.trainer.assemble import GivenObjects
    from skyfleet.trainer.run import Run


logger = logging.getLogger(__name__)

PLAN_TABLE = "plan.md"
MAX_LEARNER_LOSSES = 5
"""In a row from the same checkpoint; then the run stops."""


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
    """Train or resume a run, compare before with after, and write the report.

    With Ray a learner that lost a rank is started again from the last checkpoint and the journal.
    """
    from skyfleet.trainer.loops import train

    n_losses, reached = 0, -1
    while True:
        step = -1
        try:
            async with open_training_run(config, given=given, on_progress=on_progress) as run:
                step = run.state.step
                await train(run)
                return conclude(run)
        except LearnerLostError as error:
            n_losses, reached = (n_losses if step <= reached else 0) + 1, max(step, reached)
            if not config.trainer.placement.use_ray or n_losses > MAX_LEARNER_LOSSES:
                raise
            logger.warning("the learner is started again: %s", error)


@asynccontextmanager
async def open_training_run(
    config: RunConfig,
    *,
    given: GivenObjects | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Run]:
    """A run ready to train, resumed if it has a checkpoint; closed on exit.

    `on_progress` gets one line per set-up step. A configuration error leaves the run directory
    unchanged. No other process can open the run until it is closed.
    """
    start = perf_counter()
    config = drop_buckets_without_credentials(config)
    anchored = anchor_paths(config)  # what runs from here on may change the working directory
    folder = Path(anchored.trainer.run_path)
    check_buckets(config)
    async with (
        hold_run_folders(config, on_progress) as locks,
        lock_addresses(locate_locks(config), on_progress) as bucket_locks,
    ):
        checkpoint = prepare_folders(config, on_progress)
        if sentence := describe_start(config, checkpoint):
            on_progress(sentence)
        was_started = (folder / METRICS).exists()
        on_progress("loading torch and transformers")
        # Imported here, because it takes seconds and the checks above need none of it.
        from skyfleet.trainer.assemble import assemble

        with explain_disk_full(folder):
            run = await assemble(
                anchored,
                checkpoint=checkpoint,
                given=given,
                given_paths=list_given_paths(config),
                locks=[*locks, *bucket_locks],
                on_progress=on_progress,
            )
            run = replace(
                run,
                uploads=RunUploads.from_config(
                    anchored, bucket_locks, on_failing=run.alerts.report_failing_upload
                ),
                opened_at=start,
                first_step=run.state.step,
            )
            run.alerts.begin(opened_at=start, first_step=run.first_step)
            ended_by: BaseException | None = None
            try:
                write_atomically(folder / CONFIG, dump_yaml(config))
                attach_inputs(run.log, config)
                # Not in a folder that only holds something else, such as evaluations.
                if was_started:
                    last_step = run.state.step if checkpoint else -1
                    discard_replayed_steps(folder, last_step)
                    run.checker.resume(last_step)
                    await asyncio.to_thread(download_episodes, anchored, last_step, on_progress)
                run.uploads.start()
                with tuned_gc():
                    yield run
            except BaseException as error:
                ended_by = error
                raise
            finally:
                try:
                    await run.close(ended_by)
                finally:
                    await run.uploads.close()


def _write_run_report(folder: Path) -> None:
    """Write report.html, and plan.md beside a plan; a failure is logged, because training succeeded."""
    try:
        if (folder / PLAN).is_file():
            write_atomically(folder / PLAN_TABLE, f"{compare_plan(open_run(folder)).to_text()}\n")
    except SkyfleetError as error:
        logger.warning("the run is not compared with its plan: %s", error)
    try:
        write_report([open_run(folder)], folder / REPORT)
    except Exception as error:
        logger.warning("cannot write the report: %s; try `skyfleet report %s`", error, folder)


def conclude(run: Run) -> TrainingOutcome:
    """Compare every set before training with the same set now; writes results.md and the report."""
    comparisons = tuple(_compare_sets(run))
    table = None
    if comparisons:
        best, deciding = run.state.best_step, next(iter(run.evaluator.sets))
        table = f"{comparison_table(comparisons)}\n{describe_best_step(deciding, best)}\n"
        if sentence := _describe_missing(run.folder):
            table += f"Incomplete: {sentence}.\n"
        write_atomically(run.folder / RESULTS, table)
    else:  # those of an earlier end of this run would be taken for its results
        (run.folder / RESULTS).unlink(missing_ok=True)
    record_usage(
        run.folder,
        from_step=run.first_step,
        to_step=run.state.step,
        seconds=perf_counter() - run.opened_at,
    )
    outcome = TrainingOutcome(
        folder=run.folder,
        step=run.state.step,
        best_step=run.state.best_step,
        comparisons=comparisons,
        table=table,
    )
    _write_run_report(run.folder)
    attach_results(run.log, run.folder)
    run.alerts.report_end(outcome.step, outcome.best_step, outcome.table or "")
    return outcome


def _describe_missing(folder: Path) -> str | None:
    try:
        missing = find_missing_episodes(open_run(folder))
    except SkyfleetError as error:  # the report says the same
        logger.info("missing episodes are not listed: %s", error)
        return None
    return None if missing is None else missing.describe()


def _compare_sets(run: Run) -> Iterator[Comparison]:
    """Of each set, and of the held-out environments of all sets."""
    pairs: list[tuple[EvalReport, EvalReport]] = []
    for name in run.evaluator.sets:
        before = load_report(run.folder, name, 0)
        after = load_report(run.folder, name, run.state.step)
        if not before or not after or run.state.step == 0:
            continue
        try:
            yield compare(before, after)
        except TaskError as error:  # no task in common, or graded by other code
            run.console.note(f"{name} is not in the table: {error}")
        else:
            pairs.append((before, after))
    if (held_out := compare_held_out(pairs)) is not None:
        yield held_out


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

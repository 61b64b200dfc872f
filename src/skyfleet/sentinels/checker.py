"""InvariantChecker: runs the sentinels of each stage, and stops the run or warns."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.sample import Sample
from skyfleet.config.trainer import Mode
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import healthy
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.learner.loss_recorder import LossRecorder
from skyfleet.sentinels.finding import Finding, Sentinel
from skyfleet.sentinels.fingerprint import find_weights, fingerprint
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import SENTINELS
from skyfleet.sentinels.stages import (
    AdvantageStage,
    Invariants,
    MetricsStage,
    RolloutStage,
    SampleSums,
    SyncStage,
    UpdateStage,
    number_attempts,
)
from skyfleet.sentinels.trend_checks import MetricsHistory
from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, sync_file, sync_folder
from skyfleet.storage.step_rows import truncate_rows
from skyfleet.trajectories.trajectory import Group, Trajectory, first_grading_error

logger = logging.getLogger(__name__)

FINDINGS_FILE = "sentinels.jsonl"
OnWarning = Callable[[str, int, str], None]
"""Called with the name of a sentinel, the step and what it found."""


class InvariantChecker:
    """The training loop calls one method per stage, in the order of a step."""

    def __init__(
        self,
        *,
        folder: Path,
        expected: Invariants,
        modes: Mapping[str, Mode],
        recording_engine: RecordingEngine,
        losses: LossRecorder,
        learner: Learner,
        engines: Sequence[Engine],
        on_warning: OnWarning | None = None,
    ) -> None:
        """`on_warning` gets the first warning of each sentinel."""
        self._on_warning = on_warning
        self._path, self._expected, self._modes = folder / FINDINGS_FILE, expected, modes
        self._recording_engine, self._losses = recording_engine, losses
        self._learner, self._engines = learner, engines
        self._history = MetricsHistory(folder / "metrics.jsonl")
        self._step = self._version = 0
        self._sums: list[SampleSums] = []
        self._n_sampled: dict[int, int] = {}
        self._first_grading_error = ""
        self._fingerprint: Tensor | None = None
        """Of the learner's weights after the last update."""
        self._found: set[str] = set()
        """Since the last row: a weight sync comes after the row of its step."""
        self._warned: set[str] = set()
        self._unsynced = False
        self._seconds = 0.0

    def resume(self, last_step: int) -> None:
        """Remove the findings of steps that are run again; call it before the first check."""
        if not self._path.exists():
            return
        rows = truncate_rows(self._path, last_step)
        if not rows:
            self._path.unlink()
        # A weight sync comes after the row of its step, so its finding belongs to the next row.
        self._found = {str(row.get("sentinel")) for row in rows if row["step"] == last_step}

    def sync(self) -> None:
        """Make the findings durable: called before a checkpoint that follows them is saved."""
        if self._unsynced:
            sync_file(self._path)
            sync_folder(self._path.parent)
            self._unsynced = False

    def check_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        restored: Sequence[Trajectory] = (),
        is_open: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`restored` were sampled before this process began: they are compared with themselves.

        Completions of sessions that are `is_open` belong to groups of later steps.
        """
        self._step, self._version = step, self._learner.policy_version
        with self._timed():
            transcripts, lost = self._recording_engine.drain(groups, restored, is_open=is_open)
            self._first_grading_error = first_grading_error(groups)
            self._n_sampled = {id(r.transcript): r.n_sampled for r in transcripts}
            self._check(
                RolloutStage(
                    expected=self._expected,
                    step=step,
                    groups=groups,
                    transcripts=transcripts,
                    lost_completions=lost,
                    policy_version=self._version,
                )
            )

    def check_advantages(
        self, groups: Sequence[Group], kept: FilterResult, samples: Sequence[Sample]
    ) -> None:
        with self._timed():
            self._sums = SampleSums.from_samples(samples)
            if self._fingerprint is None:
                self._fingerprint = self._compute_fingerprint()
            self._check(
                AdvantageStage(
                    expected=self._expected,
                    step=self._step,
                    groups=groups,
                    kept=kept,
                    attempts=number_attempts(kept.groups),
                    samples=samples,
                    sums=self._sums,
                    n_sampled=self._n_sampled,
                )
            )

    def check_update(self, samples: Sequence[Sample], report: StepReport) -> None:
        with self._timed():
            before, self._fingerprint = self._fingerprint, self._compute_fingerprint()
            self._check(
                UpdateStage(
                    expected=self._expected,
                    step=self._step,
                    samples=report.samples or samples,
                    sums=SampleSums.from_samples(report.samples) if report.samples else self._sums,
                    policy_version=self._version,
                    report=report,
                    record=self._losses.drain(),
                    before=before,
                    after=self._fingerprint,
                )
            )

    def check_sync(self, version: int) -> None:
        with self._timed():
            self._check(
                SyncStage(
                    version=version,
                    previous=self._version,
                    learner=self._learner,
                    engines=healthy(self._engines),
                )
            )

    def check_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns `sentinel/<name>` for every sentinel that is on: 1 if it ever found something."""
        with self._timed():
            first_rows, last_rows = self._history.read()
            self._check(
                MetricsStage(
                    expected=self._expected,
                    metrics=metrics,
                    first_rows=first_rows,
                    last_rows=last_rows,
                    first_grading_error=self._first_grading_error,
                )
            )
            keys = {name: f"sentinel/{name}" for name, mode in self._modes.items() if mode != "off"}
            before = last_rows[-1] if last_rows else {}
            status = {k: max(float(n in self._found), before.get(k, 0.0)) for n, k in keys.items()}
        seconds, self._seconds, self._found = self._seconds, 0.0, set()
        return status | {"timing/sentinels": seconds}

    def _check(self, stage: object) -> None:
        found: list[tuple[Sentinel[Any], Finding]] = []
        for sentinel in SENTINELS:
            if sentinel.stage is type(stage) and self._modes[sentinel.name] != "off":
                finding = sentinel.check(stage)
                if finding is not None:
                    found.append((sentinel, finding))
        for sentinel, finding in found:
            name = sentinel.name
            self._write(name, finding)
            self._found.add(name)
            if self._modes[name] == "warn" and name not in self._warned:
                logger.warning("sentinel %s, step %d: %s", name, self._step, _describe(finding))
                self._warned.add(name)
                if self._on_warning is not None:
                    self._on_warning(name, self._step, _describe(finding))
        for sentinel, finding in found:
            name = sentinel.name
            if self._modes[name] == "stop":
                raise sentinel.error(
                    f"sentinel {name}, step {self._step}: {_describe(finding)}. All findings are in "
                    f"{self._path}; to continue despite it, set trainer.sentinels.modes.{name}=warn"
                )

    def _write(self, name: str, finding: Finding) -> None:
        row: dict[str, Any] = {
            "step": self._step,
            "sentinel": name,
            "mode": self._modes[name],
            "sentence": finding.sentence,
            "evidence": finding.evidence,
        }
        make_folder(self._path.parent)
        with explain_disk_full(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._unsynced = True

    def _compute_fingerprint(self) -> Tensor | None:
        weights = find_weights(self._learner)
        return None if weights is None else fingerprint(weights)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds += perf_counter() - start


def _describe(finding: Finding) -> str:
    """`a sentence (key=value, key=value)`"""
    evidence = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in finding.evidence.items()
    )
    return f"{finding.sentence} ({', '.join(evidence)})"

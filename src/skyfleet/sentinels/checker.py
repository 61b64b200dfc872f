"""Watch: shows each hop's records to the sentinels, and stops the run or warns as they are set."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.sample import Sample
from skyfleet.config.sentinels import Mode
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import living
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.sentinels.finding import Finding, Sentinel
from skyfleet.sentinels.fingerprint import fingerprint, weights_of
from skyfleet.sentinels.invariants import Invariants
from skyfleet.sentinels.loss_recorder import LossRecorder
from skyfleet.sentinels.memory import Memory
from skyfleet.sentinels.recording_engine import RecordingEngine
from skyfleet.sentinels.registry import ROSTER
from skyfleet.sentinels.stages import Credited, Digest, Learned, Played, Synced, Told, numbered
from skyfleet.trajectories.trajectory import Group, first_grading_error

logger = logging.getLogger(__name__)

JOURNAL = "sentinels.jsonl"


class InvariantChecker:
    """The loop calls one method a hop, in the order of a step."""

    def __init__(
        self,
        *,
        folder: Path,
        expected: Invariants,
        modes: Mapping[str, Mode],
        witness: RecordingEngine,
        losses: LossRecorder,
        learner: Learner,
        engines: Sequence[Engine],
    ) -> None:
        self._journal, self._expected, self._modes = folder / JOURNAL, expected, modes
        self._witness, self._losses = witness, losses
        self._learner, self._engines = learner, engines
        self._memory = Memory(folder / "metrics.jsonl")
        self._step = self._version = 0
        self._digests: list[Digest] = []
        self._sampled: dict[int, int] = {}
        self._why_unknown = ""
        self._print: Tensor | None = None
        """Of the learner's weights, as last seen."""
        self._found: set[str] = set()
        """Since the last row: a sync comes behind its step's."""
        self._warned: set[str] = set()
        self._seconds = 0.0

    def played(self, step: int, groups: Sequence[Group]) -> None:
        self._step, self._version = step, self._learner.policy_version
        with self._timed():
            speeches, lost = self._witness.testify(groups)
            self._why_unknown = first_grading_error(groups)
            self._sampled = {id(speech.transcript): speech.n_sampled for speech in speeches}
            played = Played(
                expected=self._expected,
                step=step,
                groups=groups,
                speeches=speeches,
                lost_completions=lost,
                policy_version=self._version,
            )
            self._look(played)

    def credited(
        self, groups: Sequence[Group], kept: FilterResult, samples: Sequence[Sample]
    ) -> None:
        with self._timed():
            self._digests = Digest.of_each(samples)
            if self._print is None:
                self._print = self._weights()
            credited = Credited(
                expected=self._expected,
                step=self._step,
                groups=groups,
                kept=kept,
                attempts=numbered(kept.groups),
                samples=samples,
                digests=self._digests,
                sampled=self._sampled,
            )
            self._look(credited)

    def learned(self, samples: Sequence[Sample], report: StepReport) -> None:
        with self._timed():
            before, self._print = self._print, self._weights()
            learned = Learned(
                expected=self._expected,
                step=self._step,
                samples=report.credited or samples,
                digests=Digest.of_each(report.credited) if report.credited else self._digests,
                policy_version=self._version,
                report=report,
                seen=self._losses.testify(),
                before=before,
                after=self._print,
            )
            self._look(learned)

    def synced(self, version: int) -> None:
        with self._timed():
            self._look(
                Synced(
                    version=version,
                    previous=self._version,
                    learner=self._learner,
                    engines=living(self._engines),
                )
            )

    def told(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`sentinel/<name>` for every sentinel that is on: 1 where it has found something so far."""
        with self._timed():
            began, lately = self._memory.recall()
            self._look(
                Told(
                    expected=self._expected,
                    metrics=metrics,
                    began=began,
                    lately=lately,
                    first_grading_error=self._why_unknown,
                )
            )
            keys = {name: f"sentinel/{name}" for name, mode in self._modes.items() if mode != "off"}
            before = lately[-1] if lately else {}
            status = {k: max(float(n in self._found), before.get(k, 0.0)) for n, k in keys.items()}
        seconds, self._seconds, self._found = self._seconds, 0.0, set()
        return status | {"timing/sentinels": seconds}

    def _look(self, records: object) -> None:
        found: list[tuple[Sentinel[Any], Finding]] = []
        for sentinel in ROSTER:
            if sentinel.hop is type(records) and self._modes[sentinel.name] != "off":
                finding = sentinel.look(records)
                if finding is not None:
                    found.append((sentinel, finding))
        for sentinel, finding in found:
            name = sentinel.name
            self._write(name, finding)
            self._found.add(name)
            if self._modes[name] == "warn" and name not in self._warned:
                logger.warning("sentinel %s, step %d: %s", name, self._step, _told(finding))
                self._warned.add(name)
        for sentinel, finding in found:
            name = sentinel.name
            if self._modes[name] == "stop":
                raise sentinel.error(
                    f"sentinel {name}, step {self._step}: {_told(finding)}. All findings are in "
                    f"{self._journal}; trainer.sentinels.modes.{name}=warn goes on all the same"
                )

    def _write(self, name: str, finding: Finding) -> None:
        row: dict[str, Any] = {
            "step": self._step,
            "sentinel": name,
            "mode": self._modes[name],
            "sentence": finding.sentence,
            "evidence": finding.evidence,
        }
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _weights(self) -> Tensor | None:
        weights = weights_of(self._learner)
        return None if weights is None else fingerprint(weights)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds += perf_counter() - start


def _told(finding: Finding) -> str:
    """`a sentence (key=value, key=value)`"""
    evidence = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in finding.evidence.items()
    )
    return f"{finding.sentence} ({', '.join(evidence)})"

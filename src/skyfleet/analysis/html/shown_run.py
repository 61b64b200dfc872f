"""ShownRun: a run folder read once, with the letter and colour it has on the page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from skyfleet.analysis.run_folder import RunFolder
from skyfleet.analysis.signal import quarters
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    folder: RunFolder
    slot: int
    alone: bool
    """No other run is on the page, so it needs no letter."""
    metrics: tuple[Mapping[str, float], ...]
    timing: tuple[Mapping[str, float], ...]
    reports: Mapping[str, Mapping[int, EvalReport]]
    training: tuple[Entry, ...]
    evaluation: tuple[Entry, ...]
    excuses: tuple[str, ...]
    """A sentence for each file of episodes that cannot be listed."""

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def mark(self) -> str:
        """`A` for the first of several."""
        return "" if self.alone else _letters(self.slot)

    @property
    def title(self) -> str:
        return f"{self.mark} {self.name}".strip()

    @property
    def last_step(self) -> int:
        return int(max((row["step"] for row in self.metrics), default=0))

    def view_command(self, entry_id: str) -> str:
        """What opens the episode whole."""
        return shlex.join(("skyfleet", "view", str(self.folder.path), "--episode", entry_id))


def read_runs(folders: Sequence[RunFolder]) -> list[ShownRun]:
    return [
        _read(folder, slot=slot, alone=len(folders) == 1) for slot, folder in enumerate(folders)
    ]


def training_envs(runs: Iterable[ShownRun]) -> list[str]:
    return sorted({entry.env_key for run in runs for entry in run.training})


def first_and_last(run: ShownRun) -> tuple[list[Entry], list[Entry]]:
    """The training episodes of the first and of the last quarter of the steps."""
    first, last = (set(steps) for steps in quarters(entry.step for entry in run.training))
    return (
        [entry for entry in run.training if entry.step in first],
        [entry for entry in run.training if entry.step in last],
    )


def _read(folder: RunFolder, *, slot: int, alone: bool) -> ShownRun:
    excuses: list[str] = []
    entries = folder.entries(on_damage=lambda error: excuses.append(f"Left out: {error}."))
    return ShownRun(
        folder=folder,
        slot=slot,
        alone=alone,
        metrics=tuple(folder.metrics()),
        timing=tuple(folder.timing()),
        reports=folder.reports(),
        training=tuple(entry for entry in entries if entry.kind == "train"),
        evaluation=tuple(entry for entry in entries if entry.kind == "eval"),
        excuses=tuple(excuses),
    )


def _letters(slot: int) -> str:
    """A to Z, then A2 to Z2."""
    again, place = divmod(slot, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(again + 1) if again else "")

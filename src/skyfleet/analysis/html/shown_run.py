"""ShownRun: a run folder read once, with the letter and colour it has on the page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from urllib.parse import quote

from skyfleet.analysis.run_folder import RunFolder
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

    @property
    def view_command(self) -> str:
        return shlex.join(("skyfleet", "view", str(self.folder.path)))


def place_in_viewer(entry_id: str) -> str:
    """What comes behind the address that `skyfleet view` prints."""
    return f"#episode={quote(entry_id)}"


def read_runs(folders: Sequence[RunFolder]) -> list[ShownRun]:
    return [
        _read(folder, slot=slot, alone=len(folders) == 1) for slot, folder in enumerate(folders)
    ]


def training_envs(runs: Iterable[ShownRun]) -> list[str]:
    return sorted({entry.env_key for run in runs for entry in run.training})


def quarters(run: ShownRun) -> tuple[list[Entry], list[Entry]]:
    """The training episodes of the first and of the last quarter of the steps, one step at least."""
    steps = sorted({entry.step for entry in run.training})
    n = max(1, len(steps) // 4)
    first, last = set(steps[:n]), set(steps[-n:])
    return (
        [entry for entry in run.training if entry.step in first],
        [entry for entry in run.training if entry.step in last],
    )


def _read(folder: RunFolder, *, slot: int, alone: bool) -> ShownRun:
    entries = folder.entries()
    return ShownRun(
        folder=folder,
        slot=slot,
        alone=alone,
        metrics=tuple(folder.metrics()),
        timing=tuple(folder.timing()),
        reports=folder.reports(),
        training=tuple(entry for entry in entries if entry.kind == "train"),
        evaluation=tuple(entry for entry in entries if entry.kind == "eval"),
    )


def _letters(slot: int) -> str:
    """A to Z, then A2 to Z2."""
    again, place = divmod(slot, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(again + 1) if again else "")

"""Reports: the reports that a path names, and those of two paths side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.records import RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    pairs: tuple[tuple[EvalReport, EvalReport], ...]
    """Before and after, set by set."""
    unmatched: tuple[str, ...]
    """Sets that only one side has."""


def match_reports(before: Path, after: Path | None, *, step: int | None = None) -> Matched:
    """A run folder alone is its first step against its last, or against `step`.

    Of two, each path is a report, a folder of reports, or a run folder: its last step, or `step`.
    """
    if step is not None and after is not None and not (_steps(before) or _steps(after)):
        raise ConfigError(
            f"--step {step} is of a run folder, and neither {before} nor {after} is one"
        )
    if after is None:
        first, last = _first_and_later(before, step)
        one, other = _of_folder(first), _of_folder(last)
    else:
        one, other = read_reports(before, step=step), read_reports(after, step=step)
    if after is not None and before.is_file() and after.is_file():
        return Matched(pairs=tuple(zip(one.values(), other.values(), strict=True)), unmatched=())
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ConfigError(
            f"{before} has {sorted(one)} and {after or before} has {sorted(other)}: no set in "
            "common; name two report files to compare sets of different names"
        )
    return Matched(
        pairs=tuple((one[name], other[name]) for name in common),
        unmatched=tuple(sorted(one.keys() ^ other.keys())),
    )


def read_reports(path: Path, *, step: int | None = None) -> dict[str, EvalReport]:
    """By set: of a report, of a folder of them, or of a run's last step, or `step`."""
    if path.is_file():
        return _read([path])
    if steps := _steps(path):
        return _of_folder(steps[max(steps) if step is None else _known(path, step, steps)])
    return _of_folder(path)


def _first_and_later(run: Path, step: int | None) -> tuple[Path, Path]:
    steps = _steps(run)
    if len(steps) < 2:
        raise ConfigError(
            f"{run} has reports of {len(steps)} steps, and a comparison needs two; name a run "
            "folder that was evaluated twice, or two reports"
        )
    later = max(steps) if step is None else _known(run, step, steps)
    return steps[min(steps)], steps[later]


def _steps(run: Path) -> dict[int, Path]:
    """`reports/step_000060` and the like of a run folder."""
    folders = ((p.name.removeprefix("step_"), p) for p in run.glob("reports/step_*") if p.is_dir())
    return {int(number): folder for number, folder in folders if number.isdecimal()}


def _known(run: Path, step: int, steps: dict[int, Path]) -> int:
    if step not in steps:
        raise ConfigError(f"--step {step}: {run} was evaluated at {sorted(steps)}; choose of these")
    return step


def _of_folder(folder: Path) -> dict[str, EvalReport]:
    reports = _read(sorted(folder.glob("*.json")))
    if not reports:
        raise ConfigError(
            f"{folder} holds no report; name a report, a folder of reports or a run folder"
        )
    return reports


def _read(paths: Iterable[Path]) -> dict[str, EvalReport]:
    reports = {}
    for path in paths:
        try:
            report = EvalReport.from_json(path.read_text(encoding="utf-8"))
        except (RecordError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no report: {error}") from None
        reports[report.name] = report
    return reports

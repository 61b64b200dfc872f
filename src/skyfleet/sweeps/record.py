"""SweepRecord: what became of the runs of a sweep, in `sweep.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyfleet.errors import ConfigError
from skyfleet.storage.local import write_atomically
from skyfleet.storage.step_rows import read_last_step
from skyfleet.sweeps.plan import SweepPlan, SweepRun
from skyfleet.trainer.resuming import reject_other_run

RECORD = "sweep.json"

State = Literal["waiting", "started", "launched", "failed", "finished"]


class RunRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    state: State = "waiting"
    error: str = ""
    """Why it failed, in one sentence."""
    total_steps: int | None = None
    """The steps that it was planned for; a finished run with more steps in the plan goes on."""
    seconds: float = 0.0
    """How long its processes ran."""


class SweepRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format_version: Literal[1] = 1
    runs: dict[str, RunRecord] = Field(default_factory=dict)

    def get(self, name: str) -> RunRecord:
        return self.runs.get(name, RunRecord())


def read_record(folder: Path) -> SweepRecord:
    path = folder / RECORD
    if not path.exists():
        return SweepRecord()
    try:
        return SweepRecord.model_validate_json(path.read_bytes())
    except ValidationError:
        raise ConfigError(
            f"{path} cannot be read; move it away: finished runs are then found by their folders"
        ) from None


def write_record(folder: Path, record: SweepRecord) -> None:
    write_atomically(folder / RECORD, record.model_dump_json(indent=1) + "\n")


def check_folders(plan: SweepPlan, record: SweepRecord) -> None:
    """Raise ConfigError if a folder holds a run with other settings, or with more steps."""
    for run in plan.runs:
        find_state(run, record)
        if record.get(run.name).state == "launched":
            continue  # its paths and data are those of another machine
        try:
            reject_other_run(run.config)
        except ConfigError as error:
            problem = str(error).partition("; give trainer.run_name")[0]
            raise ConfigError(f"{problem}; give the sweep another --name") from None


def find_state(run: SweepRun, record: SweepRecord) -> State:
    """The state of a run by its record and by its folder, which may come from another machine."""
    known = record.get(run.name)
    done = _read_finished_step(run.folder)
    if done is None:
        # Its folder was removed, so it starts again.
        return "waiting" if known.state == "finished" else known.state
    if known.state == "finished" and known.total_steps == run.total_steps:
        return "finished"
    if run.total_steps is None or done == run.total_steps:
        return "finished"
    if done > run.total_steps:
        raise ConfigError(
            f"{run.folder} has {done} steps and this sweep only {run.total_steps}; give the sweep "
            "another --name, or as many steps"
        )
    return "waiting" if known.state == "finished" else known.state


def _read_finished_step(folder: Path) -> int | None:
    """The last step of a run that wrote its results; None for any other folder."""
    step = read_last_step(folder / "metrics.jsonl")
    # A copy from the bucket has no report: it is with the evaluations there.
    if step is None or not any((folder / name).is_file() for name in ("report.html", "results.md")):
        return None
    return step if any(folder.glob(f"reports/step_{step:06d}/*.json")) else None

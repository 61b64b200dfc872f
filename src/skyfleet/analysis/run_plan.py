"""RunPlan: what a run is expected to take and to learn from, as `plan.json` in its folder holds it."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.trajectories.records import RecordError

PLAN, USAGE = "plan.json", "usage.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Estimate(_Record):
    value: float
    low: float
    high: float
    """The ends of the 95 % interval; both equal the value if it was measured once."""

    def scaled(self, factor: float) -> Estimate:
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class MemoryPhase(_Record):
    name: str
    n_bytes: int
    parts: dict[str, int]
    """Bytes by use; those that are held all the time are in every phase."""


class ExpectedSignal(_Record):
    n_groups: int
    """Groups that were sampled for the estimate."""
    mixed_groups: Estimate
    """Share of groups whose rewards differ: only these change the policy."""
    pass_rate: float


class DetectableGain(_Record):
    """The smallest true gain that the evaluation shows with 80 % power."""

    n_tasks: int
    attempts: int
    low: float | None
    """If before and after differ by the noise of sampling only; None: no gain is detectable."""
    high: float | None
    """If the results of a task before and after are unrelated."""


class Price(_Record):
    cloud: str
    instance: str
    dollars_per_hour: float


class RunPlan(_Record):
    format_version: Literal[1] = 1
    skyfleet_version: str
    run_name: str
    machine: str
    config: dict[str, Any]
    """Every key with its value, secrets redacted."""
    n_probe_steps: int
    n_steps: int
    n_warm_start_steps: int
    n_episodes: int
    """Per step."""
    n_evaluations: int
    n_checkpoints: int
    quantities: dict[str, Estimate]
    """By name; `QUANTITIES` lists them with their units."""
    memory: list[MemoryPhase]
    signals: dict[str, ExpectedSignal]
    """By environment."""
    detectable: dict[str, DetectableGain]
    """By evaluation set."""
    prices: list[Price] = Field([])
    price_note: str = ""
    """Why there are no prices, or what they refer to."""


Unit = Literal["seconds", "tokens", "bytes", "tokens/s"]
QUANTITIES: dict[str, Unit] = {
    "startup": "seconds",
    "step": "seconds",
    "rollouts per step": "seconds",
    "learning per step": "seconds",
    "first evaluation": "seconds",
    "later evaluation": "seconds",
    "checkpoint": "seconds",
    "whole run": "seconds",
    "sampled tokens per step": "tokens",
    "response tokens per step": "tokens",
    "sampling rate": "tokens/s",
    "training rate": "tokens/s",
    "peak memory": "bytes",
}


class Usage(_Record):
    """What a training process took as a whole; written beside a plan."""

    from_step: int
    """Where the process resumed; 0 for a whole run."""
    to_step: int
    seconds: float
    peak_memory_bytes: int
    """Of the GPU, if the run is on one."""


def write_plan(path: Path, plan: RunPlan) -> None:
    make_folder(path.parent)
    write_atomically(path, plan.model_dump_json(indent=1) + "\n")


def read_plan(path: Path) -> RunPlan:
    """FileNotFoundError if there is none."""
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise RecordError(f"{path}: {field}: {first['msg']}; run `skyfleet plan` again") from None


def write_usage(folder: Path, usage: Usage) -> None:
    write_atomically(folder / USAGE, usage.model_dump_json(indent=1) + "\n")


def read_usage(folder: Path) -> Usage | None:
    path = folder / USAGE
    try:
        return Usage.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RecordError(f"{path}: {error.error_count()} invalid fields; remove it") from None


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity."""
    return value if isfinite(value) else None

"""MachineProfile: what one machine takes for one model, measured by `skyfleet plan --measure`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.errors import ConfigError
from skyfleet.simulation.rollouts import HostCosts
from skyfleet.simulation.workload import Workload
from skyfleet.storage.local import make_folder, write_atomically


class MachineProfile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["machine"] = "machine"
    machine: str
    model: str
    backend: str
    is_async: bool
    """The learner was measured as the asynchronous loop uses it, with recomputed old logprobs."""
    decode_seconds: dict[int, float]
    """A decoding step by the number of sequences, without their context."""
    context_seconds: float
    """Per step and token of context."""
    prefill_seconds: float = 0.0
    """Per prompt, beside its tokens."""
    prefill_token_seconds: float
    turn_seconds: float
    """Of the Python process that plays episodes; so is the next one."""
    episode_seconds: float
    update_fixed_seconds: float
    update_token_seconds: float
    update_square_seconds: float = 0.0
    """Per squared length of a sample, for attention."""
    push_seconds: float
    fixed_token_seconds: float
    """Metrics, checks and the log of a step, per token."""
    engine_slowdown: float = 1.0
    """While the learner works beside it; so is the next one."""
    learner_slowdown: float = 1.0
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineEngineCosts:
    """`EngineCosts` of a measured machine."""

    profile: MachineProfile
    max_running: int
    kv_tokens: float = float("inf")

    @property
    def context_seconds(self) -> float:
        return self.profile.context_seconds

    def step_seconds(self, n_running: int) -> float:
        return interpolate(self.profile.decode_seconds, n_running)

    def prefill_seconds(self, n_new: int, n_before: int) -> float:
        # The first token is sampled in the same pass, which decodes for the others too.
        profile = self.profile
        return profile.prefill_seconds + n_new * profile.prefill_token_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStepCosts:
    """`StepCosts` of a measured machine."""

    profile: MachineProfile
    recomputes_cache: bool = False

    @property
    def push_seconds(self) -> float:
        return self.profile.push_seconds

    @property
    def engine_slowdown(self) -> float:
        return self.profile.engine_slowdown

    @property
    def learner_slowdown(self) -> float:
        return self.profile.learner_slowdown

    def update_seconds(self, lengths: Sequence[int]) -> float:
        profile = self.profile
        squares = sum(length * length for length in lengths)
        per_sample = sum(lengths) * profile.update_token_seconds
        return profile.update_fixed_seconds + per_sample + squares * profile.update_square_seconds

    def fixed_seconds(self, n_tokens: int) -> float:
        return n_tokens * self.profile.fixed_token_seconds


def host_costs(profile: MachineProfile) -> HostCosts:
    return HostCosts(
        turn_seconds=profile.turn_seconds,
        episode_seconds=profile.episode_seconds,
        shares_engine_thread=profile.backend == "embedded",
    )


def interpolate(values: dict[int, float], at: int) -> float:
    """Between the nearest measured points, and along the last two beyond them."""
    points = sorted(values.items())
    if len(points) == 1:
        return points[0][1]
    index = next((i for i, (x, _) in enumerate(points[1:], 1) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def write_profile(path: Path, profile: MachineProfile) -> None:
    make_folder(path.parent)
    write_atomically(path, profile.model_dump_json(indent=1) + "\n")


def read_machine_profile(path: Path) -> MachineProfile:
    try:
        return MachineProfile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"--profile {path}: no such file; `skyfleet plan CONFIG --measure` writes one"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"--profile {path}: {name}: {first['msg']}; measure it again with --measure"
        ) from None

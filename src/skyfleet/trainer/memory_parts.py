"""The parts of a memory plan, and how they add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyfleet.models.shape import ModelShape

MIB = 2**20
PROCESS_BYTES = 300 * MIB
"""Tasks, trajectories, tokenizers and what the allocator keeps, beyond what is loaded at the start."""

KV_CACHE, PROCESS, WEIGHTS = "KV cache", "process", "weights"
ENGINE_WEIGHTS = "the engine's copy of the weights"
SMALLER_MODEL = "a smaller model in trainer.policy.model.path"
USE_LORA = f"trainer.policy.model.lora.rank=16 or {SMALLER_MODEL}"
NO_CRITIC = "trainer.algorithm.advantage_estimator=grpo instead of a critic, or a smaller model in trainer.critic.model.path"
SHORTER = "a lower generator.max_input_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory, and the settings that lower it."""

    name: str
    n_bytes: int
    remedy: str = ""
    is_estimate: bool = False
    """Less may do, such as shorter sequences or less fragmentation than expected."""

    @property
    def least_bytes(self) -> int:
        return self.n_bytes * 3 // 4 if self.is_estimate else self.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is held all the time, and what each phase adds; phases do not overlap."""

    held: tuple[Part, ...]
    phases: tuple[tuple[Part, ...], ...]
    phase_names: tuple[str, ...] = ()
    """Of a training run, one per phase."""

    @property
    def peak_parts(self) -> tuple[Part, ...]:
        """The parts of the phase that takes most."""
        return (*self.held, *max(self.phases, key=total))

    @property
    def peak_bytes(self) -> int:
        return total(self.peak_parts)

    @property
    def least_bytes(self) -> int:
        """What a run takes at its peak if every estimate is too high."""
        phases = [sum(part.least_bytes for part in phase) for phase in self.phases]
        return sum(part.least_bytes for part in self.held) + max(phases)

    @property
    def generation_bytes(self) -> int:
        """At the peak of the first phase."""
        return total(self.held) + total(self.phases[0])

    @property
    def learner_bytes(self) -> int:
        """Everything except the process, the weights and the engine."""
        others = (PROCESS, WEIGHTS, ENGINE_WEIGHTS, KV_CACHE)
        held = [part for part in self.held if part.name not in others]
        return total(held) + max(map(total, self.phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The shapes of the models of a run, and how their numbers are stored."""

    policy: ModelShape
    reference: ModelShape | None = None
    critic: ModelShape | None = None
    on_gpu: bool = False
    itemsize: int = 4
    """Bytes per weight and activation: 2 in bfloat16."""
    is_loaded: bool = False
    """The policy's weights are in memory already."""


def total(parts: Sequence[Part]) -> int:
    return sum(part.n_bytes for part in parts)

"""TrainerState: how far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class TrainerState:
    step: int = 0
    """Reinforcement steps learned from."""
    warm_start_step: int = 0
    logged_step: int = -1
    """The last row in the metrics; 0 is the evaluation before training."""
    evaluated_steps: list[int] = field(default_factory=list)
    best_step: int = 0
    """Of those evaluated."""
    reference_step: int = 0
    """The policy as it was saved then is the KL's reference."""
    pending_metrics: dict[str, float] = field(default_factory=dict)
    """What an interrupted step had measured before it could be logged."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

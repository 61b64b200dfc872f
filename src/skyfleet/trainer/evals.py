"""Evals: how a run is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.evaluation.baselines import Baseline
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Group

Dump = Callable[[str, int, Sequence[Group], Mapping[str, float]], None]
"""Set, step, its episodes and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evals:
    sets: Mapping[str, Sequence[Task]]
    """The first decides which step was the best."""
    policy: AgentFactory
    played_by: AgentInfo
    n_samples: int
    trained_envs: frozenset[str]
    costly_envs: frozenset[str]
    """Each episode costs an instance of somebody's: no baselines there."""
    dump: Dump | None = None
    baselines: dict[str, Mapping[str, Baseline]] = field(default_factory=dict)
    """By set; measured once, when the set is first evaluated."""
